"""Every row against JAX: values, jvp, vjp, order 2, vmap, eagerly and under jit, in float32 and float64.

``make test-peers`` prints how many functions agree and the worst errors.
"""

import contextlib
import warnings
from types import SimpleNamespace

import pytest

import blufunc as bf
import blufunc.numpy as bnp
from tests.peers.peer_row import TOLERANCE, error_of, probe
from tests.peers.peer_table import ROWS

pytestmark = pytest.mark.peer

OURS = SimpleNamespace(
    np=bnp,
    lax=bf.lax,
    nn=bf.nn,
    random=bf.random,
    scipy=bf.scipy,
    tree=bf.tree,
    checkpoint=bf.checkpoint,
    custom_jvp=bf.custom_jvp,
    custom_vjp=bf.custom_vjp,
    eval_shape=bf.eval_shape,
    grad=bf.grad,
    hessian=bf.hessian,
    jacfwd=bf.jacfwd,
    jacrev=bf.jacrev,
    jit=bf.jit,
    jvp=bf.jvp,
    linearize=bf.linearize,
    linear_transpose=bf.linear_transpose,
    value_and_grad=bf.value_and_grad,
    vjp=bf.vjp,
    vmap=bf.vmap,
    compile=False,
)


def jax_namespace():
    """The same names in JAX."""
    import jax
    import jax.scipy

    names = [k for k in vars(OURS) if k not in ("np", "compile")]
    return SimpleNamespace(np=jax.numpy, compile=True, **{k: getattr(jax, k) for k in names})


@contextlib.contextmanager
def precision(dtype):
    """JAX with 64-bit types where the run has them."""
    import jax

    with jax.enable_x64(dtype == "float64"):
        yield


def test_names_are_unique():
    assert len({r.name for r in ROWS}) == len(ROWS) >= 300


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
    bad, worst = [], 0.0
    for name, arrays in got.items():
        base = name.removeprefix("jit of ")
        if base in left_out or "everything" in left_out:
            continue
        assert len(arrays) == len(want[name]), f"{name}: {len(arrays)} results, JAX has {len(want[name])}"
        for g, w in zip(arrays, want[name], strict=True):
            error = error_of(g, w)
            worst = max(worst, error)
            factor = {"value": 1, "vmap": 1, "jvp": 10, "vjp": 10}.get(base, 30)
            if not error <= TOLERANCE[dtype] * row.tol * factor:
                bad.append(f"{name}: {error:.1e} ({g.dtype}{g.shape} against {w.dtype}{w.shape})")
    request.node.user_properties.append(("peer", (row.name, dtype, worst, row.differs and row.differs[0])))
    assert not bad, "; ".join(bad)
