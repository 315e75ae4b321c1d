"""The command line: settings from arguments and checkpoints; outputs of a run.

The last module, which ties the others together. In: the arguments. Out: a trained model's files, a sample, and the
command that continues. Invalid input becomes a message and exit status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import blufunc as bf
from blufunc import io, random, tree
from blufunc.errors import ArgumentError, DataError, MemoryBudgetError
from examples.gpt import data, devices, facts, mesh_options, model, report, sample, train

OUT = "runs/gpt"
LONGER = "the learning rate, now at its lowest, rises again: its schedule is laid over all the steps anew"
DATA_HELP = """a text file, a folder of text files or of token shards, a row of tokens (.npy), or GPT-2 tokens
in llm.c's format (.bin); default: the Python standard library's own source"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 2 for invalid input."""
    options = _parser().parse_args(arguments)
    if bf.distributed.is_launched():
        bf.distributed.initialize()
    try:
        return _run(options)
    except (DataError, MemoryBudgetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the second Ctrl-C of a run, or one outside the training
        print(f"interrupted: {_last_checkpoint(options)}", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    began = time.perf_counter()
    settings, checkpoints, resume = _settings(options)
    dataset = data.load(settings.data)
    prompt = dataset.encode(options.prompt) if options.prompt else list(dataset.opening)
    layout = devices.layout(
        options.mesh,
        settings.config,
        settings.batch,
        **mesh_options.plan_of(options),
        recompute=options.recompute,
        loss_chunk=options.loss_chunk,
        memory_budget=options.memory_budget,
    )
    if layout.leads:
        with facts.writing(Path(settings.out)):  # fail now rather than after training
            tempfile.TemporaryFile(dir=settings.out).close()
    run = train.Run(settings, checkpoints, resume, layout)
    if run.done >= settings.steps and not _is_restarted(checkpoints):
        raise DataError(
            f"the run in {settings.out} has taken {run.done} of its {settings.steps} steps: nothing is left to do",
            where=f"--resume {options.resume}",
            fix=f"ask for more of them: --steps {2 * run.done}",
        )
    if layout.leads:
        _announce(run, dataset)

    try:
        with checkpoints:
            score, stopped = train.train(run, dataset, options.minutes, bar=not options.no_progress)
    except train.Stopped:
        if layout.leads:
            after = f"after {run.done:,} of {settings.steps:,} steps"
            command = _continue_command(settings, run.done, options)
            report.summary({"interrupted": f"{after}, which are saved", "to continue": command}, None)
        return io.STOPPED
    params = layout.whole(run.values["params"])
    if not layout.leads:
        return 0

    weights_path = run.save_weights(params)
    curve = Path(settings.out) / "loss.png"
    with facts.writing(curve.parent):
        report.loss_curve(run.history, curve, dataset.unit, f"{settings.preset} on {dataset.name}")
    text = None
    if options.sample_tokens:
        key = random.fold_in(random.key(settings.seed), run.done)
        params = bf.device_put(params, bf.local_devices()[0])
        made = sample.generate(params, settings.config, prompt, options.sample_tokens, key)
        text = dataset.decode(prompt + made).strip("\n")
    rows = {
        "stopped early": stopped and f"{stopped}, after {run.done:,} of {settings.steps:,} steps",
        "validation loss": f"{score:.3f} nats a {dataset.unit}"
        + (f" = {score / math.log(2):.3f} bits a byte" if dataset.text else ""),
        "loss curve": str(curve),
        "weights": str(weights_path),
        "time": report.duration(time.perf_counter() - began),
        "on continuing": run.done >= settings.steps and LONGER,
        "to continue": _continue_command(settings, run.done, options),
    }
    report.summary({name: value for name, value in rows.items() if value}, text)
    return 0


def _announce(run: train.Run, dataset: data.Dataset) -> None:
    settings, config, unit = run.settings, run.settings.config, dataset.unit
    batch = f"{settings.batch} x {config.context} {unit}s"
    size = sum(leaf.size for leaf in tree.leaves(run.values["params"]))
    seen, held_out = (sum(len(part.tokens) for part in side) for side in (dataset.train, dataset.validation))
    sizes = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items() if value)
    for line in (
        f"model   {settings.preset}: {size:,} parameters ({sizes})",
        f"data    {dataset.name}: {seen:,} {unit}s for training, {held_out:,} for validation",
        f"run     steps {run.done + 1:,} to {settings.steps:,} of {batch}",
    ):
        report.console.print(line, markup=False, soft_wrap=True)


def _settings(
    options: argparse.Namespace,
) -> tuple[train.Settings, io.Checkpointer, io.Checkpointer | None]:
    """Settings of the command line, else the checkpoint, else the preset's recipe.

    Returns:
      them, the checkpoints of this run, and those that it goes on from.
    """
    names = [field.name for field in dataclasses.fields(train.Settings)]
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.data:
        given["data"] = os.path.abspath(options.data)  # a run may be continued from another folder,
    given["out"] = _out(options)  # and may have been moved
    own = io.Checkpointer(train.checkpoints_of(given["out"]), keep=train.KEPT)
    if options.resume is not None:
        there = io.Checkpointer(train.checkpoints_of(options.resume))
        return dataclasses.replace(_saved_settings(there), **given), own, there
    preset = given.get("preset", "tiny")
    usual = {"preset": preset, "vocab": model.PRESETS[preset].vocab, "experts": 0, "data": None, "seed": 0}
    settings = train.Settings(**usual | train.RECIPES[preset] | given)
    done, restarted = own.latest(), _is_restarted(own)
    if done is None or (options.anew and not restarted):
        return settings, own, None
    saved = dataclasses.replace(_saved_settings(own), out=settings.out)
    if saved == settings:
        return settings, own, own if done < settings.steps or restarted else None
    if done < saved.steps:
        raise DataError(
            f"{settings.out} holds another run, which has taken {done:,} of its {saved.steps:,} steps",
            where=f"--out {settings.out}",
            why="a new run would replace its checkpoints",
            fix=f"--resume {settings.out} goes on with it, --anew replaces it, or choose another folder: --out",
        )
    return settings, own, None


def _is_restarted(own: io.Checkpointer) -> bool:
    """True if an earlier attempt of this job has saved the last checkpoint."""
    if not bf.distributed.restart_count() or own.latest() is None:
        return False
    job = bf.distributed.job_id()
    return job is not None and own.facts().get("job") == job


def _saved_settings(checkpoints: io.Checkpointer) -> train.Settings:
    settings = facts.fact(checkpoints.facts(), "settings", train.Settings, checkpoints.folder)
    if settings.preset not in model.PRESETS:
        why = f"its preset is {settings.preset!r}, and this version knows {', '.join(model.PRESETS)}"
        raise facts.another_version(checkpoints.folder, why)
    return settings


def _out(options: argparse.Namespace) -> str:
    if options.resume == "":
        raise DataError("the path of the run is empty", where="--resume ''", fix="name the folder of a run")
    if options.out is not None:
        return options.out
    return OUT if options.resume is None else options.resume


def _last_checkpoint(options: argparse.Namespace) -> str:
    where = train.checkpoints_of(_out(options))
    done = io.Checkpointer(where).latest()
    return (
        "no checkpoint was saved" if done is None else f"the last checkpoint, of step {done:,}, is in {where}"
    )


def _continue_command(settings: train.Settings, done: int, options: argparse.Namespace) -> str:
    """The command to continue, for the current shell and folder."""
    python = sys.executable
    if python.startswith(os.getcwd() + os.sep):
        python = os.path.relpath(python)
    words = [python, "-m"]
    if bf.process_count() > 1:
        words += ["blufunc.parallel.launch", "-n", str(bf.process_count()), "-m"]
    words += ["examples.gpt", "--resume", settings.out]
    words += mesh_options.spelled(options)
    words += ["--recompute"] if options.recompute else []
    words += ["--loss-chunk", str(options.loss_chunk)] if options.loss_chunk else []
    words += ["--memory-budget", options.memory_budget] if options.memory_budget else []
    if done >= settings.steps:
        words += ["--steps", str(2 * done)]
    return shlex.join(words)


def _parser() -> argparse.ArgumentParser:
    whole = mesh_options.whole

    def positive(text: str) -> float:
        if not 0 < (value := float(text)) < float("inf"):
            raise argparse.ArgumentTypeError(f"{value:g} is not a positive number")
        return value

    def size(text: str) -> str:
        try:
            bf.jit(abs, memory_budget=text)
        except ArgumentError:
            raise argparse.ArgumentTypeError(f"{text!r} is no size, as 12GB and 500MiB are") from None
        return text

    parser = argparse.ArgumentParser("python -m examples.gpt", description="Train a GPT from pure functions.")
    add = parser.add_argument
    add(
        "--preset",
        choices=model.PRESETS,
        help="the model's sizes, and a recipe to go with them (default: tiny)",
    )
    add("--vocab", type=whole(2), metavar="N", help="tokens in the vocabulary, where not the preset's")
    add("--data", metavar="PATH", help=DATA_HELP)
    add("--steps", type=whole(1), metavar="N", help="training steps of the whole run")
    add("--batch", type=whole(1), metavar="N", help="windows in a step")
    add("--lr", type=positive, metavar="RATE", help="the peak learning rate")
    add("--seed", type=whole(0), metavar="N", help="of parameters, batches and sample (default: 0)")
    mesh_options.add_options(add)
    add(
        "--recompute",
        action="store_true",
        help="compute layers again in the backward pass: slower, in less memory",
    )
    add(
        "--loss-chunk",
        type=whole(0),
        default=0,
        metavar="N",
        help="tokens of a device that have logits at a time: less memory (default: 0, all of them)",
    )
    add(
        "--memory-budget",
        type=size,
        metavar="SIZE",
        help="what a step may need of each device's memory, such as 12GB: as much as that takes is computed again",
    )
    add(
        "--experts",
        type=whole(0),
        metavar="N",
        help="experts in the place of each layer's network (default: 0)",
    )
    add("--minutes", type=positive, default=math.inf, metavar="M", help="save, report and stop after so long")
    add("--out", metavar="DIR", help=f"where to write (default: {OUT})")
    add("--resume", metavar="DIR", help="go on with the run in a folder, with its settings")
    add(
        "--anew",
        action="store_true",
        help="start again, where the folder has an unfinished run of these settings",
    )
    add("--sample-tokens", type=whole(0), default=400, metavar="N", help="the sample's length (default: 400)")
    add("--prompt", metavar="TEXT", help="how the sample begins")
    add("--no-progress", action="store_true", help="lines instead of a progress bar")
    return parser
