"""Cross-entropy of a linear layer that never materializes all logits.

A face, above ``vocabulary_loss_call.py``, which holds the operations. With large vocabularies the logits are
by far the largest array of a training step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int, static_number
from blufunc.nn.activations import as_inexact, wide_of
from blufunc.nn.vocabulary_loss_call import How, linear_cross_entropy_p, linear_cross_entropy_total_p

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array

_NAME = "linear_cross_entropy"
_FEATURES = {"VC": 1, "CV": 0}


def linear_cross_entropy(
    x: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    reduction: str = "mean",
    layout: str = "VC",
) -> Array:
    """Chunked cross-entropy of ``softmax(x @ weight.T + bias)``, integer labels.

        loss = nn.linear_cross_entropy(x, params["tokens"], labels)          # tied to an embedding [V, C]
        loss = nn.linear_cross_entropy(x, kernel, labels, layout="CV")       # the kernel of a dense layer

    With ``logits = soft_cap * tanh((x @ weight.T + bias) / soft_cap)`` and ``log_z = logsumexp(logits)``, the loss of
    a token is ``log_z - (1 - label_smoothing) * logits[label] - label_smoothing * mean(logits) + z_loss * log_z**2``:
    label smoothing as in Szegedy et al. (arXiv:1512.00567), z-loss as in PaLM (arXiv:2204.02311).

    The value and its gradients match the plain form, up to rounding. Only one chunk [chunk, V] of logits
    exists at a time, and its gradient overwrites it. With a mean or a sum, the gradients are computed along
    with the value, and no matmul runs twice; with ``"none"``, the backward pass recomputes the logits.
    Matmuls have the operands' dtype (under ``autocast``, the low one), as ``x @ weight.T`` has. Losses and
    the weight gradient, a sum over tokens, are accumulated in float32 or wider.

    If tokens are sharded, each device has its own chunks, and the gradient of the weight is all-reduced once. A
    sharded weight is gathered first: for a sharded vocabulary use ``bf.parallel.vocabulary_parallel_cross_entropy``.

    Args:
      x: floats [..., C].
      weight: floats [V, C], as in an embedding; or [C, V] with ``layout="CV"``.
      labels: integers [...], in [0, V). Out of range, loss and gradient are NaN.
      bias: floats [V]. Classes that must not be chosen, such as padding, may have -inf.
      label_smoothing: in [0, 1]: fraction of each target spread over all classes; default 0.
      z_loss: factor of the square of the logarithm of the normaliser; default 0.
      ignore_index: tokens with this label are ignored: they have loss and gradient 0.
      soft_cap: largest magnitude of a logit (Gemma 2, arXiv:2408.00118).
      chunk: number of tokens with logits at a time; by default, as many as need half a gigabyte in 16 bits. Each
        chunk reads and writes the gradient of the weight, so that chunks below a thousand tokens are slow.
      reduction: ``"mean"`` over the tokens that are not ignored, 0 if there are none; ``"sum"``; or ``"none"``.
      layout: the axes of the weight, ``"VC"`` or ``"CV"``.
    Returns:
      float32 (float64 for such operands): a scalar, or with ``reduction="none"`` an array of the labels' shape.
    Raises:
      ShapeError, DtypeError: the arrays do not match.
      ValueRangeError: invalid value of an option.
      ArgumentError: an option is a traced value, or not a number.
    """
    x, weight, labels = as_inexact(x), as_inexact(weight), bnp.asarray(labels)
    how = _options(label_smoothing, z_loss, soft_cap, chunk, reduction, layout)
    bias = None if bias is None else as_inexact(bias)
    _check(x, weight, labels, bias, how)
    common = bnp.promote_types(x.dtype, weight.dtype)
    x, weight = x.astype(common), weight.astype(common)
    wide = wide_of(x)
    if labels.dtype.itemsize < 4:  # too narrow to index all classes
        labels = labels.astype(dtypes.int32)
    shares = bnp.ones(labels.shape, wide)
    if ignore_index is not None:
        counted = bnp.not_equal(labels, static_int(ignore_index, _NAME, "ignore_index"))
        labels, shares = bnp.where(counted, labels, 0), counted.astype(wide)
    more = () if bias is None else (bias,)
    if reduction == "none":
        (losses,) = linear_cross_entropy_p.at(x, weight, labels, *more, how=how)
        return losses if ignore_index is None else bnp.where(counted, losses, 0)
    count: Any = 1
    if reduction == "mean":
        count = max(labels.size, 1) if ignore_index is None else bnp.maximum(bnp.sum(shares), 1)
    scale = bnp.asarray(1 / count, dtype=wide)
    (total,) = linear_cross_entropy_total_p.at(x, weight, labels, shares, scale, *more, how=how)
    return total


def _options(
    label_smoothing: Any, z_loss: Any, soft_cap: Any, chunk: Any, reduction: Any, layout: Any
) -> How:
    """The options, checked."""
    smoothing = float(static_number(label_smoothing, _NAME, "label_smoothing"))
    z = float(static_number(z_loss, _NAME, "z_loss"))
    cap = None if soft_cap is None else float(static_number(soft_cap, _NAME, "soft_cap"))
    tokens = None if chunk is None else static_int(chunk, _NAME, "chunk")
    if not 0 <= smoothing <= 1:
        raise _out_of_range("label_smoothing", smoothing, "in [0, 1]: it is a part of each target")
    if not math.isfinite(z):
        raise _out_of_range("z_loss", z, "finite")
    if cap is not None and not 0 < cap < math.inf:
        raise _out_of_range("soft_cap", cap, "positive and finite, or None")
    if tokens is not None and tokens < 1:
        raise _out_of_range("chunk", tokens, "a number of tokens, at least 1, or None")
    if reduction not in ("mean", "sum", "none"):
        raise _out_of_range("reduction", reduction, "'mean', 'sum' or 'none'")
    if not isinstance(layout, str) or layout not in _FEATURES:
        raise _out_of_range("layout", layout, "'VC' for a weight [V, C], or 'CV' for [C, V]")
    return How(smoothing, z, cap, tokens, _FEATURES[layout])


def _out_of_range(option: str, value: Any, allowed: str) -> errors.ValueRangeError:
    return errors.ValueRangeError(
        f"{_NAME}: {option} is {value!r:.60}.", where=source.here(), fix=f"{option} must be {allowed}"
    )


def _check(x: Any, weight: Any, labels: Any, bias: Any, how: How) -> None:
    """Raise unless the arrays match."""
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, labels {tuple(labels.shape)}"
    shapes += "" if bias is None else f", bias {tuple(bias.shape)}"

    def fail(why: str, fix: str = "") -> None:
        raise errors.ShapeError(
            f"{_NAME}: the shapes do not match: {shapes}.", where=source.here(), why=why, fix=fix
        )

    if not dtypes.is_integer(labels.dtype):
        raise errors.DtypeError(
            f"{_NAME}: the labels must be integers, not {labels.dtype}.",
            where=source.here(),
            fix="pass the indices of the classes; for probabilities, softmax_cross_entropy takes logits",
        )
    for what, a in (("x", x), ("weight", weight), ("bias", bias)):
        if a is not None and not dtypes.is_floating(a.dtype):
            raise errors.DtypeError(f"{_NAME}: {what} must be real, not {a.dtype}.", where=source.here())
    if weight.ndim != 2:
        fail("the weight has two axes, the classes and the features.")
    features, classes = weight.shape[how.features], weight.shape[1 - how.features]
    axes = "[V, C]" if how.features else "[C, V]"
    if not x.ndim or x.shape[-1] != features:
        other = "CV" if how.features else "VC"
        fix = f"layout={other!r}, if that is how the weight lies" if x.ndim and x.shape[-1] == classes else ""
        fail(f"x is [..., C], and the weight is {axes}, so that C would be {features}.", fix)
    if not classes:
        fail("there are no classes.")
    if tuple(labels.shape) != tuple(x.shape[:-1]):
        fail("there is one label for each row of x.")
    if bias is not None and tuple(bias.shape) != (classes,):
        fail(f"the bias has a number for each of the {classes} classes.")
