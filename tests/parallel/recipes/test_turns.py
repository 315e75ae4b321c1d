"""Parts of a batch by turns: the same values, and overlapped collectives."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, DeviceSpec, LinkSpec, P, ShapeDtypeStruct, errors, lax, nn
from blufunc.parallel.recipes import by_turns
from tests.parallel.exchanged import equations, same

SPECS = {"up": P(None, None, "model"), "down": P(None, "model")}


def layer(p, x):
    return x + lax.psum(nn.gelu(x @ p["up"]) @ p["down"], "model")


def tokens_layer(p, x):
    """Sequence parallel: tokens are sharded between layers."""
    x = lax.all_gather(x, "model", axis=1, tiled=True)
    return (
        lax.psum_scatter(x + nn.gelu(x @ p["up"]) @ p["down"], "model", scatter_dimension=1, tiled=True) / 4
    )


def model(of, turns):
    def run(params, x):
        if turns == 1:
            return lax.scan(lambda x, p: (of(p, x), None), x, params)[0]
        step = lambda parts, p: (by_turns(of)(p, parts), None)
        return bnp.concatenate(lax.scan(step, tuple(bnp.split(x, turns)), params)[0])

    return run


def training(run):
    def step(params, x):
        return bf.value_and_grad(lambda p, x: (run(p, x).astype("float32") ** 2).sum(), (0, 1))(params, x)

    return step


def params(layers, width, make):
    return {"up": make(layers, width, 4 * width), "down": make(layers, 4 * width, width)}


RNG = np.random.default_rng(0)
PARAMS = params(2, 8, lambda *shape: (RNG.normal(size=shape) / 4).astype(np.float32))
X = RNG.normal(size=(4, 8, 8)).astype(np.float32)
MESH = AbstractMesh((4,), ("model",))


@pytest.mark.parametrize("turns", [2, 4])
@pytest.mark.parametrize(
    "of, rows", [(layer, P()), (tokens_layer, P(None, "model"))], ids=["tensor", "sequence"]
)
def test_parts_have_the_values_and_gradients_of_the_whole(of, rows, turns):
    out = (P(), (SPECS, rows))

    def mapped(turns):
        def step(params, x):
            value, grads = training(model(of, turns))(params, x)
            return (value if of is layer else lax.psum(value, "model")), grads

        return bf.shard_map(step, mesh=MESH, in_specs=(SPECS, rows), out_specs=out)

    same(mapped(turns)(PARAMS, X), mapped(1)(PARAMS, X), rtol=1e-4)


def test_parts_may_be_those_of_a_generator():
    p = {name: v[0] for name, v in PARAMS.items()}
    specs = {"up": P(None, "model"), "down": P("model")}

    def mapped(of):
        return bf.shard_map(of, mesh=MESH, in_specs=(specs, P()), out_specs=P())

    turned = mapped(lambda p, x: bnp.concatenate(by_turns(layer)(p, (part for part in bnp.split(x, 2)))))
    same(turned(p, X), mapped(layer)(p, X), rtol=1e-4)


def test_each_part_computes_up_to_its_next_collective():
    f = bf.shard_map(model(layer, 2), mesh=MESH, in_specs=(SPECS, P()), out_specs=P())
    names = [e.prim.name for e, _ in equations(bf.make_jaxpr(f)(PARAMS, X))]
    order = "".join(
        {"dot_general": "p", "psum_invariant": "e", "add": "+"}.get(n, "") for n in names if n != "gelu"
    )
    assert order.replace("+", "").startswith("ppeppe") and order.endswith("e++")


def two_blocks(p, x):
    """Two collectives an iteration, as a transformer layer has."""
    return layer({"up": p["up2"], "down": p["down2"]}, layer(p, x))


def planned(step, out):
    weights = params(4, 4096, lambda *shape: ShapeDtypeStruct(shape, "bfloat16"))
    weights |= {f"{k}2": w for k, w in weights.items()}
    mesh = AbstractMesh((8,), ("model",))
    mapped = bf.shard_map(step, mesh=mesh, in_specs=(PAIRS, P()), out_specs=out)
    return bf.plan(
        bf.jit(mapped), mesh, weights, ShapeDtypeStruct((8, 2048, 4096), "bfloat16"),
        device=DeviceSpec(flops=8e14, bandwidth=3e12), links={"model": LinkSpec(3.5e11, 5e-6)},
    )  # fmt: skip


PAIRS = SPECS | {f"{k}2": s for k, s in SPECS.items()}
STEPS = {
    "forward": (lambda run: run, P(), 0.3),
    "forward and backward": (training, (P(), (PAIRS, P())), 0.6),
}


@pytest.mark.parametrize("case", STEPS)
def test_plans_show_less_exposed_communication(case):
    make, out, share = STEPS[case]
    whole, halves = (planned(make(model(two_blocks, turns)), out) for turns in (1, 2))
    assert halves.exposed_seconds < share * whole.exposed_seconds
    assert halves.scheduled_seconds < whole.scheduled_seconds
    assert halves.collectives.total_bytes == whole.collectives.total_bytes
    assert abs(whole.exposed_seconds + whole.compute_seconds - whole.scheduled_seconds) < 1e-12


REFUSED = {
    "no parts": (lambda p, x: by_turns(layer)(p, ())[0], errors.ArgumentError, "0 parts have 0"),
    "parts of several types": (
        lambda p, x: by_turns(layer)(p, (x[:1], x[1:]))[0], errors.ArgumentError, "2 parts have 2",
    ),
    "not a function": (lambda p, x: by_turns(3)(p, (x,))[0], errors.ArgumentError, "by_turns"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    f, kind, message = REFUSED[case]
    one = {"up": P(None, "model"), "down": P("model")}
    first = {k: v[0] for k, v in PARAMS.items()}
    with pytest.raises(kind, match=message):
        bf.shard_map(f, mesh=MESH, in_specs=(one, P()), out_specs=P())(first, X)


def test_outside_of_shard_map_it_is_an_error():
    with pytest.raises(errors.UnsupportedError, match="by_turns outside of shard_map"):
        by_turns(lambda p, x: x)(1.0, (X, X))
