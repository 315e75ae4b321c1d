"""Strict promotion: what JAX accepts under its flags is accepted here."""

import warnings

import pytest

import blufunc as bf
from tests.peers.peer_table import ROWS
from tests.peers.test_peers import OURS, jax_namespace

pytestmark = pytest.mark.peer

MODES = [("numpy_rank_promotion", "raise"), ("numpy_dtype_promotion", "strict")]

REFUSED = {
    "np.heaviside": "arrays of two ranks, which JAX does not look at there",
    "np.gcd of integers": "arrays of two ranks, which JAX does not look at there",
}


def shapes(library, names, row, mode, value):
    args = [names.np.asarray(a, dtype=a.dtype) for a in row.sample("float32")]
    with getattr(library, mode)(value):
        return library.eval_shape(row.function(names), *args)


@pytest.mark.parametrize("mode, value", MODES)
def test_functions_promote_nothing_of_their_own(mode, value):
    jax = pytest.importorskip("jax")
    tried, refused = 0, {}
    for row in ROWS:
        if not row.jit:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                shapes(jax, jax_namespace(), row, mode, value)
        except Exception:
            continue
        tried += 1
        try:
            shapes(bf, OURS, row, mode, value)
        except Exception as e:
            refused[row.name] = e
    assert tried > 700
    assert set(refused) <= set(REFUSED), refused
