"""The examples at a tiny size: their figures come out, and their tables say what their docstrings say."""

import re
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import data
import pytest
import stand_ins

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., list[str]]


@pytest.fixture(autouse=True, scope="module")
def each_docstring_is_parsed_once() -> Iterator[None]:
    with mock.patch.object(stand_ins, "docstring_corpus", cache(stand_ins.docstring_corpus)):
        yield


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example, look at its figure, and return the lines that it printed."""
    pytest.importorskip("matplotlib").use("agg")

    def lines_of(name: str, *arguments: object) -> list[str]:
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        main(["--quick", "--output", str(tmp_path), *map(str, arguments)])
        assert (tmp_path / f"{name}.png").stat().st_size > 5_000
        (tmp_path / f"{name}.png").unlink()
        return capsys.readouterr().out.splitlines()

    return lines_of


def table(lines: list[str]) -> dict[str, list[float]]:
    """The means of the rows that have some, by the name of the row."""
    rows = (line for line in lines if re.search(r"\d ±", line))
    return {re.split(r"\s{2,}", row)[0]: [float(m) for m in re.findall(r"(\S+) ±", row)] for row in rows}


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("adaptation", ("source only", "map, linear", "joint loss, unbalanced")),
        ("set_prediction", ("scipy loop",)),
        ("flow_matching", ("paired",)),
        ("attention", ("Sinkhorn", "softmax")),
        ("ensembles", ("leaves of at least 10, recalibrated",)),
        ("generators", ("no critic: transport",)),
        ("graphs", ("µs a pair of nodes: exact ",)),
        ("number_tokens", ("shuffled values", "distances: scaling symlog")),
    ],
)
def test_tables_have_all_rows(run: Run, name: str, texts: tuple[str, ...]) -> None:
    if name == "number_tokens":
        pytest.importorskip("accelerate")
    lines = run(name)
    assert all(any(text in line for line in lines) for text in texts)


def test_cost_sensitive(run: Run) -> None:
    rows = table(run("cost_sensitive"))
    assert len(rows) == 4
    for name in ("digits, cross-entropy", "breast cancer, cross-entropy"):
        assert rows[name][1] < rows[name][0], "the decision of least expected cost costs less"


def test_documents(run: Run, no_data: Path) -> None:
    lines = run("documents")
    assert lines[0].startswith(data.OTHER)
    accuracies = {line[:26].strip(): float(line[26:].split()[0]) for line in lines[-3:]}
    assert list(accuracies) == ["tf-idf, cosine", "word mover's distance", "the same, tf-idf weights"]
    assert min(accuracies.values()) > 0.4


def test_histogram_regression(run: Run, no_data: Path) -> None:
    assert len(table(run("histogram_regression"))) == 4  # without abalones


def test_registration(run: Run, no_data: Path) -> None:
    first, *lines = run("registration")
    assert first.startswith(f"{data.OTHER}a surface that is made by a formula. shapes/stanford-bunny.obj is not here")
    assert len(lines) == 10


def test_sequences(run: Run, tmp_path: Path, no_data: Path) -> None:
    """On docstrings: the table, and n = 1 is blind to the order of words."""
    with pytest.raises(SystemExit, match=r"lacks text/warandpeace\.txt, words/glove_twitter_25d\.npz; name a folder"):
        run("sequences", "--data", tmp_path)
    lines = run("sequences")
    assert lines[0].startswith(f"{data.OTHER}sentences of the docstrings")
    assert all(float(line[52:70]) > 0.9 for line in lines[2:5])
    blind, *others = (float(value) for value in lines[9].partition(":")[2].split())
    assert blind == 0 < 0.1 < min(others)
