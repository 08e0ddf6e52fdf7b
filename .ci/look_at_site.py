"""Look at every page of the built site in a headless browser, at three widths, light and dark.

python .ci/look_at_site.py build/site [--pictures FOLDER]

A page fails with an error in the console, a missing picture, anything wider than the window that does not scroll by
itself, or a table that is wider than its column. Tables are looked at on all pages. Needs selenium (`pip install
selenium`) and, from the system's packages, chromium with chromedriver; without them nothing is checked, and the exit
code is 0.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REFERENCE = ("otloss", "otloss.sinkhorn", "otloss_llm.EMO")  # the generated pages are alike
SIZES = {"phone": (390, 800), "small": (1280, 900), "large": (1920, 1080)}
WIDE_TABLES = """
return [...document.querySelectorAll("main table")]
    .filter((table) => table.scrollWidth > table.clientWidth + 1)
    .map((table) => "a table is wider than its column: " + table.textContent.trim().slice(0, 60));
"""
# Pictures without pixels, and boxes beyond the right edge of the window outside of boxes that scroll by themselves.
FAULTS = """
const faults = [];
for (const image of document.images) {
    if (!image.complete || image.naturalWidth === 0) faults.push("picture missing: " + image.src);
}
const scrolls = (box) => {
    for (let b = box; b && b !== document.body; b = b.parentElement) {
        if (["auto", "scroll", "hidden"].includes(getComputedStyle(b).overflowX)) return true;
    }
    return false;
};
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width + 1) {
    for (const box of document.querySelectorAll("main *")) {
        if (box.getBoundingClientRect().right > width + 1 && !scrolls(box)) {
            faults.push("wider than the window: " + box.tagName + " " + box.textContent.slice(0, 60));
            break;
        }
    }
    faults.push("the page scrolls sideways: " + document.documentElement.scrollWidth + " > " + width);
}
return faults;
"""


def browser(driver: str, chromium: str) -> Any:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def resize(window: Any, width: int, height: int) -> None:
    # The window of a desktop has a least width; the window of a device has none.
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def wide_tables(window: Any, address: str, site: Path) -> list[str]:
    """Return a line for each table that is wider than its column, on any page, at one of three widths."""
    lines = []
    pages = sorted(path for path in site.rglob("*.html") if "<table" in path.read_text(encoding="utf-8"))
    for width, height in SIZES.values():
        resize(window, width, height)
        for page in pages:
            name = page.relative_to(site).as_posix()
            window.get(f"{address}/{name}")
            lines += [f"{name}, {width} px: {fault}" for fault in window.execute_script(WIDE_TABLES)]
    return lines


def pages_of(site: Path) -> list[str]:
    """Return the names of the pages, and a few pages of the reference."""
    names = (page.relative_to(site).with_suffix("").as_posix() for page in sorted(site.rglob("*.html")))
    own = [name for name in names if not name.startswith(("_", "reference/generated/"))]
    return own + [f"reference/generated/{name}" for name in REFERENCE]


def faults_of(window: Any, address: str, pages: list[str], pictures: Path | None) -> list[str]:
    """Return a line for each fault of each page."""
    lines = []
    for name in pages:
        for size, (width, height) in SIZES.items():
            resize(window, width, height)
            for mode in ("light", "dark"):
                window.get(f"{address}/{name}.html")
                window.execute_script(
                    "localStorage.setItem('mode', arguments[0]); localStorage.setItem('theme', arguments[0]);", mode
                )
                window.refresh()
                where = f"{name}, {size}, {mode}: "
                lines += [where + fault for fault in window.execute_script(FAULTS)]
                lines += [where + entry["message"] for entry in window.get_log("browser") if entry["level"] == "SEVERE"]
                if pictures is not None:
                    path = pictures / f"{name.replace('/', '-')}-{size}-{mode}.png"
                    path.write_bytes(window.get_screenshot_as_png())
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder for a screenshot of each page")
    asked = parser.parse_args(arguments)
    driver = shutil.which("chromedriver")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        print("no chromium with chromedriver here: the pages were not looked at")
        return 0
    if asked.pictures is not None:
        asked.pictures.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(asked.site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    window = browser(driver, chromium)
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        pages = pages_of(asked.site)
        lines = faults_of(window, address, pages, asked.pictures) + wide_tables(window, address, asked.site)
    finally:
        window.quit()
        server.shutdown()
    print("\n".join(lines) or f"{len(pages)} pages at {len(SIZES)} widths, light and dark, and all tables: no faults")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
