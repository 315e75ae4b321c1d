"""Every row against JAX: values, jvp, vjp, order 2, vmap, jit, two precisions.

``make test-peers`` prints the number of functions that agree and the worst errors.
"""

import contextlib
import functools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import blufunc as bf
import blufunc.flatten_util
import blufunc.image
import blufunc.numpy as bnp
import blufunc.scipy
from tests.peers.peer_row import TOLERANCE, error_of, probe
from tests.peers.peer_table import ROWS

pytestmark = pytest.mark.peer

NAMES = """
    image lax nn random scipy tree flatten_util custom_batching checkpoint_policies
    checkpoint closure_convert custom_gradient custom_jvp custom_vjp eval_shape grad hessian jacfwd jacrev jit jvp
    linearize linear_transpose named_call named_scope pure_callback value_and_grad vjp vmap
""".split()
"""The parts of either library that rows use, except ``numpy``."""


def namespace(library, numpy, **more):
    """Those names of one library."""
    return SimpleNamespace(np=numpy, **{name: getattr(library, name) for name in NAMES}, **more)


OURS = namespace(bf, bnp, compile=False)


@functools.cache
def jax_namespace():
    """The same names in JAX, compiled without its slow passes."""
    import jax
    import jax.flatten_util
    import jax.image
    import jax.scipy
    import jax.scipy.cluster.vq
    import jax.scipy.fft
    import jax.scipy.integrate
    import jax.scipy.interpolate
    import jax.scipy.ndimage
    import jax.scipy.optimize
    import jax.scipy.signal
    import jax.scipy.sparse.linalg
    import jax.scipy.spatial.transform
    import jax.scipy.stats

    jax.config.update("jax_disable_most_optimizations", True)
    return namespace(jax, jax.numpy, compile=True)


INTEGERS = "indices and counts are int32: there is no x64 switch that makes them int64"


@contextlib.contextmanager
def precision(dtype):
    """JAX with 64-bit types where the run has them."""
    import jax

    with jax.enable_x64(dtype == "float64"):
        yield


def test_names_are_unique():
    assert len({r.name for r in ROWS}) == len(ROWS) >= 450


@pytest.mark.parametrize(
    "row, dtype", [pytest.param(r, d, id=f"{r.name}-{d}") for r in ROWS for d in r.dtypes]
)
def test_agrees_with_jax(row, dtype, request):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what JAX has to say is not our test
        with precision(dtype):
            want = probe(jax_namespace(), row, dtype)
        got = probe(OURS, row, dtype)
    left_out = row.differs[1] if row.differs else ()
    reasons = [row.differs[0]] if row.differs else []
    bad, worst = [], 0.0
    for name, arrays in got.items():
        base = name.removeprefix("jit of ")
        if base in left_out or "everything" in left_out:
            continue
        assert len(arrays) == len(want[name]), f"{name}: {len(arrays)} results, JAX has {len(want[name])}"
        for g, w in zip(arrays, want[name], strict=True):
            if g.dtype == np.int32 and w.dtype == np.int64:
                w, reasons = w.astype(np.int32), [*reasons, INTEGERS]
            error = error_of(g, w)
            worst = max(worst, error)
            factor = {"value": 1, "vmap": 1, "jvp": 10, "vjp": 10}.get(base, 30)
            if not error <= TOLERANCE[dtype] * row.tol * factor:
                bad.append(f"{name}: {error:.1e} ({g.dtype}{g.shape} against {w.dtype}{w.shape})")
    request.node.user_properties.append(("peer", (row.name, dtype, worst, sorted(set(reasons)))))
    assert not bad, "; ".join(bad)
