"""Pages that are programs: run blocks, compare outputs, make notebooks.

The ``python`` blocks of a page run in order, in one namespace. A block ``text title="Output"`` after one shows what
it prints, where ``...`` stands for any text; with the title ``MEASURED``, numbers may differ. ``python -m
website.programs docs/tutorial/*.md`` writes these outputs; ``tests/test_docs.py`` compares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import linecache
import re
from pathlib import Path
from typing import Any, NamedTuple

_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n"
    r"(?:\n```text title=\"(?P<title>Output[^\"]*)\"\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
MEASURED = "Output, as measured on one machine"
"""Title of an output of which only words are compared: its numbers are measured."""


class Ran(NamedTuple):
    """A block of a page after its execution.

    Attributes:
      code: source of the block.
      shown: the output that the page shows; None if it shows none.
      title: title of that output.
      printed: what the block printed.
    """

    code: str
    shown: str | None
    title: str
    printed: str

    def agrees(self) -> bool:
        """True if the page shows what the block printed."""
        shown, printed = _tidy(self.shown or ""), self.printed
        if self.title == MEASURED:
            return _words(shown) == _words(printed)
        pattern = re.escape(shown).replace(r"\.\.\.", ".*?")
        return re.fullmatch(pattern, printed, re.DOTALL) is not None


def run(text: str, name: str) -> list[Ran]:
    """Execute the blocks of a page.

    Args:
      text: Markdown of the page.
      name: name of the page; lines of errors and of jaxprs refer to it.

    Returns:
      the blocks, in order. An exception of a block propagates.
    """
    names: dict[str, Any] = {"__name__": "page"}
    file = re.sub(r"^\d+-", "", Path(name).stem) + ".py"
    program, ran = "", []
    for m in _BLOCK.finditer(text):
        code = "\n" * program.count("\n") + m["code"]  # lines count on from block to block
        program += m["code"]
        linecache.cache[file] = (len(program), None, program.splitlines(True), file)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, file, "exec"), names)
        ran.append(Ran(m["code"], m["output"], m["title"] or "Output", _tidy(printed.getvalue())))
    return ran


def _words(text: str) -> list[str]:
    return sorted(re.findall(r"[A-Za-z_]{3,}", text))  # rows are in the order of their times


def _tidy(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.rstrip("\n").split("\n")) if text.strip() else ""


def written(text: str, name: str) -> str:
    """The page with the outputs that its blocks print; one that agrees stays."""
    ran = iter(run(text, name))

    def block(m: re.Match[str]) -> str:
        r = next(ran)
        code = f"```python\n{r.code}```\n"
        if not r.printed:
            return code
        shown = r.shown if r.shown is not None and r.agrees() else r.printed
        return f'{code}\n```text title="{r.title}"\n{shown}```\n'

    return _BLOCK.sub(block, text)


def notebook(text: str) -> str:
    """A page as a Jupyter notebook: prose and blocks in order, without outputs.

    Returns:
      JSON of the format 4.5 of notebooks.
    """
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str) -> None:
        if not source.strip():
            return
        cell = {"id": f"cell-{len(cells)}", "cell_type": kind, "metadata": {}, "source": source.strip("\n")}
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))

    end = 0
    for m in _BLOCK.finditer(text):
        add("markdown", text[end : m.start()])
        add("code", m["code"])
        end = m.end()
    add("markdown", text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1)


def main() -> None:
    """Write the outputs of pages into them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        before = page.read_text()
        if (after := written(before, page.name)) != before:
            page.write_text(after)
            print(f"{page}: outputs written")


if __name__ == "__main__":
    main()
