"""Tokens per second of the demo's training step on the CPU, against JAX.

Both run the same program on the same kind of random tokens, with the preset and batch of ``make demo``.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import blufunc as bf
from benchmarks.harness.timing import report, row, together
from benchmarks.suites import gpt_in_jax
from examples.gpt import model, train


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="tiny", choices=sorted(model.PRESETS))
    parser.add_argument("--calls", type=int, default=5)
    options = parser.parse_args()
    config, batch = model.PRESETS[options.preset], train.RECIPES[options.preset]["batch"]
    tokens = np.random.default_rng(0).integers(0, config.vocab, (batch, config.context + 1)).astype(np.int32)

    optimizer = train.make_optimizer(1000, 1e-3)
    step = train.make_step(config, optimizer)
    params = model.init(bf.random.key(0), config)
    mine = {"state": (params, optimizer.init(params)), "tokens": bf.numpy.asarray(tokens)}

    def ours():
        *mine["state"], loss = step(*mine["state"], mine["tokens"])
        return float(loss)

    j_optimizer, j_step = gpt_in_jax.step(config)
    j_step = jax.jit(j_step, donate_argnums=(0, 1))
    j_params = gpt_in_jax.model.init(jax.random.key(0), config)
    other = {"state": (j_params, j_optimizer.init(j_params)), "tokens": jnp.asarray(tokens)}

    def theirs():
        *other["state"], loss = j_step(*other["state"], other["tokens"])
        return float(loss)

    a, b = together(ours, theirs, options.calls)
    n = batch * config.context
    what = f"{options.preset} training step"
    report("cpu_train", [row(what, n / a, n / b, "tokens/s")])


if __name__ == "__main__":
    main()
