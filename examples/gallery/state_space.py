"""A state-space model that reads handwritten digits one pixel at a time.

A. Orvieto et al., "Resurrecting Recurrent Neural Networks for Long Sequences" (2023): layers of linear
recurrences with complex diagonal transitions. An associative scan computes all steps of a layer in parallel;
the same recurrence, one step at a time, is the model while it reads.

Expected at the default size: "accuracy" above 0.94 on 297 images held out, each a sequence of 64 pixels;
"gap", the largest difference between the logits of the scan and of the recurrence, below 1e-3.
"""

from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import lax, nn, optim, random
from examples.gallery import app
from examples.ports import digits

CLASSES = 10


class Size(NamedTuple):
    epochs: int = 30
    batch: int = 50
    width: int = 32
    states: int = 32  # complex numbers of a layer
    layers: int = 2


SIZES = {
    "tiny": Size(epochs=1, batch=100, width=8, states=8, layers=1),
    "cpu": Size(),
    "cuda": Size(epochs=200, batch=500, width=256, states=256, layers=6),
}


def dense(key, m, n):
    return {"w": random.normal(key, (m, n)) / m**0.5, "b": jnp.zeros(n)}


def apply(layer, x):
    return x @ layer["w"] + layer["b"]


def init_layer(key, width, states):
    """Transitions whose absolute values are in [0.9, 0.999], and phases below pi / 4."""
    keys = random.split(key, 5)
    radius = random.uniform(keys[0], (states,), minval=0.9, maxval=0.999)
    return {
        "log_decay": jnp.log(-jnp.log(radius)),
        "phase": random.uniform(keys[1], (states,), maxval=jnp.pi / 4),
        "into": dense(keys[2], width, 2 * states),
        "out": dense(keys[3], 2 * states, width),
        "gate": dense(keys[4], width, 2 * width),
    }


def transition(layer):
    return jnp.exp(lax.complex(-jnp.exp(layer["log_decay"]), layer["phase"]))


def inputs(layer, u):
    """Complex inputs of the states, scaled so that these have a variance near one."""
    real, imag = jnp.split(apply(layer["into"], u), 2, axis=-1)
    return lax.complex(real, imag) * jnp.sqrt(1 - jnp.abs(transition(layer)) ** 2)


def output(layer, state):
    """Output of a layer from its states, by a gated linear unit."""
    y = nn.gelu(apply(layer["out"], jnp.concatenate([state.real, state.imag], -1)))
    return nn.glu(apply(layer["gate"], y))


def states(a, b):
    """States [time, n] of h[t] = a h[t-1] + b[t] from 0, by an associative scan."""

    def after(first, second):
        return second[0] * first[0], second[0] * first[1] + second[1]

    return lax.associative_scan(after, (jnp.broadcast_to(a, b.shape), b))[1]


def logits(params, pixels):
    """Logits after each pixel of one image [time], [time, CLASSES]."""
    x = apply(params["in"], pixels[:, None])
    for layer in params["layers"]:
        h = states(transition(layer), inputs(layer, nn.layer_norm(x)))
        x = x + output(layer, h)
    return apply(params["out"], nn.layer_norm(x))


def recurrent_logits(params, pixels):
    """The same, one pixel at a time with a state of constant size."""

    def step(hs, pixel):
        x, new = apply(params["in"], pixel[None]), []
        for layer, h in zip(params["layers"], hs, strict=True):
            h = transition(layer) * h + inputs(layer, nn.layer_norm(x))
            x = x + output(layer, h)
            new.append(h)
        return new, apply(params["out"], nn.layer_norm(x))

    start = [jnp.zeros(layer["phase"].shape, jnp.complex64) for layer in params["layers"]]
    return lax.scan(step, start, pixels)[1]


def run(size, key, bar):
    (images, labels), (test_images, test_labels) = digits.load()
    images, labels, test_images = map(jnp.asarray, (images, labels, test_images))
    *layer_keys, in_key, out_key, train_key = random.split(key, size.layers + 3)
    params = {
        "in": dense(in_key, 1, size.width),
        "layers": [init_layer(k, size.width, size.states) for k in layer_keys],
        "out": dense(out_key, size.width, CLASSES),
    }
    batches = len(images) // size.batch
    optimizer = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.adamw(optim.cosine_decay_schedule(4e-3, size.epochs * batches), weight_decay=0.01),
    )
    model = bf.vmap(logits, (None, 0))

    def loss(params, images, labels):
        """Cross-entropy after the last pixel."""
        last = model(params, images)[:, -1]
        return nn.softmax_cross_entropy_with_integer_labels(last, labels).mean()

    @bf.jit
    def epoch(params, state, key):
        rows = random.permutation(key, len(images))[: batches * size.batch].reshape(batches, size.batch)

        def step(carry, rows):
            params, state = carry
            value, grads = bf.value_and_grad(loss)(params, images[rows], labels[rows])
            updates, state = optimizer.update(grads, state, params)
            return (optim.apply_updates(params, updates), state), value

        carry, losses = lax.scan(step, (params, state), rows)
        return *carry, losses.mean()

    @bf.jit
    def test(params):
        return jnp.mean(model(params, test_images)[:, -1].argmax(-1) == test_labels)

    state, accuracies = optimizer.init(params), []
    for i in bar(size.epochs):
        params, state, value = epoch(params, state, random.fold_in(train_key, i))
        accuracies.append(test(params))
        bar.say(loss=value, accuracy=accuracies[-1])

    read = bf.jit(recurrent_logits)(params, test_images[0])
    gap = jnp.abs(read - logits(params, test_images[0])).max()
    figure, (left, right) = app.subplots(1, 2)
    left.plot(np.arange(1, size.epochs + 1), 1 - np.asarray(accuracies))
    left.set(xlabel="epoch", ylabel="error on test images", yscale="log")
    right.imshow(nn.softmax(read).T, cmap="Blues", aspect="auto", vmin=0, vmax=1)
    right.set(xlabel="pixels read", ylabel="class", title=f"probabilities, as it reads a {test_labels[0]}")
    right.set_yticks(range(CLASSES))
    return app.Result({"accuracy": float(accuracies[-1]), "loss": float(value), "gap": float(gap)}, figure)


if __name__ == "__main__":
    app.main(run, SIZES)
