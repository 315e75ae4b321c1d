"""A multi-layer perceptron from scratch on small digits.

Parameters are a list of pairs; training is a jitted step.
"""

import numpy as np

import blufunc.numpy as jnp
from blufunc import grad, jit, random
from blufunc.nn import relu
from blufunc.scipy.special import logsumexp
from examples.ports import digits

SIZES = [64, 128, 64, 10]
STEP_SIZE = 0.1
BATCH = 100
EPOCHS = 15


def init_params(key, sizes):
    keys = random.split(key, len(sizes) - 1)
    return [
        (random.normal(k, (m, n)) * jnp.sqrt(2.0 / m), jnp.zeros(n))
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def predict(params, images):
    x = images
    for w, b in params[:-1]:
        x = relu(jnp.dot(x, w) + b)
    w, b = params[-1]
    logits = jnp.dot(x, w) + b
    return logits - logsumexp(logits, axis=1, keepdims=True)


def loss(params, batch):
    images, targets = batch
    return -jnp.mean(jnp.sum(predict(params, images) * targets, axis=1))


@jit
def update(params, batch):
    grads = grad(loss)(params, batch)
    return [(w - STEP_SIZE * dw, b - STEP_SIZE * db) for (w, b), (dw, db) in zip(params, grads, strict=True)]


@jit
def accuracy(params, images, labels):
    return jnp.mean(jnp.argmax(predict(params, images), axis=1) == labels)


def main():
    (images, labels), (test_images, test_labels) = digits.load()
    one_hot = np.eye(10, dtype=np.float32)[labels]
    rng = np.random.RandomState(0)
    params = init_params(random.PRNGKey(0), SIZES)
    for epoch in range(EPOCHS):
        for rows in np.array_split(rng.permutation(len(images)), len(images) // BATCH):
            params = update(params, (images[rows], one_hot[rows]))
        test = accuracy(params, test_images, test_labels)
        print(f"epoch {epoch:2d}: test accuracy {float(test):.3f}")
    return {"accuracy": float(test), "loss": float(loss(params, (images, one_hot)))}


if __name__ == "__main__":
    main()
