"""Random bits and keys in LoopIR: the cipher inside fused kernels.

Kernels, stage 6, rules of ``values.py``. In: an equation and a place in its result. Out: the value there, with the bits
of ``core/ops/random_bits.py``: the cipher of a counter under a key. In memory a key is 8 bytes, the high word first;
kernels load it as one uint64, whose low half is the key's high word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from blufunc.core.ir.jaxpr import Eqn
from blufunc.core.ops.elementwise import or_p, shift_left_p, shift_right_logical_p
from blufunc.core.ops.random_bits import (
    random_bits_p,
    random_fold_in_p,
    random_seed_p,
    random_split_p,
    random_unwrap_p,
    random_wrap_p,
)
from blufunc.kernels.loopir.access_map import Place
from blufunc.kernels.loopir.index import Computed, Index, flat, of
from blufunc.kernels.loopir.index import constant as fixed
from blufunc.kernels.loopir.ir import KEY, Value, apply, const, converted

_WORD = np.dtype(np.uint32)


def _shifted(value: Value, prim: Any) -> Value:
    return apply(prim, (value, const(32, KEY)), {}, KEY)


def _swapped(value: Value) -> Value:
    """A uint64 with its halves swapped."""
    return apply(or_p, (_shifted(value, shift_left_p), _shifted(value, shift_right_logical_p)), {}, KEY)


def words(key: Value) -> tuple[Value, Value]:
    """The high and the low word of a key."""
    return converted(key, _WORD), converted(_shifted(key, shift_right_logical_p), _WORD)


def cipher(key: Value, counter: Index, width: int) -> Value:
    """Random bits: the cipher of a counter under a key."""
    return Value("bits", words(key), (counter, width), np.dtype(f"u{width // 8}"))


def _new_key(key: Value, counter: Index) -> Value:
    return _swapped(cipher(key, counter, 64))


Evaluate = Callable[[Any, Place], Value]
"""``at(operand, place)``: an element of an operand."""


def _counted(eqn: Eqn, place: Place, at: Evaluate) -> tuple[Value, Index]:
    """The key of an element of a result, and its position in that key's array."""
    (keys,) = eqn.invars
    n = keys.aval.ndim
    return at(keys, place[:n]), flat(place[n:], eqn.params["shape"])


def _bits(eqn: Eqn, place: Place, at: Evaluate) -> Value:
    return cipher(*_counted(eqn, place, at), eqn.params["bit_width"])


def _split(eqn: Eqn, place: Place, at: Evaluate) -> Value:
    return _new_key(*_counted(eqn, place, at))


def _fold_in(eqn: Eqn, place: Place, at: Evaluate) -> Value:
    keys, data = eqn.invars
    return _new_key(at(keys, place), of(Computed(at(data, place), 0, (1 << 32) - 1)))


def _seed(eqn: Eqn, place: Place, at: Evaluate) -> Value:
    seed = at(eqn.invars[0], place)
    return _swapped(converted(seed if seed.dtype.itemsize == 8 else converted(seed, _WORD), KEY))


def _wrap(eqn: Eqn, place: Place, at: Evaluate) -> Value:
    hi, lo = (converted(at(eqn.invars[0], (*place, fixed(i))), KEY) for i in range(2))
    return apply(or_p, (hi, _shifted(lo, shift_left_p)), {}, KEY)


def _unwrap(eqn: Eqn, place: Place, at: Evaluate) -> Value:
    key = at(eqn.invars[0], place[:-1])
    bits = apply(shift_left_p, (Value("number", (), place[-1], KEY), const(5, KEY)), {}, KEY)
    return converted(apply(shift_right_logical_p, (key, bits), {}, KEY), _WORD)


RULES: dict[Any, Callable[[Eqn, Place, Evaluate], Value]] = {
    random_bits_p: _bits,
    random_split_p: _split,
    random_fold_in_p: _fold_in,
    random_seed_p: _seed,
    random_wrap_p: _wrap,
    random_unwrap_p: _unwrap,
}
"""By primitive, all of ``fusion.iteration_space.RANDOM``."""
