"""Values and derivatives at ties, zeros, branch points and infinities.

Each row says what they are there, by hand. Where a function has no derivative, as abs at 0, the row states the
convention: the symmetric one for abs and for ties of max and min, none handed on for rectifiers, and the density, at
the ends of a support, for probabilities.
"""

import math

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import nn
from blufunc.scipy import special, stats
from tests.transforms.common import arr

inf, nan, pi, e = math.inf, math.nan, math.pi, math.e
LN2 = math.log(2)
GATE = 1 / (1 + e)  # of 1: how much of it is missing

# function, point, value, first and second derivative
ONE = [
    ("numpy", bnp.abs, 0, 0, 0, 0),
    ("numpy", bnp.abs, -inf, inf, -1, 0),
    ("numpy", bnp.fabs, -2, 2, -1, 0),
    ("numpy", bnp.sign, 0, 0, 0, 0),
    ("numpy", bnp.sinc, 0, 1, 0, -(pi**2) / 3),
    ("numpy", bnp.sinc, 1e-9, 1, -(pi**2) / 3 * 1e-9, -(pi**2) / 3),
    ("numpy", bnp.sinc, 1, 0, -1, 2),
    ("numpy", bnp.sinc, 0.0954, None, None, None),  # on either side of where its series ends
    ("numpy", bnp.sinc, 0.0956, None, None, None),
    ("numpy", bnp.i0, 0, 1, 0, 0.5),
    ("numpy", bnp.sqrt, 0, 0, inf, -inf),
    ("numpy", bnp.square, 0, 0, 0, 2),
    ("numpy", bnp.nan_to_num, inf, np.finfo(np.float64).max, 0, 0),
    ("numpy", bnp.nan_to_num, nan, 0, 0, 0),
    ("numpy", bnp.log1p, -1, -inf, inf, -inf),
    ("nn", nn.relu, 0, 0, 0, 0),
    ("nn", lambda x: x * nn.relu(x), 0, 0, 0, 0),
    ("nn", lambda x: x * nn.relu(x), 2, 4, 4, 2),
    ("nn", nn.relu6, 6, 6, 0, 0),
    ("nn", lambda x: x * nn.relu6(x), 6, 36, 6, 0),
    ("nn", lambda x: x * nn.hard_tanh(x), 1, 1, 2, 2),
    ("nn", nn.hard_silu, -3, 0, 0, 0),
    ("nn", nn.hard_silu, 0, 0, 0.5, 1 / 3),
    ("nn", nn.hard_silu, 3, 3, 1, 0),
    ("nn", nn.hard_sigmoid, -3, 0, 0, 0),
    ("nn", nn.sparse_plus, -1, 0, 0, 0),
    ("nn", nn.sparse_plus, 0, 0.25, 0.5, 0.5),
    ("nn", nn.sparse_plus, 1, 1, 1, 0),
    ("nn", nn.sparse_plus, inf, inf, 1, 0),
    ("nn", nn.sparse_plus, -inf, 0, 0, 0),
    ("nn", nn.leaky_relu, 0, 0, 1, 0),
    ("nn", nn.elu, 0, 0, 1, 1),
    ("nn", nn.elu, inf, inf, 1, 0),
    ("nn", nn.elu, -inf, -1, 0, 0),
    ("nn", nn.celu, -inf, -1, 0, 0),
    ("nn", nn.softplus, 0, LN2, 0.5, 0.25),
    ("nn", nn.softplus, 800, 800, 1, 0),
    ("nn", nn.softplus, inf, inf, 1, 0),
    ("nn", nn.softplus, -inf, 0, 0, 0),
    ("nn", nn.log_sigmoid, 0, -LN2, 0.5, -0.25),
    ("nn", nn.soft_sign, 0, 0, 1, 0),
    ("nn", nn.silu, 0, 0, 0.5, 0.5),
    ("nn", nn.gelu, 0, 0, 0.5, 2 * math.sqrt(2 / pi) / 2),
    ("nn", nn.squareplus, 0, 1, 0.5, 0.25),
    ("nn", nn.log1mexp, LN2, -LN2, 1, -2),
    ("special", special.expit, 0, 0.5, 0.25, 0),
    ("special", special.entr, 0, 0, inf, -inf),
    ("special", special.entr, 1, 0, -1, -1),
    ("special", special.entr, -1, -inf, 0, 0),
    ("special", special.i0, 0, 1, 0, 0.5),
    ("special", special.i1, 0, 0, 0.5, 0),
    ("special", special.log_ndtr, 0, -LN2, math.sqrt(2 / pi), -2 / pi),
    ("special", special.spence, 1, 0, -1, 0.5),
    ("special", special.spence, 0.951, None, None, None),
    ("special", special.spence, 0.949, None, None, None),
    ("laplace", stats.laplace.cdf, 0, 0.5, 0.5, 0.5),
    ("laplace", stats.laplace.cdf, -1, 0.5 / e, 0.5 / e, 0.5 / e),
    ("laplace", stats.laplace.cdf, 1, 1 - 0.5 / e, 0.5 / e, -0.5 / e),
    ("laplace", stats.laplace.pdf, 0, 0.5, 0, 0),
    ("expon", stats.expon.cdf, 0, 0, 1, -1),
    ("expon", stats.expon.cdf, -1, 0, 0, 0),
    ("expon", stats.expon.logcdf, -1, -inf, 0, 0),
    ("expon", stats.expon.logcdf, LN2, -LN2, 1, -2),
    ("expon", stats.expon.sf, 0, 1, -1, 1),
    ("expon", stats.expon.logsf, 0, 0, -1, 0),
    ("expon", stats.expon.logsf, -1, 0, 0, 0),
    ("uniform", stats.uniform.cdf, 0, 0, 1, 0),
    ("uniform", stats.uniform.cdf, 1, 1, 1, 0),
    ("uniform", stats.uniform.cdf, 2, 1, 0, 0),
    ("logistic", stats.logistic.cdf, 0, 0.5, 0.25, 0),
    ("pareto", lambda x: stats.pareto.logcdf(x, 2.0), 0.5, -inf, 0, 0),
    ("pareto", lambda x: stats.pareto.logcdf(x, 2.0), 2, math.log(0.75), 1 / 3, -11 / 18),
    ("gamma", lambda x: stats.gamma.cdf(x, 2.0), -1, 0, 0, 0),
    ("gamma", lambda x: stats.gamma.cdf(x, 2.0), 1, 1 - 2 / e, 1 / e, 0),
    ("gamma", lambda x: stats.gamma.cdf(x, 1.0), 0, 0, 1, -1),
    ("gamma", lambda x: stats.gamma.logcdf(x, 2.0), -1, -inf, 0, 0),
    ("gamma", lambda x: stats.gamma.logsf(x, 2.0), -1, 0, 0, 0),
    ("chi2", lambda x: stats.chi2.logcdf(x, 4.0), -1, -inf, 0, 0),
    ("beta", lambda x: stats.beta.cdf(x, 1.0, 1.0), 0, 0, 1, 0),
    ("beta", lambda x: stats.beta.cdf(x, 1.0, 1.0), 1, 1, 1, 0),
    ("beta", lambda x: stats.beta.logcdf(x, 2.0, 3.0), -1, -inf, 0, 0),
    ("beta", lambda x: stats.beta.logsf(x, 2.0, 3.0), 2, -inf, 0, 0),
    ("truncnorm", lambda x: stats.truncnorm.logcdf(x, -1.0, 2.0), -3, -inf, 0, 0),
    ("truncnorm", lambda x: stats.truncnorm.cdf(x, -1.0, 2.0), 3, 1, 0, 0),
    ("truncnorm", lambda x: stats.truncnorm.sf(x, -1.0, 2.0), -3, 1, 0, 0),
]

# function, point, value, gradient, Hessian
TWO = [
    (bnp.maximum, (1, 1), 1, (0.5, 0.5), ((0, 0), (0, 0))),
    (bnp.minimum, (2, 2), 2, (0.5, 0.5), ((0, 0), (0, 0))),
    (bnp.logaddexp, (0, 0), LN2, (0.5, 0.5), ((0.25, -0.25), (-0.25, 0.25))),
    (bnp.logaddexp, (3, 2), 3 + math.log1p(1 / e), (1 - GATE, GATE), None),
    (bnp.logaddexp, (inf, 1), inf, (1, 0), ((0, 0), (0, 0))),
    (bnp.logaddexp, (-inf, 1), 1, (0, 1), ((0, 0), (0, 0))),
    (bnp.logaddexp, (-inf, -inf), -inf, (0.5, 0.5), ((0, 0), (0, 0))),
    (bnp.logaddexp2, (1, 1), 2, (0.5, 0.5), ((LN2 / 4, -LN2 / 4), (-LN2 / 4, LN2 / 4))),
    (bnp.hypot, (0, 0), 0, (0, 0), None),
    (bnp.hypot, (3, 4), 5, (0.6, 0.8), ((0.128, -0.096), (-0.096, 0.072))),
    (bnp.hypot, (-1, 0), 1, (-1, 0), ((0, 0), (0, 1))),
    (bnp.hypot, (1e200, 1e200), math.hypot(1e200, 1e200), (math.sqrt(0.5),) * 2, ((0, 0), (0, 0))),
    (bnp.hypot, (inf, 1), inf, (1, 0), ((0, 0), (0, 0))),
    (bnp.power, (2, 0), 1, (0, LN2), ((0, 0.5), (0.5, LN2**2))),
    (bnp.power, (0, 2), 0, (0, 0), None),
    (special.xlogy, (0, 2), 0, (LN2, 0), ((0, 0.5), (0.5, 0))),
    (special.xlog1py, (0, 1), 0, (LN2, 0), ((0, 0.5), (0.5, 0))),
    (special.rel_entr, (1, 1), 0, (1, -1), ((1, -1), (-1, 1))),
    (special.kl_div, (1, 1), 0, (0, 0), ((1, -1), (-1, 1))),
    (special.betaln, (1, 1), 0, (-1, -1), ((1, 1 - pi**2 / 6), (1 - pi**2 / 6, 1))),
    (lambda x, y: nn.logsumexp(bnp.stack([x, y])), (0, 0), LN2, (0.5, 0.5), ((0.25, -0.25), (-0.25, 0.25))),
    (lambda x, y: nn.logsumexp(bnp.stack([x, y])), (-inf, 0), 0, (0, 1), ((0, 0), (0, 0))),
    (lambda x, y: nn.softmax(bnp.stack([x, y]))[0], (0, 0), 0.5, (0.25, -0.25), ((0, 0), (0, 0))),
    (lambda x, y: bnp.max(bnp.stack([x, y])), (1, 1), 1, (0.5, 0.5), ((0, 0), (0, 0))),
    (lambda x, y: bnp.var(bnp.stack([x, y])), (1, 1), 0, (0, 0), ((0.5, -0.5), (-0.5, 0.5))),
    (lambda x, y: bnp.prod(bnp.stack([x, y])), (0, 0), 0, (0, 0), ((0, 1), (1, 0))),
    (
        lambda x, y: bnp.linalg.norm(bnp.stack([x, y])),
        (3, 4),
        5,
        (0.6, 0.8),
        ((0.128, -0.096), (-0.096, 0.072)),
    ),
    (lambda x, y: bnp.linalg.norm(bnp.stack([x, y]), 1), (0, -1), 1, (0, -1), ((0, 0), (0, 0))),
]


def name_of(f):
    return getattr(f, "__name__", "f").strip("<>")


def equal(got, want, what):
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-11, atol=1e-12, err_msg=what
    )


def second_by_differences(f, x, h=1e-3):
    values = [float(f(arr(x + k * h))) for k in (-2, -1, 0, 1, 2)]
    first = (values[0] - 8 * values[1] + 8 * values[3] - values[4]) / (12 * h)
    second = (-values[0] + 16 * values[1] - 30 * values[2] + 16 * values[3] - values[4]) / (12 * h * h)
    return first, second


@pytest.mark.second
@pytest.mark.parametrize(
    "f, x, value, first, second",
    [pytest.param(*row[1:], id=f"{row[0]}.{name_of(row[1])}({row[2]})") for row in ONE],
)
def test_one_operand(f, x, value, first, second):
    v, g = arr(x), bf.grad(f)
    if value is None:
        first, second = second_by_differences(f, x)
        np.testing.assert_allclose(float(g(v)), first, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(float(bf.grad(g)(v)), second, rtol=1e-6)
        return
    equal(f(v), value, "value")
    equal(g(v), first, "grad")
    equal(bf.jvp(f, (v,), (arr(1.0),))[1], first, "jvp")
    equal(bf.grad(g)(v), second, "grad of grad")
    equal(bf.jvp(g, (v,), (arr(1.0),))[1], second, "jvp of grad")
    equal(bf.grad(lambda u: bf.jvp(f, (u,), (arr(1.0),))[1])(v), second, "grad of jvp")
    equal(bf.vmap(bf.grad(g))(bnp.stack([v, v])), [second] * 2, "vmap of grad of grad")
    equal(bf.jit(bf.grad(g))(v), second, "jit of grad of grad")


@pytest.mark.parametrize(
    "f, point, value, gradient, hessian", [pytest.param(*row, id=f"{name_of(row[0])}{row[1]}") for row in TWO]
)
def test_two_operands(f, point, value, gradient, hessian):
    of_vector = lambda v: f(v[0], v[1])
    v = arr(np.array(point, np.float64))
    equal(of_vector(v), value, "value")
    equal(bf.grad(of_vector)(v), gradient, "grad")
    equal(bf.jacfwd(of_vector)(v), gradient, "jacfwd")
    if hessian is None:
        return
    equal(bf.hessian(of_vector)(v), hessian, "hessian")
    equal(bf.jacrev(bf.jacrev(of_vector))(v), hessian, "grad of grad")
    equal(bf.jit(bf.jacfwd(bf.jacfwd(of_vector)))(v), hessian, "jvp of jvp")


SWEEP = [-6.0, -3.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0, 6.0]

PEERS = {
    "nn": "relu relu6 leaky_relu elu selu celu hard_tanh gelu sigmoid silu softplus log_sigmoid mish hard_sigmoid "
    "hard_silu sparse_plus sparse_sigmoid squareplus",
    "numpy": "square log1p exp2 expm1 arcsinh arctan tanh cosh sinh nan_to_num",
    "scipy.special": "ndtr log_ndtr expit erf erfc",
    "scipy.stats.norm": "logpdf pdf cdf logcdf sf logsf",
    "scipy.stats.cauchy": "logpdf pdf cdf logcdf sf logsf",
    "scipy.stats.logistic": "logpdf pdf cdf sf",
    "scipy.stats.gumbel_l": "logpdf pdf cdf logcdf sf logsf",
    "scipy.stats.gumbel_r": "logpdf pdf cdf logcdf sf logsf",
    "scipy.stats.uniform": "logpdf pdf cdf",
}


def member(root, path):
    for part in path.split("."):
        root = getattr(root, part)
    return root


@pytest.mark.peer
@pytest.mark.parametrize(
    "path", [f"{module}.{name}" for module, names in PEERS.items() for name in names.split()]
)
def test_beside_jax(path):
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax.scipy")
    with jax.enable_x64(True):
        theirs = member(jax, path)
        ours = member(bf, path)
        x = np.array(SWEEP)
        for k, what in enumerate(["value", "grad", "grad of grad"]):
            f, g = ours, theirs
            for _ in range(k):
                f, g = bf.grad(f), jax.grad(g)
            got, want = bf.vmap(f)(arr(x)), jax.vmap(g)(jax.numpy.asarray(x))
            np.testing.assert_allclose(
                np.asarray(got), np.asarray(want), rtol=1e-9, atol=1e-12, err_msg=f"{what} at {SWEEP}"
            )
