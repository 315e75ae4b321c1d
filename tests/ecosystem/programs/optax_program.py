"""optax: optimizers in a scan, schedules, losses and masks."""

import jax
import jax.numpy as jnp
import optax


def trained(optimizer):
    x = jax.random.normal(jax.random.key(0), (32, 4))
    y = jnp.sin(x.sum(1))
    params = {"w": jnp.linspace(-1, 1, 4), "b": jnp.zeros(())}
    loss = lambda p: optax.squared_error(x @ p["w"] + p["b"], y).mean()

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), values = jax.jit(lambda c: jax.lax.scan(step, c, None, length=20))(
        (params, optimizer.init(params))
    )
    return {"w": params["w"], "b": params["b"], "losses": values}


def results():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 20)
    optimizers = {
        "sgd": optax.sgd(schedule, momentum=0.9, nesterov=True),
        "adamw": optax.adamw(0.1),
        "adafactor": optax.adafactor(0.1),
        "lamb": optax.lamb(0.1),
        "lion": optax.lion(0.01),
        "chain": optax.chain(optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.scale(-0.1)),
        "masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}),
        "multi": optax.MultiSteps(optax.adam(0.1), 2),
        "lookahead-free": optax.apply_if_finite(optax.rmsprop(0.01), 3),
    }
    found = {f"{name}/{k}": v for name, o in optimizers.items() for k, v in trained(o).items()}
    logits = jnp.linspace(-2, 2, 12).reshape(3, 4)
    found["cross entropy"] = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 3, 1]))
    found["ctc"] = optax.ctc_loss(
        jnp.zeros((1, 5, 4)), jnp.zeros((1, 5)), jnp.array([[1, 2, 3]]), jnp.zeros((1, 3))
    )
    found["hessian"] = (
        optax.hvp(lambda p, x, y: jnp.sum(p**3), jnp.ones(2), jnp.arange(2.0), None, None)
        if hasattr(optax, "hvp")
        else 0.0
    )
    return found
