"""Events of MkDocs: generated pages, links, navigation, charts, notebooks.

``mkdocs.yml`` names this file. In: the configuration and the files of ``docs``. Out: the same, with the pages that
``reference``, ``gallery`` and ``design`` generate, and with links as ``links.py`` rewrites them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # MkDocs imports this file alone, from any folder

from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402

from website import charts, gallery, links, programs, reference  # noqa: E402


def _first_heading(text: str) -> str:
    return next(line[2:].strip() for line in text.splitlines() if line.startswith("# "))


def _design() -> dict[str, str]:
    """The index of the design pages."""
    pages = sorted((ROOT / "docs/design").glob("*.md"))
    rows = [f"- [{_first_heading(p.read_text())}]({p.name})" for p in pages]
    return {
        "design/README.md": "# Design\n\nDecisions that someone could want to reverse: motivation, alternatives, "
        "what was measured.\n\n" + "\n".join(rows) + "\n"
    }


def _copies() -> dict[str, str]:
    """Pages that are files outside of ``docs``."""
    return {page: (ROOT / file).read_text() for file, page in links.PAGES.items() if file != "README.md"}


def on_config(config: Any) -> Any:
    """Expand the entries ``folder/*`` of the navigation."""
    if lines := reference.lacking():
        raise PluginError(
            "names of the reference lack something; docs/design/029 says what to write:\n" + "\n".join(lines)
        )
    generated = {"design": _design(), "reference": reference.pages(), "examples": gallery.pages()}
    config["generated_pages"] = {k: v for part in (*generated.values(), _copies()) for k, v in part.items()}

    def expanded(entries: list[Any]) -> list[Any]:
        out: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                ((title, value),) = entry.items()
                if isinstance(value, str) and value.endswith("/*"):
                    value = _listing(value[:-2], generated)
                elif isinstance(value, list):
                    value = expanded(value)
                out.append({title: value})
            elif entry.endswith("/*"):
                out.extend(_listing(entry[:-2], generated))
            else:
                out.append(entry)
        return out

    nav = expanded(config["nav"])
    listed = set(_files(nav))
    further = sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in listed)
    next(entry for entry in nav if "How-to" in entry)["How-to"].extend(further)  # new pages are found at once
    config["nav"] = nav
    return config


def _files(entries: list[Any]) -> list[str]:
    """All files that a navigation names."""
    found: list[str] = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += _files(value) if isinstance(value, list) else [value]
    return found


def _listing(folder: str, generated: dict[str, dict[str, str]]) -> list[Any]:
    if folder == "design":
        return ["design/README.md", *sorted(f"design/{p.name}" for p in (ROOT / "docs/design").glob("*.md"))]
    return {"reference": reference.navigation, "examples": gallery.navigation}[folder]()


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and a notebook for each page of the tutorial."""
    for page, text in config["generated_pages"].items():
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / "docs/tutorial").glob("[0-9]*.md")):
        content = programs.notebook(path.read_text())
        files.append(File.generated(config, f"tutorial/{path.stem}.ipynb", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links; add charts, and the download of a tutorial's page."""
    uri = page.file.src_uri
    file = next((f for f, p in links.PAGES.items() if p == uri and f != "README.md"), None)
    if file is None:
        file = uri if uri.startswith("examples/") else f"docs/{uri}"
    markdown = links.indented(links.rewritten(markdown, file, uri))
    if (
        uri == "README.md"
    ):  # the reference is on the site only, so the file of the repository cannot link to it
        markdown = markdown.replace("the API reference", "[the API reference](reference/README.md)")
        markdown = markdown.replace(
            "every public name (on the site)", "[every public name](reference/README.md)"
        )
    if uri == "benchmarks.md":
        markdown = charts.inserted(markdown)
    if re.fullmatch(r"tutorial/\d.*\.md", uri):
        name = uri.removeprefix("tutorial/").removesuffix(".md")
        head, _, rest = markdown.partition("\n")
        markdown = (
            f"{head}\n\n[Download this page as a notebook]({name}.ipynb){{ download .notebook }}\n{rest}"
        )
    return markdown


def on_post_build(config: Any) -> None:
    """Write the search index as a script too, for pages opened from a folder."""
    index = Path(config["site_dir"]) / "search" / "search_index.json"
    (index.parent / "search_index.js").write_text(f"var __index = {index.read_text()}")
