"""Output of a run: progress while it trains, its loss curve, and the summary.

It receives numbers, and knows nothing of models or weight files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich import progress
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

console = Console(highlight=False)


@dataclasses.dataclass
class History:
    """Training loss of every step, and validation loss after some of them."""

    train: list[float] = dataclasses.field(default_factory=list)
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)


# ------------------------------------------------------------------------------------------------ progress


class Watch(Protocol):
    """Called with each step as it ends."""

    def __call__(self, step: int, loss: float, validation: float | None) -> None: ...


@contextlib.contextmanager
def watch(
    first: int, steps: int, tokens_per_step: int, unit: str, bar: bool, shown: bool = True
) -> Iterator[Watch]:
    """Progress bar on a terminal; about twenty lines in a log file; or nothing."""
    if not shown:
        yield lambda step, loss, validation: None
    elif bar and console.is_terminal:
        with _bar(first, steps, tokens_per_step, unit) as on_step:
            yield on_step
    else:
        yield _lines(first, steps, tokens_per_step, unit)


@contextlib.contextmanager
def _bar(first: int, steps: int, tokens_per_step: int, unit: str) -> Iterator[Watch]:
    columns = (
        progress.BarColumn(bar_width=None),
        progress.TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
        progress.TextColumn("[bold]loss {task.fields[loss]}[/]  validation {task.fields[validation]}"),
        progress.TextColumn("{task.fields[speed]} " + unit + "s/s"),
        progress.TimeRemainingColumn(elapsed_when_finished=True),
        progress.TextColumn("left"),
    )
    speed = _Speed(first, tokens_per_step)
    with progress.Progress(*columns, console=console, refresh_per_second=4, expand=True) as display:
        task = display.add_task("", total=steps, completed=first, loss="–", validation="–", speed="–")

        def on_step(step: int, loss: float, validation: float | None) -> None:
            fields = {} if validation is None else {"validation": f"{validation:.3f}"}
            display.update(task, completed=step, loss=f"{loss:.3f}", speed=f"{speed(step):,.0f}", **fields)

        yield on_step


def _lines(first: int, steps: int, tokens_per_step: int, unit: str) -> Watch:
    speed = _Speed(first, tokens_per_step)
    every = max(1, steps // 20)

    def on_step(step: int, loss: float, validation: float | None) -> None:
        if validation is None and step % every and step != steps:
            return
        rate = speed(step)
        line = f"step {step:>6,}/{steps:,}   loss {loss:.3f}   {rate:>8,.0f} {unit}s/s"
        line += f"   {duration((steps - step) * tokens_per_step / rate)} left"
        console.print(line if validation is None else f"{line}   validation {validation:.3f}", soft_wrap=True)

    return on_step


class _Speed:
    """Tokens per second since the end of the first step, which compiles."""

    def __init__(self, first: int, tokens_per_step: int):
        self.step, self.tokens_per_step, self.time = first, tokens_per_step, time.perf_counter()
        self.compiling = True

    def __call__(self, step: int) -> float:
        now = time.perf_counter()
        rate = (step - self.step) * self.tokens_per_step / max(now - self.time, 1e-9)
        if self.compiling:
            self.step, self.time, self.compiling = step, now, False
        return rate


# ----------------------------------------------------------------------------------------------- the curve


def loss_curve(history: History, path: Path, unit: str, title: str) -> None:
    """Plot the losses over the steps into a PNG. Needs no display."""
    ink, faint = "#1f4e79", "#a9c4de"
    steps = np.arange(1, len(history.train) + 1)
    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
        axes = figure.subplots()
        axes.plot(steps, history.train, color=faint, linewidth=0.7, label="training, each batch")
        axes.plot(steps, smooth(history.train), color=ink, linewidth=1.8, label="training, smoothed")
        if history.validation:
            at, losses = zip(*history.validation, strict=True)
            label = f"validation, {losses[-1]:.3f} at the end"
            axes.plot(at, losses, "o-", color="#c8553d", linewidth=1.2, markersize=4, label=label)
        axes.set(xlabel="step", ylabel=f"cross-entropy (nats a {unit})", title=title)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
        axes.margins(x=0.02)
        axes.legend(frameon=False)
        figure.savefig(path)


def smooth(losses: list[float]) -> np.ndarray:
    """Centred moving average over a twentieth of the run; narrower near both ends."""
    at = np.arange(len(losses))
    reach = np.minimum(np.minimum(at, at[::-1]), max(1, len(losses) // 40))
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    return (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)


# --------------------------------------------------------------------------------------------- the summary


def summary(rows: dict[str, str], sample: str | None) -> None:
    """Results of the run: a sample, and one line per figure."""
    if sample is not None:
        console.print(Panel(Text(sample), title="a sample", title_align="left", border_style="dim"))
    for name, value in rows.items():  # never wrapped: the last line is for copying
        console.print(Text.assemble((f"{name:<17}", "bold"), value), soft_wrap=True)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
