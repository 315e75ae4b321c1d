"""Rotary position embeddings, with the scalings of long contexts.

A face. In: queries or keys [..., T, H, D], their positions, and the ``rope_scaling`` of a checkpoint's
configuration. Frequencies are constants of a traced program, unless the scaling depends on the positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ops.rows import wide_dtype
from blufunc.nn.activations import as_inexact
from blufunc.nn.language.rotation import rotated
from blufunc.numpy.promotion import fits

if TYPE_CHECKING:
    from blufunc.core.ir.array_like import ArrayLike
    from blufunc.core.ir.trace import Array


class RopeFrequencies(NamedTuple):
    """``frequencies``: angles per position [D/2]; ``factor``: of cosines and sines."""

    frequencies: Any
    factor: float


def rope(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    interleaved: bool = False,
    features: int | None = None,
    max_positions: int | None = None,
    length: ArrayLike | None = None,
) -> Array:
    """Rotate pairs of features by angles of their position (arXiv:2104.09864).

    Pair i of a vector at position p turns by ``p * base**(-2 i / D)``, so that inner products of queries and
    keys depend on the distance of their positions. Computed in float32 at least, and rounded once.

    Args:
      x: [..., T, H, D]: T positions of H heads, or [T, H, D]. D is even.
      positions: integers that broadcast to [..., T], from 0 on.
      base: the base of the angles; ``rope_theta`` of a configuration.
      scaling: ``rope_scaling``, or ``rope_parameters``, of a Hugging Face configuration, of the ``rope_type``
        default, linear, dynamic, yarn, llama3 or longrope: see ``rope_frequencies``.
      interleaved: pair features 2i and 2i + 1 (GPT-J); by default i and i + D/2 (Llama, GPT-NeoX).
      features: rotate the first ``features`` of D, which must be even, and keep the others; default all, or the
        share ``partial_rotary_factor`` of the scaling.
      max_positions: see ``rope_frequencies``.
      length: see ``rope_frequencies``; ``positions.max() + 1`` by default.
    Returns:
      an array of the shape and dtype of ``x``.
    Raises:
      ShapeError: the number of rotated features is odd or more than D, or positions do not broadcast.
      DtypeError: positions are not integers.
      ArgumentError, ValueRangeError: the scaling has an unknown type or field, or lacks one.
    """
    x, positions = as_inexact(x), bnp.asarray(positions)
    if x.ndim < 3 or not fits(positions.shape, x.shape[:-2]):
        raise errors.ShapeError(
            f"rope: positions of shape {tuple(positions.shape)} do not fit x of shape {tuple(x.shape)}.",
            where=source.here(),
            why="x is [..., T, H, D], positions broadcast to [..., T].",
            fix="positions = arange(T)",
        )
    if not dtypes.is_integer(positions.dtype):
        raise errors.DtypeError(
            f"rope takes integers as positions, not {positions.aval}.",
            where=source.here(),
            fix="positions.astype('int32')",
        )
    size = x.shape[-1]
    kind = _type_of(scaling)
    if features is None:
        features = int(size * (scaling or {}).get("partial_rotary_factor", 1.0))
    features = static_int(features, "rope", "features")
    if features % 2 or not 0 < features <= size:
        raise errors.ShapeError(
            f"rope: {features} of {size} features cannot be rotated in pairs.",
            where=source.here(),
            fix="an even number of features",
        )
    if length is None and kind in _OF_LENGTH:
        length = bnp.max(positions) + 1
    wide = wide_dtype(x.dtype)
    frequencies, factor = _frequencies(features, base, scaling, max_positions, length)
    angles = bnp.expand_dims(positions, (-2, -1)).astype(wide) * bnp.asarray(frequencies, dtype=wide)
    cos, sin = (f(angles) if factor == 1 else f(angles) * factor for f in (bnp.cos, bnp.sin))
    turned = rotated(x[..., :features], cos, sin, interleaved)
    return turned if features == size else bnp.concatenate([turned, x[..., features:]], -1)


def rope_frequencies(
    features: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    max_positions: int | None = None,
    length: ArrayLike | None = None,
) -> RopeFrequencies:
    """Angles per position of ``rope``, and the factor of its cosines and sines.

    The types of scaling, with the fields that each requires:

    - ``default``: none.
    - ``linear`` (``factor``): positions are divided by it (arXiv:2306.15595).
    - ``dynamic`` (``factor``): the base grows with the length beyond ``max_positions`` (NTK-aware scaling).
    - ``yarn`` (``factor``; ``attention_factor``, ``beta_fast``, ``beta_slow``, ``mscale``, ``mscale_all_dim``,
      ``truncate``): slow pairs are interpolated, fast ones are not (arXiv:2309.00071).
    - ``llama3`` (``factor``, ``low_freq_factor``, ``high_freq_factor``): the same by wavelength (Llama 3.1).
    - ``longrope`` (``short_factor``, ``long_factor``; ``factor``, ``attention_factor``): a factor for each pair, of
      which the second list serves lengths beyond the original ones (arXiv:2402.13753).

    ``original_max_position_embeddings`` of the last three is ``max_positions`` if it lacks. ``type`` is the older
    name of ``rope_type``. ``rope_theta`` takes the place of ``base``.

    Args:
      features: the number of rotated features, even.
      base: the base of the angles.
      scaling: a dict with ``rope_type`` and the fields above; None for no scaling.
      max_positions: ``max_position_embeddings`` of the configuration.
      length: the number of positions of the sequence, which may be traced, for dynamic and longrope; None for one
        within ``max_positions``.
    Returns:
      float32 [features / 2], and a number.
    Raises:
      ArgumentError: a field is unknown or lacks.
      ValueRangeError: the type is unknown.
    """
    features = static_int(features, "rope_frequencies", "features")
    frequencies, factor = _frequencies(features, base, scaling, max_positions, length)
    return RopeFrequencies(bnp.asarray(frequencies, dtype=dtypes.float32), factor)


def _frequencies(
    features: int, base: float, scaling: Mapping[str, Any] | None, max_positions: int | None, length: Any
) -> tuple[Any, float]:
    """``rope_frequencies``, of which those that are constants are float64 of NumPy."""
    kind = _type_of(scaling)
    fields = _fields(kind, dict(scaling or {}), max_positions)
    base = fields.get("rope_theta", base)
    if not isinstance(base, (int, float)) or not base > 0:
        raise errors.ArgumentError(
            f"rope: the base is a positive number, not {base!r:.60}.", where=source.here(), fix="base=10000.0"
        )
    angles = base ** -(np.arange(0, features, 2, dtype=np.float64) / features)
    return _SCALINGS[kind].scaled(angles, fields, base, length)


# -- scalings --------------------------------------------------------------------------------------


class _Scaling(NamedTuple):
    """A type of scaling.

    ``scaled`` maps angles [D/2], fields, base and length to new angles and the factor of cosine and sine.
    """

    scaled: Callable[[np.ndarray, dict[str, Any], float, Any], tuple[Any, float]]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_ORIGINAL = "original_max_position_embeddings"


def _default(angles: np.ndarray, fields: dict, base: float, length: Any) -> tuple[Any, float]:
    return angles, 1.0


def _linear(angles: np.ndarray, fields: dict, base: float, length: Any) -> tuple[Any, float]:
    return angles / fields["factor"], 1.0


def _dynamic(angles: np.ndarray, fields: dict, base: float, length: Any) -> tuple[Any, float]:
    # the base is multiplied by growth ** (D / (D - 2)), so angle i by growth ** (-2 i / (D - 2))
    n, factor, most = len(angles), fields["factor"], fields[_ORIGINAL]
    if length is None or n == 1:
        return angles, 1.0
    beyond = bnp.maximum(bnp.asarray(length), most).astype(dtypes.float32) * (factor / most)
    return bnp.asarray(angles, dtype=dtypes.float32) * bnp.power(
        beyond - (factor - 1), -bnp.arange(n, dtype=dtypes.float32) / (n - 1)
    ), 1.0


def _yarn(angles: np.ndarray, fields: dict, base: float, length: Any) -> tuple[Any, float]:
    n, factor, most = len(angles), fields["factor"], fields[_ORIGINAL]

    def pair_of(rotations: float) -> float:
        """The pair that turns ``rotations`` times within the original length."""
        return n * math.log(most / (rotations * 2 * math.pi)) / math.log(base)

    low, high = pair_of(fields.get("beta_fast") or 32), pair_of(fields.get("beta_slow") or 1)
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * n - 1)
    interpolated = np.clip((np.arange(n) - low) / (high - low if high != low else 0.001), 0, 1)
    angles = angles / factor * interpolated + angles * (1 - interpolated)
    attention = fields.get("attention_factor")
    if attention is None:
        scale, all_dim = fields.get("mscale"), fields.get("mscale_all_dim")
        size = lambda m: 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1
        attention = size(scale) / size(all_dim) if scale and all_dim else size(1)
    return angles, float(attention)


def _llama3(angles: np.ndarray, fields: dict, base: float, length: Any) -> tuple[Any, float]:
    factor, low, high = (fields[f] for f in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = fields[_ORIGINAL] * angles / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)  # of pairs with more than `high` turns all
    return angles / factor * (1 - kept) + angles * kept, 1.0


def _longrope(angles: np.ndarray, fields: dict, base: float, length: Any) -> tuple[Any, float]:
    factor, attention, most = fields.get("factor"), fields.get("attention_factor"), fields[_ORIGINAL]
    if factor is None:
        factor = fields["max_positions"] / most if fields["max_positions"] else 1.0
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(most))
    both = [np.asarray(fields[f], np.float64) for f in ("short_factor", "long_factor")]
    if any(f.shape != angles.shape for f in both):
        raise errors.ShapeError(
            f"rope: short_factor and long_factor have shapes {both[0].shape} and {both[1].shape}, and there are "
            f"{len(angles)} pairs of features.",
            where=source.here(),
            fix="one factor for each pair",
        )
    short, long = (angles / f for f in both)
    if length is None:
        return short, float(attention)
    short, long = (bnp.asarray(f, dtype=dtypes.float32) for f in (short, long))
    return bnp.where(bnp.asarray(length) > most, long, short), float(attention)


_SCALINGS = {
    "default": _Scaling(_default),
    "linear": _Scaling(_linear, ("factor",)),
    "dynamic": _Scaling(_dynamic, ("factor", _ORIGINAL)),
    "yarn": _Scaling(
        _yarn,
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": _Scaling(_llama3, ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    "longrope": _Scaling(
        _longrope, ("short_factor", "long_factor", _ORIGINAL), ("factor", "attention_factor")
    ),
}

_OF_LENGTH = ("dynamic", "longrope")
"""Types whose frequencies depend on the length of the sequence."""

_ANYWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Fields of any type."""


def _type_of(scaling: Mapping[str, Any] | None) -> str:
    if scaling is not None and not isinstance(scaling, Mapping):
        raise errors.ArgumentError(
            f"rope: a scaling is a dict, not a {type(scaling).__name__}.",
            where=source.here(),
            fix='scaling={"rope_type": "linear", "factor": 2.0}',
        )
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise errors.ValueRangeError(
            f"rope: {kind!r:.60} is not a type of scaling.",
            where=source.here(),
            fix=f"rope_type is one of {', '.join(_SCALINGS)}",
        )
    return kind


def _fields(kind: str, fields: dict[str, Any], max_positions: int | None) -> dict[str, Any]:
    """The fields of a scaling, checked; the original length is filled in."""
    rule = _SCALINGS[kind]
    if kind == "dynamic" and max_positions is not None:
        fields[_ORIGINAL] = max_positions  # Hugging Face reads no other
    elif _ORIGINAL in rule.required and fields.get(_ORIGINAL) is None and max_positions is not None:
        fields[_ORIGINAL] = max_positions
    if kind == "yarn" and fields.get("factor") is None and max_positions and fields.get(_ORIGINAL):
        fields["factor"] = max_positions / fields[_ORIGINAL]
    lacking = [f for f in rule.required if fields.get(f) is None]
    unknown = [f for f in fields if f not in (*_ANYWHERE, *rule.required, *rule.optional)]
    if lacking or unknown:
        fault = f"lacks {', '.join(lacking)}" if lacking else f"has no field {', '.join(map(str, unknown))}"
        raise errors.ArgumentError(
            f"rope: a scaling of type {kind} {fault}.",
            where=source.here(),
            why=f"its fields are {', '.join((*rule.required, *rule.optional)) or 'none'}.",
            fix="max_positions=config['max_position_embeddings']" if lacking == [_ORIGINAL] else None,
        )
    return fields | {"max_positions": max_positions}
