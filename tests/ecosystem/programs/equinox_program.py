"""equinox: modules, filtered transforms, stateful layers, loops and errors."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp


def results():
    key = jax.random.PRNGKey(0)
    x = jax.random.normal(key, (16, 3))
    mlp = eqx.nn.MLP(3, 2, 8, 2, key=key)

    @eqx.filter_jit
    def step(model):
        value, grads = eqx.filter_value_and_grad(lambda m: (jax.vmap(m)(x) ** 2).mean())(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value

    losses = []
    for _ in range(5):
        mlp, value = step(mlp)
        losses.append(value)

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="ema")
    normed, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    gru = eqx.nn.GRUCell(3, 4, key=key)
    scanned = jax.lax.scan(lambda h, x: (gru(x, h),) * 2, jnp.zeros(4), x)[1]
    attention = eqx.nn.MultiheadAttention(3, 3, key=key)

    def loop(kind):
        def f(x):
            body = lambda c: (c[0] + 1, jnp.sin(c[1]) * 1.1)
            return eqxi.while_loop(lambda c: c[0] < 6, body, (0, x), max_steps=16, kind=kind, checkpoints=4)[
                1
            ]

        return f

    loops = {
        f"{kind} loop": (f(0.5), jax.grad(f)(0.5), jax.jit(jax.vmap(jax.grad(f)))(jnp.array([0.1, 0.7])))
        for kind in ("bounded", "checkpointed")
        for f in [loop(kind)]
    }
    refused = 0
    checked = lambda x: eqx.error_if(x, x < 0, "negative")
    for f in (checked, jax.vmap(checked)):
        try:
            eqx.filter_jit(f)(jnp.array([-1.0]))
        except Exception:
            refused += 1
    values, pullback = eqx.filter_vjp(lambda m: jax.vmap(m)(x), mlp)
    return {
        "losses": jnp.stack(losses),
        "batch norm": normed,
        "gru": scanned,
        "attention": attention(x, x, x),
        "conv": eqx.nn.Conv2d(1, 2, 3, key=key)(jnp.ones((1, 5, 5))),
        "refused": refused,
        "pullback": jax.tree.leaves(eqx.filter(pullback(jnp.ones_like(values))[0], eqx.is_array)),
        "jvp": eqx.filter_jvp(lambda x: jnp.sin(x), (x,), (jnp.ones_like(x),))[1],
        "hessian": jax.hessian(lambda w: eqx.tree_at(lambda m: m.layers[0].bias, mlp, w)(x[0]).sum())(
            jnp.ones(8)
        ),
        **loops,
    }
