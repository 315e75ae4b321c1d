"""Differentially private training: per-example clipping, and noise on the sum.

The algorithm is that of M. Abadi et al., "Deep Learning with Differential Privacy" (2016).
"""

import numpy as np

import blufunc as jax
import blufunc.numpy as jnp
from blufunc import grad, jit, nn, random, vmap
from examples.ports import digits

SIZES = [64, 48, 10]
STEP_SIZE = 0.5
BATCH = 150
EPOCHS = 20
CLIP = 1.0
NOISE = 0.5


def init_params(key, sizes):
    keys = random.split(key, len(sizes) - 1)
    return [
        {"w": random.normal(k, (m, n)) / jnp.sqrt(m), "b": jnp.zeros((n,))}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def predict(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, image, label):
    return -nn.log_softmax(predict(params, image))[label]


def clipped_grad(params, image, label):
    """Gradient of one example, clipped to norm ``CLIP``."""
    grads = grad(loss)(params, image, label)
    leaves, structure = jax.tree.flatten(grads)
    norm = jnp.linalg.norm(jnp.stack([jnp.linalg.norm(g) for g in leaves]))
    return jax.tree.unflatten(structure, [g / jnp.maximum(norm / CLIP, 1.0) for g in leaves])


@jit
def private_grad(params, key, images, labels):
    grads = vmap(clipped_grad, in_axes=(None, 0, 0))(params, images, labels)
    leaves, structure = jax.tree.flatten(grads)
    keys = random.split(key, len(leaves))
    noised = [
        (g.sum(0) + CLIP * NOISE * random.normal(k, g.shape[1:])) / images.shape[0]
        for k, g in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, noised)


@jit
def update(params, key, images, labels):
    grads = private_grad(params, key, images, labels)
    return jax.tree.map(lambda p, g: p - STEP_SIZE * g, params, grads)


@jit
def accuracy(params, images, labels):
    return jnp.mean(jnp.argmax(predict(params, images), axis=-1) == labels)


def main():
    (images, labels), (test_images, test_labels) = digits.load()
    rng = np.random.RandomState(0)
    key = random.key(0)
    params = init_params(random.fold_in(key, 0), SIZES)
    step = 0
    for epoch in range(EPOCHS):
        for rows in rng.permutation(len(images)).reshape(-1, BATCH):
            step += 1
            params = update(params, random.fold_in(key, step), images[rows], labels[rows])
        if epoch % 5 == 4:
            print(
                f"epoch {epoch + 1:2d}: test accuracy {float(accuracy(params, test_images, test_labels)):.3f}"
            )
    norms = vmap(
        lambda x, y: jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(clipped_grad(params, x, y)))), (0, 0)
    )
    return {
        "accuracy": float(accuracy(params, test_images, test_labels)),
        "longest gradient": float(norms(images[:200], labels[:200]).max()),
    }


if __name__ == "__main__":
    main()
