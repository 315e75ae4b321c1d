"""Metadata that depends on where the package is published: links and URLs.

On PyPI, a relative link leads nowhere. With the address of the repository's files in ``BLUFUNC_REPOSITORY_URL`` when a
wheel or sdist is built (``https://host/owner/blufunc/blob/main``), the links of README.md become absolute and the
project has URLs. Without it, links become their text, and there are no URLs: nothing that is published is a dead link.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```[ \t]*$)", re.DOTALL | re.MULTILINE)


def published(readme: str, address: str) -> str:
    """The README for PyPI.

    Args:
      readme: its Markdown, with links relative to the repository.
      address: where the repository's files are shown; empty if that is not known.

    Returns:
      Markdown without relative links. Without an address, pictures are left out.
    """

    def link(m: re.Match[str]) -> str:
        if re.match(r"[a-z]+:|#", m["target"]):
            return m[0]
        if not address:
            return "" if m["image"] else m["text"]
        url = f"{address.rstrip('/')}/{m['target']}"
        return f"{m['image']}[{m['text']}]({url.replace('/blob/', '/raw/') if m['image'] else url})"

    parts = _FENCE.split(readme)
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))


class CustomMetadataHook(MetadataHookInterface):
    """The dynamic fields ``readme`` and ``urls`` of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both, from ``BLUFUNC_REPOSITORY_URL``."""
        address = os.environ.get("BLUFUNC_REPOSITORY_URL", "")
        text = published((Path(self.root) / "README.md").read_text(), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address:
            at = address.rstrip("/")
            metadata["urls"] = {
                "Documentation": f"{at}/docs/README.md",
                "Source": re.sub(r"/(?:-/)?(?:blob|tree|src)/.*", "", at),
                "Changelog": f"{at}/CHANGELOG.md",
            }
        else:
            metadata["urls"] = {}
