"""Where data is looked for, downloads from a server on this machine, and conversions of what was downloaded."""

import hashlib
import lzma
import os
import re
import shutil
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import fields as fields_of
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import data
import data_conversions
import numpy as np
import pytest

NAME, RIGHT = "text/short.txt", b"some text\n" * 1000
WORDS, MATRIX = ["the", "é", "cat"], np.arange(6.0).reshape(3, 2)


def vectors_of_r() -> bytes:
    """The format of R's `save`: a list with the matrix, then its attributes; numbers are big-endian, by column."""

    def number(*values: int) -> bytes:
        return struct.pack(f">{len(values)}i", *values)

    def name(text: bytes) -> bytes:
        return number(0x402, 1, 0x40009, len(text)) + text

    texts = b"".join(number(0x40009, len(word.encode())) + word.encode() for word in WORDS)
    raw = b"RDX2\nX\n" + number(2, 0x40402, 0x20300) + name(b"glove_twitter_25d")
    raw += number(0x30E, MATRIX.size) + MATRIX.T.astype(">f8").tobytes()
    raw += name(b"dim") + number(13, 2, 3, 2) + name(b"dimnames") + number(19, 2, 16, 3) + texts + number(254)
    return lzma.compress(raw)


VECTORS = vectors_of_r()


class Server(BaseHTTPRequestHandler):
    """The file at /right, and what can go wrong at the other addresses."""

    def do_GET(self) -> None:  # the name that http.server calls
        if self.path == "/absent":
            self.send_error(404)
            return
        body = {"/wrong": RIGHT.upper(), "/vectors": VECTORS}.get(self.path, RIGHT)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path == "/stalls":
            self.server.may_end.wait(10)  # type: ignore[attr-defined]
        else:
            self.wfile.write(body[:5000] if self.path == "/cut" else body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    http.may_end = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.may_end.set()  # type: ignore[attr-defined]
    http.shutdown()
    thread.join()
    http.server_close()


@dataclass
class Clone:
    """A repository in a folder of its own: examples/data.py with a table of few files at the addresses of a server."""

    data: Any
    cached: Path


@pytest.fixture
def clone(server: str, tmp_path: Path) -> Iterator[Clone]:
    """Nothing is cached, and there is no folder beside the repository."""
    pytest.importorskip("pooch")
    folder = tmp_path / "repository/examples"
    folder.mkdir(parents=True)
    copy = shutil.copy(data.__file__, folder)
    fields = ",".join(field.name for field in fields_of(data.File))
    known = hashlib.sha256(RIGHT).hexdigest()
    names = (NAME, *(f"text/{path}" for path in ("wrong", "cut", "absent", "stalls", "vectors")))
    rows = [f"{name},1,{known},nltk/nltk_data,{'right' if name == NAME else name[5:]}," for name in names]
    rows[-1] = f"originals/glove_twitter_25d.rda,1,{hashlib.sha256(VECTORS).hexdigest()},rimonim/embedplyr,vectors,"
    made = "words/glove_twitter_25d.npz,1,,,,glove"
    (folder / "data_files.csv").write_text("\n".join([fields, *rows, made]), encoding="utf-8")
    spec = spec_from_file_location("data_of_clone", copy)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["data_of_clone"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__.update(ADDRESS=f"{server}/{{path}}", TIMEOUT=0.3)
    yield Clone(module, Path(os.environ["XDG_CACHE_HOME"]) / "otloss")
    del sys.modules["data_of_clone"]


def put(root: Path, content: bytes = RIGHT) -> Path:
    (root / NAME).parent.mkdir(parents=True)
    (root / NAME).write_bytes(content)
    return root


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# ---- downloads -------------------------------------------------------------------------------------------------------


def test_a_download_is_kept_and_not_repeated(clone: Clone) -> None:
    assert clone.data.folder(NAME) == clone.cached
    assert (clone.cached / NAME).read_bytes() == RIGHT
    clone.data.ADDRESS = "http://127.0.0.1:9/{path}"
    assert clone.data.folder(NAME) == clone.cached
    assert clone.data.file(NAME) == clone.cached / NAME


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("wrong", "its SHA-256 is not the one of data_files.csv"),
        ("cut", "the connection was cut"),
        ("absent", "the server answers 404"),
        ("stalls", "no connection"),
    ],
)
def test_a_bad_download_leaves_nothing(clone: Clone, name: str, why: str) -> None:
    said = f"text/{name} is not here, and its download failed: {why}; http://127.0.0.1:.*/{name}"
    with pytest.raises(clone.data.MissingError, match=said):
        clone.data.folder(f"text/{name}")
    assert files_in(clone.cached) == []
    clone.cached.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(clone.cached)
    clone.cached.write_text("a file where the folder is expected")
    with pytest.raises(clone.data.MissingError, match="the cache cannot be written"):
        clone.data.folder(NAME)


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_the_order_of_folders(
    clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file, beside = clone.data.folder, clone.data.file, clone.data.BESIDE
    assert beside == tmp_path / "shared/data"
    assert folder(NAME) == clone.cached
    put(beside)
    assert folder(NAME) == beside
    clone.data.main([NAME])
    assert capsys.readouterr().out == f"{beside / NAME}\n"
    for call in (folder, file):
        with pytest.raises(SystemExit, match=f"--data {tmp_path}/typo lacks {NAME}; name a folder that has it"):
            call(NAME, chosen=tmp_path / "typo")
    monkeypatch.setenv("OTLOSS_DATA", str(tmp_path / "set"))
    with pytest.raises(SystemExit, match=rf"\$OTLOSS_DATA, {tmp_path}/set, lacks {NAME}"):
        folder(NAME)
    assert folder(NAME, chosen=put(tmp_path / "chosen")) == tmp_path / "chosen"
    assert file(NAME, tmp_path / "chosen" / NAME) == tmp_path / "chosen" / NAME
    put(tmp_path / "set")
    assert folder(NAME) == tmp_path / "set"
    assert capsys.readouterr().out == ""


def test_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs/reports/data.md").read_text(encoding="utf-8")
    patterns = re.findall(r"`([a-z]+/[^`]+)`", page)
    files = data.table().values()
    assert {file.source for file in files} == {*data.SOURCES, ""}
    for file in files:
        assert len(file.sha256) == 64
        assert file.bytes > 0
        assert (file.made_by in data_conversions.CONVERSIONS) == (file.source == "")
        assert bool(file.address) == (not file.made_by and "mathematics-" not in file.name)
        assert file.source in page
        assert file.name.startswith("originals/") or any(
            fnmatch(file.name, pattern) or file.name.startswith(f"{pattern}/") for pattern in patterns
        ), file.name
    needed = {name for names, _ in data_conversions.CONVERSIONS.values() for name in names}
    assert needed <= set(data.table())


# ---- conversions -----------------------------------------------------------------------------------------------------


def llama2c_file(model: Any) -> bytes:
    """A model of transformers as llama2.c writes it; rows of queries and keys are interleaved."""
    config, layers = model.config, model.model.layers
    numbers = (config.hidden_size, config.intermediate_size, len(layers), config.num_attention_heads,
               config.num_key_value_heads, config.vocab_size, config.max_position_embeddings)  # fmt: skip
    half = config.head_dim // 2

    def interleaved(weight: Any) -> Any:
        order = [head * 2 * half + part * half + k for head in range(len(weight) // half // 2) for k in range(half)
                 for part in (0, 1)]  # fmt: skip
        return weight[order]

    parts = [model.model.embed_tokens.weight]
    parts += [layer.input_layernorm.weight for layer in layers]
    parts += [interleaved(layer.self_attn.q_proj.weight) for layer in layers]
    parts += [interleaved(layer.self_attn.k_proj.weight) for layer in layers]
    parts += [layer.self_attn.v_proj.weight for layer in layers]
    parts += [layer.self_attn.o_proj.weight for layer in layers]
    parts += [layer.post_attention_layernorm.weight for layer in layers]
    parts += [getattr(layer.mlp, f"{name}_proj").weight for name in ("gate", "down", "up") for layer in layers]
    parts += [model.model.norm.weight]
    floats = np.concatenate([part.detach().numpy().ravel() for part in parts]).astype("<f4")
    return struct.pack("<7i", *numbers) + floats.tobytes() + bytes(8)  # its file ends with tables of rotations


def test_a_llama_of_llama2c(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    torch.manual_seed(0)
    pieces = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{k:02X}>" for k in range(256)), " t", "he", " the", "t", "h", "e",
              " ", "n"]  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(pieces), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, rms_norm_eps=1e-5,
    ))  # fmt: skip
    texts = [piece.encode() for piece in pieces]
    tokens = struct.pack("<i", 7) + b"".join(struct.pack("<fi", -k, len(t)) + t for k, t in enumerate(texts))
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    for name in names:
        (tmp_path / name).write_bytes(data_conversions.llama2c(name, llama2c_file(model), tokens))
    made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(len(pieces), (2, 9))
    torch.testing.assert_close(made(ids).logits, model(ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("then")["input_ids"] == [1, 261, 266]
    assert tokenizer.decode([261, 266], skip_special_tokens=True) == "then"


def test_vectors_of_r_are_converted_after_their_download(clone: Clone) -> None:
    with np.load(clone.data.folder("words") / "words/glove_twitter_25d.npz") as made:
        assert made["words"].tolist() == WORDS
        np.testing.assert_array_equal(made["vectors"], MATRIX)
        assert made["vectors"].dtype == np.float32
    assert files_in(clone.cached) == ["glove_twitter_25d.npz", "glove_twitter_25d.rda"], "written whole"


# ---- grades ----------------------------------------------------------------------------------------------------------
