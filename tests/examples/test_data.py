"""Where data is looked for, and downloads from a server on this machine."""

import hashlib
import re
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import data
import data_conversions
import pytest

NAME, RIGHT = "text/right", b"some text\n" * 1000


class Server(BaseHTTPRequestHandler):
    """The file at /right, and what can go wrong at the other addresses."""

    def do_GET(self) -> None:  # the name that http.server calls
        if self.path == "/absent":
            self.send_error(404)
            return
        body = RIGHT.upper() if self.path == "/wrong" else RIGHT
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
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.may_end.set()  # type: ignore[attr-defined]
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def cached(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few files at the addresses of a server; nothing is cached, and there is no folder beside the repository."""
    pytest.importorskip("pooch")
    known = hashlib.sha256(RIGHT).hexdigest()
    names = [NAME, *(f"text/{path}" for path in ("wrong", "cut", "absent", "stalls"))]
    files = {name: data.File(name, 1, known, "nltk/nltk_data", name.removeprefix("text/"), "") for name in names}
    files["made"] = data.File("made", 1, "", "", "", "upper")
    monkeypatch.setitem(data_conversions.CONVERSIONS, "upper", ([NAME], lambda name, content: content.upper()))
    settings = {"ADDRESS": f"{server}/{{path}}", "TIMEOUT": 0.3, "BESIDE": tmp_path / "shared/data"}
    for name, value in ({"table": lambda: files} | settings).items():
        monkeypatch.setattr(data, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/otloss"


def put(root: Path) -> Path:
    (root / NAME).parent.mkdir(parents=True)
    (root / NAME).write_bytes(RIGHT)
    return root


def test_a_download_is_kept_and_not_repeated(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data.folder("made") == cached
    assert (cached / "made").read_bytes() == RIGHT.upper()
    monkeypatch.setattr(data, "ADDRESS", "http://127.0.0.1:9/{path}")
    assert data.folder(NAME) == cached
    assert data.file(NAME) == cached / NAME
    assert sorted(path.name for path in cached.rglob("*") if path.is_file()) == ["made", "right"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("wrong", "its SHA-256 is not the one of data_files.csv"),
        ("cut", "the connection was cut"),
        ("absent", "the server answers 404"),
        ("stalls", "no connection"),
    ],
)
def test_a_bad_download_leaves_nothing(cached: Path, name: str, why: str) -> None:
    said = f"text/{name} is not here, and its download failed: {why}; http://127.0.0.1:.*/{name}"
    with pytest.raises(data.MissingError, match=said):
        data.folder(f"text/{name}")
    assert [path for path in cached.rglob("*") if path.is_file()] == []


def test_the_order_of_folders(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data.folder(NAME) == cached
    put(data.BESIDE)
    assert data.folder(NAME) == data.BESIDE
    with pytest.raises(SystemExit, match=f"--data {tmp_path}/typo lacks {NAME}; name a folder that has it"):
        data.folder(NAME, chosen=tmp_path / "typo")
    monkeypatch.setenv("OTLOSS_DATA", str(tmp_path / "set"))
    with pytest.raises(SystemExit, match=rf"\$OTLOSS_DATA, {tmp_path}/set, lacks {NAME}"):
        data.folder(NAME)
    assert data.folder(NAME, chosen=put(tmp_path / "chosen")) == tmp_path / "chosen"
    assert data.file(NAME, tmp_path / "chosen" / NAME) == tmp_path / "chosen" / NAME
    put(tmp_path / "set")
    assert data.folder(NAME) == tmp_path / "set"
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
