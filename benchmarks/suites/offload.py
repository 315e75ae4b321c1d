"""Offload to the memory of the host: the link, optimizer state, residuals, peaks.

    BLUFUNC_SAVE_RESULTS=1 python -m benchmarks.suites.offload --platform cuda

``link``: copies of 256 MiB between the device and page-locked memory, each way and both at once. ``state``: a step of
GPT-2 1.5B (48 x 1600 x 25, T = 1024) with AdamW in bf16, with its moments in the memory of the host and a budget of 24
GB, against the same step with all of it on the device. ``residuals``: the step of GPT-2 124M with half of its residual
memory, by a budget (which may offload or recompute) and by ``checkpoint_policies``, against the step without a limit;
and the same with its layers in a ``scan``.

Times are medians of calls that wait for the result. Peaks are those of blufunc's allocator, in the same run, next to
the plan's. On a CPU there is one memory, and everything runs at tiny sizes to try the program itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import blufunc as bf
from benchmarks.harness.programs import device
from benchmarks.harness.timing import report
from blufunc import checkpoint_policies, optim, tree
from blufunc.kernels.backends.cuda.device_model import H200
from blufunc.kernels.backends.cuda.driver import driver
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.memory import Space
from examples.gpt import model


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model, its batch, and the tokens that have logits at a time."""

    config: model.Config
    batch: int
    chunk: int


LARGE = Sizes(model.Config(48, 25, 1600, 1024, 50304), 16, 4096)
SMALL = Sizes(model.Config(12, 12, 768, 1024, 50304), 32, 8192)
TINY = Sizes(model.Config(2, 2, 32, 16, 64), 2, 0)
LIMIT = 24_000_000_000
RESIDUALS = 0.5
COPY = 256 << 20
NAMED = {"names_which_can_be_saved": ["stream"], "names_which_can_be_offloaded": ["hidden"]}


def main() -> None:
    """Print the rows, and record them."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu", help="cpu: tiny sizes")
    parser.add_argument("--only", default="", help="the parts with this in their names")
    parser.add_argument("--steps", type=int, default=10, help="timed calls of a step")
    options = parser.parse_args()
    if options.platform == "cuda":
        bf.config.update("default_device", "cuda")
    rows = [row for name, part in PARTS.items() if options.only in name for row in part(options, name)]
    report("offload", rows, options.platform, device()["name"] if options.platform == "cuda" else "")


def emit(part: str, what: str, **figures: Any) -> dict:
    """Print a row, and return it."""
    shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    print(f"{part:<10} {what:<34} {shown}", flush=True)
    return {"part": part, "what": what, **figures}


# -- the link ----------------------------------------------------------------------------------------


def link(o: argparse.Namespace, part: str) -> Iterator[dict]:
    """GB/s of copies, and seconds of a small one; the constants of the device model."""
    if o.platform != "cuda":
        return
    allocate = lambda pool, n: pool.allocate((n,), np.dtype(np.uint8), "the benchmark of the link")
    here, there = cuda_memory.pool(0), cuda_memory.pinned_pool(0)
    ends = [(allocate(here, COPY), allocate(there, COPY)) for _ in range(2)]
    out, back = driver.copy_streams(0)
    for nbytes, calls in ((COPY, 10), (1 << 12, 100)):

        def copy_out(nbytes: int = nbytes) -> None:
            driver.transfer(ends[0][1].ptr, ends[0][0].ptr, nbytes, out)

        def copy_in(nbytes: int = nbytes) -> None:
            driver.transfer(ends[1][0].ptr, ends[1][1].ptr, nbytes, back)

        for what, run in (("out", [copy_out]), ("in", [copy_in]), ("both", [copy_out, copy_in])):
            seconds = statistics.median(_together(run, calls, (out, back)) for _ in range(5)) / calls
            figures = {"GB_s": nbytes / seconds / 1e9} if nbytes == COPY else {"us": 1e6 * seconds}
            yield emit(part, f"{what}, {nbytes} bytes", **figures)
    yield emit(part, "the device model", GB_s=H200.host_link / 1e9, us=1e6 * H200.copy)


def _together(functions: list[Callable[[], None]], calls: int, streams: tuple[Any, Any]) -> float:
    """Seconds of ``calls`` rounds of functions that enqueue copies."""
    for stream in streams:
        stream.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        for function in functions:
            function()
    for stream in streams:
        stream.synchronize()
    return time.perf_counter() - start


# -- steps -------------------------------------------------------------------------------------------


def measured(o: argparse.Namespace, part: str, what: str, step: Any, state: list[Any], tokens: Any) -> dict:
    """Row of a step ``(params, state, tokens) -> (params, state, loss)``, warmed up."""
    lowered = step.lower(*state, tokens)
    memory, losses = lowered.memory, []

    def call() -> float:
        start = time.perf_counter()
        *state[:], loss = step(*state, tokens)
        losses.append(float(loss))
        return time.perf_counter() - start

    for _ in range(12):  # matmuls are tuned, and graphs captured
        call()
    place = state[0]["tokens"].device
    if o.platform == "cuda":
        cuda_memory.pool(place.index).reset_peak()
    seconds = statistics.median(call() for _ in range(o.steps))
    stats = place.memory_stats()
    figures: dict[str, Any] = {
        "ms": 1e3 * seconds,
        "tokens_s": tokens.shape[0] * (tokens.shape[1] - 1) / seconds,
        "plan_GB": memory.peak_bytes / 1e9,
        "plan_host_GB": memory.host_bytes / 1e9,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    if o.platform == "cuda":
        figures |= {
            "peak_GB": stats["peak_bytes_in_use"] / 1e9,
            "peak_to_plan": stats["peak_bytes_in_use"] / memory.peak_bytes,
            "host_GB": stats["host_bytes_in_use"] / 1e9,
        }
    if memory.overlap is not None:
        figures["plan_exposed"] = memory.overlap.exposed_seconds / memory.overlap.step_seconds
    return emit(part, what, **figures)


def training(loss: Callable, offloads: bool, budget: int | None = None) -> tuple[Any, Any]:
    """The optimizer, and the compiled step; ``offloads``: its state waits on the host."""
    optimizer = optim.adamw(3e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

    def step(params: Any, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        value, grads = bf.value_and_grad(bf.autocast(loss))(params, tokens)
        state = bf.device_put(state, Space.Device)
        updates, state = optimizer.update(grads, state, params)
        if offloads:
            state = bf.device_put(state, Space.Host)
        return optim.apply_updates(params, updates), state, value

    return optimizer, bf.jit(step, donate_argnums=(0, 1), memory_budget=budget)


def begun(sizes: Sizes, optimizer: Any, offloads: bool, stacked: bool = False) -> list[Any]:
    """Parameters and optimizer state; on the host without passing through the device.

    ``stacked``: the parameters of all layers are stacked, for a scan over them.
    """

    def init(key: Any) -> Any:
        params = model.init(key, sizes.config)
        if stacked:
            params["blocks"] = tree.map(lambda *leaves: bf.numpy.stack(leaves), *params["blocks"])
        return params

    params = bf.jit(init)(bf.random.key(0))
    types = bf.eval_shape(optimizer.init, params)
    place = Space.Host if offloads else Space.Device
    state = tree.map(lambda t: bf.device_put(np.zeros(t.shape, t.dtype), place), types)
    return [params, state]


def tokens_of(sizes: Sizes) -> Any:
    """A batch of random tokens, and the one that follows each window."""
    shape = sizes.batch, sizes.config.context + 1
    return bf.numpy.asarray(np.random.default_rng(0).integers(0, sizes.config.vocab, shape, np.int32))


def state(o: argparse.Namespace, part: str) -> Iterator[dict]:
    """Steps of the large model, with its moments on the device and on the host."""
    sizes = LARGE if o.platform == "cuda" else TINY
    wiring = model.Wiring(recompute=True, loss_chunk=sizes.chunk)
    loss = lambda params, tokens: model.loss(params, tokens, sizes.config, wiring)
    tokens, rates = tokens_of(sizes), []
    for what, offloads, budget in (("on the device", False, None), ("moments on the host", True, LIMIT)):
        optimizer, step = training(loss, offloads, budget)
        row = measured(o, part, what, step, begun(sizes, optimizer, offloads), tokens)
        rates.append(row["tokens_s"])
        yield row
    yield emit(part, "rate, of that without a limit", ratio=rates[1] / rates[0], goal=0.6)


def residuals(o: argparse.Namespace, part: str) -> Iterator[dict]:
    """Steps of the small model without a limit, and with half of its residual memory."""
    sizes = SMALL if o.platform == "cuda" else TINY
    tokens, rates = tokens_of(sizes), {}
    plain = _loss(sizes, None)
    _, step = training(plain, False)
    memory = step.lower(*begun(sizes, training(plain, False)[0], False), tokens).memory
    fixed = memory.argument_bytes + memory.output_bytes
    half = int(fixed + RESIDUALS * (memory.peak_bytes - fixed))
    to_host = {"offload_src": "device", "offload_dst": "pinned_host"}
    offloading = checkpoint_policies.save_and_offload_only_these_names(**NAMED, **to_host)
    keeping = checkpoint_policies.save_only_these_names("stream", "hidden")
    limit = half if o.platform == "cuda" else None
    for what, policy, budget, stacked in (
        ("without a limit", None, None, False),
        ("half, by a budget", None, limit, False),
        ("a policy that keeps", keeping, None, False),
        ("a policy that offloads", offloading, None, False),
        ("a policy that keeps, in a scan", keeping, None, True),
        ("a policy that offloads, in a scan", offloading, None, True),
    ):
        optimizer, step = training(_loss(sizes, policy, stacked), False, budget)
        row = measured(o, part, what, step, begun(sizes, optimizer, False, stacked), tokens)
        rates[what] = row["tokens_s"]
        yield row
    ratio = rates["half, by a budget"] / rates["without a limit"]
    yield emit(part, "rate by a budget, of that without", ratio=ratio, goal=0.9)


def _loss(sizes: Sizes, policy: Any, stacked: bool = False) -> Callable:
    """The loss of a model; with a policy for the named values of each layer.

    ``stacked``: the layers are a scan over stacked parameters.
    """
    wiring = model.Wiring(
        lay=lambda x, what: bf.checkpoint_name(x, what) if policy is not None else x, loss_chunk=sizes.chunk
    )
    if policy is None:
        return lambda params, tokens: model.loss(params, tokens, sizes.config, wiring)
    layer = bf.checkpoint(lambda p, x: model.block(p, x, sizes.config, wiring), policy=policy)

    def loss(params: Any, tokens: Any) -> Any:
        x = model.embed(params, tokens[:, :-1])
        if stacked:
            x, _ = bf.lax.scan(lambda x, p: (layer(p, x)[0], None), x, params["blocks"])
        for p in () if stacked else params["blocks"]:
            x, _ = layer(p, x)
        return model.cross_entropy(params, x, tokens[:, 1:], wiring)

    return loss


PARTS = {"link": link, "state": state, "residuals": residuals}

if __name__ == "__main__":
    main()
