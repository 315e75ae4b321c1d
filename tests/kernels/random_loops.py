"""Random programs with loops and branches, nested up to three deep.

``Program(seed)`` is a function of the arrays of ``inputs``. Its loops and branches are drawn, and so are their carries:
what a round leaves in them is computed, updated in place, swapped, duplicated, passed through or constant. Values stay
bounded and every step is contractive, so that rounding errors of executors do not grow. Conditions and indices are
computed from integers, which are exact; floats of one precision never become another's.

A body draws from a generator of its own, seeded at the place where it is made: it does the same however often it is
traced.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from blufunc import random as bf_random

SHAPES = ((), (), (4,), (3, 4), (4, 4), (2, 3, 4), (0, 3), (300,), (1,), (17, 2))
POINTS = ((), (), (3,), (2,))
FLOATS = ("float32", "float64", "bfloat16", "float16")
SIGNED = ("int32", "int64", "int8")
DTYPES = (
    "float32", "float32", "float32", "float64", "float64", "int32", "int32", "int64", "int8", "uint8", "bool",
    "bfloat16", "float16", "complex64",
)  # fmt: skip
DEPTH = 3

Value = Any


def inputs(seed: int) -> list[np.ndarray]:
    """Arguments of all programs."""
    rng = np.random.default_rng(seed)
    uniform = lambda *shape: rng.uniform(-1, 1, shape)
    return [
        uniform(3, 4).astype(np.float32),
        uniform(4, 4).astype(np.float32),
        uniform(4).astype(np.float32),
        np.float32(uniform()),
        uniform(300).astype(np.float32),
        uniform(3, 4),
        uniform(4, 4),
        rng.integers(-3, 6, (4,)).astype(np.int32),
        np.int32(rng.integers(0, 5)),
        rng.integers(0, 255, (3, 4)).astype(np.uint8),
        rng.integers(0, 2, (3, 4)).astype(bool),
        uniform(3, 4).astype(bf.dtypes.bfloat16),
        uniform(4, 4).astype(np.float16),
        rng.integers(-8, 9, (4, 4)).astype(np.int8),
        rng.integers(-8, 9, (3, 4)).astype(np.int64),
        (uniform(4) + 1j * uniform(4)).astype(np.complex64),
    ]


def points(seed: int) -> list[np.ndarray]:
    """Arguments of all programs for points."""
    rng = np.random.default_rng(seed)
    uniform = lambda *shape: rng.uniform(-1, 1, shape)
    return [
        np.float32(uniform()),
        uniform(3).astype(np.float32),
        uniform(2).astype(np.float32),
        np.float64(uniform()),
        uniform(2),
        np.int32(rng.integers(0, 9)),
        rng.integers(0, 9, (3,)).astype(np.int32),
        np.bool_(rng.integers(0, 2)),
    ]


def name_of(x: Value) -> str:
    """The dtype of a value, ``"key"`` for keys."""
    return "key" if bf.dtypes.issubdtype(x.dtype, bf.dtypes.prng_key) else x.dtype.name


class Program:
    """A random program.

    Args:
      seed: of its choices.
      smooth: whether it can be differentiated in reverse: it has no callbacks, and each loop has a last round.
      pointwise: whether it has elementwise operations and short stacks alone: of a batch, kernels run its loops.
    """

    def __init__(self, seed: int, smooth: bool = False, pointwise: bool = False):
        self.seed, self.smooth, self.pointwise = seed, smooth, pointwise
        self.shapes = POINTS if pointwise else SHAPES
        self.dtypes = ("float32", "float32", "float64", "int32", "bool") if pointwise else DTYPES

    def __call__(self, *given: Value) -> list[Value]:
        part = Part(self, f"{self.seed}", 0, [bnp.asarray(x) for x in given])
        if not self.pointwise:
            part.values.append(bf_random.key(self.seed))
            part.views()
        part.operations(part.choose((1, 2, 3)))
        results = [part.control() for _ in range(part.choose((1, 1, 2)))]
        part.operations(2)
        results += part.unread[-2:]
        if part.choose((True, False)):
            results.append(part.any())  # an argument, or a value that a loop began with
        leaves = bf.tree.leaves(results)
        return [bf_random.key_data(x) if name_of(x) == "key" else x for x in leaves]


class Part:
    """The values of a body so far, and ways to make more.

    Args:
      program: the whole program.
      seed: of the choices in this part.
      depth: number of loops and branches around it.
      values: what it begins with.
    """

    def __init__(self, program: Program, seed: str, depth: int, values: Sequence[Value]):
        self.program, self.seed, self.depth = program, seed, depth
        self.random = random.Random(seed)
        self.values = list(values)
        self.unread: list[Value] = []
        self.parts = 0

    def choose(self, xs: Sequence) -> Any:
        return xs[self.random.randrange(len(xs))]

    def inner(self, init: Sequence[Value]) -> Callable[[Sequence[Value]], Part]:
        """A maker of the parts of one body, of its own values and of those around it.

        At times an initial carry is one of these: then its memory is needed in all rounds.
        """
        self.parts += 1
        seed = f"{self.seed}/{self.parts}"
        around = self.random.sample(self.values, min(3, len(self.values)))
        if self.choose((True, False)):
            around.append(self.choose(init))
        return lambda own: Part(self.program, seed, self.depth + 1, [*around, *own, *own])

    # -- values ----------------------------------------------------------------------------------------

    def any(self, *names: str, ranks: Sequence[int] = range(9)) -> Value:
        """Some value of one of the dtypes, by default of any; None if there is none."""
        fits = lambda x: (not names or name_of(x) in names) and x.ndim in ranks
        unread = [n for n, x in enumerate(self.unread) if fits(x)]
        if unread and self.choose((True, True, False)):
            return self.unread.pop(self.choose(unread))
        found = [x for x in self.values if fits(x)]
        return self.choose(found[-10:] + found[:6]) if found else None

    def add(self, *xs: Value) -> None:
        """Add new values, to be read soon: what nothing reads is not computed."""
        self.values += xs
        self.unread += xs

    def like(self, shape: tuple[int, ...], name: str) -> Value:
        """Some value, brought to a shape and dtype."""
        if name == "key":
            return self.any("key")
        x = self.any(name)
        if x is None:
            return self.literal(shape, name)
        if x.shape == shape:
            return x
        size = math.prod(shape)
        if x.size == size:
            return x.reshape(shape)
        if x.size > size and x.ndim and self.choose((True, False)):
            return x.reshape(-1)[:size].reshape(shape)
        return bnp.broadcast_to(self.total(x), shape)

    def literal(self, shape: tuple[int, ...], name: str) -> Value:
        number = {"bool": True, "complex64": 0.25 - 0.5j}.get(name, self.choose((0, 1, 3)))
        return bnp.full(shape, number * 0.25 if name in FLOATS else number, name)

    def total(self, x: Value) -> Value:
        """A scalar of the same dtype."""
        name = name_of(x)
        if name == "bool":
            return self.choose((bnp.any, bnp.all))(x)
        if name in (*SIGNED, "uint8"):
            return self.small(x.sum().astype(name))
        return (x / max(x.size, 1)).sum().astype(name)

    def small(self, x: Value) -> Value:
        return x & 15 if name_of(x) in SIGNED else x

    def integer(self) -> Value:
        """A scalar from 0 to 15."""
        return self.like((), "int32") & 15

    def index(self, n: int) -> Value:
        """A scalar index, at times out of range."""
        i = self.integer()
        return self.choose((lambda: i % max(n, 1), lambda: i - 3, lambda: i.astype("uint8"), lambda: 0))()

    def predicate(self) -> Value:
        i, j = self.integer(), self.integer()
        return self.choose(
            (lambda: i % 2 == 0, lambda: i < j, lambda: self.like((), "bool"), lambda: i > 3)
        )()

    # -- operations ------------------------------------------------------------------------------------

    def views(self) -> None:
        """Views of some values, which loops get as operands."""
        for _ in range(3):
            x = self.any(ranks=(1, 2))
            moves = [
                lambda x: x[::-1],
                lambda x: x.T,
                lambda x: x[1:],
                lambda x: bnp.broadcast_to(x, (2, *x.shape)),
            ]
            self.values.append(self.choose(moves)(x))

    def operations(self, count: int) -> None:
        """Append some new values."""
        kinds = [self.arithmetic] * 4 + [
            self.movement, self.movement, self.reduction, self.product, self.product, self.update, self.update,
            self.update, self.gather, self.ordered, self.barrier, self.keys, self.exact, self.exact, self.parts_of,
            self.stack,
        ]  # fmt: skip
        if self.program.pointwise:
            kinds = [self.arithmetic] * 3 + [self.stack, self.stack, self.comparison, self.short_reduction]
        elif not self.program.smooth:
            kinds.append(self.callback)
        for _ in range(count):
            self.add(self.choose(kinds)())
        if self.depth < DEPTH and self.choose((True, False)):
            self.control()
            self.add(self.choose(kinds)())

    def mixed(self, x: Value, y: Value) -> Value:
        """A new value of two of one dtype and shape."""
        name = name_of(x)
        if name == "bool":
            return self.choose((lambda: x ^ y, lambda: x | ~y, lambda: x & y))()
        if name == "uint8":
            return self.choose((lambda: x * 3 + y, lambda: x ^ y, lambda: bnp.maximum(x, y)))()
        if name in SIGNED:
            return self.choose((lambda: (x + y) & 15, lambda: (x * 3 - y) & 15, lambda: bnp.minimum(x, y)))()
        if name == "complex64":
            return self.choose((lambda: x * 0.5 + y * 0.4j, lambda: bnp.conj(x) * 0.7 - y * 0.2))()
        return self.choose(
            (
                lambda: bnp.tanh(x * 0.6 + y * 0.4),
                lambda: bnp.sin(x) * 0.7 - y * 0.3,
                lambda: x * y,
                lambda: bnp.maximum(x, y * 0.5),
                lambda: bnp.exp(-x * x) * y,
            )
        )().astype(name)

    def arithmetic(self) -> Value:
        x = self.any()
        if name_of(x) == "key":
            return x
        y = self.like(x.shape, name_of(x))
        if self.choose((True, False, False)):
            return bnp.where(self.like(x.shape, "bool"), x, y)
        return self.mixed(x, y)

    def movement(self) -> Value:
        x = self.any(ranks=(1, 2, 3))
        x = self.like((3, 4), "float32") if x is None else x
        return self.choose((lambda: x[::-1], lambda: x.T, lambda: x[..., ::2], lambda: x.reshape(-1)[1:]))()

    def reduction(self) -> Value:
        x = self.any("float32", "float64", "int32", "bfloat16", ranks=(1, 2, 3))
        if x is None or not x.size:
            return self.like((4,), "float32")
        axis = self.choose(range(x.ndim))
        if name_of(x) == "int32":
            return self.choose((bnp.max, bnp.argmax, lambda x, axis: x.sum(axis) & 15))(x, axis).astype(
                "int32"
            )
        return self.choose((bnp.mean, bnp.max, bnp.min))(x, axis)

    def product(self) -> Value:
        """A matmul, at times of views or of a batch."""
        name = self.choose(("float32", "float32", "float64"))
        x = self.like((3, 4), name)
        if self.choose((True, *(False,) * 7)):  # large enough for panels
            x, y = self.like((18, 40), name), self.like((40, 35), name)
            return bnp.tanh(self.choose((x, x[::-1], bnp.stack([x, x * 0.5]))) @ y)
        y = self.like(self.choose(((4, 4), (4,), (4, 7), (4, 33), (2, 4, 4))), name)
        x = self.choose(
            (x, x[::-1], x[:, ::-1], x[:1], bnp.broadcast_to(x, (2, 3, 4)), x[0], x @ x.T @ x * 0.1)
        )
        if y.ndim == 2 and y.shape == (4, 4):
            y = self.choose((y, y.T, y[::-1], y[:, 1:], y[:, ::2], y[:, :1]))
        return bnp.tanh(x @ y * 0.25)

    def update(self) -> Value:
        """An update of a part; the old value is at times read again."""
        x = self.any(ranks=(1, 2, 3))
        if x is None or not x.size or name_of(x) == "key":
            return self.like((3, 4), "float32")
        name, n = name_of(x), x.shape[0]
        i = self.index(n)
        rows = (self.like((4,), "int32") + self.choose((0, -2, 1))).astype(
            self.choose(("int32", "int32", "int64", "int8", "uint8", "uint64"))
        )
        mode = self.choose((None, "clip", "drop"))
        row, some = self.like(x.shape[1:], name), self.like((4, *x.shape[1:]), name)
        window = tuple(self.choose(range(1, m + 1)) for m in x.shape)
        ways = [
            lambda: x.at[i].set(row, mode=mode),
            lambda: x.at[rows].set(some, mode=mode),
            lambda: x.at[rows].set(row, mode=mode),
            lambda: x.at[i].set(x[0]),
            lambda: x.at[..., -1].set(self.literal((), name)),
            lambda: lax.dynamic_update_slice(x, row[None], (i, *(0,) * (x.ndim - 1))),
            lambda: lax.dynamic_update_slice(x, self.like(window, name), [self.index(m) for m in x.shape]),
        ]
        half = (lambda y: y * 0.5) if name in (*FLOATS, "complex64") else self.small
        if name != "bool":
            ways += [
                lambda: half(half(x.at[rows].add(some, mode=mode))),
                lambda: half(x.at[i].add(row, mode=mode)),
            ]
        if x.ndim > 1:
            ways += [
                lambda: x.at[i, self.index(x.shape[1])].set(self.like(x.shape[2:], name), mode=mode),
                lambda: x.at[:, self.index(x.shape[1])].set(self.like((n, *x.shape[2:]), name)),
                lambda: x.at[rows, rows[::-1]].set(self.like((4, *x.shape[2:]), name), mode=mode),
            ]
        new = self.choose(ways)()
        self.add(new)
        return self.choose((lambda: new, lambda: self.mixed(new, x), lambda: self.mixed(x[::-1], x)))()

    def gather(self) -> Value:
        x = self.any(ranks=(1, 2, 3))
        if x is None or not x.size or name_of(x) == "key":
            return self.like((3, 4), "float64")
        rows = self.like((4,), "int32") - 1
        return self.choose(
            (
                lambda: bnp.take(x, rows, axis=0, mode="clip"),
                lambda: bnp.take(x, rows, axis=x.ndim - 1, mode="wrap"),
                lambda: x.at[rows].get(mode="fill", fill_value=0),
                lambda: lax.dynamic_index_in_dim(x, self.index(x.shape[0]), 0, False),
                lambda: lax.dynamic_slice_in_dim(x, self.index(x.shape[-1]), 1, x.ndim - 1),
            )
        )()

    def ordered(self) -> Value:
        """Sorts and scans."""
        x = self.any("float32", "float64", "int32", ranks=(1, 2))
        if x is None or not x.size:
            return self.like((3, 4), "float32")
        n = x.shape[-1]
        scale = (lambda y: y & 15) if name_of(x) == "int32" else lambda y: y / n
        return self.choose(
            (
                lambda: bnp.sort(x, axis=-1),
                lambda: lax.top_k(x, min(n, 2))[0],
                lambda: scale(bnp.cumsum(x, axis=-1)),
                lambda: scale(lax.cumsum(x, 0, reverse=True)) if x.shape[0] <= n else x,
                lambda: lax.cummax(x, x.ndim - 1),
            )
        )()

    def barrier(self) -> Value:
        x, y, three = lax.optimization_barrier((self.any(), self.any(), 0.5))
        self.add(x, three)
        return y

    def stack(self) -> Value:
        """A short stack, taken apart and made again."""
        found = [x for x in self.values if x.ndim and x.shape[0] in (2, 3) and name_of(x) != "key"]
        x = self.choose(found) if found else self.like((3,), "float32")
        rows = [x[i] for i in range(x.shape[0])]
        return self.choose(
            (
                lambda: bnp.stack([self.mixed(x, y) for x, y in zip(rows, rows[1:] + rows[:1], strict=True)]),
                lambda: bnp.stack([rows[-1], *rows[:-1]]),
                lambda: bnp.concatenate([x[1:], self.mixed(x, x)[:1]]),
                lambda: self.mixed(x, x[::-1]),
            )
        )()

    def comparison(self) -> Value:
        x = self.like(self.choose(self.program.shapes), "int32")
        return self.choose((lambda: x > self.integer(), lambda: x % 3 == 0, lambda: (x & 7) + 1))()

    def short_reduction(self) -> Value:
        x = self.any("float32", "float64", ranks=(1,))
        x = self.like((3,), "float32") if x is None else x
        return self.choose((bnp.mean, bnp.max, bnp.min))(x)

    def keys(self) -> Value:
        key = self.any("key", ranks=(0,))
        if key is None:
            return self.like((4,), "bfloat16")
        return self.choose(
            (
                lambda: bf_random.split(key)[0],
                lambda: bf_random.split(key)[1],
                lambda: bf_random.fold_in(key, self.integer()),
                lambda: bf_random.uniform(key, (3, 4)),
                lambda: bf_random.randint(key, (4,), 0, 9),
            )
        )()

    def exact(self) -> Value:
        """Integers and booleans of others."""
        x, y = self.like((4,), "int32"), self.like((3, 4), "uint8")
        return self.choose(
            (
                lambda: x > self.integer(),
                lambda: y.astype("int32") & 15,
                lambda: (x * 17).astype("uint8"),
                lambda: self.like((3, 4), "bool").astype("int32"),
                lambda: bnp.cumsum(x) & 15,
                lambda: lax.top_k(x, 3)[1],
                lambda: bnp.argsort(x).astype("int32"),
                lambda: self.integer() + 1,
            )
        )()

    def parts_of(self) -> Value:
        """Complex numbers of real ones, or the reverse."""
        z = self.any("complex64")
        if z is None or self.choose((True, False)):
            x = self.any("float32")
            x = self.literal((4,), "float32") if x is None else x
            return lax.complex(x, self.like(x.shape, "float32"))
        return self.choose((bnp.real, bnp.imag))(z)

    def callback(self) -> Value:
        x = self.any("float32", "float64", "int32")
        x = self.literal((4,), "float32") if x is None else x
        double = lambda x: np.asarray(x)[..., ::-1] if np.ndim(x) else x
        like = bf.ShapeDtypeStruct(x.shape, x.dtype)
        return bf.pure_callback(double, like, x, vmap_method="sequential")

    # -- loops and branches ----------------------------------------------------------------------------

    def control(self) -> Any:
        """The results of a loop or branch; some are dropped."""
        kind = self.choose(("scan", "scan", "fori", "while", "while", "cond", "switch"))
        results = getattr(self, f"{kind}_loop" if kind in ("scan", "fori", "while") else kind)()
        leaves = bf.tree.leaves(results)
        kept = [x for x in leaves if self.choose((True, True, False))] or leaves[:1]
        self.add(*kept)
        return kept

    def carries(self) -> list[Value]:
        """Initial carries: of few types, so that they can change places."""
        types = [
            (self.choose(self.program.shapes), self.choose(self.program.dtypes))
            for _ in range(self.choose((1, 1, 2)))
        ]
        made: list[Value] = []
        for _ in range(self.choose((1, 2, 2, 3, 4))):
            kind = self.choose(("new", "new", "new", "value", "again"))
            if kind == "new":
                made.append(self.like(*self.choose(types)))
            else:
                made.append(made[-1] if made and kind == "again" else self.any())
        return made

    def next(self, part: Part, carry: Sequence[Value]) -> list[Value]:
        """The carries after a round."""
        out: list[Value] = []
        for x in carry:
            y = self.left(part, carry, out, x)
            if name_of(x) != "key":
                y = y.astype(name_of(x))
                unread = [n for n, u in enumerate(part.unread) if name_of(u) == name_of(x)]
                while unread and part.choose((True, True, True, False)):
                    u = part.unread.pop(part.choose(unread))
                    y = part.mixed(y, u if u.shape == y.shape else bnp.broadcast_to(part.total(u), y.shape))
                    unread = [n for n, u in enumerate(part.unread) if name_of(u) == name_of(x)]
            out.append(y)
            part.values.append(y)
        return out

    def left(self, part: Part, carry: Sequence[Value], out: Sequence[Value], x: Value) -> Value:
        """The value that replaces the carry ``x``; ``out`` are those of carries before it."""
        kind = (x.shape, name_of(x))
        of_kind = lambda values: [y for y in values if (y.shape, name_of(y)) == kind]
        same, before = of_kind((*carry, *part.values, *out)), of_kind(carry)
        fresh = of_kind(part.unread) or [x]
        ways = [
            lambda: x,
            lambda: part.choose(before),
            lambda: part.choose(same),
            lambda: part.choose(fresh),
            lambda: part.choose(fresh),
            lambda: part.like(*kind),
            lambda: lax.optimization_barrier(part.choose(same)) if not self.program.pointwise else x,
        ]
        if name_of(x) != "key":
            ways += [
                lambda: part.mixed(part.like(*kind), x),
                lambda: part.mixed(part.choose(before), part.choose(before)),
                lambda: part.literal(*kind),
                lambda: self.updated(part, part.choose(before)),
                lambda: self.updated(part, x),
            ]
        return part.choose(ways)()

    def updated(self, part: Part, x: Value) -> Value:
        """The array with one place written."""
        if not x.ndim or not x.size or name_of(x) == "key":
            return x
        i, row = part.index(x.shape[0]), part.like(x.shape[1:], name_of(x))
        return part.choose((lambda: x.at[i].set(row), lambda: x.at[i].set(part.literal((), name_of(x)))))()

    def body(self, make: Callable, own: Sequence[Value], carry: Sequence[Value]) -> tuple[Part, list[Value]]:
        part = make([*own, *carry])
        part.operations(part.choose((0, 1, 2, 3)))
        return part, self.next(part, carry)

    def rematerialized(self, f: Callable) -> Callable:
        return bf.checkpoint(f) if self.choose((True, *(False,) * 5)) else f

    def scan_loop(self) -> Any:
        init = self.carries()
        make = self.inner(init)
        n = self.choose((1, 2, 3, 3, 3, 4, 0))
        known = [x for x in self.values if x.ndim and x.shape[0] >= n and name_of(x) != "key"]
        several = self.choose((0, 1, 1, 2)) if known and not self.program.pointwise else 0
        xs = [self.choose(known)[:n] for _ in range(several)]

        def step(carry: Any, x: Any) -> Any:
            part, new = self.body(make, x, carry)
            ys = [part.choose((part.any, part.any, lambda: part.choose(carry), lambda: part.choose(new)))()
                  for _ in range(0 if self.program.pointwise else part.choose((0, 1, 2)))]  # fmt: skip
            return new, [bf_random.key_data(y) if name_of(y) == "key" else y for y in ys]

        reverse = self.choose((True, False, False))
        return lax.scan(self.rematerialized(step), init, xs, length=n, reverse=reverse)

    def fori_loop(self) -> Any:
        init = self.carries()
        make = self.inner(init)
        step = lambda i, carry: self.body(make, [bnp.asarray(i, "int32")], carry)[1]
        low, high = self.choose((0, 1, -2)), self.choose((2, 3, 4, 0))
        if self.choose((True, False)) and not self.program.smooth:
            high = self.integer() & 3
        return lax.fori_loop(low, high, self.rematerialized(step), init)

    def while_loop(self) -> Any:
        init = self.carries()
        make, decide = self.inner(init), self.inner(init)
        limit = self.integer() & 3
        kind = self.choose(("rounds", "rounds", "value", "flag"))

        def goes_on(state: Any) -> Value:
            i, carry = state
            part = decide([i, *carry])
            within = i < limit + 1
            if kind == "value":
                return within & (part.integer() != 3)
            return within & part.like((), "bool") if kind == "flag" else within

        step = lambda state: (state[0] + 1, self.body(make, [state[0]], state[1])[1])
        most = self.choose((None, 2, 5)) if not self.program.smooth else self.choose((2, 5))
        return lax.while_loop(goes_on, self.rematerialized(step), (bnp.int32(0), init), max_steps=most)

    def cond(self) -> Any:
        return self.branches(2, lambda cases, carry: lax.cond(self.predicate(), *cases, carry))

    def switch(self) -> Any:
        n = self.choose((1, 3, 4))
        return self.branches(n, lambda cases, carry: lax.switch(self.integer() - 2, cases, carry))

    def branches(self, count: int, run: Callable) -> Any:
        carry = self.carries()
        makes = [self.inner(carry) for _ in range(count)]
        return run([lambda carry, make=make: self.body(make, (), carry)[1] for make in makes], carry)
