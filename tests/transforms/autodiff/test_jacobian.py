"""``jacfwd``, ``jacrev``, ``hessian``: against each other, formulas and JAX."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors
from blufunc.core.ir import dtypes
from blufunc.transforms.autodiff.grad import grad
from blufunc.transforms.autodiff.jacobian import hessian, jacfwd, jacobian, jacrev
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.checkpointing.checkpoint import checkpoint
from blufunc.transforms.control_flow.scan import scan
from blufunc.transforms.custom_rules.custom_jvp import custom_jvp
from blufunc.transforms.staging.jit import jit
from blufunc.transforms.staging.make_jaxpr import make_jaxpr
from tests.transforms.common import arr, close, draw

BOTH = pytest.mark.parametrize("jac", [jacfwd, jacrev])


@BOTH
def test_a_linear_map_is_its_matrix(jac):
    w, x = draw(4, 3), draw(3)
    close(jac(lambda x: w @ x)(x), w)
    close(jac(lambda w, x: w @ x, 1)(w, x), w)
    close(jac(lambda w: w @ x)(w), np.einsum("ij,k->ijk", np.eye(4), np.asarray(x)))
    close(jac(lambda x: x)(x), arr(np.eye(3)))
    close(jac(lambda x: x.T)(w), arr(np.einsum("ik,jl->jikl", np.eye(4), np.eye(3))))


@BOTH
@pytest.mark.parametrize("argnums", [0, 1, -1, (0, 1), (1, 0), [1], np.int64(1)], ids=str)
def test_trees_of_trees(jac, argnums):
    """The results' tree outside, the arguments' inside; empty containers stay."""

    def f(p, x):
        return {"y": p["a"] * x, "z": [p["b"] @ x, None, ()]}

    p, x = {"a": draw(3), "b": draw(2, 3), "none": None}, draw(3, seed=1)
    a, b, v = (np.asarray(t) for t in (p["a"], p["b"], x))
    of_p = {
        "y": {"a": arr(np.diag(v)), "b": arr(np.zeros((3, 2, 3))), "none": None},
        "z": [
            {"a": arr(np.zeros((2, 3))), "b": arr(np.einsum("ij,k->ijk", np.eye(2), v)), "none": None},
            None,
            (),
        ],
    }
    of_x = {"y": arr(np.diag(a)), "z": [arr(b), None, ()]}
    found = jac(f, argnums)(p, x)
    pick = {0: lambda i, j: i, 1: lambda i, j: j, -1: lambda i, j: j}
    if isinstance(argnums, (tuple, list)):
        want = {
            "y": tuple((of_p, of_x)[i]["y"] for i in argnums),
            "z": [tuple((of_p, of_x)[i]["z"][0] for i in argnums), None, ()],
        }
    else:
        want = pick[int(argnums)](of_p, of_x)
    close(found, want)


@BOTH
def test_keyword_arguments_and_aux(jac):
    def f(x, *, scale):
        return x * scale, {"twice": x * 2, "n": x.astype("int32")}

    x = draw(3)
    j, aux = jac(f, has_aux=True)(x, scale=T)
    close(j, arr(np.eye(3) * 1.3))
    close(aux["twice"], x * 2)
    assert aux["n"].dtype == np.int32
    j, aux = jit(lambda x: jac(f, has_aux=True)(x, scale=T))(x)
    close(aux["twice"], x * 2)
    h, aux = hessian(lambda x: ((x**3).sum(), x), has_aux=True)(x)
    close(h, arr(np.diag(6 * np.asarray(x))))
    close(aux, x)


X, T = arr(0.7), arr(1.3)


@custom_jvp
def _ruled(x):
    return bnp.sin(x) * x


_ruled.defjvp(lambda p, t: (_ruled(*p), t[0] * (bnp.cos(p[0]) * p[0] + bnp.sin(p[0]))))


FUNCTIONS = {
    "sines": lambda x: bnp.sin(x) * x[::-1],
    "scalar": lambda x: (x**2).prod(),
    "jit": jit(lambda x: bnp.tanh(x) @ x),
    "checkpoint": checkpoint(lambda x: bnp.outer(x, bnp.exp(x))),
    "scan": lambda x: scan(lambda c, a: (c * bnp.sin(a), c + a), x[0], x)[1],
    "custom": lambda x: jit(_ruled)(x) + _ruled(x[0]),
    "a constant": lambda x: arr([1.0, 2.0]),
    "in part constant": lambda x: bnp.stack([x[0] * x[1], arr(3.0)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_modes_agree_under_every_transform(name):
    f = FUNCTIONS[name]
    x = draw(3)
    want = jacfwd(f)(x)
    step = 1e-6
    columns = [
        (np.asarray(f(x + step * e)) - np.asarray(f(x - step * e))) / (2 * step) for e in arr(np.eye(3))
    ]
    close(want, arr(np.stack(columns, -1)), 1e-8)
    for j in (jacrev(f), jit(jacfwd(f)), jit(jacrev(f)), jacrev(jit(f)), jacfwd(checkpoint(f))):
        close(j(x), want, 1e-12)
    xs = bnp.stack([x, x * 2])
    for j in (jacfwd(f), jacrev(f)):
        close(vmap(j)(xs)[0], want)
    second = jacfwd(jacfwd(f))(x)
    for j in (jacfwd(jacrev(f)), jacrev(jacfwd(f)), jacrev(jacrev(f)), hessian(f), jit(hessian(f))):
        close(j(x), second, 1e-10)
    close(grad(lambda x: (jacrev(f)(x) ** 2).sum())(x), grad(lambda x: (jacfwd(f)(x) ** 2).sum())(x), 1e-10)


def test_the_function_is_evaluated_once():
    """Values of the primal have no axis for the basis."""
    runs = []

    def f(x):
        runs.append(x)
        return bnp.exp(x)

    for jac in (jacfwd, jacrev):
        jaxpr = make_jaxpr(jac(f))(draw(3))
        assert [e.outvars[0].aval.shape for e in jaxpr.eqns if e.prim.name == "exp"] == [(3,)]
    assert len(runs) == 2
    assert jacobian is jacrev


@BOTH
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,)], ids=str)
def test_sizes_zero_and_one(jac, shape):
    x = draw(*shape)
    assert jac(lambda x: x * 2)(x).shape == shape * 2
    assert jac(lambda x: bnp.stack([x, x]))(x).shape == (2, *shape, *shape)
    assert jac(lambda x: x.sum())(x).shape == shape
    assert jac(lambda x: ())(x) == () and jac(lambda p: p[0])((x, ()))[1] == ()


@BOTH
def test_dtypes(jac):
    """Forward mode gives the results' dtype, reverse mode the arguments'."""
    f = lambda x: x.astype("float32") * 2
    assert jac(f)(draw(3)).dtype == (np.float32 if jac is jacfwd else np.float64)
    both = jac(lambda x, y: (x * 2, y * 3), (0, 1))(draw(2), arr([1.0], np.float32))
    close(both[0][0], arr(np.eye(2) * 2))
    close(both[1][1], arr([[3.0]], np.float32))


def test_integers():
    n = arr([1, 2], np.int32)
    j = jacfwd(lambda x: (x * 2, bnp.floor(x).astype("int32")))(draw(3))
    assert j[1].dtype == dtypes.float0 and j[1].shape == (3, 3)
    j = jacrev(lambda n, x: x * n.sum(), (0, 1), allow_int=True)(n, draw(3))
    assert j[0].dtype == dtypes.float0 and j[0].shape == (3, 2)
    close(j[1], arr(np.eye(3) * 3))


def test_complex_numbers():
    z = arr([1 + 2j, 0.5 - 1j], np.complex128)
    w = np.asarray(z)
    for jac in (jacfwd, jacrev):
        close(jac(lambda z: z**3, holomorphic=True)(z), arr(np.diag(3 * w**2), np.complex128))
    close(hessian(lambda z: (z**3).sum(), holomorphic=True)(z), arr(np.diag(6 * w), np.complex128))
    close(jacfwd(lambda x: x * z)(draw(2)), arr(np.diag(w), np.complex128))
    close(jacrev(lambda z: bnp.real(z * z))(z), arr(np.diag(2 * w), np.complex128))


def test_second_derivatives_of_trees():
    def f(p):
        return (p["a"] ** 2 * p["b"]).sum()

    p = {"a": draw(2), "b": draw(2, seed=3)}
    h = hessian(f)(p)
    a, b = (np.asarray(p[k]) for k in "ab")
    close(h["a"], {"a": arr(np.diag(2 * b)), "b": arr(np.diag(2 * a))})
    close(h["b"], {"a": arr(np.diag(2 * a)), "b": arr(np.zeros((2, 2)))})


ERRORS = {
    "integer argument, forward": (lambda: jacfwd(lambda n: n * 2.0)(arr([1], np.int32)), "argument n"),
    "integer argument, reverse": (lambda: jacrev(lambda n: n * 2.0)(arr([1], np.int32)), "n, which is i32"),
    "complex argument, forward": (lambda: jacfwd(lambda z: z)(arr([1j], np.complex64)), "real floating"),
    "complex result, reverse": (lambda: jacrev(lambda x: x * 1j)(draw(2)), "real floating results"),
    "integer result, reverse": (lambda: jacrev(lambda x: {"k": x.astype("int32")})(draw(2)), "k"),
    "not holomorphic": (
        lambda: jacfwd(lambda z: z.real, holomorphic=True)(arr([1j], np.complex64)),
        "complex",
    ),
    "no pair": (lambda: jacrev(lambda x: x, has_aux=True)(draw(2)), "has_aux"),
    "no pair, forward": (lambda: jacfwd(lambda x: x, has_aux=True)(draw(2)), "has_aux"),
    "argnums out of range": (lambda: jacfwd(lambda x: x, 3)(draw(2)), "argnums"),
    "argnums": (lambda: hessian(lambda x: x, "x"), "argnums"),
    "no function": (lambda: jacrev(3), "takes a function"),
    "no array": (lambda: jacrev(lambda x: x)("a"), "argument x"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, says = ERRORS[name]
    with pytest.raises(errors.BlufuncError, match=says) as info:
        call()
    assert "test_jacobian.py" in info.value.where and info.value.fix


@pytest.mark.peer
def test_against_jax():
    import jax

    def program(np_):
        def f(p, x):
            h = np_.tanh(p["w"] @ x + p["b"])
            return {"h": h, "loss": np_.sum(h**2) * np_.sin(x[0])}

        return f

    rng = np.random.default_rng(0)
    p = {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": rng.normal(size=4).astype(np.float32)}
    x = rng.normal(size=3).astype(np.float32)
    ours, theirs = program(bnp), program(jax.numpy)
    for name in ("jacfwd", "jacrev", "hessian"):
        mine = {"jacfwd": jacfwd, "jacrev": jacrev, "hessian": hessian}[name]
        for argnums in (0, 1, (0, 1)):
            got = mine(ours, argnums)(p, x)
            want = getattr(jax, name)(theirs, argnums)(p, x)
            got, want = jax.tree.leaves(jax.tree.map(np.asarray, got)), jax.tree.leaves(want)
            assert len(got) == len(want)
            for g, w in zip(got, want):
                np.testing.assert_allclose(g, np.asarray(w), rtol=1e-4, atol=1e-5)
