"""Options of a command line that say how a run is sharded.

Precedes ``cli.py``, and that of ``examples/llm``. In: the arguments. Out: the axes of a mesh, and the attributes of a
``sharded.Plan``, as ``devices.layout`` takes them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from examples.gpt import sharded

USUAL = sharded.ALONE


def add_options(add: Callable[..., Any]) -> None:
    """Add the options to a parser, by its ``add_argument``."""
    add(
        "--mesh",
        type=mesh,
        metavar="AXIS=N,...",
        help=f"devices along the axes {', '.join(sharded.AXES)} (see the README): the processes of a "
        "launcher (data by default, if there are several), or simulated ones on the CPU; -1 is the size that uses all",
    )
    add(
        "--accumulate",
        type=whole(1),
        default=USUAL.microbatches,
        metavar="N",
        help="microbatches in a batch, one after the other; of a pipeline, one behind the other (default: 1)",
    )
    add(
        "--routing",
        choices=["ring", "all_gather", "all_to_all"],
        default=USUAL.routing,
        help="how queries meet keys along the axis seq (default: ring)",
    )
    add(
        "--pipeline-schedule",
        choices=["1f1b", "interleaved", "zb-h1", "gpipe"],
        default=USUAL.schedule,
        help="the order of passes along the axis stage (default: 1f1b)",
    )
    add(
        "--chunks",
        type=whole(1),
        metavar="N",
        help="chunks of layers that each stage of an interleaved pipeline runs in turns (default: 2)",
    )
    add(
        "--shard-vocabulary",
        action="store_true",
        help="shard the vocabulary along the axis stage: all stages compute embeddings and logits together",
    )


def plan_of(options: argparse.Namespace) -> dict[str, Any]:
    """The attributes of a plan that the options give."""
    return {
        "microbatches": options.accumulate,
        "routing": options.routing,
        "schedule": options.pipeline_schedule,
        "chunks": options.chunks or (2 if options.pipeline_schedule == "interleaved" else 1),
        "sharded_ends": options.shard_vocabulary,
    }


def spelled(options: argparse.Namespace) -> list[str]:
    """The options as words of a command line, without those that are usual."""
    words = ["--mesh", sharded.spelled(options.mesh)] if options.mesh else []
    for flag, value, default in (
        ("--accumulate", options.accumulate, USUAL.microbatches),
        ("--routing", options.routing, USUAL.routing),
        ("--pipeline-schedule", options.pipeline_schedule, USUAL.schedule),
        ("--chunks", options.chunks, None),
    ):
        words += [] if value == default else [flag, str(value)]
    return [*words, "--shard-vocabulary"] if options.shard_vocabulary else words


def whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` on."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def mesh(text: str) -> dict[str, int]:
    """Parse the axes of a mesh: data=2,model=-1."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in sharded.AXES:
            known = ", ".join(sharded.AXES)
            raise argparse.ArgumentTypeError(f"{axis!r} is no axis that a run can be divided along: {known}")
        if axis in axes:
            raise argparse.ArgumentTypeError(f"{axis} stands there twice")
        axes[axis] = -1 if size == "-1" else whole(1)(size)
    if list(axes.values()).count(-1) > 1:
        raise argparse.ArgumentTypeError("-1 is the size of one axis at most")
    return axes
