"""A variational autoencoder of small binary digits.

D. P. Kingma and M. Welling, "Auto-Encoding Variational Bayes".
"""

import numpy as np

import blufunc.numpy as jnp
import blufunc.optim as optax
from blufunc import jit, lax, nn, random, value_and_grad
from examples.ports import digits

HIDDEN, LATENT = 128, 8
BATCH = 100
EPOCHS = 40


def dense(key, m, n):
    return {"w": random.normal(key, (m, n)) * jnp.sqrt(1.0 / m), "b": jnp.zeros(n)}


def init_params(key):
    sizes = {
        "in": (64, HIDDEN),
        "mean": (HIDDEN, LATENT),
        "spread": (HIDDEN, LATENT),
        "back": (LATENT, HIDDEN),
        "out": (HIDDEN, 64),
    }
    keys = random.split(key, len(sizes))
    return {name: dense(k, m, n) for k, (name, (m, n)) in zip(keys, sizes.items(), strict=True)}


def apply(layer, x):
    return x @ layer["w"] + layer["b"]


def encode(params, images):
    h = nn.gelu(apply(params["in"], images))
    return apply(params["mean"], h), nn.softplus(apply(params["spread"], h)) + 1e-3


def decode(params, z):
    return apply(params["out"], nn.gelu(apply(params["back"], z)))


def bernoulli_logpdf(logits, x):
    return -jnp.sum(jnp.logaddexp(0.0, jnp.where(x, -1.0, 1.0) * logits), -1)


def kl_to_standard_normal(mean, spread):
    return -0.5 * jnp.sum(1.0 + 2 * jnp.log(spread) - mean**2 - spread**2, -1)


def loss(params, key, images):
    """Negative evidence lower bound, in nats per image."""
    mean, spread = encode(params, images)
    z = mean + spread * random.normal(key, mean.shape)
    return jnp.mean(kl_to_standard_normal(mean, spread) - bernoulli_logpdf(decode(params, z), images))


optimizer = optax.adam(2e-3)


@jit
def run_epoch(key, params, state, images):
    """Train on all batches of an epoch, as one scan."""
    order_key, key = random.split(key)
    batches = random.permutation(order_key, images).reshape(-1, BATCH, 64)

    def step(carry, batch):
        params, state, key = carry
        key, noise_key = random.split(key)
        value, grads = value_and_grad(loss)(params, noise_key, batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, key), value

    (params, state, _), losses = lax.scan(step, (params, state, key), batches)
    return params, state, losses.mean()


def main():
    (images, _), (test_images, _) = digits.load()
    images, test_images = images > 0.5, test_images > 0.5
    params = init_params(random.key(0))
    state = optimizer.init(params)
    for epoch in range(EPOCHS):
        params, state, train = run_epoch(random.key(epoch + 1), params, state, images.astype(np.float32))
        if epoch % 10 == 9:
            test = loss(params, random.key(99), test_images.astype(np.float32))
            print(f"epoch {epoch + 1:2d}: train {float(train):.2f}, test {float(test):.2f} nats")
    logits = decode(params, random.normal(random.key(3), (3, LATENT)))
    for row in np.asarray(nn.sigmoid(logits)).reshape(3, 8, 8).transpose(1, 0, 2):
        print("   ".join("".join(" .:*#"[int(p * 4.99)] for p in image) for image in row))
    return {"train": float(train), "test": float(test)}


if __name__ == "__main__":
    main()
