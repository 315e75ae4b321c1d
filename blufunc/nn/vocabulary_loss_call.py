"""Primitives of ``linear_cross_entropy``, the loss over a large vocabulary.

A face, below ``vocabulary_loss.py``. An equation holds its definition as a jaxpr, as attention's does, and
every compiler inlines it. Four primitives, of x [..., C], weight, labels [...] and an optional bias [V]:

    linear_cross_entropy          x, weight, labels -> losses [...]
    linear_cross_entropy_tangent  the tangent of the losses, linear in those of x, weight and bias
    linear_cross_entropy_grads    x, weight, labels, shares [...] -> losses, and the gradients of sum(shares * losses)
    linear_cross_entropy_total    x, weight, labels, shares [...], scale -> scale * sum(shares * losses)

and within the third, where devices may have a kernel for it (``kernels/backends/cuda/library/softmax_gemm.py``):

    linear_softmax                x [n, C], weight, classes [n], live [n], near [n] -> slopes [n, V], losses [n],
                                  factors [n]: the cross-entropy of each row, and its gradient with respect to the
                                  row's logits, which is factors[:, None] * slopes

The transpose of the second is the third: individually differentiated losses recompute their logits, since
their weights are known only in the backward pass. The last knows them in the forward pass: it is the third,
without recomputation.

All of them process the tokens in chunks: [chunk, V] logits are computed, read once, overwritten by their gradient,
read by two matmuls, and freed before the next chunk begins. Matmuls accumulate the gradient of the weight in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.ir import dtypes
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.trace import set_trace
from blufunc.core.ops.barrier import optimization_barrier
from blufunc.core.ops.linear_softmax import BELOW, FAR, NAME
from blufunc.core.primitives.linear_ops import add_any, batched_front
from blufunc.core.primitives.sharding import Rule
from blufunc.core.primitives.tangents import Zero, is_linear
from blufunc.core.programs.stage import stage
from blufunc.nn.activations import wide_of
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.calls import Call, jit_p
from blufunc.transforms.control_flow.composite import Composite
from blufunc.transforms.control_flow.platform_variants import either_p
from blufunc.transforms.control_flow.scan import scan

LOGITS = 1 << 28
"""Logits per chunk by default: half a gigabyte in 16 bits."""

LEAST = 1024
"""Tokens below which a chunk does not amortize updating the weight's gradient."""

GradMask = tuple[bool, bool, bool]
"""Whether to compute the gradients of x, of the weight and of the bias."""

IN_A_ROW = 32
"""Max chunks to unroll, which are planned with the program; more become a loop."""


@dataclasses.dataclass(frozen=True)
class How:
    """Options that are the same for all tokens.

    Attributes:
      label_smoothing, z_loss, soft_cap: see ``linear_cross_entropy``.
      chunk: tokens with logits at a time; None: as many as fit in ``LOGITS``.
      features: the axis of the weight that is C.
      low: the dtype of matmul operands, if not their own.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    chunk: int | None = None
    features: int = 1
    low: np.dtype | None = None

    def tokens(self, classes: int) -> int:
        """Number of tokens per chunk."""
        return self.chunk or max(LEAST, 1 << (LOGITS // classes).bit_length() - 1)

    def in_products(self, low: np.dtype, bias: Sequence[Any]) -> bool:
        """True if devices may have a kernel for this loss (``softmax_slopes``)."""
        others = self.label_smoothing or self.z_loss or self.soft_cap is not None or bias
        return low == dtypes.bfloat16 and not others


# -- one chunk -------------------------------------------------------------------------------------


def _product(x: Any, y: Any, axes: tuple[int, int], dtype: Any) -> Any:
    (i, j) = axes
    return lax.dot_general(x, y, (((i,), (j,)), ((), ())), preferred_element_type=dtype)


def _logits(how: How, x: Any, weight: Any, bias: Any = None) -> tuple[Any, Any]:
    """Logits [n, V] of a chunk, in the dtype of x, and the slope of the cap."""
    logits = _product(x, weight, (1, how.features), x.dtype).astype(wide_of(x))
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if how.soft_cap is None:
        return logits, None
    slope = bnp.tanh(logits / how.soft_cap)
    return slope * how.soft_cap, 1 - bnp.square(slope)


def chunk_losses(how: How, logits: Any, labels: Any) -> tuple[Any, ...]:
    """Losses [n] of a chunk, NaN for invalid labels, and parts of their gradients.

    The parts: ``exp(logits - max)`` [n, V] and its row sums [n, 1], ``logsumexp`` of the logits [n, 1], and
    the mask of the labels [n, V].
    """
    V = logits.shape[1]
    top = lax.stop_gradient(bnp.max(logits, -1, keepdims=True))
    logits = logits - top
    exp = bnp.exp(logits)
    total = bnp.sum(exp, -1, keepdims=True)
    hit = labels[:, None] == lax.broadcasted_iota(labels.dtype, logits.shape, 1)
    log_total = bnp.log(total)
    picked = bnp.sum(bnp.where(hit, logits, 0), -1)
    losses = bnp.squeeze(log_total, -1) - (1 - how.label_smoothing) * picked
    if how.label_smoothing:
        losses = losses - how.label_smoothing / V * bnp.sum(logits, -1)
    log_z = log_total + top
    if how.z_loss:
        losses = losses + how.z_loss * bnp.square(bnp.squeeze(log_z, -1))
    return bnp.where(_in_range(labels, V), losses, math.nan), exp, total, log_z, hit


def _in_range(labels: Any, V: int) -> Any:
    return (labels >= 0) & (labels < V)


def chunk_gradient(how: How, slope: Any, parts: Sequence[Any], labels: Any, shares: Any) -> Any:
    """Gradient of ``sum(shares * losses)`` with respect to a chunk's uncapped logits.

    For a label out of range it is NaN, like the loss; for share 0 it is 0, even if the loss is infinite.
    """
    exp, total, log_z, hit = parts
    V = exp.shape[1]
    share = shares[:, None]
    scale = (1 + 2 * how.z_loss * log_z) if how.z_loss else 1
    target = bnp.where(hit, bnp.asarray(1 - how.label_smoothing, exp.dtype), 0)
    if how.label_smoothing:
        target = target + how.label_smoothing / V
    gradient = exp * (scale / total) - target
    if slope is not None:
        gradient = gradient * slope
    known = bnp.where(_in_range(labels, V)[:, None], share, math.nan)
    return bnp.where(share == 0, bnp.zeros((), exp.dtype), gradient * known)


# -- one chunk, on devices with a kernel for GEMM and softmax --------------------------------------


def softmax_slopes(how: How, tokens: Any, weight: Any, labels: Any, shares: Any) -> tuple[Any, Any, Any]:
    """Losses [n] of a chunk, and its logits' gradient as slopes [n, V], factors [n].

    The gradient of ``sum(shares * losses)`` is ``factors[:, None] * slopes``, so that logits need not be
    reread for per-row values. Factors are 0 where shares are 0, whose losses may be infinite or inexact, and
    NaN where a label is out of range.
    """
    V = weight.shape[1 - how.features]
    known, wide = _in_range(labels, V), wide_of(tokens)
    classes = bnp.where(known, labels.astype(dtypes.int32), -1)
    rows = bnp.take(weight, bnp.maximum(classes, 0), axis=1 - how.features, mode="clip")
    rows = rows if how.features else rows.T
    near = bnp.sum(tokens.astype(wide) * rows.astype(wide), -1)
    live = shares != 0
    slopes, losses, factors = linear_softmax_p.at(tokens, weight, classes, live, near, features=how.features)
    factors = bnp.where(live, bnp.where(known, shares, math.nan) * factors, bnp.zeros((), wide))
    return bnp.where(known, losses, math.nan), slopes, factors


def _softmax(x: Any, weight: Any, classes: Any, live: Any, near: Any, *, features: int) -> list[Any]:
    """Definition of ``linear_softmax``; for its kernel see ``library/softmax_gemm``."""
    wide = wide_of(x)
    logits = _product(x, weight, (1, features), x.dtype).astype(wide)
    hit = classes[:, None] == lax.broadcasted_iota(classes.dtype, logits.shape, 1)
    known = _in_range(classes, logits.shape[1])
    own = bnp.where(known, bnp.sum(bnp.where(hit, logits, 0), -1), near)
    top = bnp.max(logits, -1)
    far = known & live & ((top > near + FAR) | (own < near - BELOW))
    shift = bnp.where(far, top, near)
    exp = bnp.where(hit, bnp.zeros((), wide), bnp.exp(logits - shift[:, None]))
    others = bnp.sum(exp, -1)
    slopes = bnp.where(live[:, None], bnp.where(hit, -others[:, None], exp), bnp.zeros((), wide))
    above = own - shift  # 0 up to rounding, or the excess of the largest logit
    low, high = bnp.log1p(others * bnp.exp(-above)), bnp.log(others + bnp.exp(above)) - above
    losses = bnp.where(above >= -BELOW, low, high)
    return [slopes.astype(x.dtype), losses, 1 / (others + bnp.exp(above))]


def _either(whole: Callable, in_products: Callable, args: Sequence[Any]) -> list[Any]:
    """Both forms, one of which the device chooses."""
    avals = [a.aval.strong() for a in args]
    bodies = [stage(fun, avals, "linear_cross_entropy_grads") for fun in (whole, in_products)]
    assert not any(body.consts for body in bodies), "they are functions of their operands"
    parts = (len(bodies[0].outvars), 0, 0)
    return either_p.bind(*args, jaxpr=bodies[0], preferred=bodies[1], parts=parts, held=(False,) * len(args))


# -- all chunks ------------------------------------------------------------------------------------


def _over_chunks(step: Callable, xs: Sequence[Any], size: int) -> tuple[list, list]:
    """Process chunks of ``size`` tokens in order.

    Args:
      step: ``step(*chunks) -> (terms, outs)``, lists of arrays.
      xs: arrays of all tokens, along their first axes.
    Returns:
      the sums of the terms, and the outs of all tokens.
    """
    n, (x, *others) = xs[0].shape[0], xs
    total, outs = step(*(a[:size] for a in xs))
    found, at = [outs], size
    while at < n:  # frees the logits of the preceding chunk before this one's are computed
        x, total, found[-1] = optimization_barrier((x, total, found[-1]))
        count = 1 if n <= IN_A_ROW * size else max((n - at) // size, 1)
        if count > 1:
            rows = [bnp.reshape(a[at : at + count * size], (count, size, *a.shape[1:])) for a in (x, *others)]
            total, outs = scan(lambda total, chunks: _added(total, *step(*chunks)), total, rows)
            outs = [bnp.reshape(o, (count * size, *o.shape[2:])) for o in outs]
        else:
            total, outs = _added(total, *step(*(a[at : at + size] for a in (x, *others))))
        found.append(outs)
        at += count * size
    if len(found) > 1:
        total = optimization_barrier(total)  # so that the last matmul accumulates too, not its reader
    outs = [bnp.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)]
    return total, outs


def _added(total: list, terms: list, outs: list) -> tuple[list, list]:
    return [a + b for a, b in zip(total, terms, strict=True)], outs


def _losses(x: Any, weight: Any, labels: Any, *bias: Any, how: How) -> list[Any]:
    """The losses of all tokens."""
    low = how.low or x.dtype
    if not labels.size:
        return [bnp.zeros(labels.shape, wide_of(x))]
    tokens, weight = bnp.reshape(x, (labels.size, x.shape[-1])).astype(low), weight.astype(low)

    def step(tokens: Any, labels: Any) -> tuple[list, list]:
        logits, _ = _logits(how, tokens, weight, *bias)
        return [], [chunk_losses(how, logits, labels)[0]]

    size = how.tokens(weight.shape[1 - how.features])
    _, (losses,) = _over_chunks(step, [tokens, bnp.ravel(labels)], size)
    return [bnp.reshape(losses, labels.shape)]


def _grads(
    x: Any, weight: Any, labels: Any, shares: Any, *bias: Any, how: How, wanted: GradMask, remat: bool = False
) -> list[Any]:
    """Losses of all tokens (inexact where the share is 0), and requested gradients.

    ``remat``: derivatives of this recompute the logits too, instead of keeping those of all chunks.
    """
    low, wide, (of_x, *of_rest) = how.low or x.dtype, wide_of(x), wanted
    summed = [a for a, want in zip((weight, *bias), of_rest, strict=False) if want]
    if not labels.size:
        results = (x, *summed) if of_x else summed
        return [bnp.zeros(labels.shape, wide), *(bnp.zeros(a.shape, a.dtype) for a in results)]
    tokens, low_weight = bnp.reshape(x, (labels.size, x.shape[-1])).astype(low), weight.astype(low)
    size = how.tokens(weight.shape[1 - how.features])
    args = (tokens, low_weight, bnp.ravel(labels), bnp.ravel(shares), *bias)
    of: dict[str, Any] = {"how": how, "wanted": wanted, "size": size, "dtype": x.dtype}
    if remat or not how.in_products(low, bias):
        outs = _whole(*args, **of, remat=remat)
    else:
        outs = _either(functools.partial(_whole, **of), functools.partial(_in_products, **of), args)
    shapes = (labels.shape, *((x.shape,) * of_x), *(a.shape for a in summed))
    types = (wide, *((x.dtype,) * of_x), *(a.dtype for a in summed))
    return [bnp.reshape(o, s).astype(t) for o, s, t in zip(outs, shapes, types, strict=True)]


def _whole(
    tokens: Any, weight: Any, labels: Any, shares: Any, *bias: Any,
    how: How, wanted: GradMask, size: int, dtype: Any, remat: bool = False,
) -> list[Any]:  # fmt: skip
    """Losses and requested gradients through logits that their gradient overwrites."""
    wide, (of_x, of_weight, of_bias) = wide_of(tokens), wanted

    def step(tokens: Any, labels: Any, shares: Any) -> tuple[list, list]:
        logits, slope = _logits(how, tokens, weight, *bias)
        losses, *parts = chunk_losses(how, logits, labels)
        gradient = chunk_gradient(how, slope, parts, labels, shares)
        rounded = gradient.astype(tokens.dtype)
        outs, terms = [losses], []
        if of_x:
            outs.append(_product(rounded, weight, (1, 1 - how.features), dtype))
        if of_weight:
            terms.append(_product(*_ordered(how, rounded, tokens), (0, 0), wide))
        if of_bias:
            terms.append(bnp.sum(gradient, 0))
        return terms, outs

    total, outs = _over_chunks(checkpoint(step) if remat else step, [tokens, labels, shares], size)
    return [*outs, *total]


def _in_products(
    tokens: Any, weight: Any, labels: Any, shares: Any, *, how: How, wanted: GradMask, size: int, dtype: Any
) -> list[Any]:
    """The same with slopes from the fused kernel in place of logits.

    The gradient of x is scaled after its matmul, and that of the weight by scaled tokens, so each is rounded
    once more than in the other form.
    """
    wide, (of_x, of_weight, _) = wide_of(tokens), wanted
    mixed = dtype != tokens.dtype
    low = tokens.dtype if mixed else wide  # dtype of the matmul for x, which is rounded once

    def step(tokens: Any, labels: Any, shares: Any) -> tuple[list, list]:
        losses, slopes, factors = softmax_slopes(how, tokens, weight, labels, shares)
        outs, terms = [losses, factors], []
        if of_x:
            slope = _product(slopes, weight, (1, 1 - how.features), low)
            outs.append(slope if mixed else (slope * factors[:, None]).astype(dtype))
        if of_weight:
            # after a barrier: otherwise tokens would be kept in float32 since their first use
            tokens, column = optimization_barrier((tokens, factors[:, None]))
            scaled = bnp.where(column == 0, bnp.zeros((), wide), tokens.astype(wide) * column)
            terms.append(_product(*_ordered(how, slopes, scaled.astype(slopes.dtype)), (0, 0), wide))
        return terms, outs

    total, (losses, factors, *outs) = _over_chunks(step, [tokens, labels, shares], size)
    if mixed:  # all at once, by the reader
        outs = [(o.astype(wide) * factors[:, None]).astype(dtype) for o in outs]
    return [losses, *outs, *total]


def _ordered(how: How, of_classes: Any, of_features: Any) -> tuple[Any, Any]:
    """The operands of the weight gradient's matmul, in the weight's layout."""
    return (of_classes, of_features) if how.features else (of_features, of_classes)


def _total(x: Any, weight: Any, labels: Any, shares: Any, scale: Any, *bias: Any, how: How) -> list[Any]:
    (losses,) = linear_cross_entropy_p.at(x, weight, labels, *bias, how=how)
    return [_summed(shares, losses) * scale]


def _summed(shares: Any, losses: Any) -> Any:
    """Sum without ignored losses, which may be infinite."""
    return bnp.sum(bnp.where(shares == 0, bnp.zeros((), losses.dtype), shares * losses))


# -- primitives ------------------------------------------------------------------------------------


class _OfTokens(Composite):
    """A composite over tokens, of which some operands have one row each."""

    lines = False

    per_token: tuple[int, ...] = (0, 2)
    """The operands with one element, or row, per token."""

    def summed(self, how: dict) -> bool:
        """True if some results are sums over tokens."""
        return False

    def batch(self, axis, args, dims, *, jaxpr, how: How, **rest):
        """Examples become tokens; with several weights or weight gradients, chunks shrink."""
        if self.summed(rest) or any(d is not None for i, d in enumerate(dims) if i not in self.per_token):
            tokens = -(-how.tokens(args[1].aval.shape[1 - how.features]) // max(axis.size, 1))
            short = {"how": dataclasses.replace(how, chunk=tokens), **rest}
            avals = [v.aval for v in jaxpr.invars]
            return super().batch(axis, args, dims, jaxpr=self.staged(avals, **short), **short)
        moved = [
            batched_front(axis, a, d) if i in self.per_token else a
            for i, (a, d) in enumerate(zip(args, dims, strict=True))
        ]
        outs = self.at(*moved, how=how, **rest)
        return outs, [0] * len(outs)

    def autocast(self, cells, dtype, *, jaxpr, how: How, **rest):
        """Matmuls in low precision; the weight stays wide, so its gradient is not rounded."""
        if cells[0].eligible and how.low is None:
            how = dataclasses.replace(how, low=dtype)
        args = [c.value if i == 0 else c.traced() for i, c in enumerate(cells)]
        return self.at(*args, how=how, **rest)

    def shard(self, avals, outs, **params) -> Rule:
        """Tokens are independent; weights are whole, their gradients sums over tokens."""
        lead = avals[self.per_token[1]].shape
        factors = tuple((i,) for i in range(len(lead)))

        def dims(aval: ShapedArray, by_token: bool) -> tuple:
            whole = ((),) * (aval.ndim - len(lead) * by_token)
            return (*factors, *whole) if by_token else whole

        operands = tuple(dims(a, i in self.per_token) for i, a in enumerate(avals))
        by_token = 1 + params["wanted"][0] if "wanted" in params else 1
        results = tuple(dims(a, i < by_token) for i, a in enumerate(outs))
        reduced = dict.fromkeys(range(len(lead)), "sum") if self.summed(params) else {}

        return Rule(operands, results, tuple(lead), reduced, params=self.restaged(avals))


class _Softmax(_OfTokens):
    name, definition = NAME, _softmax
    batch = Call.batch  # its operands are one chunk
    shard = autocast = None  # type: ignore[assignment]  # it is within an operation that has its own


class _Tangent(_OfTokens):
    name = "linear_cross_entropy_tangent"

    def transpose(self, cts, *args, jaxpr, how, nonzeros):
        (ct,) = cts
        if ct.__class__ is Zero:
            return
        x, weight, labels, *bias = args[: len(nonzeros)]
        tangents = dict(zip([i for i, nz in enumerate(nonzeros) if nz], args[len(nonzeros) :], strict=True))
        wanted = tuple(is_linear(tangents.get(i)) for i in (0, 1, 3))
        grads = linear_cross_entropy_grads_p.at(x, weight, labels, ct, *bias, how=how, wanted=wanted)[1:]
        targets = [tangents[i] for i, want in zip((0, 1, 3), wanted, strict=True) if want]
        for target, grad in zip(targets, grads, strict=True):
            target.add(grad)

    batch = Call.batch  # operand types do not determine the batching
    shard = autocast = None  # type: ignore[assignment]  # likewise: its body is gone through


class _Losses(_OfTokens):
    name, definition, tangent = "linear_cross_entropy", _losses, _Tangent()


class _Grads(_OfTokens):
    name, definition, per_token = "linear_cross_entropy_grads", _grads, (0, 2, 3)

    def summed(self, how):
        return any(how["wanted"][1:])

    def linearize(self, trace, primals, tangents, *, jaxpr, **how):
        recomputing = self.staged([v.aval for v in jaxpr.invars], remat=True, **how)
        return jit_p.linearize(trace, primals, tangents, jaxpr=recomputing, name=self.name)


class _Total(_OfTokens):
    name, definition = "linear_cross_entropy_total", _total
    batch = Call.batch  # the body's rule: shared operands get one gradient per batch
    shard = None  # type: ignore[assignment]  # its body is divided

    def linearize(self, trace, primals, tangents, *, jaxpr, how):
        """The value with its gradient, and the linear inner product with it."""
        x, weight, labels, shares, scale, *bias = primals
        of = [*tangents[:2], *tangents[5:]]
        wanted = tuple([i < len(of) and of[i].__class__ is not Zero for i in range(3)])
        late = (how.low or x.dtype) == dtypes.float16  # float16 cannot represent shares of a large batch
        with set_trace(trace.split):  # gradients are primal values, inner products with tangents are linear
            weighted = shares if late else shares * scale
            ins = (x, weight, labels, weighted, *bias)
            losses, *grads = linear_cross_entropy_grads_p.at(*ins, how=how, wanted=wanted)
            perturbed = [t for t, want in zip(of, wanted, strict=False) if want]
            wide = losses.dtype
            terms = [bnp.sum(g.astype(wide) * t.astype(wide)) for g, t in zip(grads, perturbed, strict=True)]
            tangent = functools.reduce(add_any, terms)
            return [_summed(shares, losses) * scale], [tangent * scale if late else tangent]


linear_softmax_p = _Softmax()
linear_cross_entropy_p, linear_cross_entropy_grads_p, linear_cross_entropy_total_p = (
    _Losses(),
    _Grads(),
    _Total(),
)
