"""Rows against JAX: ``scipy.special``, ``scipy.stats`` and ``random``."""

import functools

import numpy as np

from tests.peers.peer_row import A, Row


def at(m, path):
    """A function by its path."""
    return functools.reduce(getattr, path.split("."), m)


def fun(name, f, *args, **more):
    """A row with a function of its own."""
    return Row(name, args, f, **more)


SPECIAL_1 = {
    "gamma": (0.3, 5), "gammaln": (0.3, 5), "digamma": (0.5, 5), "erf": (-2, 2), "erfc": (-2, 2), "erfinv": (-0.9, 0.9),
    "expit": (-4, 4), "logit": (0.1, 0.9), "entr": (0.1, 2), "i0": (-3, 3), "i0e": (-3, 3),
    "i1": (-3, 3), "i1e": (-3, 3),
    "ndtr": (-3, 3), "log_ndtr": (-8, 4), "ndtri": (0.05, 0.95), "expi": (0.3, 3),
    "logsumexp": (-3, 3), "softmax": (-3, 3), "log_softmax": (-3, 3),
}  # fmt: skip
SPECIAL_2 = {
    "betaln": ((0.5, 4), (0.5, 4)), "beta": ((0.5, 4), (0.5, 4)), "gammainc": ((0.5, 4), (0.5, 4)),
    "gammaincc": ((0.5, 4), (0.5, 4)), "xlogy": ((0.3, 2), (0.3, 2)), "xlog1py": ((0.3, 2), (0.3, 2)),
    "rel_entr": ((0.3, 2), (0.3, 2)), "kl_div": ((0.3, 2), (0.3, 2)), "zeta": ((1.5, 4), (0.5, 4)),
    "poch": ((0.5, 3), (0.5, 3)),
}  # fmt: skip
P = (A((5,), 0.5, 3.0), A((5,), -0.5, 0.5), A((5,), 0.5, 2))
SPECIAL = [
    *(
        Row(
            f"scipy.special.{n} itself", (A((2, 4), *ends),), lambda m, x, n=n: getattr(m.scipy.special, n)(x)
        )
        for n, ends in SPECIAL_1.items()
    ),
    *(
        Row(
            f"scipy.special.{n}",
            (A((5,), *a), A((5,), *b)),
            order=0 if n in ("zeta", "poch") else 1 if "gammainc" in n else 2,
        )
        for n, (a, b) in SPECIAL_2.items()
    ),
    fun("scipy.special.exp1", lambda m, x: m.scipy.special.exp1(x), A((5,), 0.3, 3), order=0),
    fun(
        "scipy.special.spence",
        lambda m, x: m.scipy.special.spence(x),
        A((5,), 0.3, 3),
        differs=("JAX's reverse derivative is NaN between 0.5 and 1.5", ("vjp", "jvp of vjp", "vmap of vjp")),
    ),
    fun(
        "scipy.special.betainc",
        lambda m, a, b, x: m.scipy.special.betainc(a, b, x),
        A((5,), 0.5, 3),
        A((5,), 0.5, 3),
        A((5,), 0.1, 0.9),
        order=0,
    ),
    fun("scipy.special.polygamma", lambda m, x: m.scipy.special.polygamma(np.int32(2), x), A((5,), 0.5, 4)),
    fun("scipy.special.multigammaln", lambda m, x: m.scipy.special.multigammaln(x, 3), A((5,), 2, 5)),
    fun("scipy.special.factorial", lambda m, x: m.scipy.special.factorial(x), A((5,), 0.5, 5)),
    fun("scipy.special.gammasgn", lambda m, x: m.scipy.special.gammasgn(x), A((6,), -3, 3), order=0),
    fun(
        "scipy.special.xlogy at zero",
        lambda m, x, y: m.scipy.special.xlogy(x, y),
        A((3,), make=np.zeros_like),
        A((3,), make=np.zeros_like),
        order=0,
    ),
    fun(
        "scipy.special.logsumexp with weights",
        lambda m, x, b: m.scipy.special.logsumexp(x, axis=1, b=b),
        A((3, 4)),
        A((3, 4), 0.5, 2),
    ),
]


def stat(name, *args, **more):
    """A function of a distribution."""
    return fun(
        f"scipy.stats.{name}", lambda m, *xs: at(m.scipy.stats, name.split(" ")[0])(*xs), *args, **more
    )


U, S = A((5,), 0.1, 0.9), P[2]
K = A((5,), 0, 4, make=np.floor)
STATS = [
    *(
        stat(f"{d}.{n}", P[0], P[1], S)
        for d in ("norm", "cauchy")
        for n in "logpdf pdf cdf logcdf sf logsf".split()
    ),
    # JAX has no derivative of the densities of Gumbel's distributions: it raises an error about float0
    *(
        stat(f"{d}.{n}", P[0], P[1], S, order=0 if "pdf" in n else 2)
        for d in ("gumbel_l", "gumbel_r")
        for n in "logpdf pdf cdf logcdf sf logsf".split()
    ),
    *(
        stat(f"{d}.{n}", P[0], P[1], S)
        for d in ("laplace", "logistic", "expon")
        for n in ("logpdf", "pdf", "cdf")
    ),
    *(stat(f"{d}.ppf", U, P[1], S) for d in ("norm", "cauchy", "logistic", "uniform", "expon")),
    *(stat(f"{d}.logpdf", P[0], S, P[1], S, tol=2) for d in ("gamma", "chi2", "t")),
    stat("gamma.cdf", P[0], S, order=1),
    stat("chi2.sf", P[0], S, order=1),
    stat("beta.logpdf", U, S, S, tol=2),
    stat("beta.cdf", U, S, S, order=0),
    stat("pareto.logpdf", A((5,), 1.5, 4), S),
    stat("gennorm.logpdf", P[0], S),
    stat("vonmises.logpdf", P[1], S),
    stat("wrapcauchy.logpdf", P[0], A((5,), 0.2, 0.8)),
    stat("truncnorm.logpdf", A((5,), -0.4, 0.4), A((5,), -2, -1), A((5,), 1, 2), tol=4),
    stat("uniform.logpdf", U, A((5,), -1, 0), A((5,), 1, 2), order=1),
    stat("bernoulli.logpmf", A((5,), 0, 1, "int32"), U),
    stat("binom.logpmf", K, A((5,), 5, 9, make=np.floor), U, order=1),
    stat("geom.logpmf", A((5,), 1, 4, make=np.floor), U, order=1),
    stat("nbinom.logpmf", K, S, U, order=1),
    stat("poisson.logpmf", A((5,), 0, 4, "int32"), S),
    stat("poisson.cdf", A((5,), 0, 4, "int32"), S, order=0),
    stat("betabinom.logpmf", K, A((5,), 5, 9, make=np.floor), S, S, order=0, dtypes=("float32",)),
    stat(
        "betabinom.logpmf in float64",
        K,
        A((5,), 5, 9, make=np.floor),
        S,
        S,
        order=0,
        dtypes=("float64",),
        differs=("JAX is off by up to 1e-6 in float64; blufunc matches SciPy to rounding", ("value", "vmap")),
    ),
    stat(
        "multinomial.logpmf",
        A((3,), 1, 1, "int32"),
        A((), 3, 3, "int32"),
        A((3,), 0.2, 1, make=lambda p: p / p.sum()),
        order=0,
    ),
    stat("dirichlet.logpdf", A((3,), 0.2, 1, make=lambda p: p / p.sum()), A((3,), 0.5, 3), order=0, tol=4),
    stat(
        "multivariate_normal.logpdf",
        A((3,)),
        A((3,)),
        A((3, 3), -1, 1, make=lambda x: x @ x.T + 2 * np.eye(3)),
        tol=2,
    ),
    stat("rankdata", A((6,), 0, 3, "int32"), order=0, dtypes=("float32",)),
    stat("sem", A((6, 3))),
    stat("mode", A((9,), 0, 3, "int32"), order=0),
]


def sample(name, f, *args, **more):
    """Samples: ``f(m, key, dtype, *parameters)``."""
    args = args or (A((3,), 0.5, 2),)
    return fun(f"random.{name}", lambda m, *xs: f(m, m.random.key(42), xs[0].dtype, *xs), *args, **more)


PLAIN = "uniform normal exponential gumbel laplace logistic cauchy maxwell".split()
INITIALIZERS = (
    "glorot_normal glorot_uniform he_normal he_uniform lecun_normal lecun_uniform "
    "normal uniform truncated_normal"
).split()
RANDOM = [
    *(sample(n, lambda m, k, d, x, n=n: x * getattr(m.random, n)(k, (7, 3), d), order=1) for n in PLAIN),
    sample("bits", lambda m, k, d, x: m.random.bits(k, (5,), "uint32"), order=0),
    sample("bits of 8", lambda m, k, d, x: m.random.bits(k, (5,), "uint8"), order=0),
    sample("split", lambda m, k, d, x: m.random.key_data(m.random.split(k, (2, 3))), order=0),
    sample("fold_in", lambda m, k, d, x: m.random.key_data(m.random.fold_in(k, 7)), order=0),
    sample(
        "keys under vmap",
        lambda m, k, d, x: m.vmap(lambda k: m.random.normal(k, (2,), d))(m.random.split(k, 4)),
        order=0,
    ),
    sample("randint", lambda m, k, d, x: m.random.randint(k, (9,), -5, 100, "int32"), order=0),
    sample("randint of bytes", lambda m, k, d, x: m.random.randint(k, (9,), 0, 200, "uint8"), order=0),
    sample(
        "uniform in a range",
        lambda m, k, d, a, b: m.random.uniform(k, (3,), d, a, a + b),
        A((3,)),
        A((3,), 0.5, 2),
    ),
    sample("bernoulli", lambda m, k, d, p: m.random.bernoulli(k, p, (4, 3)), A((3,), 0.2, 0.8), order=0),
    sample("categorical", lambda m, k, d, l: m.random.categorical(k, l, shape=(6, 3)), A((3, 4)), order=0),
    sample("permutation", lambda m, k, d, x: m.random.permutation(k, x), A((9,))),
    sample("permutation of rows", lambda m, k, d, x: m.random.permutation(k, x, independent=True), A((5, 3))),
    sample("choice", lambda m, k, d, x: m.random.choice(k, x, (4,)), A((9,)), dtypes=("float32",)),
    sample(
        "choice without replacement", lambda m, k, d, x: m.random.choice(k, x, (4,), replace=False), A((9,))
    ),
    sample(
        "choice with weights",
        lambda m, k, d, x, p: m.random.choice(k, x, (4,), p=p / p.sum()),
        A((9,)),
        A((9,), 0.5, 2),
        order=0,
    ),
    sample(
        "truncated_normal",
        lambda m, k, d, a, b: m.random.truncated_normal(k, a, b, (3,), d),
        A((3,), -2, -1),
        A((3,), 0.5, 2),
        tol=10,
    ),
    sample("gamma", lambda m, k, d, a: m.random.gamma(k, a, (4, 3), d), order=1, tol=40),
    sample("beta", lambda m, k, d, a: m.random.beta(k, a, a + 1, (3,), d), order=1, tol=40),
    sample("dirichlet", lambda m, k, d, a: m.random.dirichlet(k, a, (2,), d), order=1, tol=40),
    sample("t", lambda m, k, d, a: m.random.t(k, a, (3,), d), order=1, tol=40),
    sample("chisquare", lambda m, k, d, a: m.random.chisquare(k, a, (3,), d), order=1, tol=40),
    sample("poisson", lambda m, k, d, a: m.random.poisson(k, 8 * a, (4, 3), "int32"), order=0),
    sample(
        "binomial", lambda m, k, d, p: m.random.binomial(k, 20.0, p, (4, 3), d), A((3,), 0.2, 0.8), order=0
    ),
    sample(
        "geometric", lambda m, k, d, p: m.random.geometric(k, p, (4, 3), "int32"), A((3,), 0.2, 0.8), order=0
    ),
    sample("pareto", lambda m, k, d, b: m.random.pareto(k, b, (3,), d), tol=4),
    sample("rayleigh", lambda m, k, d, b: m.random.rayleigh(k, b, (3,), d)),
    sample("lognormal", lambda m, k, d, b: m.random.lognormal(k, b, (3,), d), tol=4),
    sample(
        "weibull_min",
        lambda m, k, d, a, b: m.random.weibull_min(k, a, b, (3,), d),
        A((3,), 0.5, 2),
        A((3,), 0.5, 2),
        tol=4,
    ),
    sample("triangular", lambda m, k, d, a: m.random.triangular(k, -a, a / 2, a, (3,), d), order=1, tol=4),
    sample(
        "rademacher", lambda m, k, d, x: m.random.rademacher(k, (7,), "int32"), order=0, dtypes=("float32",)
    ),
    sample(
        "multivariate_normal",
        lambda m, k, d, x, c: m.random.multivariate_normal(k, x, c, (4,), d),
        A((3,)),
        A((3, 3), -1, 1, make=lambda x: x @ x.T + 2 * np.eye(3)),
        tol=4,
    ),
    sample("orthogonal", lambda m, k, d, x: m.random.orthogonal(k, 3, (), d), order=0, tol=2),
    sample("ball", lambda m, k, d, x: m.random.ball(k, 3, 2, (4,), d), order=0, tol=4, dtypes=("float32",)),
    sample(
        "choice and rademacher with x64",
        lambda m, k, d, x: (m.random.choice(k, x, (4,)), m.random.rademacher(k, (7,), "int32")),
        A((9,)),
        order=0,
        dtypes=("float64",),
        differs=(
            "the intermediates that JAX's x64 switch widens in a sampler stay 32-bit: one key gives one sample",
            ("value", "vmap"),
        ),
    ),
    *(
        sample(
            f"nn.initializers.{n}",
            lambda m, k, d, x, n=n: getattr(m.nn.initializers, n)()(k, (4, 6), d),
            order=0,
        )
        for n in INITIALIZERS
    ),
]
ROWS = [*SPECIAL, *STATS, *RANDOM]
