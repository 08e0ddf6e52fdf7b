"""Build hook: the README and the addresses in the metadata of the distribution.

Both follow from `repository` in pyproject.toml, the address of the public repository. `make release` sets it. While it
is empty, metadata have no addresses and links of the README stay relative.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


def project_urls(repository: str) -> dict[str, str]:
    """Return the addresses of the project."""
    if not repository:
        return {}
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def with_addresses(text: str, repository: str) -> str:
    """Return Markdown whose relative links and pictures are addresses in the repository."""
    if not repository:
        return text
    relative = r"\[(.*?)\]\((?!https?://|#)(.*?)\)"
    text = re.sub("!" + relative, rf"![\1]({repository}/raw/main/\2)", text)
    return re.sub("(?<!!)" + relative, rf"[\1]({repository}/blob/main/\2)", text)


class AddressHook(MetadataHookInterface):
    """Sets `urls` and `readme`."""

    def update(self, metadata: dict) -> None:
        repository = self.config["repository"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = project_urls(repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": with_addresses(text, repository)}
