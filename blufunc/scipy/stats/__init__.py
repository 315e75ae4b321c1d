"""SciPy's ``stats``: distributions, and statistics of samples.

A face, above ``blufunc.numpy`` and ``scipy.special``. A distribution is a module with the functions ``logpdf``,
``pdf``, ``cdf`` and so on, as in JAX; ``blufunc.random`` draws from most of them. With ``loc`` and ``scale`` it is the
distribution of ``scale * x + loc``. Arguments are scalars or arrays that broadcast together; integers become float32.
"""

from blufunc import _lazy

with _lazy.names(__name__):
    from blufunc.scipy.stats import bernoulli as bernoulli
    from blufunc.scipy.stats import beta as beta
    from blufunc.scipy.stats import betabinom as betabinom
    from blufunc.scipy.stats import binom as binom
    from blufunc.scipy.stats import cauchy as cauchy
    from blufunc.scipy.stats import chi2 as chi2
    from blufunc.scipy.stats import dirichlet as dirichlet
    from blufunc.scipy.stats import expon as expon
    from blufunc.scipy.stats import gamma as gamma
    from blufunc.scipy.stats import gennorm as gennorm
    from blufunc.scipy.stats import geom as geom
    from blufunc.scipy.stats import gumbel_l as gumbel_l
    from blufunc.scipy.stats import gumbel_r as gumbel_r
    from blufunc.scipy.stats import laplace as laplace
    from blufunc.scipy.stats import logistic as logistic
    from blufunc.scipy.stats import multinomial as multinomial
    from blufunc.scipy.stats import multivariate_normal as multivariate_normal
    from blufunc.scipy.stats import nbinom as nbinom
    from blufunc.scipy.stats import norm as norm
    from blufunc.scipy.stats import pareto as pareto
    from blufunc.scipy.stats import poisson as poisson
    from blufunc.scipy.stats import t as t
    from blufunc.scipy.stats import truncnorm as truncnorm
    from blufunc.scipy.stats import uniform as uniform
    from blufunc.scipy.stats import vonmises as vonmises
    from blufunc.scipy.stats import wrapcauchy as wrapcauchy
    from blufunc.scipy.stats.kde import gaussian_kde as gaussian_kde
    from blufunc.scipy.stats.samples import ModeResult as ModeResult
    from blufunc.scipy.stats.samples import mode as mode
    from blufunc.scipy.stats.samples import rankdata as rankdata
    from blufunc.scipy.stats.samples import sem as sem
