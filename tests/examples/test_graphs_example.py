"""The example of graphs: molecules from SMILES, and a table and a figure at a tiny size."""

from __future__ import annotations

import runpy
from pathlib import Path

import data
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_molecules_from_smiles(monkeypatch: pytest.MonkeyPatch) -> None:
    molecule = runpy.run_path(str(EXAMPLES / "molecules.py"))["molecule"]
    bonds, atoms = molecule("CN(C)C(=O)c1ccc(cc1)OCl")  # a dimethylamide, para
    assert bonds.sum() == 2 * 13
    np.testing.assert_array_equal(bonds, bonds.T)
    assert bonds[5, 10] == 1, "the ring is closed"
    np.testing.assert_array_equal(atoms[:, -2], [3, 0, 3, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0])  # hydrogens
    np.testing.assert_array_equal(atoms[:, -3].nonzero()[0], range(5, 11))  # aromatic
    assert molecule("c1cnc[nH]1")[1][:, -2].tolist() == [1, 1, 0, 1, 1]
    assert molecule("C[C@@H]1CC[C@@H]1C=C")[1][:, -2].tolist() == [3, 1, 2, 2, 1, 1, 2]
    assert molecule("CS(=O)(=O)C#N")[1][:, -2].tolist() == [3, 0, 0, 0, 0, 0]


def test_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.setattr(data, "BESIDE", tmp_path / "none")
    made, path = runpy.run_path(str(EXAMPLES / "graphs.py")), tmp_path / "freesolv.csv"
    lines = [f"{'C' * (1 + k % 5)}{'O' * (k % 2)}C,{k % 5 - 3 * (k % 2)}" for k in range(40)]
    path.write_text("\n".join(["smiles,expt", *lines]), encoding="utf-8")
    made["main"](["--quick", "--data", str(path), "--output", str(tmp_path)])
    rows = {
        line[:20].strip(): float(line.split("k=1 ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()[-3:]
    }
    assert rows == pytest.approx(dict.fromkeys(["mean features", "transport of atoms", "fused Gromov"], 0.0))
    assert (tmp_path / "graphs.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match=r"--data no_such_file\.csv lacks molecules/freesolv\.csv"):
        made["main"](["--quick", "--data", "no_such_file.csv", "--output", str(tmp_path)])
    monkeypatch.setitem(made["main"].__globals__, "find_spec", lambda name: None)  # without datamol
    made["main"](["--quick", "--output", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{data.OTHER}the characters of Les Misérables alone")
    assert len(printed) == 3
