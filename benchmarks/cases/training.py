"""Steps of training around a loss, for blufunc, JAX and PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

RATE = 1e-3


def trained(loss: Callable[..., Any], rate: float = RATE) -> Callable[..., Any]:
    """``step(lib, params, *batch) -> (params, value)`` of gradient descent."""

    def step(m: Any, params: Any, *batch: Any) -> Any:
        value, grads = m.value_and_grad(lambda p: loss(m, p, *batch))(params)
        return m.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads), value

    return step


def torch_value_and_grad(loss: Callable[..., Any], compiled: bool = False) -> Callable[..., Any]:
    """Loss and gradients in PyTorch, the loss compiled or not.

    Returns:
      ``program(torch, params, *batch) -> (value, gradients)``.
    """
    kept: list[Callable] = []

    def program(t: Any, params: Any, *batch: Any) -> Any:
        from torch.utils import _pytree as pytree

        if not kept:
            of = functools.partial(loss, t)
            kept.append(t.compile(of) if compiled else of)
        leaves, tree = pytree.tree_flatten(params)
        leaves = [x.detach().requires_grad_() for x in leaves]
        value = kept[0](pytree.tree_unflatten(leaves, tree), *batch)
        return value.detach(), pytree.tree_unflatten(list(t.autograd.grad(value, leaves)), tree)

    return program


def torch_trained(loss: Callable[..., Any], rate: float = RATE, compiled: bool = False) -> Callable[..., Any]:
    """The step of gradient descent in PyTorch."""
    program = torch_value_and_grad(loss, compiled)

    def step(t: Any, params: Any, *batch: Any) -> Any:
        from torch.utils import _pytree as pytree

        value, grads = program(t, params, *batch)
        leaves, tree = pytree.tree_flatten(params)
        new = t._foreach_sub(leaves, t._foreach_mul(pytree.tree_leaves(grads), rate))
        return pytree.tree_unflatten(list(new), tree), value

    return step


def cross_entropy(m: Any, logits: Any, labels: Any) -> Any:
    """Mean cross-entropy of logits, computed in float32."""
    logits = logits.astype(m.numpy.float32)
    chosen = m.numpy.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (m.nn.logsumexp(logits, axis=-1) - chosen).mean()
