"""Time to trace the GPT-2 124M training step to a jaxpr, against JAX.

Nothing is computed and no parameters are made: arguments are shapes. Both sides retrace each time; JAX's own caches of
traced library functions stay warm, as in real use.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp

import blufunc as bf
from benchmarks.harness.timing import report, row
from benchmarks.suites import gpt_in_jax
from examples.gpt import model, train

BATCH, REPEATS = 32, 7


def ours(config):
    """Function that traces the step with blufunc; returns the number of equations."""
    optimizer = train.make_optimizer(1000, 1e-3)
    params = bf.eval_shape(lambda k: model.init(k, config), bf.random.key(0))
    state = bf.eval_shape(optimizer.init, params)
    tokens = bf.ShapeDtypeStruct((BATCH, config.context + 1), "int32")

    def run():
        step = train.make_step(config, optimizer)
        return len(bf.make_jaxpr(step.__wrapped__)(params, state, tokens).eqns)

    return run


def theirs(config):
    """Function that traces the step with JAX; returns the number of equations."""
    optimizer, step = gpt_in_jax.step(config)
    params = jax.eval_shape(lambda k: gpt_in_jax.model.init(k, config), jax.random.key(0))
    state = jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((BATCH, config.context + 1), jnp.int32)

    def run():
        fresh = lambda *args: step(*args)  # a new function, so that the trace is not cached
        return len(jax.make_jaxpr(fresh)(params, state, tokens).eqns)

    return run


def main() -> None:
    """Print first and median times, their ratio, and the sizes of the jaxprs."""
    config = dataclasses.replace(model.PRESETS["gpt2-124m"])
    a, b = ours(config), theirs(config)
    times: dict[str, list[float]] = {"blufunc": [], "jax": []}
    for _ in range(REPEATS):
        for name, run in (("blufunc", a), ("jax", b)):
            start = time.perf_counter()
            count = run()
            times[name].append(time.perf_counter() - start)
            if len(times[name]) == 1:
                print(f"{name}: {count} equations at the top level")
    first = row("make_jaxpr of the gpt2-124m step, first", times["blufunc"][0], times["jax"][0], "s")
    middle = lambda xs: sorted(xs[1:])[len(xs[1:]) // 2]
    warm = row("the same, median when warm", middle(times["blufunc"]), middle(times["jax"]), "s")
    report("trace", [first, warm])


if __name__ == "__main__":
    main()
