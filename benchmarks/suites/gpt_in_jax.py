"""The GPT example as a JAX program: the same source with other imports.

``examples/gpt/model.py`` is executed with the JAX counterparts of ``blufunc.numpy``, ``nn`` and ``random``, so both
sides of a benchmark are textually the same program.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import examples.gpt.model


def _layer_norm(x, scale, bias, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + eps) * scale + bias


def _linear_cross_entropy(x, weight, labels, chunk=None):
    """Plain loss: JAX and optax have no chunks, so ``chunk`` is ignored."""
    return optax.softmax_cross_entropy_with_integer_labels(x @ weight.T, labels).mean()


nn = types.SimpleNamespace(
    gelu=jax.nn.gelu,
    layer_norm=_layer_norm,
    dot_product_attention=jax.nn.dot_product_attention,
    linear_cross_entropy=_linear_cross_entropy,
    softmax_cross_entropy_with_integer_labels=optax.softmax_cross_entropy_with_integer_labels,
)


def _load() -> types.ModuleType:
    source = Path(examples.gpt.model.__file__).read_text()
    source = source.replace("import blufunc.numpy as bnp\n", "").replace(
        "from blufunc import nn, random\n", ""
    )
    module = sys.modules["gpt_model_in_jax"] = types.ModuleType("gpt_model_in_jax")  # dataclasses look it up
    module.__dict__.update(bnp=jnp, nn=nn, random=jax.random)
    exec(compile(source, "gpt_model_in_jax.py", "exec"), module.__dict__)
    return module


model = _load()


def step(config, steps: int = 1000, lr: float = 1e-3):
    """Optimizer and training step as in ``examples/gpt/train.py``, not jitted."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, max(1, steps // 10), steps, end_value=lr / 10)
    mask = lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=mask),
    )

    def train_step(params, state, tokens):
        loss, grads = jax.value_and_grad(model.loss)(params, tokens, config)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return optimizer, train_step
