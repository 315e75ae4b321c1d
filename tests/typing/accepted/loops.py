"""Control flow: a recurrent network, loops of trees, branches, scans."""

from typing import NamedTuple, assert_type

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import Array, lax, nn, random, tree


class Cell(NamedTuple):
    w: Array
    u: Array
    b: Array


class State(NamedTuple):
    h: Array
    c: Array


def lstm(cell: Cell, xs: Array, state: State) -> tuple[State, Array]:
    def body(state: State, x: Array) -> tuple[State, Array]:
        i, f, g, o = jnp.split(x @ cell.w + state.h @ cell.u + cell.b, 4, axis=-1)
        c = nn.sigmoid(f) * state.c + nn.sigmoid(i) * jnp.tanh(g)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return State(h, c), h

    last, hs = lax.scan(body, state, xs, unroll=2)
    assert_type(last, State)
    assert_type(hs, Array)
    return last, hs


def loss(cell: Cell, xs: Array, state: State) -> Array:
    return jnp.sum(lstm(cell, xs, state)[1] ** 2)


assert_type(
    bf.jit(bf.grad(loss))(
        Cell(jnp.ones(1), jnp.ones(1), jnp.ones(1)), jnp.ones(1), State(jnp.ones(1), jnp.ones(1))
    ),
    Cell,
)


def without_inputs(x: Array) -> Array:
    def body(c: Array, _: None) -> tuple[Array, None]:
        return c * 2, None

    out, nothing = lax.scan(body, 1.0, None, length=3)
    assert_type(out, Array)
    assert_type(nothing, None)
    return out + x


def pairs(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], dict[str, Array]]:
    return (carry[0] + 1, carry[1] + x), {"y": x}


# A carry of Python numbers, and NumPy arrays as inputs: the body says what the results are.
final, outs = lax.scan(pairs, (0, 1.0), np.ones(3, np.float32))
assert_type(final, tuple[Array, Array])
assert_type(outs, dict[str, Array])


def smaller(s: tuple[Array, Array]) -> Array:
    return s[0] < 3


def larger(s: tuple[Array, Array]) -> tuple[Array, Array]:
    return s[0] + 1, s[1] * 2


assert_type(lax.while_loop(smaller, larger, (jnp.zeros(()), jnp.ones(2))), tuple[Array, Array])
assert_type(lax.while_loop(smaller, larger, (0, jnp.ones(2))), tuple[Array, Array])
count, _ = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1]), (0, jnp.ones(2)))


def add_index(i: Array, x: Array) -> Array:
    return x + i


def add_index_to_both(i: int, xs: State) -> State:
    return tree.map(lambda x: x + i, xs)


assert_type(lax.fori_loop(0, 3, add_index, jnp.ones(2)), Array)
assert_type(lax.fori_loop(0, jnp.asarray(3), add_index, 0.0), Array)
assert_type(lax.fori_loop(0, 3, add_index_to_both, State(jnp.ones(2), jnp.ones(2))), State)
lax.fori_loop(0, 3, lambda i, x: x + i, 0.0)


def double(x: Array) -> Array:
    return x * 2


def negate(x: Array) -> Array:
    return -x


assert_type(lax.cond(True, double, negate, jnp.ones(2)), Array)
assert_type(lax.cond(jnp.ones(()) > 0, double, negate, operand=jnp.ones(2)), Array)
assert_type(lax.switch(jnp.asarray(1), [double, negate, jnp.sin], jnp.ones(2)), Array)
assert_type(lax.map(double, jnp.ones(2)), Array)
assert_type(lax.associative_scan(jnp.add, jnp.ones(8)), Array)


def combine(a: State, b: State) -> State:
    return State(a.h * b.h, a.c * b.h + b.c)


assert_type(lax.associative_scan(combine, State(jnp.ones(8), jnp.ones(8)), reverse=True), State)
sample = lax.scan(lambda key, _: (random.fold_in(key, 1), random.normal(key)), random.key(0), None, length=2)
