"""Training: one compiled step, the state it updates, and the loop around it.

Follows model, data and weights, and precedes the command line. All of training is one pure function,

    step(params, state, tokens) -> (params, state, loss)

which ``jit`` compiles once and whose first two arguments are donated. Step k reads only the k-th batch, so a run that
stops and continues is the same run, as long as its number of steps is unchanged: the learning rate schedule spans them.
On a mesh of devices (``devices.py``) it computes the same, sharded as in ``sharded.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import blufunc as bf
from blufunc import optim, random, tree
from examples.gpt import data, devices, model, report, sharded, weights


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that determine a run's results and outputs. Saved with its checkpoints."""

    preset: str
    vocab: int
    experts: int
    data: str | None
    steps: int
    batch: int
    lr: float
    seed: int
    out: str

    @property
    def config(self) -> model.Config:
        return dataclasses.replace(model.PRESETS[self.preset], vocab=self.vocab, experts=self.experts)


RECIPES = {
    "tiny": {"steps": 2500, "batch": 8, "lr": 3e-3},  # the demo: about 75 seconds on two CPU cores
    "small": {"steps": 5000, "batch": 32, "lr": 1e-3},
    "gpt2-124m": {"steps": 20000, "batch": 32, "lr": 6e-4},
}
EVALUATIONS = 10  # validations while training; each one also saves a checkpoint
QUICK, FULL = 32, 256  # validation windows while training, and at the end


# ------------------------------------------------------------------------------------------------ training


def make_optimizer(steps: int, lr: float):
    """AdamW: gradient clipping, short warm-up, cosine decay to a tenth, matrix decay."""
    warmup = max(1, steps // 10)
    schedule = optim.warmup_cosine_decay_schedule(0.0, lr, warmup, max(2, steps), end_value=lr / 10)
    return optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=_matrices),
    )


def make_step(config: model.Config, optimizer, plan: sharded.Plan = sharded.ALONE) -> Callable:
    """The compiled training step."""
    value_and_grad = sharded.value_and_grad(config, plan)

    def step(params, state, tokens):
        loss, grads = value_and_grad(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        values = {"params": optim.apply_updates(params, updates), "optimizer": state}
        values = sharded.keep(values, plan)
        return values["params"], values["optimizer"], loss

    return bf.jit(step, donate_argnums=(0, 1), memory_budget=plan.memory_budget)


def make_evaluate(
    config: model.Config, batch: int, layout: devices.Layout
) -> Callable[[Any, np.ndarray], float]:
    """Mean loss over many windows, one batch at a time."""
    plan = dataclasses.replace(layout.plan, microbatches=1, schedule="gpipe", recompute=False)
    value_and_grad = sharded.value_and_grad(config, plan)
    loss = bf.jit(lambda params, tokens: value_and_grad(params, tokens)[0])  # unused results are not computed

    def evaluate(params, windows: np.ndarray) -> float:
        windows = sharded.even(windows, config, plan)
        batches = [windows[at : at + batch] for at in range(0, len(windows), batch)]
        return sum(float(loss(params, layout.divided(part))) * len(part) for part in batches) / len(windows)

    return evaluate


def _matrices(params):
    """True for weights and embeddings, by name: on a mesh, biases may have more axes."""
    return tree.map_with_path(lambda where, _: where[-1].key not in ("bias", "scale"), params)


class Run:
    """State of a run: the contents of a checkpoint, and its devices."""

    def __init__(self, settings: Settings, resume: Path | None, layout: devices.Layout):
        self.settings, self.layout = settings, layout
        self.optimizer = make_optimizer(settings.steps, settings.lr)
        self.history = report.History()

        def fresh(key):
            params = model.init(key, settings.config)
            return {"params": params, "optimizer": self.optimizer.init(params)}

        key = random.key(settings.seed)
        if resume is None:
            self.values = fresh(key)
        else:
            self.values = weights.load(resume, like=bf.eval_shape(fresh, key))
            self.history = weights.fact(resume, "history", report.History)
        self.values = layout.placed(self.values)

    @property
    def done(self) -> int:
        """Number of completed steps."""
        return len(self.history.train)

    def save(self) -> None:
        """Save all that ``--resume`` needs, for any mesh; one process writes."""
        values = self.layout.whole(self.values)
        if not self.layout.leads:
            return
        path = Path(self.settings.out) / "checkpoint.safetensors"
        weights.save(path, values, {**self._facts, "history": dataclasses.asdict(self.history)})

    def save_weights(self, params: Any) -> Path:
        """Save only the parameters, in the form of one device."""
        path = Path(self.settings.out) / "weights.safetensors"
        weights.save(path, params, self._facts)
        return path

    @property
    def _facts(self) -> dict:
        settings = self.settings
        return {"settings": dataclasses.asdict(settings), "config": dataclasses.asdict(settings.config)}


def train(run: Run, dataset: data.Dataset, minutes: float = math.inf, bar: bool = True) -> tuple[float, str]:
    """Run the remaining steps, and save.

    Returns:
      the validation loss and, if training stopped early, the reason.
    """
    settings, config, layout = run.settings, run.settings.config, run.layout
    train_windows, validation = data.windows(dataset, config.context, config.vocab, settings.batch)
    batches = data.Batches(train_windows, settings.batch, settings.seed)
    quick = validation.evenly(QUICK)
    full = validation.evenly(FULL)
    step, evaluate = (
        make_step(config, run.optimizer, layout.plan),
        make_evaluate(config, settings.batch, layout),
    )
    every = max(1, settings.steps // EVALUATIONS)
    deadline = time.monotonic() + 60 * minutes
    stopped = ""

    tokens_per_step = settings.batch * config.context
    watch = report.watch(run.done, settings.steps, tokens_per_step, dataset.unit, bar, layout.leads)
    with watch as on_step, _stop_signals() as signalled:
        params, state = run.values["params"], run.values["optimizer"]
        for k in range(run.done, settings.steps):
            params, state, loss = step(params, state, layout.divided(batches[k]))
            run.values = {"params": params, "optimizer": state}
            run.history.train.append(float(loss))
            score = None
            if run.done % every == 0 and run.done < settings.steps:
                score = evaluate(params, quick)
                run.history.validation.append((run.done, score))
                run.save()
            on_step(run.done, run.history.train[-1], score)
            interrupted = layout.any(signalled.is_set())
            if interrupted or layout.any(time.monotonic() > deadline):
                stopped = "interrupted" if interrupted else f"{minutes:g} minutes are over"
                run.save()  # at once: the process may be killed soon
                break
        score = evaluate(params, full)
        run.history.validation.append((run.done, score))
        run.save()
    return score, stopped


@contextlib.contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into an event between steps. A second Ctrl-C raises."""
    stop = threading.Event()

    def note(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
