"""A variational autoencoder of handwritten digits with a plane of latents.

D. P. Kingma and M. Welling, "Auto-Encoding Variational Bayes" (2014). A latent of two dimensions can be drawn
whole. The bound is reported for images held out, and its tighter form with many samples (Y. Burda et al.,
2016).

Expected at the default size: "bound" below 21.5 nats per image of 8 by 8 binary pixels, "tighter bound" one
to two nats below that.
"""

from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import lax, nn, optim, random
from examples.gallery import app
from examples.ports import digits

LATENT = 2


class Size(NamedTuple):
    epochs: int = 300
    batch: int = 100
    width: int = 128
    samples: int = 64  # of the tighter bound


SIZES = {
    "tiny": Size(epochs=8, width=32, samples=8),
    "cpu": Size(),
    "cuda": Size(epochs=2000, batch=500, width=1024, samples=4096),
}


def mlp(key, *sizes):
    keys = random.split(key, len(sizes) - 1)
    return [
        {"w": random.normal(k, (m, n)) / m**0.5, "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def apply(layers, x):
    for layer in layers[:-1]:
        x = nn.gelu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def encode(params, x):
    """Mean and logarithm of the standard deviation of the latent of an image."""
    mean, log_spread = jnp.split(apply(params["encoder"], x), 2)
    return mean, log_spread


def log_normal(x, mean=0.0, log_spread=0.0):
    return jnp.sum(-0.5 * ((x - mean) / jnp.exp(log_spread)) ** 2 - log_spread - 0.5 * jnp.log(2 * jnp.pi))


def log_weight(params, key, x):
    """log p(x, z) - log q(z | x) at a drawn z; its mean is at most log p(x)."""
    mean, log_spread = encode(params, x)
    z = mean + jnp.exp(log_spread) * random.normal(key, mean.shape)
    logits = apply(params["decoder"], z)
    log_likelihood = -jnp.sum(nn.softplus(jnp.where(x > 0.5, -logits, logits)))
    return log_likelihood + log_normal(z) - log_normal(z, mean, log_spread)


def loss(params, key, images):
    """Negative evidence lower bound, in nats per image."""
    return -bf.vmap(log_weight, (None, 0, 0))(params, random.split(key, len(images)), images).mean()


def bounds(params, key, images, n):
    """The negative bound, and the one of n importance samples."""

    def both(key, x):
        weights = bf.vmap(log_weight, (None, 0, None))(params, random.split(key, n), x)
        return weights.mean(), nn.logsumexp(weights) - jnp.log(n)

    plain, tighter = bf.vmap(both)(random.split(key, len(images)), images)
    return -plain.mean(), -tighter.mean()


def run(size, key, bar):
    (images, _), (test_images, test_labels) = digits.load()
    images, test_images = (jnp.asarray(x > 0.5, jnp.float32) for x in (images, test_images))
    encoder_key, decoder_key, train_key, test_key = random.split(key, 4)
    params = {
        "encoder": mlp(encoder_key, 64, size.width, size.width, 2 * LATENT),
        "decoder": mlp(decoder_key, LATENT, size.width, size.width, 64),
    }
    optimizer = optim.adamw(
        optim.cosine_decay_schedule(2e-3, size.epochs * (len(images) // size.batch)), weight_decay=0.02
    )

    @bf.jit
    def epoch(params, state, key):
        order_key, key = random.split(key)
        batches = random.permutation(order_key, images).reshape(-1, size.batch, 64)

        def step(carry, x):
            params, state = carry
            key, batch = x
            value, grads = bf.value_and_grad(loss)(params, key, batch)
            updates, state = optimizer.update(grads, state, params)
            return (optim.apply_updates(params, updates), state), value

        carry, values = lax.scan(step, (params, state), (random.split(key, len(batches)), batches))
        return *carry, values.mean()

    state, losses = optimizer.init(params), []
    for i in bar(size.epochs):
        params, state, value = epoch(params, state, random.fold_in(train_key, i))
        losses.append(value)
        bar.say(loss=value)
    bound, tighter = bf.jit(lambda p: bounds(p, test_key, test_images, size.samples))(params)

    figure, (left, right) = app.subplots(1, 2, height=3.5)
    ticks = np.linspace(-2.2, 2.2, 14, dtype=np.float32)
    grid = jnp.stack(jnp.meshgrid(ticks, -ticks), -1)
    app.images(left, nn.sigmoid(apply(params["decoder"], grid)).reshape(14, 14, 8, 8))
    left.set_title("decoded plane of latents")
    at = np.asarray(bf.vmap(lambda x: encode(params, x)[0])(test_images))
    for label in range(10):
        points = at[test_labels == label]
        right.scatter(*points.T, s=6, color=f"C{label}", label=str(label))
    right.legend(frameon=False, ncols=2, fontsize=7, loc="upper left")
    right.set_title("means of test images")
    numbers = {"bound": bound, "tighter bound": tighter, "training loss": losses[-1]}
    return app.Result({name: float(x) for name, x in numbers.items()}, figure)


if __name__ == "__main__":
    app.main(run, SIZES)
