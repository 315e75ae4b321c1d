"""``bf.collectives`` and ``bf.plan``: rows, causes, bytes and times, by hand."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import (
    AbstractMesh,
    DeviceSpec,
    LinkSpec,
    NamedSharding,
    P,
    ShapeDtypeStruct,
    errors,
    lax,
    nn,
    optim,
)
from blufunc.parallel.mesh.links import exchange_seconds, wire_bytes

MESH = AbstractMesh((4, 2), ("data", "model"))


def shape(*sizes, spec=None, mesh=MESH):
    return ShapeDtypeStruct(sizes, "float32", sharding=None if spec is None else NamedSharding(mesh, spec))


def loss(params, x):
    h = bnp.tanh(x @ params["up"])
    return ((h @ params["down"] - x) ** 2).mean()


def step(params, x):
    value, grads = bf.value_and_grad(loss)(params, x)
    return value, bf.tree.map(lambda p, g: p - 0.1 * g, params, grads)


PARAMS = {"up": shape(16, 64), "down": shape(64, 16)}
TENSOR = {"up": P(None, "model"), "down": P("model")}
X = shape(32, 16)
LINE = loss.__code__.co_firstlineno


def rows(found):
    return [(r.operation, r.axes, r.bytes, r.count, r.because, r.backward) for r in found]


def test_a_row_says_what_is_exchanged_and_which_forward_operation_caused_it():
    found = bf.collectives(bf.shard(step, MESH, (TENSOR, P("data")), (P(), TENSOR)), PARAMS, X)
    product, gradient = 8 * 16 * 4, 16 * 32 * 4
    assert sorted(rows(found)) == sorted(
        [
            ("all_reduce", ("model",), product, 1, "dot_general", False),
            ("all_reduce", ("data",), gradient, 1, "dot_general", True),
            ("all_reduce", ("data",), gradient, 1, "dot_general", True),
            ("all_reduce", ("data",), 4, 1, "reduce_sum", False),
        ]
    )
    lines = {(r.axes, r.backward, r.bytes): r.line for r in found if r.bytes > 4}
    assert lines[("model",), False, product] == f"test_collectives.py:{LINE + 2} (loss)"
    assert {r.line for r in found if r.backward} == {f"test_collectives.py:{LINE + k} (loss)" for k in (1, 2)}
    assert found.count == 4 and found.total_bytes == product + 2 * gradient + 4
    assert found.sent == product + 1.5 * (2 * gradient + 4)
    assert f"dot_general  test_collectives.py:{LINE + 1} (loss) backward" in str(found)


def bias(b, x):
    return ((x + b) ** 2).sum()


def test_a_gradient_names_the_operation_that_it_is_of():
    (found,) = bf.collectives(bf.shard(bf.grad(bias), MESH, (P(), P("data")), P()), shape(16), X)
    assert found.because == "reduce_sum, of broadcast_in_dim add" and found.backward
    assert found.line == f"test_collectives.py:{bias.__code__.co_firstlineno + 1} (bias)"


def local(w, x):
    def body(c, _):
        return lax.pmean(bnp.tanh(c @ w), "data"), None

    c, _ = lax.scan(body, x, None, length=5)
    return lax.cond(c.sum() > 0, lambda: lax.all_gather(c, "model", tiled=True), lambda: bnp.ones((16, 16)))


def test_what_the_user_wrote_is_there_as_often_as_it_runs():
    f = bf.shard_map(local, mesh=MESH, in_specs=(P(), P()), out_specs=P("model"), check_vma=False)
    found = bf.collectives(f, shape(16, 16), shape(8, 16))
    assert [(r.operation, r.count, r.condition, r.cause) for r in found] == [
        ("all_reduce", 5, "", "asked for"),
        ("all_gather", 1, "if taken", "asked for"),
    ]
    assert found[0].line == f"test_collectives.py:{local.__code__.co_firstlineno + 2} (body)"
    assert found[1].bytes == 16 * 16 * 4  # the result


def test_a_loop_without_a_known_end_counts_a_round():
    def f(x):
        return lax.while_loop(lambda c: c.sum() < 100, lambda c: c @ c, x)

    found = bf.collectives(f, shape(16, 16, spec=P("data")))
    assert {r.condition for r in found} == {"a round"} and "1 a round" in str(found)
    assert "count as one iteration" in str(bf.plan(f, MESH, shape(16, 16, spec=P("data"))))


def test_without_a_mesh_nothing_is_exchanged():
    found = bf.collectives(loss, PARAMS, X)
    assert len(found) == 0 and str(found) == "no collectives"


def test_arrays_on_a_mesh_are_asked_where_they_are(eight):
    mesh = bf.make_mesh((4, 2), ("data", "model"))
    x = bf.device_put(np.ones((32, 16), np.float32), NamedSharding(mesh, P("data")))
    (found,) = bf.collectives(lambda x: x.sum(0), x)
    assert (found.operation, found.axes, found.bytes) == ("all_reduce", ("data",), 64)


def test_a_sum_of_uneven_shards_names_what_is_summed():
    f = bf.jit(bf.grad(bias), out_shardings=NamedSharding(MESH, P("data")))
    (found,) = bf.collectives(f, shape(15), shape(32, 15, spec=P("data")))
    assert (found.operation, found.because) == ("reduce_scatter", "reduce_sum, of broadcast_in_dim add")


# -- plan ------------------------------------------------------------------------------------------


def test_rings():
    fast, slow = LinkSpec(100.0, 1.0), LinkSpec(10.0, 2.0)
    assert [wire_bytes(k, 800, 8) for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")] == [
        1400, 700, 700, 700,
    ]  # fmt: skip
    assert wire_bytes("permute", 800, 8) == 800
    assert exchange_seconds("all_reduce", 800, (8,), (fast,)) == 14 + 14
    assert exchange_seconds("all_gather", 800, (4, 2), (fast, slow)) == 70 + 7 * 2
    assert exchange_seconds("all_gather", 800, (8, 1), (fast, slow)) == 7 + 7
    assert exchange_seconds("permute", 800, (8,), (fast,)) == 8 + 1
    assert exchange_seconds("all_reduce", 800, (1,), (fast,)) == 0


def test_a_plan_for_4096_devices():
    mesh = AbstractMesh((512, 8), ("data", "model"))
    params = {"up": shape(4096, 16384), "down": shape(16384, 4096)}
    specs = {"up": P("data", "model"), "down": P("model", "data")}
    x = shape(1 << 20, 4096)
    f = bf.shard(step, mesh, (specs, P("data")), (P(), specs))
    device = DeviceSpec(flops=400e12, bandwidth=3e12, memory=80e9)
    links = {"data": LinkSpec(50e9, 5e-6), "model": LinkSpec(400e9, 1e-6)}
    plan = bf.plan(bf.jit(f, donate_argnums=0), mesh, params, x, device=device, links=links)
    of_params, of_x = 2 * 4 * 4096 * 16384 // 4096, 4 * 4096 * (1 << 20) // 512
    assert plan.argument_bytes == of_params + of_x
    # the program holds at least both gathered parameters and the hidden values of its tokens
    gathered, hidden = 4 * 4096 * 16384 // 8, 4 * 2048 * 2048
    assert of_params + of_x + 2 * gathered + hidden <= plan.peak_bytes <= 6 * gathered
    assert plan.peak_bytes < bf.plan(f, mesh, params, x).peak_bytes  # where nothing is donated
    assert plan.fits and not bf.plan(f, mesh, params, x, device=DeviceSpec(1e12, 1e12, memory=1e6)).fits
    products = 5 * 2 * 2048 * 4096 * 2048  # two forward and three backward: no gradient for x
    assert plan.cost.products == products
    assert plan.compute_seconds >= products / device.flops
    counts = {}
    for r in plan.collectives:
        counts[r.operation, r.axes] = counts.get((r.operation, r.axes), 0) + r.count
    assert counts["all_gather", ("data",)] == counts["reduce_scatter", ("data",)] == 2
    ring = 511 / 512 * gathered / 50e9 + 511 * 5e-6
    big = [r for r in plan.collectives if r.axes == ("data",) and r.bytes == gathered]
    assert len(big) == 4 and plan.exchange_seconds == pytest.approx(
        4 * ring
        + 2 * 511 / 512 * 4 / 50e9 + 2 * 511 * 5e-6  # the loss
        + 2 * 7 / 8 * of_x / 400e9 + 14 * 1e-6  # the sum of the second product
    )  # fmt: skip
    assert plan.seconds == plan.compute_seconds + plan.exchange_seconds
    assert plan.overlapped_seconds == max(plan.compute_seconds, plan.exchange_seconds)
    text = str(plan)
    assert "step on 4,096 devices (data=512, model=8)" in text and "fits in 74.5 GiB" in text


def test_without_figures_there_are_no_times():
    plan = bf.plan(loss, MESH, PARAMS, X)
    assert plan.seconds is plan.overlapped_seconds is plan.compute_seconds is plan.exchange_seconds is None
    assert plan.fits is None and "at least" not in str(plan)
    assert bf.plan(loss, MESH, PARAMS, X, links=LinkSpec(1e9)).exchange_seconds == 0


def attended(x, w):
    q, k, v = (bnp.tensordot(x, w[i], 1) for i in range(3))
    return x + nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), None


def unrolled(ws, x):
    for w in ws:
        x, _ = attended(x, w)
    return x


@pytest.mark.parametrize("backward", [False, True])
def test_bodies_of_loops_cost_what_they_cost_outside(backward):
    ws, x = ShapeDtypeStruct((4, 3, 256, 4, 64), "bfloat16"), ShapeDtypeStruct((2, 1024, 256), "bfloat16")

    def cost(f):
        loss = (lambda ws, x: f(ws, x).astype("float32").sum()) if backward else f
        return bf.plan(bf.grad(loss) if backward else f, AbstractMesh((1,), ("x",)), ws, x).cost

    loop = cost(lambda ws, x: lax.scan(attended, x, ws)[0])
    apart = cost(unrolled)
    # of the first layer a loop computes the cotangent of the input too, and residuals are stacked
    assert apart.bytes <= loop.bytes <= 1.15 * apart.bytes
    assert apart.products <= loop.products <= 1.1 * apart.products


def test_a_branch_costs_its_dearest_body_and_a_while_a_round():
    x = ShapeDtypeStruct((256, 256), "float32")
    cost = lambda f: bf.plan(f, AbstractMesh((1,), ("x",)), x).cost.products
    product = cost(lambda x: x @ x)
    assert cost(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)) == 2 * product
    assert cost(lambda x: lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ c, x)) == product


def test_bodies_of_loops_need_memory():
    def f(ws, x):
        return lax.scan(lambda c, w: (bnp.tanh(c @ w) @ w.T, None), x, ws)[0]

    x = shape(64, 256, spec=P("data"))
    plan = bf.plan(f, MESH, shape(8, 256, 1024), x)
    assert plan.body_bytes >= 16 * 1024 * 4  # the hidden values of one layer
    assert plan.peak_bytes == plan.memory.peak_bytes + plan.memory.unplanned_bytes + plan.body_bytes


WRONG = {
    "mesh": (lambda: bf.plan(loss, "x", PARAMS, X), errors.ArgumentError, "takes a mesh"),
    "function": (lambda: bf.plan(3, MESH), errors.ArgumentError, "takes a function"),
    "device": (lambda: bf.plan(loss, MESH, PARAMS, X, device=3), errors.ArgumentError, "a DeviceSpec"),
    "links": (lambda: bf.plan(loss, MESH, PARAMS, X, links=3), errors.ArgumentError, "LinkSpecs"),
    "an axis without links": (
        lambda: bf.plan(loss, MESH, PARAMS, X, links={"data": LinkSpec(1.0)}),
        errors.ShardingError,
        r"links are of the axes \['data'\]",
    ),
    "another mesh": (
        lambda: bf.plan(loss, AbstractMesh((8,), ("d",)), PARAMS, shape(8, 16, spec=P("data"))),
        errors.ShardingError,
        "is on the mesh",
    ),
    "a shape with a spec": (
        lambda: bf.collectives(bnp.sin, ShapeDtypeStruct((8,), "float32", sharding=P("data"))),
        errors.ArgumentError,
        "whose sharding is P",
    ),
    "bandwidth": (lambda: LinkSpec(0), errors.ValueRangeError, "bandwidth is 0"),
    "latency": (lambda: LinkSpec(1.0, -1), errors.ValueRangeError, "latency is -1"),
    "flops": (lambda: DeviceSpec(-1, 1), errors.ValueRangeError, "flops is -1"),
    "memory": (lambda: DeviceSpec(1, 1, 0), errors.ValueRangeError, "memory is 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    call, error, message = WRONG[what]
    with pytest.raises(error, match=message) as e:
        call()
    assert "test_collectives.py" in e.value.where


# -- annotations at the ends of a program -------------------------------------------------------------

DEVICES = AbstractMesh((4,), ("data",))
ON = lambda spec: NamedSharding(DEVICES, spec)
FSDP = {"up": P(None, "data"), "down": P("data")}
OPTIMIZER = optim.adamw(1e-2)


def train(params, state, x):
    value, grads = bf.value_and_grad(loss)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return value, optim.apply_updates(params, updates), state


BIG = {"up": shape(16, 64), "down": shape(64, 16)}
STATE = bf.eval_shape(OPTIMIZER.init, BIG)
TOKENS = shape(256, 16)
STATE_SPECS = bf.tree.map(lambda s: P(*[None] * int(np.argmax(s.shape)), "data") if s.shape else P(), STATE)


def put(tree, specs):
    return bf.tree.map(lambda x, s: ShapeDtypeStruct(x.shape, x.dtype, sharding=ON(s)), tree, specs)


PLACED = put(BIG, FSDP), put(STATE, STATE_SPECS), put(TOKENS, P("data"))
ON_ALL = bf.tree.map(ON, FSDP), bf.tree.map(ON, STATE_SPECS)
WAYS = {
    "placed": (train, PLACED),
    "out_shardings": (bf.jit(train, out_shardings=(None, *ON_ALL)), PLACED),
    "in_shardings": (bf.jit(train, in_shardings=(*ON_ALL, ON(P("data")))), (BIG, STATE, TOKENS)),
    "shard": (
        bf.shard(train, DEVICES, (FSDP, STATE_SPECS, P("data")), (P(), FSDP, STATE_SPECS)),
        (BIG, STATE, TOKENS),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_fsdp_is_one_gather_and_one_scatter_however_it_is_said(way):
    f, args = WAYS[way]
    found = bf.collectives(f, *args)
    counts = {}
    for r in found:
        counts[r.operation] = counts.get(r.operation, 0) + r.count
    assert counts == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}, str(found)
