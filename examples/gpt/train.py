"""Training: one compiled step, the state it updates, and the loop around it.

Follows model, data and facts, and precedes the command line. All of training is one pure function,

    step(params, state, tokens) -> (params, state, loss)

which ``jit`` compiles once and whose first two arguments are donated. Step k reads only the k-th batch, so a run that
stops and continues is the same run, as long as its number of steps is unchanged: the learning rate schedule spans them.
On a mesh of devices (``devices.py``) it computes the same, sharded as in ``sharded.py``.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import blufunc as bf
from blufunc import io, optim, random, tree
from blufunc.errors import DataError
from examples.gpt import data, devices, facts, model, report, sharded


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
KEPT = 3  # checkpoints: the last one, and two to go back to
QUICK, FULL = 32, 256  # validation windows while training, and at the end
RECENT, SPIKE = 50, 3.0  # a loss SPIKE times the highest of the RECENT last ones has diverged


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
    plan = dataclasses.replace(layout.plan, microbatches=1, schedule="gpipe", chunks=1, recompute=False)
    value_and_grad = sharded.value_and_grad(config, plan)

    @bf.jit
    def loss(params, tokens):
        if layout.plan.chunks > 1:  # one microbatch is too few to interleave
            params = params | {"blocks": sharded.in_order(params["blocks"], layout.plan)}
        return value_and_grad(params, tokens)[0]  # unused results are not computed

    def evaluate(params, windows: np.ndarray) -> float:
        windows = sharded.even(windows, config, plan)
        batches = [windows[at : at + batch] for at in range(0, len(windows), batch)]
        return sum(float(loss(params, layout.divided(part))) * len(part) for part in batches) / len(windows)

    return evaluate


def _matrices(params):
    """True for weights and embeddings, by name: on a mesh, biases may have more axes."""
    return tree.map_with_path(lambda where, _: where[-1].key not in ("bias", "scale"), params)


class Run:
    """State of a run, its devices, and its checkpoints.

    Attributes:
      values: parameters and optimizer state, placed.
      position: index of the next batch: the number of completed steps, and of batches that were skipped.
      history: losses of all completed steps.
      id: of the run, the same after it was resumed.
    """

    def __init__(
        self,
        settings: Settings,
        checkpoints: io.Checkpointer,
        resume: io.Checkpointer | None,
        layout: devices.Layout,
    ):
        """Begin, or go on from the last checkpoint of ``resume``."""
        self.settings, self.checkpoints, self.layout = settings, checkpoints, layout
        self.optimizer = make_optimizer(settings.steps, settings.lr)
        self.position, self.history = 0, report.History()
        self._setbacks = self._furthest = (
            0  # times that it went back, and the last step that it went back from
        )
        if resume is not None:
            self._restore(resume, resume.steps()[-1])
        else:
            self.values = layout.placed(self._fresh(random.key(settings.seed)))
            self.id = layout.agreed_id()

    def _fresh(self, key):
        params = model.init(key, self.settings.config)
        return {"params": params, "optimizer": self.optimizer.init(params)}

    @property
    def done(self) -> int:
        """Number of completed steps."""
        return len(self.history.train)

    def save(self, last: bool = False) -> None:
        """Begin to save all that it takes to go on, on any mesh; or wait for it."""
        state = {**self.values, "position": self.position}
        said = {**self._facts, "history": dataclasses.asdict(self.history), "packed": self.layout.packed}
        said |= {"run": self.id, "job": bf.distributed.job_id()}
        self.checkpoints.save(self.done, state, facts=said)
        if self.done > self._furthest:
            self._setbacks = 0
        if last:
            self.checkpoints.wait()

    def _restore(self, checkpoints: io.Checkpointer, step: int) -> None:
        found = checkpoints.facts(step)
        self.history = facts.fact(found, "history", report.History, checkpoints.folder)
        self.id = found.get("run")
        like = bf.eval_shape(self._fresh, random.key(0))
        restore = lambda like: checkpoints.restore({**like, "position": 0}, step=step)
        self.values = self.layout.restored(restore, like, found.get("packed", []))
        self.position = self.values.pop("position")

    def skip_batch(self, loss: float) -> None:
        """Go back to a checkpoint, and from there on past the batch whose loss diverged."""
        self.checkpoints.wait()
        position, steps = self.position, self._own_steps()
        if self._setbacks >= len(steps):
            raise DataError(
                f"the loss of step {self.done + 1} is {loss:g}",
                where=self.settings.out,
                why=f"it diverged again from each of {self._setbacks} checkpoints, or ahead of the first",
                fix="a lower rate: --lr",
            )
        self._setbacks += 1
        self._furthest = max(self._furthest, self.done)
        self._restore(
            self.checkpoints, steps[-self._setbacks]
        )  # an earlier one each time: the last may have diverged already
        self.position = position

    def _own_steps(self) -> list[int]:
        """Steps of this run's checkpoints.

        --anew leaves those of another run until there are as many.
        """
        steps = list(dict.fromkeys(reversed(self.checkpoints.steps())))[::-1]
        return [step for step in steps if self.checkpoints.facts(step).get("run") == self.id]

    def save_weights(self, params: Any) -> Path:
        """Save only the parameters, in the form of one device."""
        path = Path(self.settings.out) / "weights.safetensors"
        io.save(path, params, facts=self._facts)
        return path

    @property
    def _facts(self) -> dict:
        settings = self.settings
        return {"settings": dataclasses.asdict(settings), "config": dataclasses.asdict(settings.config)}


def checkpoints_of(out: str) -> Path:
    """Folder of the checkpoints of a run that writes to ``out``."""
    return Path(out) / "checkpoints"


def diverges(loss: float, losses: Sequence[float]) -> bool:
    """True for a loss that is not finite, or far above those of the steps before."""
    recent = losses[-RECENT:]
    return not math.isfinite(loss) or (len(recent) == RECENT and loss > SPIKE * max(recent))


def train(run: Run, dataset: data.Dataset, minutes: float = math.inf, bar: bool = True) -> tuple[float, str]:
    """Run the remaining steps, and save.

    Returns:
      the validation loss and, if training stopped early, the reason.
    Raises:
      Stopped: a signal asked for it, and the state is saved.
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
    # of a job that was started again after its last step, the last validation is measured again
    run.history.validation = [score for score in run.history.validation if score[0] < settings.steps]
    deadline = time.monotonic() + 60 * minutes

    tokens_per_step = settings.batch * config.context
    watch = report.watch(run.done, settings.steps, tokens_per_step, dataset.unit, bar, layout.leads)
    with watch as on_step, io.stop_signals() as signalled:
        while run.done < settings.steps:
            params, state, loss = step(
                run.values["params"], run.values["optimizer"], layout.divided(batches[run.position])
            )
            run.values, run.position = {"params": params, "optimizer": state}, run.position + 1
            if diverges(float(loss), run.history.train):
                run.skip_batch(float(loss))
                continue
            run.history.train.append(float(loss))
            score = None
            if run.done % every == 0 and run.done < settings.steps:
                score = evaluate(params, quick)
                run.history.validation.append((run.done, score))
                run.save()
            on_step(run.done, run.history.train[-1], score)
            if layout.any(signalled.is_set()):
                run.save(last=True)  # at once: the process may be killed soon
                raise Stopped
            if layout.any(time.monotonic() > deadline):
                run.save()
                break
        score = evaluate(run.values["params"], full)
        run.history.validation.append((run.done, score))
        run.save(last=True)
    return score, f"{minutes:g} minutes are over" if run.done < settings.steps else ""


class Stopped(Exception):
    """A signal asked the run to end, and its state is saved."""
