"""Sparsity as a transform: which outputs depend on which inputs, structurally.

    pattern(f, x)      # boolean (*f(x).shape, *x.shape): where the Jacobian of f may be nonzero

A box is a boolean array with the inputs as an extra trailing axis: element [i, j] is true if element i of the value
depends on input j. Elementwise operations take the union; reductions take it over the reduced axes; movement moves
rows. A matmul is a matmul of patterns. The pattern holds for all values of the inputs, and no derivative is computed.

``sparse_jacobian`` uses it: inputs that no output has in common can share one ``jvp``, so a banded Jacobian of any size
costs as many of them as it has bands (Curtis, Powell and Reid, "On the estimation of sparse Jacobian matrices", 1974).

    python -m examples.extend.sparsity
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax


class Depends(NamedTuple):
    """The value, and for each element the inputs that it depends on."""

    value: bf.Array
    on: bf.Array


depends = bf.Transform("depends", box=Depends)


def vectorised(prim, value, x, params):
    """Apply a movement primitive to rows of booleans, mapped over the inputs."""
    move = lambda column: prim.bind(column, *value[1:], **params)
    return bf.vmap(move, in_axes=-1, out_axes=-1)(x.on)


def moves(prim, *xs, **params):
    """The first operand is moved; the others, such as indices, are plain arrays."""
    x, *where = xs
    if not isinstance(x, Depends):
        raise bf.errors.UnsupportedError(
            f"positions of {prim.name} that depend on the inputs.", where=depends.where()
        )
    values = [x.value, *where]
    return Depends(prim.bind(*values, **params), vectorised(prim, values, x, params))


def joins(prim, *xs, **params):
    """Elementwise: the union over the operands, broadcast to the shape of the result."""
    values = [x.value if isinstance(x, Depends) else x for x in xs]
    out = prim.bind(*values, **params)
    on = [bnp.broadcast_to(x.on, (*out.shape, x.on.shape[-1])) for x in xs if isinstance(x, Depends)]
    return Depends(out, functools.reduce(bnp.logical_or, on))


def gathers(prim, x, *, axes):
    """Reductions: the union over the reduced axes."""
    return Depends(prim.bind(x.value, axes=axes), bnp.any(x.on, axes))


def nothing(prim, *xs, **params):
    """Results without derivatives depend on nothing."""
    return prim.bind(*[x.value if isinstance(x, Depends) else x for x in xs], **params)


RULES = {
    joins: [
        lax.add_p, lax.add_any_p, lax.sub_p, lax.mul_p, lax.div_p, lax.neg_p, lax.max_p, lax.min_p, lax.pow_p,
        lax.square_p, lax.integer_pow_p, lax.exp_p, lax.log_p, lax.log1p_p, lax.expm1_p, lax.sin_p, lax.cos_p,
        lax.tanh_p, lax.logistic_p, lax.sqrt_p, lax.abs_p, lax.select_p, lax.convert_p, lax.copy_p,
    ],
    moves: [
        lax.broadcast_in_dim_p, lax.reshape_p, lax.transpose_p, lax.slice_p, lax.rev_p, lax.gather_p,
        lax.dynamic_slice_p,
    ],
    gathers: [lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p, lax.reduce_prod_p],
    nothing: [lax.lt_p, lax.le_p, lax.gt_p, lax.ge_p, lax.eq_p, lax.ne_p, lax.sign_p, lax.floor_p,
              lax.stop_gradient_p, lax.argmax_p, lax.argmin_p],
}  # fmt: skip
for rule, prims in RULES.items():
    for p in prims:
        depends.rule(p)(functools.partial(rule, p))


def column_of(x, n):
    """Rows of an operand: none for a plain array."""
    return x.on if isinstance(x, Depends) else bnp.zeros((*x.shape, n), bool)


@depends.rule(lax.concatenate_p)
def concatenate(*xs, **params):
    n = next(x.on.shape[-1] for x in xs if isinstance(x, Depends))
    values = [x.value if isinstance(x, Depends) else x for x in xs]
    rows = [column_of(x, n) for x in xs]
    join = lambda *columns: lax.concatenate_p.bind(*columns, **params)
    return Depends(lax.concatenate_p.bind(*values, **params), bf.vmap(join, in_axes=-1, out_axes=-1)(*rows))


@depends.rule(lax.pad_p)
def pad(x, fill, **params):
    values = [v.value if isinstance(v, Depends) else v for v in (x, fill)]
    n = (x if isinstance(x, Depends) else fill).on.shape[-1]
    move = lambda column, edge: lax.pad_p.bind(column, edge, **params)
    rows = bf.vmap(move, in_axes=-1, out_axes=-1)(column_of(x, n), column_of(fill, n))
    return Depends(lax.pad_p.bind(*values, **params), rows)


@depends.rule(lax.dot_general_p)
def dot_general(x, y, **params):
    """Every element of the result depends on the inputs of its row and its column."""
    values = [v.value if isinstance(v, Depends) else v for v in (x, y)]
    out = lax.dot_general_p.bind(*values, **params)
    params["preferred_element_type"] = None
    reached = bnp.zeros((), bool)
    for i, v in enumerate((x, y)):
        if isinstance(v, Depends):
            ones = bnp.ones_like(values[1 - i], "float32")

            def reach(column, i=i, ones=ones):
                operands = (column, ones) if i == 0 else (ones, column)
                return lax.dot_general_p.bind(*operands, **params) > 0

            reached = reached | bf.vmap(reach, in_axes=-1, out_axes=-1)(v.on.astype("float32"))
    return Depends(out, reached)


# -- applications ----------------------------------------------------------------------------------


def pattern(f, x):
    """Dependencies of f(x) on x: boolean, of shape (*f(x).shape, *x.shape)."""
    x = bnp.asarray(x)
    out = depends(f)(Depends(x, bnp.eye(x.size, dtype=bool).reshape(*x.shape, x.size)))
    if not isinstance(out, Depends):
        return bnp.zeros((*out.shape, *x.shape), bool)
    return out.on.reshape(*out.value.shape, *x.shape)


def colours(p):
    """Group inputs greedily so that no two in a group share an output.

    Returns:
      the index of each input's group.
    """
    clash = p.T.astype(int) @ p.astype(int) > 0
    groups = np.full(p.shape[1], -1)
    for j in range(p.shape[1]):
        taken = set(groups[clash[j]])
        groups[j] = next(c for c in range(p.shape[1]) if c not in taken)
    return groups


def sparse_jacobian(f, x):
    """Jacobian of f, from vectors to vectors, by one ``jvp`` per group of inputs.

    Returns:
      the Jacobian, and the number of groups.
    """
    p = np.asarray(pattern(f, x))
    groups = colours(p)
    seeds = bnp.asarray(np.arange(groups.max() + 1)[:, None] == groups[None, :], x.dtype)
    compressed = bf.vmap(lambda t: bf.jvp(f, (x,), (t,))[1])(seeds)  # (groups, outputs)
    return bnp.where(p, compressed[groups].T, 0), len(seeds)


def heat(u):
    """One step of a nonlinear diffusion on a line."""
    flux = bnp.square(u[1:] - u[:-1]) * (u[1:] - u[:-1])
    return u + 0.1 * (
        bnp.concatenate([flux, bnp.zeros(1, u.dtype)]) - bnp.concatenate([bnp.zeros(1, u.dtype), flux])
    )


def main():
    u = bnp.linspace(0, 1, 12) ** 2
    print("which points of a diffusion step depend on which:")
    for row in np.asarray(pattern(heat, u)):
        print("  " + " ".join("x" if v else "." for v in row))
    jacobian, n = sparse_jacobian(heat, u)
    error = float(bnp.abs(jacobian - bf.jacfwd(heat)(u)).max())
    print(f"its Jacobian by {n} jvp instead of {u.size}, which differs by {error:.1e}")


if __name__ == "__main__":
    main()
