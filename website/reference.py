"""Pages of the API reference, and the measure of what they describe.

In: ``names.py`` and ``entries.py``. Out: pages for MkDocs, by ``hooks.py``. ``python -m website.reference`` measures:
of each public name, whether its entry has a text, a meaning of each parameter, a result and, for functions of arrays,
shapes. Its exit status is 1 if anything lacks, and then the site is not built either.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import posixpath
import re
import sys
import textwrap
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import blufunc as bf
from blufunc.config import Config
from website import entries, names
from website.entries import Entry
from website.names import Namespace

SPLIT = 80
"""Namespaces of more names have a page for each group."""


def _kind(value: Any) -> str:
    if isinstance(value, bf.Primitive):
        return "primitive"
    if inspect.isclass(value) and issubclass(value, BaseException):
        return "exception"
    if isinstance(value, (types.UnionType, types.GenericAlias)) or not callable(value):
        return "constant"
    if type(value).__module__ == "typing":
        return "constant"
    return "class" if inspect.isclass(value) else "function"


# ------------------------------------------------------------------------------------------------ measuring


def gaps(space: Namespace, name: str, value: Any) -> list[str]:
    """The facts that the entry of a name lacks."""
    kind = _kind(value)
    if kind in ("primitive", "exception"):
        return [] if inspect.getdoc(value) else ["text"]
    if kind == "constant":
        return []
    e = entries.entry(name, value, space.name)
    lacks = [] if e.summary.strip() else ["text"]
    lacks += [f"the meaning of {p.name}" for p in e.parameters if not p.meaning]
    lacks += [f"{p} is no parameter" for p in e.unknown]
    if kind == "function" and not e.returns:
        lacks.append("the result")
    if kind == "function" and entries.returns_arrays(value, space.name, name) and not e.shapes:
        lacks.append("shapes")
    if kind == "class" and not issubclass(value, bf.Primitive):
        lacks += [f"text of {n}()" for n, method in _methods(value) if not inspect.getdoc(method)]
    return lacks


def lacking() -> list[str]:
    """A line for each public name whose entry lacks something."""
    lines = []
    for space in names.namespaces():
        for name, value in space.objects():
            if found := gaps(space, name, value):
                lines.append(f"{space.name}.{name}: {', '.join(found)}")
    return lines


def main() -> int:
    """Print what the entries of public names lack."""
    lines = lacking()
    total = sum(len(space.objects()) for space in names.namespaces())
    print(*lines, sep="\n")
    print(f"{total - len(lines)} of {total} public names are described: {1 - len(lines) / total:.1%}")
    return bool(lines)


# ------------------------------------------------------------------------------------------------ rendering


def _prose(text: str) -> str:
    """A docstring as Markdown: signs in the prose lose their meaning."""
    out = []
    for block in re.split(r"(\n\n(?: {4,}[^\n]*\n?|\n)+)", "\n\n" + text.strip()):
        if block.startswith("\n\n    "):
            out.append(f"\n\n```py\n{textwrap.dedent(block.strip(chr(10)))}\n```\n\n")
            continue
        parts = re.split(r"(`+[^`]+`+)", block)
        parts[::2] = [re.sub(r"([*_<])", r"\\\1", p).replace("$", "\\$") for p in parts[::2]]
        prose = "".join(p.replace("``", "`") if i % 2 else p for i, p in enumerate(parts))
        out.append(re.sub(r"(?<=[^\n])\n(?=- )", "\n\n", prose, count=1))
    return "".join(out).strip()


def _line(text: str) -> str:
    return _prose(text).replace("\n", " ")


def _anchor(space: str, name: str) -> str:
    return f"{{ #{space}.{name} }}"


def _parameters(e: Entry, linked: Callable[[str], str]) -> list[str]:
    lines = []
    for p in e.parameters:
        facts = [f"`{p.type}`"] if p.type and p.type != "Any" else []
        facts += [f"default `{p.default}`"] if p.default is not None else []
        meaning = linked(_line(p.meaning))
        lines.append(f"- `{p.name}`" + (f" ({', '.join(facts)})" if facts else "") + f": {meaning}")
    return ["", "**Parameters**", "", *lines] if lines else []


def _called(e: Entry, space: str) -> list[str]:
    """The lines of an entry from its signature on."""
    own = {e.name, *(p.name.lstrip("*") for p in e.parameters)}
    linked = lambda text: _marked(text, space, own)
    lines = [f"`{space}.{e.name}{e.signature}`", ""] if e.signature else []
    lines += [linked(_prose(e.summary)), *_parameters(e, linked)]
    if e.returns:
        lines += ["", f"**Returns** {linked(_line(e.returns))}"]
    if e.shapes:
        calls = [f"`{c.source}` gives `{c.result}`" for c in e.shapes]
        lines += ["", f"**Shapes** {'; '.join(calls)}"]
    if e.raises:
        rows = [f"- `{cls}`" + (f": {linked(_line(text))}" if text else "") for cls, text in e.raises]
        lines += ["", "**Raises**", "", *rows]
    return lines


@cache
def _callables(space: str) -> frozenset[str]:
    """Names of a namespace that have entries with anchors."""
    return frozenset(n for n, v in names.namespace(space).objects() if _kind(v) in ("function", "class"))


def _marked(text: str, space: str, own: set[str]) -> str:
    """Names of entries of the namespace marked for ``_resolved``, but ``own`` ones."""

    def mark(m: re.Match[str]) -> str:
        return f"\x01{space}|{m[1]}\x01" if m[1] in _callables(space) and m[1] not in own else m[0]

    return re.sub(r"(?<![`\w\[])`(\w{3,})`(?!`)", mark, text)


def _resolved(text: str, file: str, places: dict[str, str]) -> str:
    """Marks as links to entries, from the page of a file."""

    def link(m: re.Match[str]) -> str:
        space, name = m[1].split("|")
        to = posixpath.relpath(places[f"{space}.{name}"], posixpath.dirname(file))
        return f"[`{name}`]({to}#{space}.{name})"

    return re.sub("\x01([^\x01]+)\x01", link, text)


def _methods(cls: type) -> list[tuple[str, Any]]:
    """Public methods and properties of a class that blufunc defines."""
    found = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("blufunc"):
            continue
        for name, member in vars(base).items():
            if name.startswith("_") or isinstance(member, (type, types.MemberDescriptorType)):
                continue
            if isinstance(member, (classmethod, staticmethod)):
                member = member.__func__
            if inspect.isfunction(member) or isinstance(member, property):
                found[name] = member
    return sorted(found.items())


def _class(space: str, name: str, value: type) -> list[str]:
    lines = _called(entries.entry(name, value, space), space)
    parts = entries.sections(inspect.getdoc(value) or "")
    if issubclass(value, enum.Enum):
        lines += ["", "**Members** " + ", ".join(f"`{m}`" for m in value.__members__)]
    if fields := entries.items(parts.get("Attributes", "")):
        lines += ["", "**Attributes**", "", *(f"- `{n}`: {_line(text)}" for n, text in fields)]
    rows = []
    for n, member in _methods(value):
        e = entries.entry(n, member, "blufunc")  # no shapes are measured of methods
        first = _line(e.summary.split("\n\n")[0])
        rows.append(f"- `{n}{'' if isinstance(member, property) else e.signature}`: {first}")
    if rows and not issubclass(value, bf.Primitive):
        lines += ["", "**Methods and properties**", "", *rows]
    return lines


def _primitives(space: str, group: list[tuple[str, Any]]) -> list[str]:
    """A table of primitives: those of rules and of printed jaxprs."""
    lines = ["| primitive | in jaxprs | kind |", "|---|---|---|"]
    for name, value in group:
        kind = (inspect.getdoc(value) or "").split("\n")[0]
        lines.append(f"| `{name}` | `{value.name}` | {_line(kind).replace('|', chr(92) + '|')} |")
    return [
        "Primitives are what rules and transforms of your own are written for: [extending](../extending.md). "
        "`p.bind(*operands, **params)` applies one.",
        "",
        *lines,
    ]


def _constants(group: list[tuple[str, Any]]) -> list[str]:
    flags = [line for _, v in group if isinstance(v, Config) for line in _flags(v)]
    rows = [
        f"| `{n}` | `{str(v).replace('|', chr(92) + '|')[:110]}` |"
        for n, v in group
        if not isinstance(v, Config)
    ]
    return [*flags, *(["| name | value |", "|---|---|", *rows] if rows else [])]


def _flags(config: Config) -> list[str]:
    """The flags of ``config``, each with its environment variable and default."""
    parts = entries.sections(inspect.getdoc(config) or "")
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    lines = ["### `config` { #blufunc.config }", "", _prose(parts[""]), ""]
    for name, text in entries.items(parts["Attributes"]):
        meaning = _line(re.sub(r"\s+- (?=``)", " ", text))
        lines.append(f"- `{name}` (`BLUFUNC_{name.upper()}`, default `{defaults[name]!r}`): {meaning}")
    return [*lines, ""]


def _exceptions(space: str, group: list[tuple[str, Any]]) -> list[str]:
    lines = []
    for name, value in group:
        entry = f"[`{name}`](../errors.md#{value.__name__.lower()})" if _has_section(value) else f"`{name}`"
        bases = ", ".join(f"`{b.__name__}`" for b in value.__bases__)
        lines.append(f"- {entry} ({bases}): {_line((inspect.getdoc(value) or '').split(chr(10) * 2)[0])}")
    return lines


def _has_section(value: type) -> bool:
    return issubclass(value, bf.errors.BlufuncError) and value is not bf.errors.BlufuncError


def _group(space: str, title: str, group: list[tuple[str, Any]], level: int = 2) -> list[str]:
    lines = [f"{'#' * level} {_line(title)}", ""]
    by_kind: dict[str, list[tuple[str, Any]]] = {}
    for name, value in group:
        by_kind.setdefault(_kind(value), []).append((name, value))
    for kind in ("function", "class"):
        for name, value in by_kind.get(kind, ()):
            lines += [f"{'#' * (level + 1)} `{name}` {_anchor(space, name)}", ""]
            lines += (
                _class(space, name, value)
                if kind == "class"
                else _called(entries.entry(name, value, space), space)
            )
            lines.append("")
    if "primitive" in by_kind:
        lines += [*_primitives(space, by_kind["primitive"]), ""]
    if "exception" in by_kind:
        lines += [*_exceptions(space, by_kind["exception"]), ""]
    if "constant" in by_kind:
        lines += [*_constants(by_kind["constant"]), ""]
    return lines


def _slug(space: str, title: str, group: list[tuple[str, Any]], taken: set[str]) -> str:
    """The name of a group's page: the module that defines it, or its kind."""
    home = names.home_of(*group[0], space)
    if title in ("Primitives", "Exceptions", "Constants and types", "Dtypes") or "." not in home:
        return title.lower().replace(" ", "-")
    package, _, module = home.rpartition(".")
    return module if module not in taken else f"{package.rpartition('.')[2]}-{module}"


def _title(title: str) -> str:
    """A group's title for the navigation."""
    return title.split(":")[0].replace("``", "")


def _page_name(space: str) -> str:
    if space.startswith("blufunc.scipy.stats"):
        return "blufunc.scipy.stats"
    return space


def _intro(space: Namespace) -> str:
    first, _, rest = space.doc.partition("\n\n")
    if space.name == "blufunc":  # its second paragraph is about the file
        rest = ""
    return "\n\n".join(p for p in (_prose(first), _prose(rest)) if p)


@cache
def _built() -> tuple[dict[str, str], list[Any]]:
    made: dict[str, list[str]] = {}
    listing: dict[str, Any] = {}
    for space in names.namespaces():
        if not space.objects():
            continue
        page = _page_name(space.name)
        file = f"reference/{page}.md"
        lines = made.setdefault(file, [])
        nested = bool(lines)
        lines += [f"{'##' if nested else '#'} `{space.name}`", "", _intro(space), ""]
        listing.setdefault(page, file)
        if len(space.objects()) > SPLIT:
            entries_of_page: list[Any] = [file]
            taken: set[str] = set()
            lines += ["| group | names |", "|---|---|"]
            for title, group in space.groups.items():
                slug = _slug(space.name, title, group, taken)
                taken.add(slug)
                part = f"reference/{page}/{slug}.md"
                lines.append(f"| [{_line(title)}]({part.removeprefix('reference/')}) | {_names(group)} |")
                made[part] = ["\n".join(_group(space.name, title, group, 1)).replace("](../", "](../../")]
                entries_of_page.append({_title(title): part})
            listing[page] = entries_of_page
            continue
        for title, group in space.groups.items():
            lines += _group(space.name, title, group, 3 if nested else 2)
    text = {file: "\n".join(lines) + "\n" for file, lines in made.items()}
    places = {name: file for file, page in text.items() for name in re.findall(r"\{ #(\S+) \}", page)}
    text = {file: _resolved(page, file, places) for file, page in text.items()}
    text["reference/README.md"] = "\n".join(_index()) + "\n"
    navigation = ["reference/README.md"]
    navigation += [{name.removeprefix("blufunc."): value} for name, value in listing.items()]
    return text, navigation


def _names(group: list[tuple[str, Any]]) -> str:
    shown = [f"`{n}`" for n, _ in group[:12]]
    return ", ".join(shown) + (f" and {len(group) - 12} more" if len(group) > 12 else "")


def _index() -> list[str]:
    spaces = [s for s in names.namespaces() if s.objects()]
    total = sum(len(s.objects()) for s in spaces)
    lines = [
        "# API reference",
        "",
        f"All {total:,} public names of {len(spaces)} namespaces. These pages are made from the code: parameters and "
        "errors from docstrings and signatures, shapes by calling each function. In shapes, `f32[3,4]` is a float32 "
        "array of shape (3, 4).",
        "",
        "Functions of arrays take what becomes one: arrays, numbers, NumPy arrays, nested lists, arrays of other "
        "libraries. All raise `ArgumentError` for anything else, `ShapeError` for shapes that do not fit, and "
        "`DtypeError` for dtypes that they do not take; entries list what is particular. [Errors](../errors.md) shows "
        "each class.",
        "",
        "| namespace | names | |",
        "|---|---|---|",
    ]
    for s in spaces:
        lines.append(
            f"| [`{s.name}`]({_page_name(s.name)}.md) | {len(s.objects())} | {_line(s.doc.split(chr(10))[0])} |"
        )
    return lines


def pages() -> dict[str, str]:
    """All pages: name among the sources of MkDocs, and Markdown."""
    return _built()[0]


def navigation() -> list[Any]:
    """Entries of the navigation."""
    return _built()[1]


if __name__ == "__main__":
    sys.exit(main())
