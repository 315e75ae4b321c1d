"""Random programs: graphs of movement, arithmetic, reductions and gathers.

Values are arrays of floats (which hold small whole numbers, so that sums are exact in any order), integers and
booleans; results of executors can be compared for equality. ``graph(choose)`` is a function of arrays; ``choose`` takes
a sequence and returns one of its elements: ``random.Random(seed).choice``, or a draw of hypothesis.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import blufunc.numpy as bnp
from blufunc import lax
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.kernels.target import Target
from tests.kernels.differential import Case, case

Choose = Callable[[Sequence], Any]

MOST = 900  # elements of a value
FLOATS = ("float32", "float32", "float64", "float16", "bfloat16")
INTEGERS = ("int32", "int32", "int64", "int8")
SHAPES = [
    (6,),
    (1,),
    (4, 6),
    (1, 5),
    (7, 3),
    (5, 1),
    (2, 3, 4),
    (3, 1, 8),
    (2, 12),
    (1, 1, 6),
    (13, 11),
    (40, 9),
]


class Graph:
    """The values so far, and ways to make more."""

    def __init__(self, choose: Choose, inputs: Sequence[Any], floating: Any, integer: Any):
        self.choose = choose
        self.float, self.int = dtypes.as_dtype(floating), dtypes.as_dtype(integer)
        self.values, self.inputs = list(inputs), list(inputs)

    def any(self, dtype: Any = None) -> Any:
        """Some value; of a dtype, converted if need be."""
        x = self.choose(self.values[-8:] + self.values[:3])
        return x if dtype is None else self.as_dtype(x, dtype)

    def as_dtype(self, x: Any, dtype: Any) -> Any:
        """The value in another dtype."""
        dtype = dtypes.as_dtype(dtype)
        if x.dtype == dtype:
            return x
        return x > 1 if dtypes.is_bool(dtype) else x.astype(dtype)

    def numbers(self) -> Any:
        """Some value that is no boolean."""
        x = self.any()
        return x.astype(self.float) if x.dtype == bool else x

    def like(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Some value, moved such that it has a shape."""
        y = self.any(dtype)
        if y.size == math.prod(shape):
            return y.reshape(shape)
        if y.ndim <= len(shape) and all(
            n in (1, m) for n, m in zip(y.shape, shape[len(shape) - y.ndim :], strict=True)
        ):
            return bnp.broadcast_to(y, shape)
        if shape and y.ndim and y.shape[0] == shape[0]:
            column = y.reshape(shape[0], -1)[:, 0]
            return bnp.broadcast_to(column.reshape(shape[0], *(1,) * (len(shape) - 1)), shape)
        return bnp.resize(y.reshape(-1)[: math.prod(shape)], shape) if y.size >= math.prod(shape) else (
            lax.broadcasted_iota(self.int, shape, self.axis(shape)).astype(dtype) if shape else y.reshape(-1)[0]
        )  # fmt: skip

    def axis(self, shape: Sequence[int]) -> int:
        """An axis."""
        return self.choose(range(len(shape)))

    def small(self, x: Any) -> Any:
        """Kept small, so that whole numbers stay exact."""
        return x if x.dtype == bool else bnp.clip(x, -50, 50)

    # -- operations ----------------------------------------------------------------------------

    def unary(self) -> Any:
        x = self.numbers()
        return self.choose([lambda: -x, lambda: abs(x), lambda: self.small(x * x), lambda: bnp.sign(x) + x])()

    def binary(self) -> Any:
        x = self.numbers()
        y = self.like(x.shape, x.dtype)
        f = self.choose([bnp.add, bnp.subtract, bnp.multiply, bnp.maximum, bnp.minimum])
        return self.small(f(x, y))

    def shared(self) -> Any:
        """Something that is used several times, at its own elements and at others."""
        x = self.numbers()
        y = self.small(x * 3 - 1)
        self.values.append(y)
        return (
            y + self.choose([lambda: y, lambda: y[::-1] if y.ndim else y, lambda: y.max(), lambda: abs(y)])()
        )

    def compare(self) -> Any:
        x = self.numbers()
        return self.choose([bnp.less, bnp.equal, bnp.greater_equal])(x, self.like(x.shape, x.dtype))

    def select(self) -> Any:
        x = self.any()
        return bnp.where(self.like(x.shape, bool), x, self.like(x.shape, x.dtype))

    def convert(self) -> Any:
        return self.as_dtype(self.any(), self.choose([self.float, self.int, np.bool_]))

    def iota(self) -> Any:
        x = self.any(self.int)
        return x + lax.broadcasted_iota(self.int, x.shape, self.axis(x.shape)) if x.ndim else x

    def reshape(self) -> Any:
        x = self.any()
        sizes, rest = [], x.size
        while rest > 1:
            n = self.choose([d for d in range(2, rest + 1) if rest % d == 0])
            sizes.append(n)
            rest //= n
        for _ in range(self.choose([0, 0, 1])):
            sizes.insert(self.choose(range(len(sizes) + 1)), 1)
        return x.reshape(sizes)

    def transpose(self) -> Any:
        x = self.any()
        order = list(range(x.ndim))
        for i in range(len(order)):
            j = self.choose(range(i, len(order)))
            order[i], order[j] = order[j], order[i]
        return x.transpose(order) if order else x

    def slice(self) -> Any:
        x = self.any()
        cuts = []
        for n in x.shape:
            start = self.choose(range(n))
            stop = self.choose(range(start + 1, n + 1))
            cuts.append(slice(start, stop, self.choose([1, 1, 2, 3])))
        return x[tuple(cuts)] if cuts else x

    def rev(self) -> Any:
        x = self.any()
        return bnp.flip(x, self.axis(x.shape)) if x.ndim else x

    def broadcast(self) -> Any:
        x = self.any()
        n = self.choose([1, 2, 3, 5])
        if x.size * n > MOST:
            return x
        at = self.choose(range(x.ndim + 1))
        return bnp.repeat(bnp.expand_dims(x, at), n, at) if n > 3 else bnp.broadcast_to(
            bnp.expand_dims(x, at), (*x.shape[:at], n, *x.shape[at:])
        )  # fmt: skip

    def pad(self) -> Any:
        x = self.any()
        config = [(self.choose([0, 1, 2, -1]), self.choose([0, 0, 1, 3]), self.choose([0, 0, 0, 1, 2]))
                  for _ in x.shape]  # fmt: skip
        size = math.prod(
            max(lo + hi + n + (n - 1) * i, 0) for n, (lo, hi, i) in zip(x.shape, config, strict=True)
        )
        if not 0 < size <= MOST:
            return x
        value = self.like((), x.dtype) if self.choose([True, False]) else bnp.asarray(0, x.dtype)
        return lax.pad(x, value, config)

    def concatenate(self) -> Any:
        x = self.any()
        if not x.ndim or x.size * 3 > MOST:
            return x
        d = self.axis(x.shape)
        others = [self.like(x.shape, x.dtype) for _ in range(self.choose([1, 2]))]
        return bnp.concatenate([x, *others], d)

    def reduce(self) -> Any:
        x = self.any()
        if not x.ndim:
            return x
        axes = tuple(d for d in range(x.ndim) if self.choose([True, False])) or (self.axis(x.shape),)
        keep = self.choose([True, False])
        if x.dtype == bool:
            return self.choose([bnp.any, bnp.all])(x, axis=axes, keepdims=keep)
        y = self.choose([bnp.sum, bnp.sum, bnp.max, bnp.min])(x, axis=axes, keepdims=keep)
        return self.small(y.astype(x.dtype))

    def cumulative(self) -> Any:
        """A scan, of which something may be reduced, or scanned again."""
        x = self.numbers()
        if not x.ndim:
            return x
        op = self.choose([lax.cumsum, lax.cumsum, lax.cummax, lax.cummin])
        d = self.choose([x.ndim - 1, self.axis(x.shape)])
        y = self.small(op(x, d, self.choose([True, False])))
        further = self.choose(["", "", "scan", "max"])
        if further == "scan":
            return self.small(self.choose([lax.cumsum, lax.cummax])(y, d, self.choose([True, False])))
        return y - y.max(d, keepdims=True) if further else y

    def softmax_like(self) -> Any:
        """Reductions over one axis, each of what was computed with the one before."""
        x = self.numbers()
        if not x.ndim:
            return x
        d = self.choose([-1, -1, self.axis(x.shape)])
        y = x - x.max(d, keepdims=True)
        self.values.append(y)
        z = self.small(bnp.maximum(y, -3) * 2)
        return z - self.small(z.sum(d, keepdims=True).astype(z.dtype))

    def column_sums(self) -> Any:
        """Reductions of the same values over lanes and over rows, as in layer norm."""
        x = self.numbers().astype(self.float)
        if x.ndim < 2:
            return x
        y = self.small(x * self.like(x.shape, x.dtype))
        self.values.append(self.small(y.sum(tuple(range(x.ndim - 1)))))
        return self.small(y - self.small(y.sum(-1, keepdims=True)))

    def argument(self) -> Any:
        x = self.numbers()
        if not x.ndim:
            return x
        d = self.choose([x.ndim - 1, self.axis(x.shape)])
        return self.choose([bnp.argmax, bnp.argmin])(x, axis=d).astype(self.int)

    def dynamic_slice(self) -> Any:
        x = self.any()
        if not x.ndim:
            return x
        starts = [self.like((), self.int) for _ in x.shape]
        return lax.dynamic_slice(x, starts, [self.choose(range(1, n + 1)) for n in x.shape])

    def dynamic_update_slice(self) -> Any:
        x = self.any()
        if not x.ndim:
            return x
        shape = tuple(self.choose(range(1, n + 1)) for n in x.shape)
        return lax.dynamic_update_slice(
            x, self.like(shape, x.dtype), [self.like((), self.int) for _ in shape]
        )

    def take(self) -> Any:
        x = self.any()
        if not x.ndim:
            return x
        d = self.axis(x.shape)
        indices = self.any(self.int).astype(np.int32)
        if x.size // x.shape[d] * indices.size > MOST:
            indices = indices.reshape(-1)[:3]
        mode = self.choose(["clip", "fill", "wrap"])
        y = bnp.take(x, indices, axis=d, mode=mode)
        return bnp.nan_to_num(y) if y.dtype == self.float else self.small(y)

    def take_along(self) -> Any:
        x = self.any()
        if not x.ndim:
            return x
        d = self.choose([x.ndim - 1, self.axis(x.shape)])
        shape = (*x.shape[:d], 1, *x.shape[d + 1 :])
        y = bnp.take_along_axis(x, self.like(shape, self.int) % min(x.shape[d], 100), axis=d)
        return y.reshape(shape[:d] + shape[d + 1 :]) if self.choose([True, False]) else y

    def one_hot_add(self) -> Any:
        x = self.numbers()
        if x.ndim != 2:
            return x
        rows = bnp.arange(x.shape[0])
        at = self.like((x.shape[0],), self.int) % min(x.shape[1], 100)
        return self.small(x.at[rows, at].add(self.like((x.shape[0],), x.dtype)))

    def several(self) -> Any:
        """The same to many arrays, as an optimiser does."""
        self.values += [self.small(x * 2 - 3) for x in self.inputs if x.dtype == self.float]
        return self.values[-1]

    def opaque(self) -> Any:
        x = self.numbers()
        if not x.ndim:
            return x
        f = self.choose([lambda: bnp.cumsum(x, axis=0).astype(x.dtype), lambda: bnp.sort(x, axis=-1)])
        return self.small(f())

    def barrier(self) -> Any:
        x, y = lax.optimization_barrier((self.any(), self.any()))
        self.values.append(x)
        return y

    def dot(self) -> Any:
        x = self.any(self.float)
        if x.ndim != 2:
            return x
        return self.small(x @ self.like((x.shape[1], self.choose([1, 2, 5])), self.float))

    def batched_dot(self) -> Any:
        """Products with batch axes in any order, some of them transposed."""
        x = self.small(self.any(self.float))
        x = x.reshape(x.shape[0], -1, x.shape[-1]) if x.ndim > 2 else x.reshape(-1, 1, x.size)
        if x.size > 100:
            return x
        spec = self.choose(
            [
                "abi,abi->ab",
                "abi,abj->abij",
                "abi,abj->abji",
                "abi,aci->bca",
                "abi,acbi->abc",
                "abi,acbi->bca",
            ]
        )
        shape = (x.shape[0], 3, *x.shape[1:]) if "acbi" in spec else x.shape
        y = self.small(self.like(shape, self.float))
        return self.small(bnp.einsum(spec, x, y))

    def scattered(self) -> Any:
        """A scatter-add into zeros, at few places that may coincide."""
        x = self.small(self.numbers())
        if not x.ndim:
            return x
        places = self.like((3,), self.int).astype(np.int32)
        updates = self.small(self.like((3, *x.shape[1:]), x.dtype))
        zeros = bnp.zeros(x.shape, x.dtype)
        mode = self.choose(["drop", "clip"])
        return self.small(zeros.at[places].add(updates, mode=mode) + x)

    def from_rows(self) -> Any:
        """The first number of rows, one for each row, but of any."""
        x = self.numbers()
        if x.ndim != 2:
            return x
        y = x.max(1)
        self.values.append(y)
        places = self.choose([bnp.argmax(x, 1), bnp.abs(self.like(y.shape, self.int)).astype(np.int32)])
        return lax.gather(x, (places % x.shape[0])[:, None], _FIRST, slice_sizes=(1, 1))

    def number(self) -> Any:
        """A number of everything, and arithmetic on it."""
        x = self.numbers()
        n = self.small(self.choose([bnp.max, bnp.min])(x))
        self.values.append(n)
        return self.small(n * 2 - self.like((), x.dtype))


_FIRST = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0,))

OPERATIONS = {
    Graph.unary: 2, Graph.binary: 5, Graph.shared: 2, Graph.compare: 1, Graph.select: 2, Graph.convert: 1,
    Graph.iota: 1, Graph.cumulative: 2,
    Graph.reshape: 2, Graph.transpose: 2, Graph.slice: 2, Graph.rev: 1, Graph.broadcast: 2, Graph.pad: 2,
    Graph.concatenate: 2, Graph.reduce: 4, Graph.softmax_like: 2, Graph.column_sums: 2, Graph.argument: 1,
    Graph.dynamic_slice: 1, Graph.dynamic_update_slice: 1, Graph.take: 1, Graph.take_along: 1, Graph.one_hot_add: 1,
    Graph.batched_dot: 1, Graph.scattered: 1, Graph.from_rows: 1, Graph.number: 1,
    Graph.opaque: 1, Graph.dot: 1, Graph.barrier: 1, Graph.several: 1,
}  # fmt: skip
"""Ways to make a value, with how likely they are."""

_WEIGHTED = [f for f, n in OPERATIONS.items() for _ in range(n)]


def inputs(rng: np.random.Generator, choose: Choose, floating: str, integer: str) -> list[np.ndarray]:
    """Arguments of a random program: of one shape, of parts of it, and of others."""
    kinds = [dtypes.as_dtype(d) for d in (floating, floating, integer)]
    base = choose(SHAPES)
    shapes = [base, base, choose([base, base[-1:], base[:1], (), choose(SHAPES)]), choose(SHAPES)]
    shapes += [choose(SHAPES) for _ in range(choose([0, 0, 0, 6]))]
    out = []
    for shape in shapes:
        x = rng.integers(-6, 7, shape)
        out.append(x.astype(choose(kinds)))
    return out


def graph(args: Sequence[Any], choose: Choose, steps: int, floating: str, integer: str) -> tuple:
    """The results of a random program on arguments."""
    made = Graph(choose, args, floating, integer)
    for _ in range(steps):
        y = choose(_WEIGHTED)(made)
        if 0 < y.size <= MOST and y.ndim <= 5:
            made.values.append(y)
    chosen = [
        made.values[-1],
        *(choose(made.values[len(args) :] or made.values) for _ in range(choose([1, 2, 3]))),
    ]
    return tuple(chosen)


def from_seed(seed: int, target: Target, steps: int = 14) -> Case:
    """A program that is the same for the same seed."""
    return replace(_program(seed, steps), target=target, _schedule=[])


@functools.lru_cache(maxsize=128)  # tests run a hundred seeds for one target after the other
def _program(seed: int, steps: int) -> Case:
    source = random.Random(seed)
    kinds = FLOATS[seed % len(FLOATS)], INTEGERS[seed % len(INTEGERS)]
    args = [from_numpy(x) for x in inputs(np.random.default_rng(seed), source.choice, *kinds)]
    donate = [i for i in range(len(args)) if source.choice([True, False])]
    fresh = source.random()
    fun = lambda *args: graph(args, random.Random(fresh).choice, steps, *kinds)
    return case(fun, *args, donate=donate, name=f"the program of seed {seed}")
