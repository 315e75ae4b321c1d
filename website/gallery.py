"""Pages of the examples: what each shows, how to run it, its picture, its source.

In: ``examples``, and the pictures in ``docs/assets``. Out: an index page, the README of each folder, and a
page for each program.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "gpt": "GPT",
    "llm": "Language models",
    "gallery": "Gallery",
    "ports": "Ported from JAX",
    "extend": "Extending",
}


def programs(folder: str) -> list[Path]:
    """Modules of a folder of ``examples``."""
    return sorted(p for p in (ROOT / "examples" / folder).glob("*.py") if not p.stem.startswith("__"))


def picture(folder: str, name: str) -> Path | None:
    """Picture of a program, or None: ``docs/assets/FOLDER/NAME.png``."""
    path = ROOT / "docs" / "assets" / folder / f"{name}.png"
    return path if path.exists() else None


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _runs(path: Path) -> bool:
    return 'if __name__ == "__main__"' in path.read_text()


def _page(folder: str, path: Path) -> str:
    docstring, source = _docstring(path), path.read_text()
    title, _, rest = docstring.partition("\n")
    lines = [f"# {path.stem}", "", title, rest]
    if picture(folder, path.stem):
        lines += ["", f"![{title}](../../docs/assets/{folder}/{path.stem}.png)"]
    if _runs(path):
        lines += ["", "Run it from a checkout:", "", f"    python -m examples.{folder}.{path.stem}", ""]
    return "\n".join([*lines, "", "## Source", "", "````py", source.rstrip(), "````", ""])


def _folders() -> list[str]:
    found = sorted(p.name for p in (ROOT / "examples").iterdir() if (p / "README.md").exists())
    return sorted(found, key=lambda name: (list(FOLDERS).index(name) if name in FOLDERS else 99, name))


def _index() -> str:
    lines = ["# Examples", "", "Programs of the repository's `examples` folder. All of them are tested.", ""]
    for folder in _folders():
        text = (ROOT / "examples" / folder / "README.md").read_text()
        lines += [
            f"## {FOLDERS.get(folder, folder)}",
            "",
            f"[{text.splitlines()[0][2:]}]({folder}/README.md).",
            "",
        ]
        lines += ["| program | shows | run |", "|---|---|---|"]
        for path in programs(folder):
            first = _docstring(path).split("\n")[0].replace("|", "\\|")
            command = f"`python -m examples.{folder}.{path.stem}`" if _runs(path) else "a part"
            lines.append(f"| [`{path.stem}`]({folder}/{path.stem}.md) | {first} | {command} |")
        if (ROOT / "examples" / folder / "__main__.py").exists():
            lines += ["", f"Run it as a whole by `python -m examples.{folder}`."]
        lines.append("")
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """All pages of the gallery: name among the sources of MkDocs, and Markdown."""
    made = {"examples/README.md": _index()}
    for folder in _folders():
        made[f"examples/{folder}/README.md"] = (ROOT / "examples" / folder / "README.md").read_text()
        for path in programs(folder):
            made[f"examples/{folder}/{path.stem}.md"] = _page(folder, path)
    return made


def navigation() -> list[Any]:
    """Entries of the navigation."""
    entries: list[Any] = ["examples/README.md"]
    for folder in _folders():
        pages = [f"examples/{folder}/{p.stem}.md" for p in programs(folder)]
        entries.append({FOLDERS.get(folder, folder): [f"examples/{folder}/README.md", *pages]})
    return entries
