"""Pictures of shardings: the devices of each part of an array.

Parallel, after stage 8. In: an array, or a shape and a sharding. Out: a table in the terminal
(``visualize_sharding``), in colour if ``rich`` is installed and the terminal supports it; or an SVG file
(``sharding_svg``), to scale. An array with more than two sharded dimensions gives one picture per part of the first of
them.
"""

from __future__ import annotations

import html
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.ir import source
from blufunc.core.ir.axes import shape_of
from blufunc.parallel.mesh.mesh import Mesh
from blufunc.parallel.mesh.sharding import NamedSharding, Sharding
from blufunc.parallel.programs.array_shards import sharding_of

_COLOURS = "4e79a7 f28e2b 59a14f b07aa1 e15759 76b7b2 edc948 9c755f ff9da7 bab0ac".split()
_WIDTH, _HEIGHT, _MARGIN, _LINE = 480, 160, 72, 24  # of an SVG picture, in pixels


def visualize_sharding(x: Any, sharding: Sharding | None = None, *, file: TextIO | None = None) -> None:
    """Print the devices that hold each part of an array.

    Args:
      x: an array; or a shape, with a sharding.
      sharding: the sharding, if ``x`` is a shape. On an abstract mesh, ranks are shown.
      file: the output; default the standard output.
    Raises:
      ArgumentError: ``x`` is a shape and there is no sharding, or ``file`` is not a file.
      ShardingError: the sharding has more entries than the array has dimensions.
    """
    shape, sharding = _shape_and_sharding(x, sharding, "visualize_sharding")
    if file is not None and not hasattr(file, "write"):
        raise errors.ArgumentError(
            f"visualize_sharding writes to a file, not to {file!r:.60}.",
            where=source.here(),
            fix="leave it out",
        )
    out = sys.stdout if file is None else file
    for picture in _pictures(shape, sharding):
        if not _write_in_colour(picture, out):
            out.write(_text(picture) + "\n")


def sharding_svg(x: Any, sharding: Sharding | None = None) -> str:
    """The picture of ``visualize_sharding`` as SVG source.

    Raises:
      ArgumentError, ShardingError: as ``visualize_sharding``.
    """
    shape, sharding = _shape_and_sharding(x, sharding, "sharding_svg")
    drawn = [_svg(picture) for picture in _pictures(shape, sharding)]
    height = _MARGIN + _HEIGHT + _LINE
    groups = [f'<g transform="translate(0,{i * height})">\n{text}\n</g>' for i, text in enumerate(drawn)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_MARGIN + _WIDTH + _LINE}" height="{height * len(drawn)}"'
    return "\n".join([f'{head} font-family="sans-serif" font-size="12">', *groups, "</svg>"]) + "\n"


@dataclass(frozen=True)
class _Picture:
    """A table of parts.

    Attributes:
        title: the caption.
        rows, columns: the parts of the two dimensions that are drawn.
        holders: for each row and column, the devices that hold that part.
    """

    title: str
    rows: Sequence[slice]
    columns: Sequence[slice]
    holders: Sequence[Sequence[str]]

    def colour(self, row: int, column: int) -> str:
        """The colour of a part, different from its neighbours'."""
        n = len(self.columns)
        return _COLOURS[(row * (n + (n % len(_COLOURS) == 0)) + column) % len(_COLOURS)]


def _shape_and_sharding(x: Any, sharding: Any, name: str) -> tuple[tuple[int, ...], Sharding]:
    if isinstance(x, ConcreteArray) and sharding is None:
        return x.aval.shape, sharding_of(x)
    if not isinstance(sharding, Sharding):
        raise errors.ArgumentError(
            f"{name} takes an array, or a shape and a sharding, not {x!r:.60} and {sharding!r:.60}.",
            where=source.here(),
            fix=f"{name}((8, 16), NamedSharding(mesh, P('x')))",
        )
    return x.aval.shape if isinstance(x, ConcreteArray) else shape_of(x, name), sharding


def _pictures(shape: tuple[int, ...], sharding: Sharding) -> Iterator[_Picture]:
    """The pictures of an array: several if more than two dimensions are sharded."""
    missing = max(0, 2 - len(shape))
    parts = [((slice(0, 1),) * missing + index, who) for index, who in _parts(shape, sharding)]
    cuts = [_cuts([index[d] for index, _ in parts]) for d in range(len(shape) + missing)]
    by_use = sorted(range(len(cuts)), key=lambda d: (len(cuts[d]) > 1, d))
    row, column = sorted(by_use[-2:])
    others = [d for d in by_use[:-2] if len(cuts[d]) > 1]
    for chosen in itertools.product(*(cuts[d] for d in others)):
        at = dict(zip(others, chosen, strict=True))
        here = [(i, who) for i, who in parts if all(i[d] == part for d, part in at.items())]
        holders = [
            [_ranges([who for i, who in here if (i[row], i[column]) == (r, c)]) for c in cuts[column]]
            for r in cuts[row]
        ]
        where = ", ".join(_label(at[d]) if d in at else ":" for d in range(len(cuts)))
        title = f"shape {shape}, {sharding}" + (f", part [{where}]" if at else "")
        yield _Picture(title, cuts[row], cuts[column], holders)


def _parts(shape: tuple[int, ...], sharding: Sharding) -> list[tuple[tuple[slice, ...], int]]:
    """Each part with the index of a device, or on abstract meshes a rank."""
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return [(index, rank) for rank, index in enumerate(sharding.indices(shape))]
    return [(index, device.id) for device, index in sharding.devices_indices_map(shape).items()]


def _cuts(slices: list[slice]) -> list[slice]:
    """The distinct slices, in order."""
    return [slice(*ends) for ends in sorted({(s.start, s.stop) for s in slices})]


def _label(s: slice) -> str:
    return f"{s.start}:{s.stop}"


def _ranges(numbers: list[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _text(picture: _Picture) -> str:
    """A table in box-drawing characters."""
    left = max(len(_label(r)) for r in picture.rows)
    cells = [_label(c) for c in picture.columns] + [text for row in picture.holders for text in row]
    width = max(map(len, cells)) + 2
    rule = lambda a, b, c: " " * (left + 1) + a + b.join(["─" * width] * len(picture.columns)) + c
    lines = [picture.title, " " * (left + 2) + " ".join(_label(c).center(width) for c in picture.columns)]
    lines.append(rule("┌", "┬", "┐"))
    for i, (row, texts) in enumerate(zip(picture.rows, picture.holders, strict=True)):
        if i:
            lines.append(rule("├", "┼", "┤"))
        lines.append(f"{_label(row):>{left}} │" + "│".join(text.center(width) for text in texts) + "│")
    lines.append(rule("└", "┴", "┘"))
    return "\n".join(line.rstrip() for line in lines)


def _write_in_colour(picture: _Picture, out: TextIO) -> bool:
    """Write a table of coloured blocks; return False if that is not possible."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console(file=out)
    if console.color_system is None:
        return False
    table = Table("", *map(_label, picture.columns), box=None, padding=0)
    for i, (row, texts) in enumerate(zip(picture.rows, picture.holders, strict=True)):
        blocks = [
            Text(f"\n  {text}  \n", style=f"black on #{picture.colour(i, j)}", justify="center")
            for j, text in enumerate(texts)
        ]
        table.add_row(Text(f"\n{_label(row)}"), *blocks)
    console.print(Text(picture.title), table, sep="\n")
    return True


def _svg(picture: _Picture) -> str:
    """Blocks to scale, with devices inside and indices along the edges."""
    across, down = _places(picture.columns, _MARGIN, _WIDTH), _places(picture.rows, _MARGIN, _HEIGHT)
    lines = [_svg_text(_MARGIN, _LINE, picture.title, "start")]
    lines += [
        _svg_text(x + w / 2, _MARGIN - 8, _label(c))
        for c, (x, w) in zip(picture.columns, across, strict=True)
    ]
    for i, (row, (y, h)) in enumerate(zip(picture.rows, down, strict=True)):
        lines.append(_svg_text(_MARGIN - 8, y + h / 2 + 4, _label(row), "end"))
        for j, (x, w) in enumerate(across):
            lines.append(
                f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="#{picture.colour(i, j)}" '
                'stroke="white"/>'
            )
            lines.append(_svg_text(x + w / 2, y + h / 2 + 4, picture.holders[i][j]))
    return "\n".join(lines)


def _places(parts: Sequence[slice], start: int, length: int) -> list[tuple[float, float]]:
    """Start and length of each part on a line of a length; empty parts have none."""
    scale = length / max(1, parts[-1].stop)
    return [(round(start + s.start * scale, 2), round((s.stop - s.start) * scale, 2)) for s in parts]


def _svg_text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'
