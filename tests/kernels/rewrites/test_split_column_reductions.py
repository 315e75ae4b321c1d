"""Reductions over long rows, which leave no room for what is found of each column."""

from dataclasses import replace

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.jaxpr import Literal
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.kernels.rewrites.canonicalize import split_column_reductions
from blufunc.kernels.schedule import KernelStep
from tests.kernels.differential import LIKE_A_GPU, case

X = from_numpy(np.random.default_rng(0).standard_normal((7, 40)).astype(np.float32))


def _centred(x):
    """The reductions of a row."""
    return x - x.max(1, keepdims=True)


def _largest(y):
    return bnp.where(bnp.isfinite(y), bnp.abs(y), 0.0)


def _scales(x):
    """The maxima of rows and columns, as scales of an operand of two matmuls."""
    y = _centred(x)
    return y, _largest(y).max(1), _largest(y).max(0)


def _products(x):
    """The operand of the sum is computed from two arrays."""
    y = _centred(x)
    z = y * bnp.sin(x)
    return y, z.sum(1), z.sum(0)


def _shared(x):
    """A library reads what is reduced, too: it is in memory."""
    y = _centred(x)
    return y, _largest(y).max(1), _largest(y).max(0), _largest(y)


def _of_columns(x):
    """Nothing of a row."""
    return _largest(x).max(0), _largest(x).min(0)


FUNCTIONS = {  # with the sizes of the arrays that each kernel writes, for joint and separate rows
    "the largest of rows and columns": (_scales, [{280, 7, 40}], [{280, 7}, {40}], 3),
    "sums of dear values": (_products, [{280, 7, 40}], [{280, 7}, {40}], 0),
    "what is a result": (_shared, [{280, 7, 40}], [{280, 7}, {40}], 0),
    "columns alone": (_of_columns, [{40}], [{40}], 0),
}


def written(made):
    """The sizes of what each launch writes, but for what its chunks leave to its end."""
    outputs = [s.region.outputs for s in made.steps if isinstance(s, KernelStep)]
    return [{v.aval.size for v in some} for some in outputs if some]


@pytest.mark.parametrize("lanes", [40, 39])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_columns_of_long_rows_are_another_kernel_s(name, lanes):
    """Which reads what the first one writes anyway."""
    function, together, apart, _ = FUNCTIONS[name]
    program = case(function, X, target=replace(LIKE_A_GPU, summed_lanes=lanes))
    assert written(program.schedule) == (together if lanes == 40 else apart)
    for got, want in zip(program.interpreted(), program.expected(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_columns_take_up_is_computed_of_one_array(name):
    """Repeated equations have their own origin; programs without long rows stay."""
    function, *_, copies = FUNCTIONS[name]
    jaxpr, origins = inline_bodies(simplify(bf.jit(function).trace(X).jaxpr))
    assert split_column_reductions(jaxpr, origins, 40) is jaxpr and not origins
    made = split_column_reductions(jaxpr, origins, 39)
    new = [e for e in made.eqns if e not in set(jaxpr.eqns) and e in origins]
    assert len(new) == copies * len(set(origins.values()))
    read = {a for e in new for a in e.invars if not isinstance(a, Literal) and a.aval.size == X.size}
    assert len(read - {v for e in new for v in e.outvars}) == bool(new)
