"""Load models, tokenizers, costs, data from what a command line names, with errors that say what to do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from otloss_llm.costs.choice import NumberSettings, choose_cost
from otloss_llm.costs.embedding import EmbeddingCost
from otloss_llm.costs.vocabulary import TokenCost
from otloss_llm.data.blocks import PackedBlocks, read_texts, split_blocks
from otloss_llm.data.questions import AnsweredQuestions, Question, count_labels, read_questions
from otloss_llm.models.adapters import check_peft
from otloss_llm.models.heads import check_causal, find_head
from otloss_llm.objectives import cost_kind

COST_SOURCES = ("model", "as-is", "random", "shuffled")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
HUB_PATIENCE = 5.0  # seconds


def load_model(path: str, **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(path)`, refusing what is not there or cannot be used as one.

    Raises:
        FileNotFoundError: neither a folder with a model nor a reachable model of the hub.
        ValueError: a model that is no causal language model, or whose weights are missing, misshapen, NaN or infinite.
    """
    from transformers import AutoModelForCausalLM

    model, info = _from_pretrained(AutoModelForCausalLM, path, "model", output_loading_info=True, **kwargs)
    made_up = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if made_up:
        raise ValueError(
            f"the model {path!r} lacks {len(made_up)} weights ({_some(made_up)}), which would be random; "
            "save it with save_pretrained of a causal language model."
        )
    broken = [name for name, weight in model.named_parameters() if not weight.is_meta and not weight.isfinite().all()]
    if broken:
        raise ValueError(
            f"the model {path!r} has NaN or infinite weights in {_some(broken)}; take a checkpoint from before that."
        )
    check_causal(model)
    return model


def load_tokenizer(path: str) -> Any:
    """`AutoTokenizer.from_pretrained(path)`, with the errors of `load_model`."""
    from transformers import AutoTokenizer

    tokenizer = _from_pretrained(AutoTokenizer, path, "tokenizer")
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what a model's folder without tokenizer files gives
        raise ValueError(
            f"the tokenizer {path!r} has no token but {tokenizer.all_special_tokens}; its files (tokenizer.json) are "
            "missing: save the tokenizer there, or name one with --tokenizer_name."
        )
    return tokenizer


def load_model_and_tokenizer(path: str, tokenizer_path: str | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """A causal LM with its tokenizer; raises ValueError where the tokenizer has more tokens than the model."""
    model, tokenizer = load_model(path, **kwargs), load_tokenizer(tokenizer_path or path)
    vocab = find_head(model).weight.shape[0]
    if len(tokenizer) > vocab:
        raise ValueError(
            f"the tokenizer of {tokenizer_path or path!r} has {len(tokenizer)} tokens, the model {path!r} only "
            f"{vocab}; give the model's own tokenizer, or resize the model's embeddings and save it."
        )
    return model, tokenizer


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A short hash of names, shapes and up to some 2,000 entries of each tensor: cheap, and another after any training.

    >>> fingerprint([("w", torch.zeros(3))]) == fingerprint([("w", torch.ones(3))])
    False
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().flatten()
        picked = flat[:: max(1, flat.numel() // 1024)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}\0".encode() + picked.numpy().tobytes())
    return digest.hexdigest()[:16]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _from_pretrained(kind: Any, path: str, what: str, **kwargs: Any) -> Any:
    folder = Path(path).expanduser()
    if folder.is_dir() and not any(folder.glob("*.json")):
        raise FileNotFoundError(f"{path!r} is a folder without a {what}: expected config.json and its files in it.")
    if what == "model" and (folder / "adapter_config.json").is_file():
        check_peft(f"the adapter {path!r}")
    source = str(folder) if folder.is_dir() else _on_the_hub(path, what)
    try:
        return kind.from_pretrained(source, **kwargs)
    except Exception as error:  # whatever goes wrong here lies in files the user named
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        article = "" if what == "tokenizer" else " as a causal language model"
        raise ValueError(
            f"the {what} {path!r} cannot be loaded{article}: {type(error).__name__}: {reason[:300]}"
        ) from error


def _on_the_hub(name: str, what: str) -> str:
    """`name` if the hub answers, else the folder where an earlier download lies.

    Asked once and briefly: `from_pretrained` tries again for most of a minute before it says that there is no network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(
            f"there is no {what} folder {name!r}, looked in {Path.cwd()}; give the folder that save_pretrained wrote."
        )
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_PATIENCE)
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no {what} {name!r}: there is no such folder in {Path.cwd()}, and the Hugging Face hub has none of that "
            "name that you may read. Check the spelling, or log in if it is private."
        ) from error
    except HfHubHTTPError:
        return name  # it answered; from_pretrained knows what to make of the rest
    except Exception as error:
        try:
            return snapshot_download(name, local_files_only=True)
        except LocalEntryNotFoundError:
            raise FileNotFoundError(
                f"no {what} {name!r}: there is no such folder in {Path.cwd()}, no download of that name, and the "
                f"Hugging Face hub cannot be reached ({type(error).__name__}: {error}). Check the path or the network."
            ) from error
    return name


def load_cost(
    source: str,
    model: Any,
    *,
    seed: int = 0,
    kind: str = "embedding",
    tokenizer: Any = None,
    numbers: NumberSettings | None = None,
) -> TokenCost:
    """A vocabulary cost for `model`.

    Args:
        source: of the embedding: "model" (its own head as it is now), "as-is" (the same, near-duplicate rows left as
            they are), "random" or "shuffled" (the controls, drawn with `seed`), a `.npy` file of shape (V, d), or a
            model (folder or name) whose head is taken.
        model: the model that will be trained; the cost must be over its vocabulary.
        seed: of the random and shuffled controls.
        kind, tokenizer, numbers: as in `otloss_llm.costs.choice.choose_cost`; the kind "number" has no embedding.

    Raises:
        ValueError: an embedding of another vocabulary, or one that is not a (V, d) array of finite numbers; a tokenizer
            without numbers.
        FileNotFoundError: a path that is not there.
    """
    vocab = find_head(model).weight.shape[0]
    return choose_cost(
        kind, embedding=lambda: _load_embedding(source, model, seed), tokenizer=tokenizer, vocab_size=vocab,
        numbers=numbers,
    )  # fmt: skip


def _load_embedding(source: str, model: Any, seed: int) -> EmbeddingCost:
    generator = torch.Generator().manual_seed(seed)
    if source in ("as-is", "random"):
        own = EmbeddingCost.from_model(model, near_duplicates="keep")
        return own if source == "as-is" else own.random_like(generator)
    if source in COST_SOURCES:
        own = EmbeddingCost.from_model(model)
        return own if source == "model" else own.shuffled(generator)
    own_file = source.endswith(".npy")
    cost = EmbeddingCost(_read_array(source)) if own_file else EmbeddingCost.from_model(load_model(source))
    vocab = find_head(model).weight.shape[0]
    if cost.shape[0] != vocab:
        raise ValueError(
            f"the cost embedding {source!r} is over a vocabulary of {cost.shape[0]} tokens, the model has {vocab}; "
            "take it from a model with the same tokenizer."
        )
    return cost


def _read_array(source: str) -> Tensor:
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no embedding file {source!r}; expected a .npy array of shape (vocabulary, width).")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{source!r} is no .npy array ({error}); write it with numpy.save.") from error
    if array.ndim != 2 or not np.isrealobj(array) or not np.issubdtype(array.dtype, np.number) or 0 in array.shape:
        raise ValueError(
            f"{source!r} has shape {array.shape} and dtype {array.dtype}, expected real numbers (vocabulary, width)."
        )
    wrong = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"{source!r} has NaN or infinity in {len(wrong)} of {len(array)} rows, the first is row {wrong[0]}; "
            "expected finite numbers (a row of zeros stands for a token without a meaning)."
        )
    return torch.as_tensor(array if array.dtype in (np.float32, np.float64) else array.astype(np.float32))


Documents = tuple[list[str], list[str] | None, list[str] | None]  # to train on, to validate on, of the test


def read_documents(train: str, validation: str | None, test: str | None, *, text_column: str = "text") -> Documents:
    """The documents of each part; None for a part without a source of its own."""
    others = [
        None if source is None else read_texts(source, split=split, text_column=text_column)
        for source, split in ((validation, "validation"), (test, "test"))
    ]
    return read_texts(train, text_column=text_column), others[0], others[1]


def pack_documents(
    pack: Callable[[list[str]], PackedBlocks],
    documents: Documents,
    *,
    validation_fraction: float,
    test_fraction: float,
) -> tuple[PackedBlocks, PackedBlocks | None, PackedBlocks | None]:
    """Packed training, validation and test blocks; a part without documents is cut off the end of the training's."""
    train, *held_out = documents
    first, *cut = split_blocks(
        pack(train),
        validation_fraction=validation_fraction if held_out[0] is None else 0.0,
        test_fraction=test_fraction if held_out[1] is None else 0.0,
    )
    parts = [
        (blocks if len(blocks) else None) if texts is None else pack(texts)
        for texts, blocks in zip(held_out, cut, strict=True)
    ]
    return first, parts[0], parts[1]


def load_blocks(
    tokenizer: Any,
    *,
    train: str,
    validation: str | None,
    test: str | None,
    block_size: int,
    validation_fraction: float,
    test_fraction: float,
    text_column: str = "text",
) -> tuple[PackedBlocks, PackedBlocks | None, PackedBlocks | None]:
    """Packed training, validation and test blocks; a part without a source of its own is cut off the end of `train`."""
    return pack_documents(
        lambda texts: PackedBlocks.from_texts(texts, tokenizer, block_size),
        read_documents(train, validation, test, text_column=text_column), validation_fraction=validation_fraction,
        test_fraction=test_fraction,
    )  # fmt: skip


def load_questions(
    tokenizer: Any,
    *,
    train: str,
    validation: str | None,
    test: str | None,
    max_length: int,
    validation_fraction: float,
    test_fraction: float,
    train_on_question: bool = False,
) -> tuple[AnsweredQuestions, AnsweredQuestions | None, list[Question]]:
    """Training and validation rows and test questions; a part without a file of its own is taken from `train`.

    Such a part is a share of all the questions in `train`, evenly spaced, because files are often sorted by the kind of
    question. Questions of equal text go into one part: none is trained on that is asked later.
    """
    rest, parts = read_questions(train), []
    texts = list(dict.fromkeys(question.question for question in rest))
    left = texts
    for name, source, fraction in (
        ("validation", validation, validation_fraction), ("test", test, test_fraction)
    ):  # fmt: skip
        if not 0 <= fraction < 1:
            raise ValueError(f"--{name}_fraction is {fraction}, expected a share of the questions in [0, 1).")
        if source is not None:
            parts.append(read_questions(source))
            continue
        count = min(max(1, round(fraction * len(texts))), len(left)) if fraction else 0
        taken = {left[i * len(left) // count] for i in range(count)}
        parts.append([question for question in rest if question.question in taken])
        rest = [question for question in rest if question.question not in taken]
        left = [text for text in left if text not in taken]
    if not rest:
        there = "1 different question" if len(texts) == 1 else f"{len(texts)} different questions"
        raise ValueError(
            f"the {there} of {train!r} leave none to train on, with --validation_fraction {validation_fraction} and "
            f"--test_fraction {test_fraction}; give more questions, or a share of 0."
        )

    def rows(questions: list[Question]) -> AnsweredQuestions:
        return AnsweredQuestions.from_questions(
            questions, tokenizer, max_length=max_length, train_on_question=train_on_question
        )

    return rows(rest), rows(parts[0]) if parts[0] else None, parts[1]


def count_number_labels(rows: PackedBlocks | AnsweredQuestions, values: Float[Tensor, " vocab"]) -> tuple[int, int]:
    """How many of the labels that are predicted are numbers, and how many labels there are.

    Args:
        values: value of each token of the vocabulary, NaN where it is no number.

    >>> values = torch.tensor([float("nan"), 1.0, 2.0])
    >>> count_number_labels(PackedBlocks(torch.tensor([[1, 2, 0], [0, 0, 0]])), values)
    (1, 4)
    """
    return count_labels(rows, ~values.isnan())


def say_of_numbers(rows: PackedBlocks | AnsweredQuestions, values: Float[Tensor, " vocab"], objective: str) -> str:
    """How much of what is trained on is numbers, in a line.

    Raises:
        ValueError: nothing of it is: the objective would be another one in silence.
    """
    numbers, labels = count_number_labels(rows, values)
    if numbers == 0:
        mend = (
            "name other questions, or add --train_on_question where the numbers are in the questions"
            if isinstance(rows, AnsweredQuestions) and not rows.train_on_question
            else "train on what has numbers"
        )
        raise ValueError(
            f"none of the {labels} tokens that are trained on is a number, and {objective} would be "
            f"{'emo' if cost_kind(objective) == 'mixed' else 'mle'}; {mend}, or take that one."
        )
    return f"{numbers} of the {labels} tokens that are trained on are numbers ({numbers / labels:.1%})"
