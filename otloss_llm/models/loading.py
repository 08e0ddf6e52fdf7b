"""Load models and tokenizers from a folder or the Hugging Face hub, with errors that say what to do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from otloss_llm._precheck import wrong_model
from otloss_llm.models.adapters import check_peft
from otloss_llm.models.heads import check_causal, find_head

HUB_TIMEOUT = 5.0  # seconds


def load_model(path: str, **kwargs: Any) -> Any:
    """`from_pretrained(path, **kwargs)` of `AutoModelForCausalLM`, or `AutoModelForSeq2SeqLM` (T5, BART), checked.

    Raises:
        FileNotFoundError: there is no such folder, and no such model on the hub (or no connection to it).
        ValueError: the model is neither a causal language model nor an encoder-decoder, or weights are missing,
            misshapen, NaN or infinite.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if names_encoder_decoder(path) else AutoModelForCausalLM
    model, info = _from_pretrained(kind, path, "model", output_loading_info=True, **kwargs)
    random = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if random:
        raise ValueError(
            f"the model {path!r} lacks {len(random)} weights ({_some(random)}), which would be random; "
            "save it with save_pretrained of a causal language model."
        )
    broken = [name for name, weight in model.named_parameters() if not weight.is_meta and not weight.isfinite().all()]
    if broken:
        raise ValueError(
            f"the model {path!r} has NaN or infinite weights in {_some(broken)}; use an earlier checkpoint."
        )
    check_causal(model)
    return model


def names_encoder_decoder(path: str) -> bool:
    """Whether the configuration in a folder or on the hub is that of an encoder-decoder; False without a valid one."""
    from transformers import AutoConfig

    if wrong_model(path, "model"):
        return False  # reported by what loads the model
    source = _source(path, "model")
    try:
        return bool(getattr(AutoConfig.from_pretrained(source), "is_encoder_decoder", False))
    except (OSError, ValueError, KeyError):  # likewise; and an adapter has no configuration of a model
        return False


def load_tokenizer(path: str) -> Any:
    """`AutoTokenizer.from_pretrained(path)`, with the errors of `load_model`."""
    from transformers import AutoTokenizer

    tokenizer = _from_pretrained(AutoTokenizer, path, "tokenizer")
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # from_pretrained gives this where the files are missing
        raise ValueError(
            f"the tokenizer {path!r} has no token but {tokenizer.all_special_tokens}: its files (tokenizer.json) are "
            "missing; save the tokenizer there, or name one with --tokenizer_name."
        )
    return tokenizer


def load_model_and_tokenizer(path: str, tokenizer_path: str | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """A causal language model with its tokenizer; raises ValueError if the tokenizer has more tokens than the model."""
    for name, what in ((path, "model"), (tokenizer_path or path, "tokenizer")):
        if wrong := wrong_model(name, what):
            raise FileNotFoundError(wrong)
    # A folder's tokenizer first: what is wrong with it shows at once. The hub is asked for the model first.
    tokenizer = load_tokenizer(tokenizer_path or path) if Path(path).expanduser().is_dir() else None
    model = load_model(path, **kwargs)
    tokenizer = tokenizer or load_tokenizer(tokenizer_path or path)
    vocab = find_head(model).weight.shape[0]
    if len(tokenizer) > vocab:
        raise ValueError(
            f"the tokenizer of {tokenizer_path or path!r} has {len(tokenizer)} tokens, the model {path!r} only "
            f"{vocab}; use the model's own tokenizer, or resize the model's embeddings and save it."
        )
    return model, tokenizer


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a short hash of names, shapes and up to 2,000 entries of each tensor; it changes with any training.

    >>> import torch
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
    if wrong := wrong_model(path, what):
        raise FileNotFoundError(wrong)
    if what == "model" and (folder / "adapter_config.json").is_file():
        check_peft(f"the adapter {path!r}")
    source = _source(path, what)
    try:
        return kind.from_pretrained(source, **kwargs)
    except Exception as error:  # of any type: the files that the user named are invalid
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        use = "" if what == "tokenizer" else " as a causal language model"
        raise ValueError(
            f"the {what} {path!r} cannot be loaded{use}: {type(error).__name__}: {reason[:300]}"
        ) from error


def _source(path: str, what: str) -> str:
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else _on_the_hub(path, what)


def _on_the_hub(name: str, what: str) -> str:
    """`name` if the hub answers within seconds, else the folder of an earlier download.

    Without a network `from_pretrained` itself would retry for most of a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"there is no {what} {name!r}: no such folder in {Path.cwd()}, and none on the Hugging Face hub that you "
            "may read. Check the spelling, or log in if it is private."
        ) from error
    except HfHubHTTPError:
        return name  # the hub answered; from_pretrained reports the rest
    except Exception as error:
        try:
            return snapshot_download(name, local_files_only=True)
        except LocalEntryNotFoundError:
            raise FileNotFoundError(
                f"there is no {what} {name!r}: no such folder in {Path.cwd()}, no earlier download, and the Hugging "
                f"Face hub cannot be reached ({type(error).__name__}: {error}). Check the path or the network."
            ) from error
    return name
