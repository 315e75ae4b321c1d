"""numpyro: a Bayesian regression by NUTS and by SVI, and log densities."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, autoguide


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(x @ w, noise), obs=y)


def results():
    x = jax.random.normal(jax.random.key(0), (20, 2))
    y = x @ jnp.array([1.0, -2.0]) + 0.1
    mcmc = MCMC(NUTS(model), num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(1), x, y)
    svi = SVI(model, autoguide.AutoNormal(model), numpyro.optim.Adam(0.05), Trace_ELBO())
    fitted = svi.run(jax.random.key(2), 50, x, y, progress_bar=False)
    points = jnp.array([0.2, 0.7])
    densities = {
        f"{d.__class__.__name__}": d.log_prob(points)
        for d in (dist.Beta(2.0, 3.0), dist.Gamma(2.0, 1.0), dist.StudentT(3.0), dist.Cauchy(0.0, 1.0))
    }
    draws = {
        f"{name} draws": d.sample(jax.random.key(3), (5,))
        for name, d in {"dirichlet": dist.Dirichlet(jnp.ones(3)), "poisson": dist.Poisson(3.0)}.items()
    }
    return {
        "nuts mean": mcmc.get_samples()["w"].mean(0),
        "nuts shape": jnp.shape(mcmc.get_samples()["noise"]),
        "svi losses": fitted.losses,
        "svi": jax.tree.leaves(fitted.params),
        **densities,
        **draws,
    }
