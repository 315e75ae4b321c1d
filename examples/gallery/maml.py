"""Model-agnostic meta-learning of sine curves from ten points.

C. Finn et al., "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks" (2017). The inner step is
``grad``, a batch of tasks is ``vmap``, and ``grad`` of both trains the parameters from which one step adapts
best.

Expected at the default size: "adapted" below 0.5, the mean squared error after one step on a new curve, and
"after ten steps" below 0.2; "untrained" above 2, the first from parameters that were only initialized.
"""

from typing import NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import lax, nn, optim, random
from examples.gallery import app

INNER_RATE = 0.01


class Size(NamedTuple):
    epochs: int = 100
    steps: int = 300  # of an epoch
    tasks: int = 25  # of a step
    shots: int = 10
    width: int = 40


SIZES = {
    "tiny": Size(epochs=4, steps=50, tasks=8, width=20),
    "cpu": Size(),
    "cuda": Size(epochs=100, steps=500, tasks=4096, width=256),
}


def init(key, width):
    sizes = [(1, width), (width, width), (width, 1)]
    keys = random.split(key, 3)
    return [
        {"w": random.normal(k, s) / s[0] ** 0.5, "b": jnp.zeros(s[1])}
        for k, s in zip(keys, sizes, strict=True)
    ]


def predict(params, x):
    for layer in params[:-1]:
        x = nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def adapt(params, x, y, steps=1):
    """Parameters after gradient steps on the points of one task."""

    def step(params, _):
        return bf.tree.map(lambda p, g: p - INNER_RATE * g, params, bf.grad(loss)(params, x, y)), None

    return lax.scan(step, params, None, steps)[0]


class Task(NamedTuple):
    """Points of one curve: to adapt to, and to be measured on; each float32[n, 1]."""

    x: bf.Array
    y: bf.Array
    test_x: bf.Array
    test_y: bf.Array


def task(key, shots):
    """A sine curve of random amplitude and phase."""
    amplitude_key, phase_key, x_key = random.split(key, 3)
    amplitude = random.uniform(amplitude_key, minval=0.1, maxval=5.0)
    phase = random.uniform(phase_key, maxval=jnp.pi)
    x = random.uniform(x_key, (2 * shots, 1), minval=-5.0, maxval=5.0)
    y = amplitude * jnp.sin(x + phase)
    return Task(x[:shots], y[:shots], x[shots:], y[shots:])


def error(params, task, steps=1):
    return loss(adapt(params, task.x, task.y, steps), task.test_x, task.test_y)


def run(size, key, bar):
    init_key, train_key, test_key = random.split(key, 3)
    params = first = init(init_key, size.width)
    tasks = lambda key, n: bf.vmap(lambda k: task(k, size.shots))(random.split(key, n))
    optimizer = optim.adam(optim.cosine_decay_schedule(1e-3, size.epochs * size.steps))

    @bf.jit
    def epoch(params, state, key):
        def step(carry, key):
            params, state = carry
            batch = tasks(key, size.tasks)
            mean_error = lambda params: bf.vmap(error, (None, 0))(params, batch).mean()
            value, grads = bf.value_and_grad(mean_error)(params)
            updates, state = optimizer.update(grads, state, params)
            return (optim.apply_updates(params, updates), state), value

        carry, values = lax.scan(step, (params, state), random.split(key, size.steps))
        return *carry, values.mean()

    state, errors = optimizer.init(params), []
    for i in bar(size.epochs):
        params, state, value = epoch(params, state, random.fold_in(train_key, i))
        errors.append(value)
        bar.say(error=value)

    test = tasks(test_key, 500)
    measure = lambda params, steps: bf.jit(bf.vmap(lambda p, t: error(p, t, steps), (None, 0)))(
        params, test
    ).mean()
    numbers = {
        "adapted": measure(params, 1),
        "after ten steps": measure(params, 10),
        "not adapted": measure(params, 0),
        "untrained": measure(first, 1),
    }

    figure, (left, right) = app.subplots(1, 2)
    left.plot(np.arange(1, size.epochs + 1) * size.steps, np.asarray(errors))
    left.set(xlabel="step", ylabel="error after one inner step", yscale="log")
    one = bf.tree.map(lambda x: x[0], test)
    x = np.linspace(-5, 5, 100, dtype=np.float32)[:, None]
    for steps, style in ((0, ":"), (1, "--"), (10, "-")):
        curve = predict(adapt(params, one.x, one.y, steps), x)
        right.plot(x[:, 0], curve[:, 0], f"C0{style}", label=f"{steps} steps")
    right.plot(one.x[:, 0], one.y[:, 0], "ko", markersize=4, label="given")
    right.plot(one.test_x[:, 0], one.test_y[:, 0], "x", color="C3", markersize=4, label="not given")
    right.legend(frameon=False)
    right.set_title("a new curve")
    return app.Result({name: float(v) for name, v in numbers.items()}, figure)


if __name__ == "__main__":
    app.main(run, SIZES)
