"""Finetuning: all parameters, or low-rank adapters.

Adapters are those of arXiv:2106.09685, or of quantized weights, those of arXiv:2305.14314. Follows ``weights.py`` and
``tokenizer.py``. In: a model, and text. Out: a folder with a model, and losses. A step is one function of the trained
parameters, the frozen ones and a batch. Data and progress are those of ``examples/gpt``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import blufunc as bf
from blufunc import io, nn, optim, random, tree
from blufunc.errors import DataError
from examples.gpt import data, report, sharded
from examples.llm import layouts, model, peft, placement, quantized, weights
from examples.llm.config import Config
from examples.llm.tokenizer import Tokenizer

TARGETS = quantized.MATRICES
"""Matrices of a layer that may have adapters."""
EVALUATED = 32
"""Validation windows."""
SAVES = 10
"""Checkpoints of a run."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that determine a run's results.

    Attributes:
      model, data: paths, as given; None: the tiny model, the standard library.
      steps, batch, length: steps, windows in a step, tokens of a window.
      lr, seed: peak learning rate; seed of batches and adapters.
      rank, alpha: of adapters, which are scaled by alpha / rank; a rank of 0 trains all parameters.
      targets: the matrices with adapters.
      quantize: "int8" or "nf4": the format of the frozen matrices; None: none.
      recompute: compute each layer again for its gradient, of which only the input is kept.
      accumulate: microbatches of a step, one after the other; in a pipeline, overlapped.
    """

    model: str | None
    data: str | None
    steps: int
    batch: int
    length: int
    lr: float
    seed: int = 0
    rank: int = 0
    alpha: float = 16.0
    targets: tuple[str, ...] = ("qkv", "out")
    quantize: str | None = None
    recompute: bool = False
    accumulate: int = 1


# -- the program -----------------------------------------------------------------------------------


def init_adapters(params: dict, settings: Settings) -> Any:
    """Adapters that change nothing yet, for the matrices that are targets."""
    whole = quantized.types(params)
    as_factors = tree.map(lambda w: bf.ShapeDtypeStruct(w.shape[::-1], w.dtype), whole)  # [inputs, outputs]
    return nn.lora.init(
        random.key(settings.seed), as_factors, settings.rank, mask=quantized.chosen(whole, settings.targets)
    )


def merged(params: dict, adapters: Any, settings: Settings) -> dict:
    """The parameters with the products of the factors added to them.

    Quantized ones are dequantized: a layer at a time, which goes to the host.
    """
    if settings.quantize is None:
        return peft.merged(params, adapters, alpha=settings.alpha)
    dtype = params["embed"].dtype

    @bf.jit
    def of_layer(layer: Any, own: Any) -> Any:
        return peft.merged(nn.quantization.dequantize(layer, dtype), own, alpha=settings.alpha)

    layers = [
        tree.map(np.asarray, of_layer(*pair))
        for pair in zip(params["layers"], adapters["layers"], strict=True)
    ]
    return params | {"layers": layers}


def make_optimizer(settings: Settings) -> optim.GradientTransformation:
    """AdamW with clipping, warm-up and cosine decay.

    Matrices decay, if all parameters are trained.
    """
    warmup = max(1, settings.steps // 10)
    rate = optim.warmup_cosine_decay_schedule(0.0, settings.lr, warmup, max(2, settings.steps))
    decay = {} if settings.rank else {"weight_decay": 0.01, "mask": _matrices}
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, **{"weight_decay": 0.0, **decay}))


def _matrices(params: dict) -> dict:
    """True for matrices, by name: stacked layers have one more dimension."""
    return tree.map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


def make_loss(layout: placement.Layout, settings: Settings, low: str | None) -> Callable:
    """Make the loss: (trained, frozen, tokens) -> the mean cross-entropy.

    Matmuls are in the dtype ``low``. All parameters are trained, and none is frozen; or adapters are, whose products
    are never arrays. On a mesh with stages, it is for evaluation.
    """
    plan, config = layout.plan, layout.config
    if plan.has("stage"):
        return layouts.loss_of_pipeline(layout, settings.length, low)
    wired = layouts.wiring(config, plan, settings.length)

    def loss(trained: Any, frozen: Any, tokens: Any) -> Any:
        params = nn.lora.apply(frozen, trained, alpha=settings.alpha) if settings.rank else trained
        return model.loss(params, tokens, config, recompute=settings.recompute, wiring=wired)

    return layouts.cast(loss, low)


def make_step(
    loss: Callable,
    optimizer: optim.GradientTransformation,
    layout: placement.Layout,
    settings: Settings,
    low: str | None,
) -> Callable:
    """The compiled step: (trained, state, frozen, tokens) -> (trained, state, loss)."""

    def step(trained: Any, state: Any, frozen: Any, tokens: Any) -> tuple[Any, Any, Any]:
        of_batch = lambda trained, tokens: loss(trained, frozen, tokens)
        value, grads = layouts.value_and_grad(of_batch, layout, settings.length, low)(trained, tokens)
        updates, state = optimizer.update(grads, state, trained)
        trained = layouts.keep(optim.apply_updates(trained, updates), layout.plan, "params")
        return trained, layouts.keep(state, layout.plan, "state"), value

    return bf.jit(step, donate_argnums=(0, 1))


# -- data ------------------------------------------------------------------------------------------


def tokenized(dataset: data.Dataset, tokenizer: Tokenizer) -> data.Dataset:
    """Text as tokens; token files stay as they are."""
    if not dataset.text or tokenizer.place == "bytes":
        return dataset

    def part(given: data.Part) -> data.Part:
        text = bytes(given.tokens).decode(errors="replace")
        return data.Part(np.asarray(tokenizer.encode(text, special=False), np.int32), given.place)

    return dataclasses.replace(
        dataset,
        train=tuple(map(part, dataset.train)),
        validation=tuple(map(part, dataset.validation)),
        text=False,
    )


def windows(dataset: data.Dataset, settings: Settings, config: Config) -> tuple[data.Windows, data.Windows]:
    """Training and validation windows.

    Raises:
      DataError: the windows are longer than the context, or the data is too short.
    """
    if settings.length > config.context:
        raise DataError(
            f"windows of {settings.length} tokens do not fit the context of {config.context}",
            where=f"--length {settings.length}",
            why="config.json has that many positions",
            fix=f"--length {config.context}",
        )
    return data.windows(dataset, settings.length, config.vocab, settings.batch)


# -- the run ---------------------------------------------------------------------------------------


class Stopped(Exception):
    """A signal asked the run to end, and its state is saved."""


class Result:
    """Outcome of a run.

    Attributes:
      params: the model, of which adapters are parts.
      adapters: the trained adapters, or None.
      history: losses.
    """

    def __init__(self, params: dict, adapters: Any, history: report.History):
        self.params, self.adapters, self.history = params, adapters, history


def run(
    params: dict,
    config: Config,
    parts: tuple[data.Windows, data.Windows],
    settings: Settings,
    out: Path,
    *,
    low: str | None = None,
    layout: placement.Layout | None = None,
    watch: report.Watch = lambda step, loss, validation: None,
) -> Result:
    """Train, or go on with what ``out`` has checkpoints of.

    Args:
      params: the model, placed by the layout; of a full finetuning, which updates them in place, they are used up.
      parts: windows of ``windows``.
      low: dtype of matmuls; None: that of the parameters.
      layout: of ``layouts.layout``; None: one device.
      watch: called after each step.
    Raises:
      DataError: ``out`` has checkpoints of other settings, or quantized weights have no adapters.
      Stopped: a signal asked for it.
    """
    if settings.quantize and not settings.rank:
        raise DataError(
            f"{settings.quantize} weights cannot be trained",
            where="Settings.quantize",
            why="their codes are integers",
            fix="a rank of adapters, such as 16",
        )
    layout = placement.Layout(config=config) if layout is None else layout
    check(settings, layout)
    trained, frozen = params, None
    if settings.rank:
        trained, frozen = layout.replicated(init_adapters(params, settings)), params
    optimizer, loss = make_optimizer(settings), make_loss(layout, settings, low)
    step, validate = make_step(loss, optimizer, layout, settings, low), bf.jit(loss)
    batches, held_out = data.Batches(parts[0], settings.batch, settings.seed), parts[1].evenly(EVALUATED)
    starts = range(0, len(held_out) - settings.batch + 1, settings.batch) or [
        0
    ]  # batches of one size: one program

    def validation(trained: Any) -> float:
        rows = [layout.divided(layout.even(held_out[at : at + settings.batch])) for at in starts]
        each = [validate(trained, frozen, batch) for batch in rows]
        return float(np.mean([float(value) for value in each]))

    state, history = layout.state(optimizer.init, trained), report.History()
    with io.Checkpointer(out / "checkpoints", keep=1) as saves, io.stop_signals() as stop:
        if saves.latest() is not None:
            history = _history(saves, settings, layout)
            found = saves.restore(like={"trained": trained, "state": state})
            trained, state = found["trained"], found["state"]
        else:
            history.validation.append((0, validation(trained)))

        def save() -> None:
            facts = {
                "settings": dataclasses.asdict(settings),
                "history": dataclasses.asdict(history),
                "packed": layout.packed,
            }
            saves.save(len(history.train), {"trained": trained, "state": state}, facts=facts)

        every = max(1, settings.steps // SAVES)
        while (done := len(history.train)) < settings.steps:
            trained, state, value = step(trained, state, frozen, layout.divided(batches[done]))
            history.train.append(float(value))
            last = done + 1 == settings.steps
            if last:
                history.validation.append((settings.steps, validation(trained)))
            watch(done + 1, history.train[-1], history.validation[-1][1] if last else None)
            if layout.any(stop.is_set()) and not last:
                save()
                saves.wait()
                raise Stopped
            if last or (done + 1) % every == 0:
                save()
    if settings.rank:
        return Result(layout.whole(merged(frozen, trained, settings)), layout.whole(trained), history)
    return Result(layout.whole(trained), None, history)


def check(settings: Settings, layout: placement.Layout) -> None:
    """Raise DataError if adapters are asked for on a mesh that does not train them."""
    if settings.rank and layout.plan.has("stage"):
        raise DataError(
            "adapters are not trained in a pipeline",
            where=f"--mesh {sharded.spelled(dict(layout.plan.mesh.shape))}",
            why="a pipeline makes the gradients of all parameters of its stages",
            fix="the axes fsdp and model, or no --lora",
        )


def _history(saves: io.Checkpointer, settings: Settings, layout: placement.Layout) -> report.History:
    facts = saves.facts()
    if facts.get("packed", []) != layout.packed:
        raise DataError(
            f"{saves.folder} has checkpoints of another form",
            where=str(saves.folder),
            why=f"axes that change the form of parameters were {facts.get('packed', [])}, and are {layout.packed}",
            fix="the same axes model and stage, or another folder: --out",
        )
    if facts["settings"] != dataclasses.asdict(settings) | {"targets": list(settings.targets)}:
        raise DataError(
            f"{saves.folder} has checkpoints of other settings",
            where=str(saves.folder),
            why=f"they are {facts['settings']}",
            fix="repeat that command to go on with it, remove the folder, or choose another one: --out",
        )
    return report.History(facts["history"]["train"], [tuple(v) for v in facts["history"]["validation"]])


def save(out: Path, result: Result, config: Config, settings: Settings) -> None:
    """Write a folder that ``generate`` reads: the model, adapters, a tokenizer.

    The model includes the adapters, which are also in a folder of their own, in the format of PEFT.
    """
    weights.save(out, result.params, config)
    if result.adapters is not None:
        peft.save(out / "adapter", result.adapters, config, settings.alpha, settings.model)
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"):
        if settings.model and (path := Path(settings.model) / name).exists():
            (out / name).write_bytes(path.read_bytes())
