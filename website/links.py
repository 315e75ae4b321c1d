"""Links between the files of the repository, as links of the site.

A page links to files of the repository, so that it reads well there. On the site some files are pages: the docs, the
guide for contributors, the changelog, the examples. A link to any other file becomes its text. Images are links too.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\((?P<target>[^)#:\s]*)(?P<anchor>#[^)\s]*)?\)"
)
_FENCE = re.compile(r"(^```.*?^```[ \t]*$)", re.DOTALL | re.MULTILINE)

PAGES = {"README.md": "README.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files outside of ``docs`` that are pages of the site."""


def page_of(path: str) -> str | None:
    """Name of the site's page that shows a file of the repository.

    Args:
      path: relative to the root of the repository.

    Returns:
      the page's name among the sources of MkDocs; None: no page shows this file.
    """
    path = path.rstrip("/")
    if path in PAGES:
        return PAGES[path]
    if path in ("docs", "docs/README.md"):
        return "README.md"
    if path == "docs/design":
        return "design/README.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if re.fullmatch(r"examples/\w+", path):
        return f"{path}/README.md"
    if path.startswith("examples/") and path.endswith((".py", ".md")):
        return re.sub(r"\.py$", ".md", path)
    return None


def indented(text: str) -> str:
    """Code in lists by the 8 columns of MkDocs instead of the 6 of GitHub."""
    code = re.compile(r"(?<=\n\n) {6}\S.*\n(?: {6,}\S.*\n)*")
    parts = _FENCE.split(text)
    parts[::2] = [code.sub(lambda m: re.sub(r"(?m)^(?=.)", "  ", m[0]), p) for p in parts[::2]]
    return "".join(parts)


def rewritten(text: str, file: str, page: str) -> str:
    """Markdown with the links of a repository's file as links between pages.

    Args:
      text: Markdown; code blocks are left alone.
      file: path of the file that holds the text, relative to the root.
      page: name of the page that shows it.
    """

    def link(m: re.Match[str]) -> str:
        target, anchor = m["target"], m["anchor"] or ""
        if not target:
            return m[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), target))
        shown = page_of(path)
        if shown is None:
            return m[0] if m["image"] else m["text"]
        return (
            f"{m['image']}[{m['text']}]({posixpath.relpath(shown, posixpath.dirname(page) or '.')}{anchor})"
        )

    parts = _FENCE.split(text)
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))
