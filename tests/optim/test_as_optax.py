"""Optimisers, wrappers and schedules against optax, step by step."""

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import optim, tree
from blufunc.transforms.staging.jit import jit

RNG = np.random.default_rng(7)
PARAMS = {
    "w": RNG.normal(size=(4, 3)),
    "v": [RNG.normal(size=4), RNG.normal(size=())],
    "t": RNG.normal(size=(5, 2)),
}
GRADS = [tree.map(lambda p: RNG.normal(size=p.shape) * 10.0 ** RNG.integers(-2, 2), PARAMS) for _ in range(6)]


def matrices(params):
    return tree.map(lambda p: p.ndim >= 2, params)


def matrices_jax(params):
    import jax

    return jax.tree.map(lambda p: p.ndim >= 2, params)


def contrib(module):
    """Where optax has newer optimizers."""
    return getattr(module, "contrib", module)


RATE = 0.05
OPTIMIZERS = {
    "adabelief": lambda o, m: o.adabelief(RATE),
    "adabelief nesterov": lambda o, m: o.adabelief(RATE, 0.8, 0.95, 1e-8, 1e-8, nesterov=True),
    "adadelta": lambda o, m: o.adadelta(RATE, 0.8, 1e-4, 0.1, m),
    "adadelta without a rate": lambda o, m: o.adadelta(),
    "adafactor": lambda o, m: o.adafactor(RATE, min_dim_size_to_factor=2),
    "adafactor not factored": lambda o, m: o.adafactor(RATE, factored=False, clipping_threshold=None),
    "adafactor with momentum": lambda o, m: o.adafactor(None, 2, 0.7, momentum=0.9, weight_decay_rate=0.01),
    "adafactor of an offset": lambda o, m: o.adafactor(RATE, 2, decay_offset=-3, multiply_by_parameter_scale=False),
    "adagrad": lambda o, m: o.adagrad(RATE),
    "adagrad from 0": lambda o, m: o.adagrad(RATE, 0.0, 1e-3),
    "adam": lambda o, m: o.adam(RATE, 0.8, 0.95, 1e-3, 1e-4),
    "adam nesterov": lambda o, m: o.adam(RATE, 0.8, 0.95, nesterov=True),
    "adam of a schedule": lambda o, m: o.adam(o.exponential_decay(0.1, 2, 0.5)),
    "adamax": lambda o, m: o.adamax(RATE),
    "adamaxw": lambda o, m: o.adamaxw(RATE, weight_decay=0.1, mask=m),
    "adamw": lambda o, m: o.adamw(RATE, weight_decay=0.1, mask=m),
    "adamw nesterov": lambda o, m: o.adamw(RATE, weight_decay=0.1, nesterov=True),
    "amsgrad": lambda o, m: o.amsgrad(RATE, 0.8, 0.5),
    "amsgrad uncorrected": lambda o, m: o.amsgrad(RATE, bias_correction_mu=False, bias_correction_nu=False),
    "lamb": lambda o, m: o.lamb(RATE, weight_decay=0.1, mask=m),
    "lars": lambda o, m: o.lars(RATE, 0.1, trust_coefficient=0.1, eps=1e-3, trust_ratio_mask=m),
    "lion": lambda o, m: o.lion(RATE, weight_decay=0.1, mask=m),
    "nadam": lambda o, m: o.nadam(RATE),
    "nadamw": lambda o, m: o.nadamw(RATE, weight_decay=0.1),
    "radam": lambda o, m: o.radam(RATE, b2=0.9),
    "radam nesterov": lambda o, m: o.radam(RATE, b2=0.9, eps_root=1e-4, threshold=4.5, nesterov=True),
    "rmsprop": lambda o, m: o.rmsprop(RATE),
    "rmsprop centred": lambda o, m: o.rmsprop(RATE, 0.5, 1e-2, 0.1, centered=True, momentum=0.9),
    "rmsprop as elsewhere": lambda o, m: o.rmsprop(RATE, eps_in_sqrt=False, momentum=0.5, nesterov=True),
    "rmsprop corrected": lambda o, m: o.rmsprop(RATE, bias_correction=True),
    "rmsprop centred and corrected": lambda o, m: o.rmsprop(RATE, 0.5, 1e-2, 0, False, True, bias_correction=True),
    "sgd": lambda o, m: o.sgd(RATE),
    "sgd nesterov": lambda o, m: o.sgd(RATE, 0.9, True),
    "sign_sgd": lambda o, m: o.sign_sgd(RATE),
    "signum": lambda o, m: o.signum(RATE),
    "yogi": lambda o, m: o.yogi(RATE),
    "muon": lambda o, m: contrib(o).muon(RATE, weight_decay=0.1),
    "muon adaptive": lambda o, m: contrib(o).muon(RATE, nesterov=False, adaptive=True, beta=0.5),
    "muon of many triples": lambda o, m: contrib(o).muon(
        RATE, [(4.0, -6.0, 2.5)] * 2 + [(3.0, -4.0, 2.0)], 3, consistent_rms=0.2, adam_learning_rate=0.01
    ),
    "muon of dion": lambda o, m: contrib(o).muon(RATE, "dion", consistent_rms=0.2),
    "adopt": lambda o, m: contrib(o).adopt(RATE, b2=0.9),
    "adopt nesterov": lambda o, m: contrib(o).adopt(RATE, b2=0.9, nesterov=True, use_clipping=False, eps=1e-2),
    "ademamix": lambda o, m: contrib(o).ademamix(RATE, weight_decay=0.1, mask=m),
    "ademamix of schedules": lambda o, m: contrib(o).ademamix(
        RATE, b3=o.linear_schedule(0.9, 0.99, 5), alpha=o.linear_schedule(0.0, 5.0, 5), eps_root=1e-4
    ),
    "prodigy": lambda o, m: contrib(o).prodigy(estim_lr0=1e-2, weight_decay=0.1),
    "prodigy of a schedule": lambda o, m: contrib(o).prodigy(
        o.linear_schedule(1.0, 0.0, 9), (0.8, 0.95), 0.9, estim_lr0=1e-2, estim_lr_coef=2.0, safeguard_warmup=True
    ),
    "schedule_free sgd": lambda o, m: contrib(o).schedule_free_sgd(RATE),
    "schedule_free sgd warmed up": lambda o, m: contrib(o).schedule_free_sgd(RATE, 3, 0.8, 0.1, 1.0),
    "schedule_free adamw": lambda o, m: contrib(o).schedule_free_adamw(RATE, 3, b2=0.95, weight_decay=0.1),
    "schedule_free of adam": lambda o, m: contrib(o).schedule_free(o.adam(RATE, b1=0.0), RATE, b1=0.95),
    "ema": lambda o, m: o.ema(0.8),
    "ema biased": lambda o, m: o.ema(0.8, False),
    "trace": lambda o, m: o.trace(0.8, True),
    "clip": lambda o, m: o.chain(o.clip(0.5), o.clip_by_global_norm(0.7)),
    "clip_by_block_rms": lambda o, m: o.clip_by_block_rms(0.3),
    "adaptive_grad_clip": lambda o, m: o.adaptive_grad_clip(0.1),
    "centralize": lambda o, m: o.centralize(),
    "scale_by_param_block_norm": lambda o, m: o.scale_by_param_block_norm(),
    "scale_by_param_block_rms": lambda o, m: o.scale_by_param_block_rms(),
    "scale_by_lion smooth": lambda o, m: o.scale_by_lion(mode="smooth", smooth_beta=2.0),
    "scale_by_lion refined": lambda o, m: o.scale_by_lion(mode="refined"),
    "adamw of a decay schedule": lambda o, m: o.adamw(RATE, weight_decay=o.linear_schedule(0.1, 0.0, 4)),
    "masked": lambda o, m: o.masked(o.adam(RATE), m),
    "partition": lambda o, m: o.partition(
        {"a": o.adam(RATE), "b": o.sgd(0.1), "c": o.set_to_zero()}, {"w": "a", "v": "b", "t": "c"}
    ),
    "MultiSteps": lambda o, m: o.MultiSteps(o.adamw(RATE), 2).gradient_transformation(),
    "MultiSteps of sums": lambda o, m: o.MultiSteps(o.sgd(RATE, 0.9), 3, use_grad_mean=False),
    "MultiSteps of a schedule": lambda o, m: o.MultiSteps(o.adam(RATE), lambda step: step + 1),
    "apply_if_finite": lambda o, m: o.apply_if_finite(o.adam(RATE), 2),
    "conditionally_mask": lambda o, m: o.conditionally_mask(o.adam(RATE), lambda step: step % 2 == 0),
    "conditionally_transform": lambda o, m: o.conditionally_transform(o.adam(RATE), lambda step: step % 2 == 0),
    "inject_hyperparams": lambda o, m: o.inject_hyperparams(o.adamw)(o.linear_schedule(0.1, 0.0, 4), b1=0.8),
    "keep_params_nonnegative": lambda o, m: o.chain(o.sgd(RATE), o.keep_params_nonnegative()),
    "named_chain": lambda o, m: o.named_chain(("clip", o.clip(0.5)), ("adam", o.adam(RATE))),
    "skip_not_finite": lambda o, m: o.MultiSteps(o.sgd(RATE), 2, should_skip_update_fn=o.skip_not_finite),
}  # fmt: skip
SPOILT = ("apply_if_finite", "skip_not_finite", "zero_nans")


def steps(module, library, mask, apply, cast, compiled):
    optimizer = OPTIMIZERS[library](module, mask)
    params = cast(PARAMS)
    state = optimizer.init(params)
    update = compiled(optimizer.update)
    for i, grads in enumerate(GRADS):
        grads = cast(grads)
        if library in SPOILT and i in (1, 2):
            grads["w"] = grads["w"] * float("inf")
        updates, state = update(grads, state, params)
        params = apply(params, updates)
        yield updates, state, params


@pytest.mark.peer
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_as_optax(name):
    import jax
    import jax.numpy as jnp
    import optax

    ours = steps(
        optim,
        name,
        matrices,
        optim.apply_updates,
        lambda t: tree.map(lambda x: bnp.asarray(x, dtype="float32"), t),
        jit if "MultiSteps" in name else lambda f: f,
    )
    theirs = steps(
        optax,
        name,
        matrices_jax,
        optax.apply_updates,
        lambda t: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), t),
        lambda f: f,
    )
    for ours_now, theirs_now in zip(ours, theirs, strict=True):
        (u, s, p), (want_u, want_s, want_p) = ours_now, theirs_now
        found, expected = tree.leaves((u, p)), jax.tree.leaves((want_u, want_p))
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == np.float32 and x.shape == y.shape
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=3e-5, atol=2e-6)
    ours, theirs = tree.leaves(s), jax.tree.leaves(want_s)
    if (
        "adam" not in name and "MultiSteps" not in name and "inject" not in name
    ):  # states of other extent or order
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=3e-5, atol=2e-6)


@pytest.mark.peer
def test_averages_as_optax():
    import jax
    import optax

    x, y = (tree.map(np.float32, t) for t in (PARAMS, GRADS[0]))
    calls = {
        "incremental_update": lambda o: o.incremental_update(x, y, 0.3),
        "periodic_update": lambda o: [o.periodic_update(x, y, np.int32(n), 3) for n in (3, 4)],
    }
    for call in calls.values():
        for a, b in zip(tree.leaves(call(optim)), jax.tree.leaves(call(optax)), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


@pytest.mark.peer
def test_eval_params_of_schedule_free_as_optax():
    import jax
    import optax

    def evaluated(o, apply, cast):
        for _, state, params in steps(o, "schedule_free adamw", None, apply, cast, lambda f: f):
            found = contrib(o).schedule_free_eval_params(state, params)
        return found

    ours = evaluated(
        optim, optim.apply_updates, lambda t: tree.map(lambda x: bnp.asarray(x, dtype="float32"), t)
    )
    theirs = evaluated(optax, optax.apply_updates, lambda t: jax.tree.map(lambda x: np.float32(x), t))
    for a, b in zip(tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=3e-5, atol=2e-6)


@pytest.mark.peer
def test_lookahead_as_optax():
    import optax

    def run(o, jnp):
        params = o.LookaheadParams.init_synced(jnp.asarray([1.0, -2.0]))
        optimizer = o.lookahead(o.adam(0.1), 2, 0.5, reset_state=True)
        state = optimizer.init(params)
        for _ in range(5):
            updates, state = optimizer.update(params.fast * 2, state, params)
            params = o.apply_updates(params, updates)
        return np.asarray(params.fast), np.asarray(params.slow)

    import jax.numpy as jnp

    np.testing.assert_allclose(run(optim, bnp), run(optax, jnp), rtol=1e-5)


SCHEDULES = {
    "warmup_exponential": lambda o: o.warmup_exponential_decay_schedule(0.0, 1.0, 4, 5, 0.5, 2, True, 0.3),
    "sgdr": lambda o: o.sgdr_schedule(
        [{"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 2, "decay_steps": 6, "end_value": 0.1}] * 3
    ),
    "linear": lambda o: o.piecewise_interpolate_schedule("linear", 2.0, {3: 0.5, 8: 4.0}),
    "cosine": lambda o: o.piecewise_interpolate_schedule("cosine", 2.0, {3: 0.5, 8: 4.0}),
    "nothing": lambda o: o.piecewise_interpolate_schedule("cosine", 2.0),
    "linear_onecycle": lambda o: o.linear_onecycle_schedule(15, 2.0),
    "cosine_onecycle": lambda o: o.cosine_onecycle_schedule(15, 2.0, 0.4, 10.0),
}


@pytest.mark.peer
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_as_optax(name):
    import optax

    ours, theirs = SCHEDULES[name](optim), SCHEDULES[name](optax)
    for count in range(20):
        np.testing.assert_allclose(float(ours(count)), float(theirs(count)), rtol=1e-5, atol=1e-8)
        assert float(jit(ours)(count)) == pytest.approx(float(theirs(count)), rel=1e-5, abs=1e-8)


@pytest.mark.peer
def test_tree_utilities_as_optax():
    import optax

    x, y = PARAMS, tree.map(lambda p: p * 0.5 + 1, PARAMS)
    calls = {
        "tree_add": (x, y), "tree_sub": (x, y), "tree_mul": (x, y), "tree_div": (x, y), "tree_scale": (2.0, x),
        "tree_add_scale": (x, 0.5, y), "tree_where": (True, x, y), "tree_clip": (x, -0.5, 0.5), "tree_vdot": (x, y),
        "tree_sum": (x,), "tree_max": (x,), "tree_min": (x,), "tree_size": (x,), "tree_norm": (x,),
        "tree_zeros_like": (x,), "tree_ones_like": (x,), "tree_full_like": (x, 3.0), "tree_cast": (x, "float32"),
        "tree_cast_like": (x, y), "tree_update_moment": (x, y, 0.9, 2), "tree_bias_correction": (x, 0.9, 3),
        "tree_update_infinity_moment": (x, y, 0.9, 1e-8),
    }  # fmt: skip
    import jax

    for name, args in calls.items():
        want = getattr(optax.tree_utils, name)(
            *jax.tree.map(lambda a: a if np.ndim(a) == 0 else np.float32(a), args)
        )
        found = getattr(optim.tree_utils, name)(
            *tree.map(lambda a: a if np.ndim(a) == 0 else np.float32(a), args)
        )
        for a, b in zip(tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6, err_msg=name)
    for order in (1, 2, float("inf")):
        want = optax.tree_utils.tree_norm(jax.tree.map(np.float32, x), ord=order, squared=True)
        np.testing.assert_allclose(float(optim.tree_utils.tree_norm(x, order, True)), float(want), rtol=1e-5)
