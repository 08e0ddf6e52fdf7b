"""Text for language models: documents, a tokenizer when none is at hand, and packed blocks of token ids.

A *document* is a string. Packing writes all documents one after another, each as `[BOS] ids EOS`, into one stream
and cuts the stream into rows of `block_size` ids; the incomplete last row is dropped. BOS is written only where
the tokenizer itself begins a text with it. A document is tokenised whole and without truncation, so its ids are
the tokenizer's own; special tokens spelt out in the text are read as the tokenizer reads them.

`docstring_corpus` gives real English without a network: the docstrings of an installed package.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
DATASET_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:.+)?", re.ASCII)
TEST_FOLDERS = frozenset({"test", "tests"})
END_OF_TEXT = "<|endoftext|>"
DOCUMENTS_PER_CALL = 256  # documents handed to the tokenizer at a time


def read_texts(source: str | Path, *, split: str = "train", text_column: str = "text") -> list[str]:
    """Read `source` into a list of documents.

    `source` is a file (`.txt` or `.md`: the whole file is one document; `.jsonl`: one document per line, from
    `text_column`), a folder (every such file below it, sorted by path), or else the name of a Hugging Face dataset
    (`name` or `name:config`), of which `split` is read. Blank documents are left out. Line ends are read as LF.

    Raises FileNotFoundError where there is neither such a path nor such a reachable dataset, and ValueError where
    what is found is blank, not UTF-8, not JSON, or lacks the column.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one document")
    >>> _ = (folder / "b.jsonl").write_text('{"text": "a second"}\\n{"text": "a third"}\\n')
    >>> read_texts(folder)
    ['one document', 'a second', 'a third']
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise ValueError(f"folder {str(path)!r} holds no {', '.join(TEXT_SUFFIXES)} file; put text files there.")
        documents = [text for file in files for text in _read_file(file, text_column)]
    elif path.is_file():
        documents = _read_file(path, text_column)
    elif path.suffix in TEXT_SUFFIXES or not DATASET_NAME.fullmatch(str(source)):
        raise FileNotFoundError(f"there is no file or folder {str(source)!r}; check the path (now in {Path.cwd()}).")
    else:
        documents = _read_dataset(str(source), split=split, text_column=text_column)
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"{str(source)!r} holds no text but whitespace; give a source with at least one document.")
    return documents


def _read_file(path: Path, text_column: str) -> list[str]:
    if path.suffix not in TEXT_SUFFIXES:
        raise ValueError(f"{str(path)!r} ends in {path.suffix!r}, expected one of {TEXT_SUFFIXES}; rename or convert.")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}; "
            f"convert it, for example with: iconv -f latin1 -t utf-8."
        ) from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if path.suffix != ".jsonl":
        return [text]
    # str.splitlines would also cut at U+2028, which may stand inside a JSON string.
    lines = enumerate(text.split("\n"), start=1)
    return [_json_text(line, f"{str(path)!r}, line {number}", text_column) for number, line in lines if line.strip()]


def _json_text(line: str, place: str, text_column: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}); expected one object per line.") from error
    if not isinstance(record, dict) or text_column not in record:
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{place} has no column {text_column!r}, found {found}; name the right one in text_column.")
    if not isinstance(record[text_column], str):
        raise ValueError(f"{place}: column {text_column!r} is {record[text_column]!r}, expected a string.")
    return record[text_column]


def _read_dataset(source: str, *, split: str, text_column: str) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no local path, and to read it as a Hugging Face dataset the datasets package is missing: "
            f'pip install "otloss[data]"'
        ) from error
    name, _, config = source.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except (FileNotFoundError, ConnectionError) as error:  # not on the hub, or no hub
        raise FileNotFoundError(
            f"{source!r} is neither a local file or folder (looked in {Path.cwd()}) nor a dataset that can be "
            f"reached: load_dataset({name!r}, {config or None!r}, split={split!r}) said: {str(error).rstrip('.')}. "
            f"Check the spelling, or download the text and give its path."
        ) from error
    if text_column not in rows.column_names:
        raise ValueError(
            f"dataset {source!r} has no column {text_column!r}, found {rows.column_names}; "
            f"name the right one in text_column."
        )
    texts = list(rows[text_column])
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(
                f"dataset {source!r}, row {number}: column {text_column!r} is {text!r}, expected a string."
            )
    return texts


def split_documents(documents: Iterable[str], fractions: Mapping[str, float], *, seed: int = 0) -> dict[str, list[str]]:
    """Split documents into named parts by the hash of their text, so that no text is in two parts.

    Documents that differ in whitespace only count as one and the first is kept. The part of a document depends on
    its text and `seed` alone, so it stays where it is when the corpus grows. `fractions` maps names to shares that
    sum to 1; the parts' numbers of documents follow them up to chance. Order is kept within a part.

    Raises ValueError where the shares do not sum to 1, or a part with a positive share stays empty.

    >>> parts = split_documents([f"document {i}" for i in range(100)], {"train": 0.8, "test": 0.2})
    >>> {name: len(part) for name, part in parts.items()}
    {'train': 80, 'test': 20}
    """
    names, shares = list(fractions), list(fractions.values())
    if not names or min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        raise ValueError(f"fractions is {dict(fractions)}, expected shares >= 0 that sum to 1; rescale them.")
    upper = np.array(list(accumulate(shares)))
    upper[upper >= upper[-1]] = math.inf  # rounding in the sum must not leave a document without a part
    parts: dict[str, list[str]] = {name: [] for name in names}
    for document in _without_duplicates(_as_documents(documents)):
        digest = hashlib.sha256(f"{seed}\0{_normalised(document)}".encode()).digest()
        position = int.from_bytes(digest[:6], "big") / 2**48
        parts[names[int(np.searchsorted(upper, position, side="right"))]].append(document)
    for name, share in zip(names, shares, strict=True):
        if share > 0 and not parts[name]:
            raise ValueError(
                f"part {name!r} with share {share} got none of {sum(map(len, parts.values()))} distinct documents; "
                f"give more documents, a larger share, or another seed."
            )
    return parts


def _as_documents(texts: Iterable[str]) -> Iterable[str]:
    if isinstance(texts, str):
        raise TypeError("texts is one string, expected a list of documents; pass [text].")
    return texts


def _normalised(text: str) -> str:
    return " ".join(text.split())


def _without_duplicates(documents: Iterable[str]) -> list[str]:
    first: dict[str, str] = {}
    for document in documents:
        first.setdefault(_normalised(document), document)
    return list(first.values())


def docstring_corpus(package: str, *, min_chars: int = 80) -> list[str]:
    """Collect the docstrings of an installed package as documents, without importing its modules.

    Module, class and function docstrings are read from the `.py` files, in the order of path and line, without
    duplicates and without `test` and `tests` folders. Prose and parameter tables stay; doctests, heading underlines
    and headings left without text go. Docstrings shorter than `min_chars` characters after that are left out, as
    are those a package writes at run time. `package` may be a part of one ("scipy.stats").

    Raises ImportError where the package is not installed, ValueError where it has no such docstring.

    >>> corpus = docstring_corpus("json")
    >>> corpus[0][:53]
    'JSON (JavaScript Object Notation) <https://json.org> '
    """
    prose = (_prose(docstring) for path in _source_files(package) for docstring in _docstrings(path))
    documents = _without_duplicates(document for document in prose if len(document) >= max(1, min_chars))
    if not documents:
        raise ValueError(f"package {package!r} has no docstring of {min_chars} or more characters in .py files.")
    return documents


def _source_files(package: str) -> list[Path]:
    top, *inner = package.split(".")
    spec = importlib.util.find_spec(top) if top else None
    if spec is None:
        raise ImportError(f"package {top!r} is not installed; install it, or name another package for the corpus.")
    files: list[Path] = []
    for root in spec.submodule_search_locations or []:
        base = Path(root, *inner)
        found = base.rglob("*.py") if base.is_dir() else [base.with_suffix(".py")]
        files += [file for file in found if file.is_file() and TEST_FOLDERS.isdisjoint(file.relative_to(root).parts)]
    if not spec.submodule_search_locations and not inner and spec.origin and spec.origin.endswith(".py"):
        files.append(Path(spec.origin))
    if inner and not files:
        raise ImportError(f"package {top!r} is installed but has no part {package!r}; check the name.")
    return sorted(files)


def _docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser's remarks on other people's string escapes
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and files for other Python versions
            return
    stack: list[ast.AST] = [tree]
    while stack:  # in the order of the source; only statements are visited, for expressions hold no docstring
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""
        children = ast.iter_child_nodes(node)
        stack += reversed(
            [child for child in children if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case)]
        )


UNDERLINE = r"[ \t]*(?:-{3,}|={3,}|~{3,}|\^{3,}|\*{3,}|\+{3,}|#{3,})[ \t]*\n"
DELETIONS = (
    re.compile(r"^[ \t]*>>>.*\n(?:[ \t]*\S.*\n)*", re.MULTILINE),  # a doctest and its output, up to a blank line
    re.compile(rf"^.+\n{UNDERLINE}(?=\s*(?:\Z|.+\n{UNDERLINE}))", re.MULTILINE),  # a heading without text
    re.compile(rf"^{UNDERLINE}", re.MULTILINE),
)
BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def _prose(docstring: str) -> str:
    text = inspect.cleandoc(docstring) + "\n"
    for pattern in DELETIONS:
        text = pattern.sub("", text)
    return BLANK_LINES.sub("\n\n", text).strip()


def train_bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2, progress: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer whose decoding gives every text back unchanged.

    `<|endoftext|>` has id 0 and serves as end, beginning and padding token; it is never added to a text unasked.
    Training is deterministic. `vocab_size` counts it and the 256 bytes; the vocabulary comes out smaller where the
    texts have too few pairs that occur `min_frequency` times.

    Raises ValueError where `vocab_size` is below 257 or there is no text.

    >>> tokenizer = train_bpe_tokenizer(["low lower lowest"] * 9, 262)
    >>> tokenizer.tokenize("slow"), tokenizer.decode(tokenizer("naïve 6²")["input_ids"])
    (['s', 'low'], 'naïve 6²')
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise ValueError(f"vocab_size is {vocab_size}, expected at least {len(alphabet) + 1}: the bytes and the end.")
    documents = list(_as_documents(texts))
    if not any(document.strip() for document in documents):
        raise ValueError(f"the {len(documents)} texts hold nothing to train on; give at least one document.")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=progress,
    )
    backend.train_from_iterator(documents, trainer=trainer, length=len(documents))
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


class PackedBlocks(Dataset[dict[str, Tensor]]):
    """Token ids in rows of one length, as a dataset for training and scoring causal language models.

    An item is `{"input_ids": (block_size,), "labels": (block_size,)}`, both int64 and equal: labels are not shifted,
    as Hugging Face models expect. `ids` is the whole as int32, (blocks, block_size); `fingerprint` is a short hash
    of it, equal for equal data.

    >>> tokenizer = train_bpe_tokenizer(["a b c d"], 257)
    >>> blocks = PackedBlocks.from_texts(["abcd", "abc"], tokenizer, 4)
    >>> blocks
    PackedBlocks(2 blocks of 4 tokens, 1 token dropped, fingerprint=905d38a27208d91e)
    >>> blocks[1]["labels"].tolist()
    [0, 65, 66, 67]
    """

    def __init__(self, ids: Int[Tensor, "blocks block_size"], *, dropped_tokens: int = 0) -> None:
        if ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < 2:
            raise ValueError(
                f"ids has shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integers (blocks, block_size) "
                f"with a block_size of 2 or more; reshape them, or use PackedBlocks.from_texts."
            )
        self.ids = ids.to("cpu", torch.int32).contiguous()
        self.dropped_tokens = dropped_tokens

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, block_size: int, *, progress: bool = True
    ) -> PackedBlocks:
        """Tokenise documents, join them as `[BOS] ids EOS`, and cut the stream into rows of `block_size` ids.

        BOS stands there only if the tokenizer begins texts with it. The incomplete last row is dropped;
        `dropped_tokens` says how many ids that were. Raises ValueError where all of it is shorter than one row.
        """
        if block_size < 2:
            raise ValueError(f"block_size is {block_size}, expected 2 or more: a block of one token predicts nothing.")
        pieces = list(_token_stream(list(_as_documents(texts)), tokenizer, progress=progress))
        stream = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
        blocks, dropped = divmod(len(stream), block_size)
        if blocks == 0:
            raise ValueError(
                f"the text is {len(stream)} tokens long (end-of-text included), less than one block of {block_size}; "
                f"give more text or smaller blocks."
            )
        ids = torch.from_numpy(stream[: blocks * block_size].reshape(blocks, block_size))
        return cls(ids, dropped_tokens=dropped)

    @property
    def block_size(self) -> int:
        """Number of ids in a block."""
        return self.ids.shape[1]

    @property
    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the block size and the ids."""
        digest = hashlib.sha256(f"{self.block_size}\0".encode())
        digest.update(self.ids.numpy().astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index].long()
        return {"input_ids": ids, "labels": ids.clone()}

    def __repr__(self) -> str:
        dropped = f"{self.dropped_tokens} token{'' if self.dropped_tokens == 1 else 's'} dropped"
        size = f"{len(self)} blocks of {self.block_size} tokens"
        return f"{type(self).__name__}({size}, {dropped}, fingerprint={self.fingerprint})"


def split_blocks(
    blocks: PackedBlocks, *, validation_fraction: float = 0.05, test_fraction: float = 0.0
) -> tuple[PackedBlocks, PackedBlocks, PackedBlocks]:
    """Cut blocks into contiguous training, validation and test parts, in this order and without shuffling.

    A fraction of 0 gives an empty part, a positive one at least one block. Raises ValueError where the fractions are
    outside [0, 1) or leave no block to train on.

    >>> parts = split_blocks(PackedBlocks(torch.arange(40).view(20, 2)), validation_fraction=0.1, test_fraction=0.2)
    >>> [len(part) for part in parts]
    [14, 2, 4]
    """
    fractions = {"validation_fraction": validation_fraction, "test_fraction": test_fraction}
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise ValueError(f"{name} is {fraction}, expected a share in [0, 1).")
    held_out = [max(1, round(fraction * len(blocks))) if fraction else 0 for fraction in fractions.values()]
    train = len(blocks) - sum(held_out)
    if train < 1:
        raise ValueError(f"{len(blocks)} blocks leave none to train on with {fractions}; give more text or less share.")
    first, second, third = blocks.ids.split([train, *held_out])
    return PackedBlocks(first), PackedBlocks(second), PackedBlocks(third)


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before a text by itself: `[BOS]` or nothing.

    >>> opening_ids(train_bpe_tokenizer(["a b c d"], 257))
    []
    """
    return [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer("")["input_ids"] else []


def _token_stream(documents: Sequence[str], tokenizer: Any, *, progress: bool) -> Iterator[np.ndarray]:
    """Yield the packed ids of a few documents at a time."""
    from tqdm import tqdm

    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token to keep documents apart; set tokenizer.eos_token first.")
    opening, end = opening_ids(tokenizer), tokenizer.eos_token_id
    with tqdm(total=len(documents), desc="tokenising", unit="doc", disable=not progress, delay=2.0) as bar:
        for start in range(0, len(documents), DOCUMENTS_PER_CALL):
            batch = documents[start : start + DOCUMENTS_PER_CALL]
            # verbose=False: the remark on texts longer than the model's context has no meaning for packing.
            rows = tokenizer(batch, add_special_tokens=False, truncation=False, padding=False, verbose=False)
            stream = [token for ids in rows["input_ids"] for token in (*opening, *ids, end)]
            yield np.array(stream, dtype=np.int32)
            bar.update(len(batch))
