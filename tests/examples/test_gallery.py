"""The page of the gallery: figures and tables of what ran, an example that fails, and one that is done."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = '''"""Title of {0}.

Text with a | in it. Result (two seeds): 3 | 4 times faster.

    python examples/{0}.py

    y = f(x)
"""
import argparse
from matplotlib import pyplot as plt
parser = argparse.ArgumentParser()
parser.add_argument("--output")
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()
print("quick is", options.quick)
plt.plot([1, 2])
plt.savefig(options.output + "/{0}.png")
'''


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("gallery", EXAMPLES / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    gallery: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gallery", gallery)
    spec.loader.exec_module(gallery)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(gallery, "HERE", tmp_path / "examples")
    gallery.HERE.mkdir()
    (gallery.HERE / "graphs.py").write_text(SCRIPT.format("graphs"), encoding="utf-8")
    (gallery.HERE / "wrong.py").write_text('# "--output" "--quick"\nraise ValueError(\'a bad line\')', encoding="utf-8")
    arguments = ["--output", str(tmp_path / "runs")]
    assert gallery.main(arguments) == 1
    assert "a bad line" in capsys.readouterr().out
    page = (tmp_path / "docs/gallery.md").read_text(encoding="utf-8")
    assert "| [graphs](#graphs) | 8 times a POT loop" in page
    assert "| 3 \\| 4 times faster. | POT, pooled features |" in page
    assert "## Title of graphs\n\n[examples/graphs.py](../examples/graphs.py)\n\n![graphs](gallery/graphs.png)" in page
    assert "```text\n    y = f(x)\n```" in page
    assert "python" not in page
    assert page.endswith("```text\nquick is False\n```\n")
    assert (tmp_path / "docs/gallery/graphs.png").stat().st_size > 1000
    (gallery.HERE / "wrong.py").unlink()
    assert gallery.main(arguments) == 0
    assert "graphs  " not in capsys.readouterr().out, "it is done"
    assert gallery.main([*arguments, "--quick", "graphs"]) == 0
    assert "quick is True" in (tmp_path / "runs/quick/gallery.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        gallery.main(["no_such_example"])
