"""distrax: distributions, bijectors, and the inverse of a function from its jaxpr."""

import distrax
import jax
import jax.numpy as jnp


def results():
    key = jax.random.PRNGKey(0)
    normal = distrax.MultivariateNormalDiag(jnp.zeros(3), jnp.ones(3) * 2)
    mixture = distrax.MixtureSameFamily(
        distrax.Categorical(jnp.zeros(2)), distrax.Normal(jnp.array([-1.0, 1.0]), jnp.ones(2))
    )
    flow = distrax.Transformed(
        distrax.Normal(0.0, 1.0), distrax.Chain([distrax.Lambda(jnp.exp), distrax.ScalarAffine(1.0, 2.0)])
    )
    inverse = distrax.Inverse(distrax.Lambda(lambda x: jnp.tanh(x * 2.0)))
    hmm = distrax.HMM(
        distrax.Categorical(jnp.zeros(2)),
        distrax.Categorical(jnp.log(jnp.array([[0.9, 0.1], [0.2, 0.8]]))),
        distrax.Normal(jnp.array([-1.0, 1.0]), jnp.ones(2)),
    )
    sample, log_prob = normal.sample_and_log_prob(seed=key, sample_shape=(4,))
    return {
        "sample": sample,
        "log_prob": log_prob,
        "mixture": mixture.log_prob(jnp.linspace(-2, 2, 5)),
        "mixture gradient": jax.grad(lambda x: mixture.log_prob(x))(0.3),
        "flow": flow.log_prob(jnp.array([0.5, 2.0])),
        "inverse": inverse.forward(jnp.array([0.1, 0.5])),
        "kl": distrax.Normal(0.0, 1.0).kl_divergence(distrax.Normal(1.0, 2.0)),
        "hmm": hmm.forward(jnp.array([0.1, -0.3, 1.2]))[0],
        "jit": jax.jit(lambda d, x: d.log_prob(x))(normal, jnp.ones(3)),
        "vmap": jax.vmap(lambda loc: distrax.Normal(loc, 1.0).entropy())(jnp.arange(3.0)),
    }
