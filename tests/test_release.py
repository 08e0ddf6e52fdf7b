"""What `make release` writes into files, and the commands that other files repeat."""

import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("pyproject.toml", "CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "otloss/__init__.py")
GIVEN = {"repository": "https://example.org/owner/name", "contact": "team@example.org", "date": "2026-12-01"}


@pytest.fixture
def release() -> SimpleNamespace:
    path = ROOT / ".ci" / "release.py"
    if not path.is_file():
        pytest.skip("not a clone of the repository")
    return SimpleNamespace(**runpy.run_path(str(path)))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "otloss").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_release_writes_address_contact_and_day_once(release: SimpleNamespace, tree: Path) -> None:
    if release.unset(ROOT) != ["REPOSITORY", "CONTACT", "DATE"]:
        pytest.skip("they are set")
    assert release.write_settings(tree, repository="", contact="", date="") == ["REPOSITORY", "CONTACT", "DATE"]
    assert release.write_settings(tree, **GIVEN) == []
    texts = {name: (tree / name).read_text(encoding="utf-8") for name in FILES}
    assert f'repository = "{GIVEN["repository"]}"\n' in texts["pyproject.toml"]
    assert f'repository-code: "{GIVEN["repository"]}"\n' in texts["CITATION.cff"]
    assert "date-released: 2026-12-01\n" in texts["CITATION.cff"]
    assert GIVEN["contact"] in texts["SECURITY.md"]
    assert GIVEN["contact"] in texts["CODE_OF_CONDUCT.md"]
    assert f"## {release.version(ROOT)} (2026-12-01)\n" in texts["CHANGELOG.md"]


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    path = ROOT / ".pre-commit-config.yaml"
    if not path.is_file():
        pytest.skip("not a clone of the repository")
    hooks = re.findall(r"entry: \.venv/bin/(.*)", path.read_text(encoding="utf-8"))
    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    assert hooks == re.findall(r"\$\(BIN\)/(.*)", rule)
    assert len(hooks) == 4
