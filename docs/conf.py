"""Configuration of the site, for Sphinx: `make docs`.

The pages are Markdown, read by MyST; the reference is made of the docstrings, a page for each public name. Nothing is
read from a network, neither here nor by the pages. Formulas of pages become MathML, and formulas of docstrings are
plain text.
"""

from __future__ import annotations

import logging
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

ROOT = Path(__file__).resolve().parents[1]
logging.getLogger("otloss").setLevel("WARNING")  # tutorials print no lines about compilation
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "otloss/__init__.py").read_text("utf-8"))

project = "otloss"
author = copyright = "The otloss developers"
release = version = VERSION[1] if VERSION else ""

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]


def inventory(name: str) -> str:
    """Return the path of the inventory that `docs/inventories/NAME.txt` lists, in the form that Sphinx reads."""
    rows = [line.split() for line in (ROOT / f"docs/inventories/{name}.txt").read_text("utf-8").splitlines()]
    body = "".join(f"{row[0]} {row[1]} 1 {row[2]} -\n" for row in rows if row[0] != "#")
    head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: stable\n"
    head += "# The remainder of this file is compressed using zlib.\n"
    path = Path(tempfile.mkdtemp()) / f"{name}.inv"
    path.write_bytes(head.encode() + zlib.compress(body.encode()))
    return str(path)


# Lists of the few names that are linked, so that the build needs no network.
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable", inventory("torch")),
    "numpy": ("https://numpy.org/doc/stable", inventory("numpy")),
    "sklearn": ("https://scikit-learn.org/stable", inventory("sklearn")),
}
exclude_patterns = ["_build", "tutorials/*"]
sphinx_gallery_conf = {  # the tutorials run at each build
    "examples_dirs": "tutorials",
    "gallery_dirs": "tutorials_built",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_signature": False,
    "thumbnail_size": (600, 300),
    "abort_on_example_error": True,
    "capture_repr": (),  # what is printed alone
    "write_computation_times": False,  # its table comes from a network
}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]
html_theme = "pydata_sphinx_theme"
html_title = "otloss"
html_css_files = ["site.css"]
html_js_files = [("tables.js", {"defer": "defer"})]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # light or dark, as the system has it
html_show_sphinx = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_depth": 2,
    "show_toc_level": 2,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "article_header_end": [],
    "pygments_light_style": "tango",
}
html_sidebars = {"index": [], "changelog": []}  # no neighbours to show

html_math_renderer = "mathml"
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["myst.header"]  # a page may start a level deeper

autosummary_generate = True
autosummary_imported_members = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False
napoleon_custom_sections = ["Source", "Sources", "Shape", "Shapes", "Units", "Notation"]
smartquotes = False  # the pages have formulas and options of commands
default_role = "code"  # single backticks of docstrings
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# ---- docstrings: plain text, with backticks for code, indented formulas and Google's sections ------------------------

SECTION = re.compile(
    r"\s*(Args|Attributes|Returns|Raises|Source|Sources|Example|Examples|Shape|Shapes|Note|Units):\s*$"
)
FIELD = re.compile(r"(\s*)([\w*., ]+)(: .*|:)$")
LITERAL = re.compile(r"(``.+?``|`[^`]+`)")


def escape(text: str) -> str:
    """Escape what would be markup outside of backticks: |x|, a * b and names that end in an underscore."""
    parts = LITERAL.split(text)
    for place in range(0, len(parts), 2):
        part = re.sub(r"(?<!\*)\*(?!\*)", r"\\*", parts[place]).replace("|", r"\|")
        parts[place] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", part)
    return re.sub(r"^(\s*)(\w)\. ", r"\1\2\\. ", "".join(parts))  # an initial is not the number of a list


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def plain_docstring(lines: list[str]) -> list[str]:
    """Return the docstring with its text escaped, and its indented formulas as literal blocks."""
    result: list[str] = []
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    in_section, in_literal = False, False
    for paragraph in filter(None, paragraphs):
        first = paragraph[0]
        if SECTION.match(first):
            in_section = True
        elif indent_of(first) == 0:
            in_section = False
        is_formula = not in_section and indent_of(first) > 0
        if first.lstrip().startswith(">>>"):
            result += [*paragraph, ""]
        elif is_formula:
            result += [*([] if in_literal else ["::", ""]), *paragraph, ""]
        elif not in_section and any(indent_of(line) > 0 for line in paragraph) and not first.lstrip().startswith("- "):
            result += [*text_and_formula(paragraph), ""]
        else:
            doctest = False
            for line in paragraph:
                doctest = doctest or line.lstrip().startswith(">>>")
                result.append(line if doctest else field(line) if in_section else escape(line))
            result.append("")
        in_literal = is_formula
    return result


def text_and_formula(paragraph: list[str]) -> list[str]:
    """A paragraph in which lines of text and indented lines follow each other: all of it keeps its lines."""
    return ["::", "", *("    " + line for line in paragraph)]


def field(line: str) -> str:
    """A line of a section: the names before the colon keep the underscore that napoleon escapes."""
    found = FIELD.fullmatch(line)
    if found is None or SECTION.match(line):
        return line if SECTION.match(line) else escape(line)
    indent, names, rest = found.groups()
    names = names[0] + re.sub(r"_(?=[,.\s])", r"\\_", names[1:]).replace("*", r"\*")
    return indent + names + ":" + escape(rest[1:])


PAGE = re.compile(r"`?\bdocs/((?:guide|reports)/\w+)\.md(?:#([\w-]+))?`?")


def link(found: re.Match[str]) -> str:
    """The role for a page that a docstring names, or for one of its labels: docs/guide/definitions.md#def-line."""
    page, label = found.groups()
    return f":ref:`{label}`" if label else f":doc:`/{page}`"


def process_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = plain_docstring([PAGE.sub(link, line) for line in lines])


# ---- formulas: MathML, which browsers draw without a script and without a font from a network ------------------------


FUNCTION = re.compile(r"<mo>&ApplyFunction;</mo>(?!\s*<mo|\s*<mrow>\s*<mo>\()")
BEFORE_NAME = re.compile(r"(</(?:mi|msub|msup)>)(\s*<mi[^>]*>(?:log|exp|KL)</mi>)")
SPACE = '<mspace width="0.17em"></mspace>'


def mathml(node: Any, as_block: bool = False) -> str:
    """Return a formula with the spaces around log, exp and KL that browsers leave out."""
    text = tex2mathml(node.astext(), as_block=as_block)
    return BEFORE_NAME.sub(rf"\1{SPACE}\2", FUNCTION.sub(SPACE, text))


def inline_formula(self: Any, node: Any) -> None:
    self.body.append(mathml(node))
    raise nodes.SkipNode


def formula(self: Any, node: Any) -> None:
    self.body.append(f'<div class="formula">{mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


# ---- links out of docs/: README.md and CONTRIBUTING.md have a page here ----------------------------------------------

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributors/contributing.md", "CHANGELOG.md": "changelog.md"}


def process_page(app: Any, docname: str, source: list[str]) -> None:
    """Links that are right in the repository become right here; anchors in HTML become targets of MyST."""
    text, top = source[0], "../" * docname.count("/")
    for file, page in PAGES.items():
        text = text.replace(f"](../{top}{file})", f"]({top}{page})")
    text = text.replace(f"](../{top}docs/", f"]({top}")
    text = re.sub(r"\]\(((?:\.\./)*)tutorials/(plot_\w+)\.py\)", r"](\1tutorials_built/\2.rst)", text)
    source[0] = re.sub(r'<a id="([\w-]+)"></a>\n', r"(\1)=\n", text)


def process_include(app: Any, path: Path, docname: str, source: list[str]) -> None:
    """Files of the root that a page includes: their links start there."""
    top = "../" * app.env.docname.count("/")  # MyST passes only the last part as `docname`
    text = source[0].replace("](docs/", f"]({top}")
    for file, page in PAGES.items():
        text = text.replace(f"]({file})", f"]({top}{page})")
    source[0] = re.sub(r"\]\((?=(?:benchmarks|examples|tests|otloss|otloss_llm)/)", f"](../{top}", text)


def process_code(app: Any, doctree: nodes.document) -> None:
    """Examples and tutorials without the comments that are for the formatter alone."""
    for block in doctree.findall(nodes.literal_block):
        if "  # fmt: skip" in block.rawsource:
            block.rawsource = block.rawsource.replace("  # fmt: skip", "")
            block.children = [nodes.Text(block.rawsource)]


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula, None))
    app.connect("autodoc-process-docstring", process_docstring, priority=100)  # before napoleon
    app.connect("source-read", process_page)
    app.connect("include-read", process_include)
    app.connect("doctree-read", process_code)
