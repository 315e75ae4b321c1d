"""Command line of the gallery's programs: options, progress, pictures.

In: a program's ``run`` function and its sizes. Out: the lines on the terminal, and the picture in the output
folder. No part of a method is here: each program is complete without this module.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from PIL import Image
from rich import progress
from rich.console import Console

import blufunc as bf

console = Console(highlight=False)
matplotlib.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})


class Result(NamedTuple):
    """Outcome of a program.

    Attributes:
      numbers: figures by their name.
      figure: the picture.
    """

    numbers: dict[str, float]
    figure: Figure


class Bar:
    """Progress bar on a terminal; about ten lines in a log file; or nothing.

    Args:
      shown: print progress at all.
    """

    def __init__(self, shown: bool = True):
        self.shown = shown
        self.values: dict[str, float] = {}

    def __call__(self, n: int) -> Iterator[int]:
        """Iterate over range(n), and show the position and the latest values."""
        if not self.shown:
            yield from range(n)
        elif console.is_terminal:
            yield from self._drawn(n)
        else:
            for i in range(n):
                yield i
                if (i + 1) % max(1, n // 10) == 0:
                    console.print(f"{i + 1:>6,}/{n:,}   {self._text()}", soft_wrap=True)

    def _drawn(self, n: int) -> Iterator[int]:
        columns = (
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("[bold]{task.fields[values]}[/]"),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
        )
        with progress.Progress(*columns, console=console, refresh_per_second=4, expand=True) as display:
            task = display.add_task("", total=n, values="")
            for i in range(n):
                yield i
                display.update(task, completed=i + 1, values=self._text())

    def say(self, **values: Any) -> None:
        """Set the values to show; arrays are read only when a line is printed."""
        self.values = values

    def _text(self) -> str:
        return "   ".join(f"{name} {float(x):.4g}" for name, x in self.values.items())


def subplots(rows: int = 1, columns: int = 1, width: float = 7.0, height: float = 3.0) -> tuple[Figure, Any]:
    """A figure without a display, and its axes, as ``matplotlib.pyplot.subplots``."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    return figure, figure.subplots(rows, columns)


def images(axes: Any, rows: Any) -> None:
    """Draw a grid of grey images, given as [rows, columns, height, width] in [0, 1]."""
    r, c, h, w = rows.shape
    padded = bf.numpy.pad(bf.numpy.clip(rows, 0, 1), ((0, 0), (0, 0), (0, 1), (0, 1)))
    tiled = padded.transpose(0, 2, 1, 3).reshape(r * (h + 1), c * (w + 1))
    axes.imshow(tiled[:-1, :-1], cmap="gray", interpolation="nearest")
    axes.set_axis_off()


def save(figure: Figure, path: Path) -> None:
    """Write a PNG of 128 colours: at most half of the bytes of all colours."""
    file = io.BytesIO()
    figure.savefig(file)
    Image.open(file).convert("RGB").quantize(128).save(path, optimize=True)


def main(run: Callable[[Any, bf.Array, Bar], Result], sizes: Mapping[str, Any]) -> None:
    """Run a program from its command line, and write its picture.

    Args:
      run: function of a size, a random key and a ``Bar`` to a ``Result``.
      sizes: a NamedTuple of integers for each name: "tiny", "cpu" and "cuda".
    """
    module = sys.modules[run.__module__]
    name = Path(module.__file__ or "").stem
    parser = argparse.ArgumentParser(f"python -m examples.gallery.{name}", description=module.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--size", choices=list(sizes), help="(default: that of the device)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--out", type=Path, default=Path("runs/gallery"), help="(default: runs/gallery)")
    for field in sizes["cpu"]._fields:
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, help="(default: that of the size)")
    options = vars(parser.parse_args())
    if options["device"] != "cpu":
        bf.config.update("default_device", options["device"])
    size = sizes[options["size"] or options["device"]]
    size = size._replace(**{f: options[f] for f in size._fields if options[f] is not None})
    start = time.perf_counter()
    numbers, figure = run(size, bf.random.key(options["seed"]), Bar())
    options["out"].mkdir(parents=True, exist_ok=True)
    save(figure, options["out"] / f"{name}.png")
    for what, value in numbers.items():
        console.print(f"{what:<28}{value:.4g}")
    console.print(
        f"{time.perf_counter() - start:.0f} s, of processor time {time.process_time():.0f} s; picture: "
        f"{options['out'] / name}.png",
        soft_wrap=True,
    )
