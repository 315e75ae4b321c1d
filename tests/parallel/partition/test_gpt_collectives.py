"""Collectives of the training step of ``examples/gpt``, as in the textbook.

The step runs under data parallelism and its relatives.

Nothing inside of the model is annotated: only parameters, optimizer state and the batch are.
"""

from collections import Counter

import numpy as np
import pytest

import blufunc as bf
from blufunc import lax, optim
from blufunc.config import config
from blufunc.core.ir.jaxpr import subjaxprs
from blufunc.core.programs.simplify import simplify
from blufunc.parallel.collectives.lowering import lower_collectives
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.partition.partition import localise
from examples.gpt import model
from tests.parallel.lockstep import P, check

CONFIG = model.Config(layers=2, heads=2, width=16, context=8, vocab=24)
B, T = 8, 8
PARAMS = bf.tree.map(np.asarray, model.init(bf.random.key(0), CONFIG))
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab, (B, T + 1)).astype(np.int32)
OPTIMIZER = optim.adamw(1e-2, eps=1e-3)  # the biases of keys have gradients of rounding errors alone
STATE = bf.tree.map(np.asarray, OPTIMIZER.init(PARAMS))
N = len(bf.tree.leaves(PARAMS))
IN_BLOCKS = len(bf.tree.leaves(PARAMS["blocks"]))


def size(tree):
    return sum(x.nbytes for x in bf.tree.leaves(tree))


ALL, BLOCKS, LOSS = size(PARAMS), size(PARAMS["blocks"]), 4


def on_largest(x):
    """The largest dimension of an array sharded over all devices."""
    return P(*[None] * int(np.argmax(x.shape)), "data") if x.shape else P()


def whole(x):
    return P()


def traffic(jaxpr, times=1):
    """Count of each collective in a step, and the bytes of its whole value or sum."""
    count, moved = Counter(), Counter()
    for eqn in jaxpr.eqns:
        name = eqn.prim.name.removeprefix("mesh_").removesuffix("_invariant")
        if eqn.prim.kind == "collective" and name not in ("axis_index", "shard_slice", "pcast", "keep_first"):
            aval = eqn.outvars[0].aval if name == "all_gather" else eqn.invars[0].aval
            count[name] += times
            moved[name] += times * aval.size * aval.dtype.itemsize
        for sub in subjaxprs(eqn.params):
            inner = traffic(sub, times * eqn.params.get("length", 1))
            count.update({k: n for k, (n, _) in inner.items()})
            moved.update({k: b for k, (_, b) in inner.items()})
    return {name: (count[name], moved[name]) for name in count}


def exchanged(step, of_params, of_state, outs=None, n=4, grads=None):
    """Collectives of a step on ``n`` devices, after comparing it with one device."""
    trees = (PARAMS, STATE, TOKENS)
    specs = [*map(of_params, bf.tree.leaves(PARAMS)), *map(of_state, bf.tree.leaves(STATE)), P("data")]
    _, treedef = bf.tree.flatten(trees)
    f = lambda *leaves: step(*bf.tree.unflatten(treedef, leaves))
    ends = None
    if outs is not None:
        of = bf.eval_shape(step, *trees)
        ends = [None, *map(outs, bf.tree.leaves(of[1])), *[None] * len(bf.tree.leaves(of[2]))]
    mesh = AbstractMesh((n,), ("data",))
    local = check(f, bf.tree.leaves(trees), specs, mesh, outs=ends, rtol=5e-4, atol=5e-4)
    return traffic(local)


def step(params, state, tokens, loss=lambda params, tokens: model.loss(params, tokens, CONFIG)):
    value, grads = bf.value_and_grad(loss)(params, tokens)
    updates, state = OPTIMIZER.update(grads, state, params)
    return value, optim.apply_updates(params, updates), state


def checkpointed(params, tokens):
    """The loss, with each block rematerialized in the backward pass."""

    @bf.checkpoint
    def block(p, x):
        x = x + model.attention(p["attention"], model.norm(p["norm1"], x), CONFIG.heads)
        return x + model.mlp(p["mlp"], model.norm(p["norm2"], x))

    x = params["tokens"][tokens[:, :-1]] + params["positions"][:T]
    for p in params["blocks"]:
        x = block(p, x)
    logits = model.norm(params["norm"], x) @ params["tokens"].T
    return bf.nn.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def microbatches(params, state, tokens, summed=lambda grads: grads):
    """A step that adds up gradients of two microbatches; ``summed`` lays out the sum."""
    loss = lambda params, rows: model.loss(params, rows, CONFIG)

    def one(total, rows):
        value, grads = bf.value_and_grad(loss)(params, rows)
        return bf.tree.map(lambda t, g: t + g / 2, total, grads), value

    zeros = bf.tree.map(bf.numpy.zeros_like, params)
    grads, values = lax.scan(one, zeros, tokens.reshape(B // 2, 2, T + 1).swapaxes(0, 1))
    updates, state = OPTIMIZER.update(summed(grads), state, params)
    return values.mean(), optim.apply_updates(params, updates), state


def cast_once(params, tokens):
    return model.loss(bf.tree.map(lambda x: x.astype("bfloat16"), params), tokens, CONFIG)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("of_params", [whole, on_largest])
@pytest.mark.parametrize(
    "loss", [cast_once, bf.autocast(lambda params, tokens: model.loss(params, tokens, CONFIG))]
)
def test_gradients_in_low_precision_go_in_buckets_too(monkeypatch, loss, of_params):
    """Conversions of gradients neither delay a sum nor keep it out of a bucket."""
    monkeypatch.setattr(config, "bucket_bytes", ALL // 8)
    specs = [*map(of_params, bf.tree.leaves((PARAMS, STATE))), P("data")]
    mesh = AbstractMesh((4,), ("data",))
    jaxpr = bf.make_jaxpr(lambda *args: step(*args, loss=loss))(PARAMS, STATE, TOKENS)
    local, _ = localise(simplify(jaxpr), tuple(bf.NamedSharding(mesh, s) for s in specs), mesh)
    eqns = lower_collectives(local).eqns
    names = [e.prim.name for e in eqns]
    assert not {"psum_invariant", "mesh_psum_scatter"} & set(names)
    sums = [e for e in eqns if e.prim.name == "mesh_sums"]
    # the embedding may be read in two precisions: two sums
    assert 3 <= len(sums) <= 9 and sum(len(e.invars) for e in sums) in (N + 1, N + 2)
    products = [i for i, n in enumerate(names) if n == "dot_general"]
    assert names.index("mesh_sums") < products[-len(products) // 3], (
        "the first begins before the backward pass ends"
    )


@pytest.mark.parametrize("n", [2, 4])
def test_data_parallel_sums_each_gradient_once(n):
    assert exchanged(step, whole, whole, n=n) == {"psum": (N + 1, ALL + LOSS)}


def test_zero_scatters_gradients_and_gathers_new_parameters():
    # ZeRO-1 and -2 are one program where there is one batch a step: a gradient is scattered as soon as it is there
    assert exchanged(step, whole, on_largest, whole) == {
        "psum_scatter": (N, ALL), "all_gather": (N, ALL), "psum": (1, LOSS),
    }  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [2, 4])
def test_fsdp_gathers_each_parameter_and_scatters_each_gradient(n):
    # one gather serves forwards and backwards: without rematerialisation what was gathered is kept
    assert exchanged(step, on_largest, on_largest, n=n) == {
        "all_gather": (N, ALL), "psum_scatter": (N, ALL), "psum": (1, LOSS),
    }  # fmt: skip


@pytest.mark.slow
def test_fsdp_with_checkpointed_blocks_gathers_twice_and_scatters_once():
    # the textbook's two gathers and one scatter a layer, but for the last bias, which no gradient needs
    last = PARAMS["blocks"][0]["mlp"]["down"]["bias"].nbytes
    f = lambda *args: step(*args, loss=checkpointed)
    assert exchanged(f, on_largest, on_largest) == {
        "all_gather": (N + IN_BLOCKS - 2, ALL + BLOCKS - 2 * last), "psum_scatter": (N, ALL), "psum": (1, LOSS),
    }  # fmt: skip


@pytest.mark.slow
def test_the_gradients_of_microbatches_are_kept_divided_or_meet_once():
    # ZeRO-2: a share of the sum on each device, scattered to by every microbatch
    each = exchanged(microbatches, whole, on_largest, whole)
    assert each["psum_scatter"] == (2 * N, 2 * ALL) and each["all_gather"] == (N, ALL)
    # ZeRO-1: sums of their own on all devices, which are scattered after the last
    sums_of_their_own = lambda grads: bf.constrain(grads, P(unreduced={"data"}))
    once = exchanged(lambda *args: microbatches(*args, summed=sums_of_their_own), whole, on_largest, whole)
    assert once == {"psum_scatter": (N, ALL), "all_gather": (N, ALL), "psum": (1, LOSS)}


def loss_of_a_loop(params, tokens, recomputed=False):
    """The model's loss by a loop over layers that are stacked."""

    def layer(x, p):
        return model.block(p, x, CONFIG)[0], None

    x = model.embed(params, tokens[:, :-1])
    x, _ = lax.scan(bf.checkpoint(layer) if recomputed else layer, x, params["blocks"])
    logits = model.head(params, x)
    return bf.nn.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def of_microbatches(loss):
    def value_and_grad(params, tokens):
        def add(total, rows):
            return bf.tree.map(bf.numpy.add, total, bf.value_and_grad(loss)(params, rows)), None

        zero = bf.numpy.zeros(()), bf.tree.map(bf.numpy.zeros_like, params)
        total, _ = lax.scan(add, zero, tokens.reshape(B // 2, 2, T + 1).swapaxes(0, 1))
        return bf.tree.map(lambda x: x / 2, total)

    return value_and_grad


STACKED = PARAMS | {"blocks": bf.tree.map(lambda *xs: np.stack(xs), *PARAMS["blocks"])}
PLAIN = lambda params, tokens: model.loss(params, tokens, CONFIG)
RECOMPUTED = lambda params, tokens: model.loss(params, tokens, CONFIG, model.Wiring(recompute=True))
LOOP_RECOMPUTED = lambda params, tokens: loss_of_a_loop(params, tokens, recomputed=True)


DATA_PARALLEL = {  # parameters, loss and gradients, and whether there are loops
    "plain": (PARAMS, bf.value_and_grad(PLAIN), False),
    "recomputed": (PARAMS, bf.value_and_grad(RECOMPUTED), False),
    "microbatches": (PARAMS, of_microbatches(PLAIN), True),
    "microbatches, recomputed": (PARAMS, of_microbatches(RECOMPUTED), True),
    "loop": (STACKED, bf.value_and_grad(loss_of_a_loop), True),
    "loop, recomputed": (STACKED, bf.value_and_grad(LOOP_RECOMPUTED), True),
    "microbatches of a loop": (STACKED, of_microbatches(loss_of_a_loop), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_annotated_ends_make_one_all_reduce_a_parameter_and_none_in_a_loop(name, eight):
    params, value_and_grad, loops = DATA_PARALLEL[name]
    mesh = bf.make_mesh((4,), ("data",))
    on = lambda *spec: bf.NamedSharding(mesh, P(*spec))
    step = bf.jit(value_and_grad, in_shardings=(on(), on("data")), out_shardings=on())
    value, grads = step(params, TOKENS)
    want, of_one = bf.value_and_grad(PLAIN)(PARAMS, TOKENS)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads["tokens"], of_one["tokens"], rtol=1e-3, atol=1e-5)

    rows = [r for r in bf.collectives(step, params, TOKENS) if r.bytes > LOSS]
    assert {(r.operation, r.axes) for r in rows} == {("all_reduce", ("data",))}
    shapes = Counter(x.shape for x in bf.tree.leaves(params))
    found = Counter()
    for r in rows:
        found[tuple(map(int, r.type.removeprefix("f32[").removesuffix("]").split(",")))] += r.count
    assert found == shapes  # each once; of the table, which is used at both ends, too

    local, _ = localise(
        step.lower(params, TOKENS).jaxpr,
        [on()] * len(bf.tree.leaves(params)) + [on("data")],
        mesh,
    )
    assert traffic(local)["psum"][0] == sum(shapes.values()) + 1
    bodies = [e.params["jaxpr"] for e in local.eqns if e.prim.name == "scan"]
    assert bool(bodies) == loops
    assert all(traffic(body) == {} for body in bodies)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "checkpointed"])
def test_fsdp_of_a_loop_over_layers_gathers_those_of_one_layer_at_a_time(recomputed):
    rng = np.random.default_rng(0)
    normal = lambda *shape: (0.3 * rng.standard_normal(shape)).astype(np.float32)
    layers, x = (normal(3, 8, 32), normal(3, 32, 8), normal(3, 8)), normal(8, 8, 8)
    specs = [P(None, None, "data"), P(None, "data"), P(None, "data")]

    def layer(h, p):
        up, down, scale = p
        return h + bf.numpy.tanh((h * scale) @ up) @ down, None

    def loss(layers, x):
        return (lax.scan(bf.checkpoint(layer) if recomputed else layer, x, layers)[0] ** 2).mean()

    f = lambda *args: bf.tree.leaves(bf.value_and_grad(loss)(args[:3], args[3]))
    mesh = AbstractMesh((4,), ("data",))
    local = check(f, [*layers, x], [*specs, P("data")], mesh, outs=[None, *specs], rtol=1e-4, atol=1e-4)
    forwards, backwards = (traffic(e.params["jaxpr"]) for e in local.eqns if e.prim.name == "scan")
    size_of_one = size(layers) // 3
    assert forwards == {"all_gather": (3, size_of_one)}
    assert backwards["psum_scatter"] == (3, size_of_one)
    # without checkpoint the scale is kept as it was broadcast forwards, and only the weights are gathered again
    assert backwards["all_gather"][0] == (3 if recomputed else 2)


def test_with_few_tokens_for_the_width_activations_move_and_not_parameters():
    few = TOKENS[:, :2]
    loss = lambda params, tokens: model.loss(params, tokens, CONFIG)
    specs = [*map(on_largest, bf.tree.leaves(PARAMS)), P("data")]
    treedef = bf.tree.structure(PARAMS)
    f = lambda *args: loss(bf.tree.unflatten(treedef, args[:-1]), args[-1])
    local = check(
        f, [*bf.tree.leaves(PARAMS), few], specs, AbstractMesh((4,), ("data",)), rtol=1e-4, atol=1e-4
    )
    largest = PARAMS["blocks"][0]["mlp"]["up"]["weight"].nbytes
    assert all(moved < count * largest for count, moved in traffic(local).values())


@pytest.mark.slow
def test_fsdp_steps_keep_the_shardings_and_follow_one_device(eight):
    mesh = bf.make_mesh((4,), ("data",))
    shardings = lambda tree: bf.tree.map(lambda x: bf.NamedSharding(mesh, on_largest(x)), tree)
    trees = bf.device_put((PARAMS, STATE), (shardings(PARAMS), shardings(STATE)))
    tokens = bf.device_put(TOKENS, bf.NamedSharding(mesh, P("data")))
    train, alone = bf.jit(step), (PARAMS, STATE)
    for _ in range(3):
        value, *trees = train(*trees, tokens)
        expected, *alone = bf.jit(step)(*alone, TOKENS)
        np.testing.assert_allclose(float(value), float(expected), rtol=1e-5)
        assert bf.tree.map(lambda x: x.sharding.spec, trees[0]) == bf.tree.map(on_largest, PARAMS)
