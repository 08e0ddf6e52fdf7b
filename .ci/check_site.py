"""Check the built site: every public name has a page, links and pictures exist, and nothing comes from a network.

python .ci/check_site.py build/site
"""

from __future__ import annotations

import importlib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]


class Page(HTMLParser):
    """The links, the files that a browser loads, and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = {"", "top"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "preload", "icon"):
            self.loaded.append(values.get("href", ""))
        elif "src" in values:
            self.loaded.append(values["src"])


def broken(site: Path) -> list[str]:
    """Return a line for each link to nothing, and for each file that would come from a network."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    lines = []
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        lines += [f"{here}: loads {name}" for name in page.loaded if urlsplit(name).netloc]
        for link in page.links + [name for name in page.loaded if not urlsplit(name).netloc]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                lines.append(f"{here}: {link} is not a file")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                lines.append(f"{here}: {link} is not an anchor")
    return lines


def documented_modules() -> list[str]:
    listed = (ROOT / "docs/reference/index.md").read_text(encoding="utf-8")
    return re.findall(r"^   (otloss[\w.]*)$", listed, re.MULTILINE)


def without_a_page(site: Path) -> list[str]:
    """Return the public names that have no page in the reference."""
    names = [f"{module}.{name}" for module in documented_modules() for name in importlib.import_module(module).__all__]
    folder = site / "reference/generated"
    return [name for name in names if not name.endswith("__version__") and not (folder / f"{name}.html").exists()]


def main() -> int:
    site = Path(sys.argv[1])
    missing = [f"{name} has no page in the reference" for name in without_a_page(site)]
    lines = missing + broken(site)
    print("\n".join(lines) if lines else f"{site}: every public name has a page, and every link leads somewhere.")
    return len(lines) > 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
