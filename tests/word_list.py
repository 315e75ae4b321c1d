"""Word list of the project's English: ``python -m tests.word_list``, a part of ``make check``.

In: the Markdown pages, comments, docstrings and identifiers of the tree. Out: one line per finding, with file, line
and the replacement; exit status 1 if there is any.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SUFFIXES = {".md", ".py", ".cuh", ".cu", ".h", ".cpp"}
SKIPPED = {"build", "dist", "runs", "__pycache__", "goldens"}  # and hidden folders
THIS = {"tests/word_list.py", "tests/test_word_list.py"}  # they spell the words out
DOCSTRING_COLUMNS = 80


class Row(NamedTuple):
    """A pattern of words, and the replacement.

    Attributes:
      stem: lower-case text that occurs in every match; it keeps the search fast.
      pattern: regular expression; a space also matches a line break, and case is ignored.
      write: the replacement.
    """

    stem: str
    pattern: str
    write: str


WORDS = (
    Row("whoever", r"whoever", "the subject: the user, the caller, the pass, the thread"),
    Row("whomever", r"whomever", "the subject: the user, the caller, the pass, the thread"),
    Row("nobody", r"nobody", "the subject: no thread, no reader, no pass"),
    Row("ours", r"ours", "blufunc's, or the name of the package"),
    Row("multiprocessor", r"multiprocessors?", "SM, SMs"),
    Row("level", r"second-?(?: |-)level cache", "L2"),
    Row("level", r"first-?(?: |-)level cache", "L1"),
    Row("warps", r"groups? of (?:four )?warps", "warpgroup"),
    Row("thread", r"threads? that cop(?:y|ies)", "producer"),
    Row("thread", r"threads? that computes?", "consumer"),
    Row("matrices", r"products? of (?:two )?matrices", "matmul, GEMM"),
    Row("text", r"texts? of (?:(?:a|the|its|all) )?kernels?", "source of ..."),
    Row("text", r"kernels?'s? texts?|generated texts?", "source"),
    Row("many", r"how many|so many", "n, count, number of"),
    Row("had", r"(?:is|are|was|were|be|been) had", "is computed, is available"),
    Row("deal", r"dealt out|deals? out", "assigned, mapped"),
    Row("tak", r"tak(?:e|es|ing|en) up", "accumulates, loads"),
    Row("took", r"took up", "accumulated, loaded"),
    Row("beside", r"beside", "alongside, next to, overlapped with, compared with"),
    Row("behind", r"behind", "after, following"),
    Row("exchang", r"exchang(?:e|es|ed|ing)", "collective, or its name: all-reduce, all-gather, send, swap"),
    Row("lie", r"(?:as|where) (?:it|they) lies?", "in place, without a copy"),
    Row("stand", r"as (?:it|they) stands?", "in place, without a copy"),
    Row("divid", r"divid(?:e|es|ed|ing) (?:over|among|along|between)", "sharded over, split across"),
    Row("again", r"comput(?:e|es|ed|ing) (?:it |them )?again", "recompute, rematerialize"),
    Row("kept", r"what is kept", "residual, saved value"),
    Row("owe", r"(?:is|are|be|still|sums?) owed|owes?", "unreduced, pending a reduction"),
    Row("alike", r"alike", "structurally identical, the same"),
    Row("wants", r"wants", "requires, needs"),
    Row("nothing", r"nothing but", "only"),
    Row("mend", r"mends?|mended|mending", "fix"),
    Row("number", r"numbers? of (?:a|the) (?:thread|device|block|warp|rank|head)(?!')", "index, rank"),
    Row("meet", r"(?:ranks|threads|warps|lanes|devices) (?:that )?meet", "synchronize, reduce"),
)
NAMES = (  # whole identifiers, without leading and trailing underscores
    Row("whoever", r"whoever", "the role: user, caller, reader"),
    Row("nobody", r"nobody", "the role: user, caller, reader"),
    Row("multiprocessor", r"multiprocessors?", "sms, n_sms"),
    Row("_many", r"how_many|so_many", "n, count"),
    Row("dealt_out", r"dealt_out", "assigned"),
    Row("columns_apart", r"(?:with_)?columns_apart", "split_column_reductions"),
    Row("products_beside", r"(?:with_)?products_beside", "overlapped_matmuls"),
    Row("openly", r"openly", "errstate"),
    Row("quietly", r"quietly", "errstate"),
    Row("again", r"again", "a noun for the value: repeated, recomputed"),
    Row("behind", r"behind", "a noun for the value: rest, followers"),
    Row("beside", r"beside", "a noun for the value: others, overlapped"),
    Row("told", r"told", "a noun for the value: report, lines"),
    Row("alike", r"alike", "a noun for the value: same, equal"),
)
OPENING = re.compile(
    r"(?:What|Whatever|Whoever|Whose|How (?:many|much|long|large|far)|From how many|By how much)\b"
)

_RAW_DOCSTRING = re.compile(rf'"""(?:{OPENING.pattern}|.{{{DOCSTRING_COLUMNS + 1},}})')


@functools.cache
def _compiled(rows: tuple[Row, ...], space: str = r"\s+") -> re.Pattern[str]:
    """One pattern for several rows; the index of its last group is that of the row."""
    pattern = "|".join(f"({row.pattern})" for row in rows).replace(" ", space)
    return re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)


@functools.cache
def _name(row: Row, after: str = "") -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)_*(?:{row.pattern})_*{after}", re.IGNORECASE)


def _occurs(stem: str, pattern: re.Pattern[str], lower: str) -> bool:
    """True if a pattern matches anywhere in a file, code included: a search around each occurrence of its stem."""
    at = lower.find(stem)
    while at >= 0:
        if pattern.search(lower, lower.rfind("\n", 0, max(0, at - 40)) + 1, at + 120):
            return True
        at = lower.find(stem, at + 1)
    return False


class Finding(NamedTuple):
    """A place that the word list rejects, and what to write there."""

    path: str
    line: int
    found: str
    write: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r}: write {self.write}"


Block = tuple[int, str]  # the line that prose begins on, and the prose


def check(path: str, text: str) -> list[Finding]:
    """Findings in one file.

    Args:
      path: name of the file; its suffix decides what counts as prose.
      text: contents of the file.
    """
    lower = text.lower()
    rows = tuple(row for row in WORDS if _occurs(row.stem, _compiled((row,), r"[\s#/*]+"), lower))
    if path.endswith(".md"):
        return _in_prose(path, [(1, _markdown(text))], rows)
    if not path.endswith(".py"):
        return _in_prose(path, _c_comments(text), rows)
    names = [
        row for row in NAMES if _occurs(row.stem, _name(row, r"(?=\s*[=,:()\]]|\s+(?:in|for)\b)"), lower)
    ]
    if not (rows or names or _RAW_DOCSTRING.search(text)):
        return []  # nothing can be found: most files are not taken apart
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = list(_docstrings(nodes))
    found = _in_prose(path, [*_comments(text), *docstrings], rows)
    for line, docstring in docstrings:
        first = docstring.strip().split("\n")[0]
        if opening := OPENING.match(first):
            found.append(Finding(path, line, opening[0] + " ...", "a noun phrase or an imperative"))
        if len(first) > DOCSTRING_COLUMNS:
            write = f"at most {DOCSTRING_COLUMNS} columns, not {len(first)}"
            found.append(Finding(path, line, first[:30] + "...", write))
    return sorted([*found, *_in_names(path, nodes, names)], key=lambda f: f.line)


def _in_prose(path: str, blocks: Iterable[Block], rows: tuple[Row, ...]) -> list[Finding]:
    found = []
    for line, prose in blocks if rows else ():
        for m in _compiled(rows).finditer(prose):
            at = line + prose.count("\n", 0, m.start())
            found.append(Finding(path, at, " ".join(m[0].split()), rows[m.lastindex - 1].write))
    return found


def _in_names(path: str, nodes: list[ast.AST], rows: list[Row]) -> list[Finding]:
    """Findings among the names that a module binds: functions, classes, arguments, variables."""
    found: dict[str, Finding] = {}
    for node in nodes if rows else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        for row in rows:
            if _name(row).fullmatch(name):
                found.setdefault(name, Finding(path, node.lineno, name, row.write))
    return list(found.values())


def _comments(text: str) -> Iterator[Block]:
    """Comments of Python source; those on consecutive lines are one block."""
    start, block, last = 0, [], -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if line != last + 1 and block:
            yield start, "\n".join(block)
            block = []
        start, last = start if block else line, line
        block.append(token.string.lstrip("#"))
    if block:
        yield start, "\n".join(block)


def _docstrings(nodes: list[ast.AST]) -> Iterator[Block]:
    """Docstrings of a module, its classes and functions, and string statements after assignments."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(text := node.value.value, str):
                yield node.lineno, _without_code(text)


def _c_comments(text: str) -> list[Block]:
    """Comments of C, C++ or CUDA source; line comments on consecutive lines are one block."""
    comments = re.finditer(r"//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/", text, re.DOTALL)
    line = lambda m: text.count("\n", 0, m.start()) + 1
    return [(line(m), re.sub(r"^[ \t]*(?://|\*)", "", m[0], flags=re.MULTILINE)) for m in comments]


def _markdown(text: str) -> str:
    """A page with everything that is not prose blanked, on the same lines."""
    for pattern in (r"^```.*?^```", r"(?<=\n\n)(?: {4}[^\n]*\n|\n)+", r"\]\([^)]*\)"):
        text = re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL | re.MULTILINE)
    return _without_code(text)


def _without_code(text: str) -> str:
    """Prose with the inside of backquotes blanked."""
    return re.sub(r"(`+)[^`]+\1", lambda m: re.sub(r"[^\n]", "_", m[0]), text)


def files() -> Iterator[str]:
    """Paths of the tree that can hold prose, relative to its root."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(
            f for f in folders if f not in SKIPPED and f[0] != "." and not f.endswith(".egg-info")
        )
        for name in sorted(names):
            path = (Path(folder) / name).relative_to(ROOT).as_posix()
            if Path(name).suffix in SUFFIXES and path not in THIS:
                yield path


def main() -> int:
    """Check the tree."""
    parser = argparse.ArgumentParser(description="the project's word list")
    parser.add_argument("paths", nargs="*", help="only paths that begin with one of these")
    options = parser.parse_args()
    paths = [p for p in files() if not options.paths or p.startswith(tuple(options.paths))]
    found = [finding for path in paths for finding in check(path, (ROOT / path).read_text())]
    for finding in found:
        print(finding)
    if found:
        print(
            f"word list: {len(found)} findings. The reasons are in CONTRIBUTING.md, Habits.", file=sys.stderr
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
