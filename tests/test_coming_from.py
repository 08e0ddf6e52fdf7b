"""The pages of docs/guide/coming_from: what both calls assign to one name is equal.

The blocks of a page run in order. One that begins with `# before` is another package's, and is skipped where that is
not installed; the next one, `# after`, is ours and assigns the same names. Costs are rectangular or without symmetry,
and weights unequal, wherever a call takes them: nothing else tells rows from columns, or one side from the other.
"""

import re
import warnings
from contextlib import chdir
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import otloss

PAGES = sorted((Path(__file__).parents[1] / "docs/guide/coming_from").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Iterations of the others stop early or follow a fixed schedule, and a log has four digits.
TOLERANCES = {"geomloss": 1e-3, "pot": 1e-4, "trl": 1e-3, "mord": 1e-2, "statsmodels": 1e-2}


def is_installed(block: str) -> bool:
    imported = set(re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE))
    return all(find_spec(package) for package in imported) and (".cuda()" not in block or torch.cuda.is_available())


def assigned(block: str) -> set[str]:
    lists = re.findall(r"^(\w+(?:, \w+)*) = ", block, re.MULTILINE)
    return {name for names in lists for name in names.split(", ")}


def run(block: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(block, block.partition("\n")[0], "exec"), own := dict(names))
    return own


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_both_calls_give_the_same(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl" if page.stem == "trl" else "transformers" if page.stem == "ntloss" else "torch")
    blocks, names = BLOCK.findall(page.read_text(encoding="utf-8")), {"__name__": "page"}
    there, expected = None, set[str]()
    with chdir(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries warn
        for block in blocks:
            if block.startswith("# before"):
                is_equal = not block.startswith("# before,")  # "before, with weights of its own"
                expected, there = assigned(block), run(block, names) if is_equal and is_installed(block) else None
            elif block.startswith("# after"):
                here = run(block, names)
                assert expected
                assert expected <= here.keys()
                for name in expected if there else ():
                    one, other = (np.asarray(values[name]) for values in (here, there))
                    np.testing.assert_allclose(one, other, TOLERANCES.get(page.stem, 1e-5), 1e-7, err_msg=name)
                expected = set()
            else:
                names = run(block, names)
    assert not expected, "the last block of another package has none of ours after it"


def test_the_cost_of_a_barycenter_is_not_symmetric() -> None:
    """Otherwise the block of POT's barycenter would hold for the cost and for its transpose."""
    torch.manual_seed(0)
    histograms, cost = torch.rand(3, 9).double(), torch.rand(9, 9).double()
    histograms = histograms / histograms.sum(1, keepdim=True)
    one, other = (otloss.barycenter(histograms, c, epsilon=0.05) for c in (cost, cost.T))
    assert (one - other).abs().max() > 0.01
