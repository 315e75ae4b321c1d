"""Pipelines by 1f1b and gpipe, against one device; collectives and residuals."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import P, errors, lax, nn, tree
from blufunc.parallel.mesh.mesh import AbstractMesh
from blufunc.parallel.recipes import mixture_of_experts, pipeline, pipeline_value_and_grad
from examples.gpt import model
from tests.parallel.exchanged import by_axes, equations, exchanged, meetings, same, same_with_gradients
from tests.parallel.lockstep import check

LAYERS, C, V, B, T = 8, 6, 11, 4, 3
RNG = np.random.default_rng(0)


def normal(*shape):
    return (0.3 * RNG.standard_normal(shape)).astype(np.float32)


SHARED = {"tokens": normal(V, C)}
STACK = {"up": normal(LAYERS, C, 8), "bias": normal(LAYERS, 8), "down": normal(LAYERS, 8, C)}


def ids(M, b=B):
    return RNG.integers(0, V, (M, b, T + 1)).astype(np.int32)


def embed(shared, m):
    return shared["tokens"][m[:, :-1]]


def block(x, p):
    return x + bnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def stage(layers, x):
    return lax.scan(lambda x, p: (block(x, p), None), x, layers)[0]


def loss(shared, x, m):
    return nn.softmax_cross_entropy_with_integer_labels(x @ shared["tokens"].T, m[:, 1:]).mean()


def whole(shared, layers, microbatches):
    together = microbatches.reshape(-1, T + 1)
    return loss(shared, stage(layers, embed(shared, together)), together)


def step(schedule, mesh, *, data=(), stage=stage, layers_spec=P("stage")):
    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            embed, stage, loss, shared, layers, microbatches, "stage", schedule=schedule, data_axes=data
        )

    return bf.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), layers_spec, P(None, data or None)),
        out_specs=(P(), (P(), layers_spec)),
    )


def expected(microbatches):
    return bf.value_and_grad(whole, (0, 1))(SHARED, STACK, microbatches)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("n, M", [(1, 3), (2, 1), (2, 5), (4, 2), (4, 4), (4, 9), (8, 3)])
@pytest.mark.parametrize("wrapped", [lambda f: f, bf.checkpoint], ids=["kept", "recomputed"])
def test_values_and_gradients(schedule, n, M, wrapped):
    f, microbatches = step(schedule, AbstractMesh((n,), ("stage",)), stage=wrapped(stage)), ids(M)
    same(f(SHARED, STACK, microbatches), expected(microbatches))


def tensor_parallel(layers, x):
    """A stage whose layers are divided once more."""

    def layer(x, p):
        return x + lax.psum(bnp.tanh(x @ p["up"] + p["bias"]) @ p["down"], "model"), None

    return lax.scan(layer, x, layers)[0]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_three_kinds_of_parallelism_at_once(schedule):
    mesh = AbstractMesh((2, 2, 2), ("data", "stage", "model"))
    spec = {"up": P("stage", None, "model"), "bias": P("stage", "model"), "down": P("stage", "model")}
    f = step(schedule, mesh, data=("data",), stage=tensor_parallel, layers_spec=spec)
    microbatches = ids(4)
    same(bf.jit(f)(SHARED, STACK, microbatches), expected(microbatches))


ACTIVATION = B * T * C * 4
SHARED_BYTES, STACK_BYTES = (sum(x.nbytes for x in tree.leaves(p)) for p in (SHARED, STACK))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("n, M", [(2, 5), (4, 3), (4, 8)])
def test_collectives(schedule, n, M):
    """Activations and cotangents take M + n - 1 ticks each; shared gradients, one sum."""
    f, microbatches = step(schedule, AbstractMesh((n,), ("stage",))), ids(M)
    assert exchanged(f, SHARED, STACK, microbatches) == {
        "ppermute": (2 * (M + n - 1), 2 * (M + n - 1) * ACTIVATION),
        "psum_invariant": (2, SHARED_BYTES + 4),
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("M", [2, 6])
def test_data_parallel_gradients_are_reduced_once_for_all_microbatches(schedule, M):
    mesh = AbstractMesh((2, 2), ("stage", "data"))
    f, microbatches = step(schedule, mesh, data=("data",)), ids(M)
    same(f(SHARED, STACK, microbatches), expected(microbatches))
    sums = {
        e.params["axes"]: (times, e.invars[0].aval.size * 4)
        for name, times, e in meetings(f, SHARED, STACK, microbatches)
        if name == "psum_invariant" and e.invars[0].aval.size > 1
    }
    assert sums == {("stage", "data"): (1, SHARED_BYTES), ("data",): (1, STACK_BYTES // 2)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("M", [2, 6])
def test_parameters_divided_outside_are_gathered_once_and_their_gradients_scattered_once(schedule, M):
    """FSDP: the stage takes reduced parameters, and leaves gradients unreduced."""
    mesh = AbstractMesh((2, 2), ("stage", "fsdp"))

    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            embed, stage, loss, shared, layers, microbatches, "stage", schedule=schedule, data_axes="fsdp"
        )

    f = bf.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(reduced={"stage", "fsdp"}), P("stage", reduced={"fsdp"}), P(None, "fsdp")),
        out_specs=(P(), (P(unreduced={"stage", "fsdp"}), P("stage", unreduced={"fsdp"}))),
    )
    args = SHARED, STACK, ids(M)
    same(f(*args), expected(args[2]))
    leaves, structure = tree.flatten(args)
    # the table, and of layers the biases, sharded over their count twice, and two weights
    of = [P(None, "fsdp"), P(("stage", "fsdp")), P("stage", "fsdp"), P("stage", "fsdp")]
    around = lambda *leaves: tree.leaves(f(*tree.unflatten(structure, leaves)))
    moved = by_axes(check(around, leaves, [*of, P()], mesh, outs=[None, *of], rtol=1e-4))
    whole = 4, SHARED_BYTES + STACK_BYTES // 2
    assert moved.pop(("ppermute", "stage"))[0] == 2 * (M + 1)
    assert moved == {
        ("all_gather", "fsdp"): whole,
        ("psum_scatter", "fsdp"): whole,
        ("psum", "stage"): (1, SHARED_BYTES // 2),
    }


def test_what_is_reduced_over_some_axes_is_summed_over_the_others():
    mesh = AbstractMesh((2, 2, 2), ("stage", "data", "fsdp"))

    def local(shared, layers, microbatches):
        axes = ("data", "fsdp")
        return pipeline_value_and_grad(
            embed, stage, loss, shared, layers, microbatches, "stage", data_axes=axes
        )

    rows = P(None, ("data", "fsdp"))
    f = bf.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("stage", reduced={"fsdp"}), rows),
        out_specs=(P(), (P(), P("stage", unreduced={"fsdp"}))),
    )
    args = SHARED, STACK, ids(3)
    same(f(*args), expected(args[2]))
    sums = {
        e.params["axes"]: e.invars[0].aval.size * 4
        for name, _, e in meetings(f, *args)
        if name == "psum_invariant" and e.invars[0].aval.size > 1
    }
    assert sums == {("stage", "data", "fsdp"): SHARED_BYTES, ("data",): STACK_BYTES // 2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_parameters_that_are_used_at_one_end_only_beside_data_parallelism(schedule):
    """Parameters of the loss or the embedding alone get gradients from it alone."""
    shared = SHARED | {"positions": normal(T, C), "scale": normal(C)}
    begin = lambda shared, m: embed(shared, m) + shared["positions"]
    end = lambda shared, x, m: loss(shared, x * shared["scale"], m)

    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            begin, stage, end, shared, layers, microbatches, "stage", schedule=schedule, data_axes="data"
        )

    def whole(shared, layers, microbatches):
        together = microbatches.reshape(-1, T + 1)
        return end(shared, stage(layers, begin(shared, together)), together)

    specs = P(), P("stage")
    f = bf.shard_map(
        local,
        mesh=AbstractMesh((2, 2), ("stage", "data")),
        in_specs=(*specs, P(None, "data")),
        out_specs=(P(), specs),
    )
    microbatches = ids(3)
    same(f(shared, STACK, microbatches), bf.value_and_grad(whole, (0, 1))(shared, STACK, microbatches))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("data", [(), ("data",)])
def test_parameters_that_nothing_uses_have_gradients_of_zero(schedule, data):
    shared = SHARED | {"unused": normal(T), "number": np.float32(1)}
    layers = STACK | {"unused": normal(LAYERS, 2)}
    f, microbatches = step(schedule, AbstractMesh((2, 2), ("stage", "data")), data=data), ids(3)
    want = bf.value_and_grad(whole, (0, 1))(shared, layers, microbatches)
    same(f(shared, layers, microbatches), want)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loss_that_does_not_see_the_stages(schedule):
    def of_parameters(shared, x, m):
        return (shared["tokens"] ** 2).mean()

    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            embed,
            stage,
            of_parameters,
            shared,
            layers,
            microbatches,
            "stage",
            schedule=schedule,
            data_axes="data",
        )

    specs = P(), P("stage")
    f = bf.shard_map(
        local,
        mesh=AbstractMesh((2, 2), ("stage", "data")),
        in_specs=(*specs, P(None, "data")),
        out_specs=(P(), specs),
    )
    want = bf.value_and_grad(lambda s, w: of_parameters(s, None, None), (0, 1))(SHARED, STACK)
    same(f(SHARED, STACK, ids(3)), want)


def gathered(layers, x):
    """A stage whose weights are sharded over the data axis, and gathered on use."""
    whole = {
        k: v if k == "bias" else lax.all_gather(v, "data", axis=1, tiled=True, to="reduced")
        for k, v in layers.items()
    }
    return stage(whole, x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_parameters_that_are_divided_along_the_data(schedule):
    """Gradients of weights that a stage gathers are scattered, and summed once."""
    spec = {"up": P("stage", "data"), "bias": P("stage"), "down": P("stage", "data")}
    mesh, microbatches = AbstractMesh((2, 2), ("stage", "data")), ids(3)
    f = step(schedule, mesh, data=("data",), stage=bf.checkpoint(gathered), layers_spec=spec)
    same(f(SHARED, STACK, microbatches), expected(microbatches))
    over_data = [
        e.invars[0].aval.size
        for name, _, e in meetings(f, SHARED, STACK, microbatches)
        if name == "psum_invariant" and e.params["axes"] == ("data",)
    ]
    assert over_data == [STACK["bias"].size // 2]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_experts_that_are_divided_along_the_data(schedule):
    layers = {"router": normal(LAYERS, C, 4), "experts": normal(LAYERS, 4, C, C)}

    def stage_of(**options):
        def layer(x, p):
            expert = lambda p, x: bnp.tanh(x @ p)
            how = {"capacity_factor": np.inf, **options}  # no token is dropped, however they are grouped
            return x + mixture_of_experts(expert, p["experts"], p["router"], x, **how)[0], None

        return lambda layers, x: lax.scan(layer, x, layers)[0]

    mesh, microbatches = AbstractMesh((2, 2), ("stage", "data")), ids(3)
    spec = {"router": P("stage"), "experts": P("stage", "data")}
    f = step(schedule, mesh, data=("data",), stage=stage_of(axis="data"), layers_spec=spec)

    def whole(shared, layers):
        together = microbatches.reshape(-1, T + 1)
        return loss(shared, stage_of()(layers, embed(shared, together)), together)

    same(f(SHARED, layers, microbatches), bf.value_and_grad(whole, (0, 1))(SHARED, layers))


def stored(f, *args):
    """The leading sizes of values whose other dimensions are those of activations.

    For a stage that is recomputed, these are the numbers of microbatches with live residuals.
    """
    jaxpr = bf.jit(f).lower(*args).jaxpr
    (body,) = [e.params["jaxpr"] for e in jaxpr.eqns if e.prim.name == "shard_map"]
    shapes = [v.aval.shape for e, _ in equations(body) for v in e.outvars if v.aval.dtype == np.float32]
    return {s[0] for s in shapes if len(s) == 4 and s[1:] == (B, T, C)} - {1}


@pytest.mark.parametrize("n, M", [(2, 9), (4, 12), (4, 24)])
def test_1f1b_keeps_2n_minus_1_microbatches_and_gpipe_all(n, M):
    mesh = AbstractMesh((n,), ("stage",))
    args = SHARED, STACK, ids(M)
    assert stored(step("1f1b", mesh, stage=bf.checkpoint(stage)), *args) - {LAYERS // n} == {2 * n - 1}
    assert max(stored(step("gpipe", mesh, stage=bf.checkpoint(stage)), *args)) == M + n - 1


@pytest.mark.parametrize("n, M", [(4, 1), (4, 2)])
def test_of_few_microbatches_1f1b_keeps_no_more_than_gpipe(n, M):
    args = SHARED, STACK, ids(M)
    mesh = AbstractMesh((n,), ("stage",))
    found = [max(stored(step(s, mesh, stage=bf.checkpoint(stage)), *args)) for s in ("1f1b", "gpipe")]
    assert found == [M + 1, M + n - 1]  # and a slot for stale data


def test_the_forward_pipeline_and_its_derivatives():
    """Results are unreduced: their sum is the last rank's."""
    x = normal(5, B, T, C)
    f = bf.shard_map(
        lambda layers, x: lax.psum(pipeline(stage, layers, x, "stage"), "stage"),
        mesh=AbstractMesh((4,), ("stage",)), in_specs=(P("stage"), P()), out_specs=P(),
    )  # fmt: skip
    same_with_gradients(f, lambda layers, x: bf.vmap(stage, (None, 0))(layers, x), (STACK, x))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_a_rank_computes_of_nothing_counts_for_nothing(schedule):
    """A stage that maps zeros, which a waiting rank has as its input, to NaN."""

    def fragile(layers, x):
        return x / bnp.sqrt((x * x).sum(-1, keepdims=True)) * (1 + layers["bias"].sum())

    def reference(shared, layers, m):
        m = m.reshape(-1, T + 1)
        x = embed(shared, m)
        for i in range(4):
            x = fragile({"bias": layers["bias"][2 * i : 2 * i + 2]}, x)
        return loss(shared, x, m)

    microbatches, layers = ids(3), {"bias": STACK["bias"]}
    f = step(schedule, AbstractMesh((4,), ("stage",)), stage=fragile)
    want = bf.value_and_grad(reference, (0, 1))(SHARED, layers, microbatches)
    same(f(SHARED, layers, microbatches), want)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loss_that_is_not_defined_of_what_is_between_the_stages(schedule):
    def local(shared, layers, microbatches):
        return pipeline_value_and_grad(
            lambda s, m: s * m,
            lambda w, x: w[0] * x,
            lambda s, x, m: bnp.sqrt(s * x).mean(),
            shared, layers, microbatches, "stage", schedule=schedule,
        )  # fmt: skip

    mesh = AbstractMesh((2,), ("stage",))
    f = bf.shard_map(local, mesh=mesh, in_specs=(P(), P("stage"), P()), out_specs=(P(), (P(), P("stage"))))
    args = np.float32(1.5), np.array([-1, -2], np.float32), 1 + RNG.random((3, 4)).astype(np.float32)
    one_device = lambda s, w, m: bnp.sqrt(s * (w[1] * (w[0] * (s * m)))).mean()
    same(f(*args), bf.value_and_grad(one_device, (0, 1))(*args))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_functions_may_close_over_values_of_the_body(schedule):
    scale, microbatches = np.float32(0.5), ids(3)

    def local(shared, layers, microbatches, scale):
        scale = scale * 2 + lax.psum(scale, "stage")  # 2.0

        def scaled(layers, x):
            return stage(layers, scale * x)

        return pipeline_value_and_grad(
            embed, scaled, loss, shared, layers, microbatches, "stage", schedule=schedule
        )

    f = bf.shard_map(
        local, mesh=AbstractMesh((2,), ("stage",)), in_specs=(P(), P("stage"), P(), P()),
        out_specs=(P(), (P(), P("stage"))),
    )  # fmt: skip

    def reference(shared, layers):
        m = microbatches.reshape(-1, T + 1)
        halves = [tree.map(lambda p, i=i: p[4 * i : 4 * i + 4], layers) for i in range(2)]
        x = stage(halves[1], 2 * stage(halves[0], 2 * embed(shared, m)))
        return loss(shared, x, m)

    same(f(SHARED, STACK, microbatches, scale), bf.value_and_grad(reference, (0, 1))(SHARED, STACK))


@pytest.mark.slow
def test_the_gpt_in_stages():
    config = model.Config(layers=4, heads=2, width=8, context=6, vocab=V)
    params = model.init(bf.random.key(0), config)
    layers = tree.map(lambda *xs: bnp.stack(xs), *params["blocks"])
    shared = {k: v for k, v in params.items() if k != "blocks"}
    tokens = RNG.integers(0, V, (4, 2, 7)).astype(np.int32)

    def embed(shared, m):
        return shared["tokens"][m[:, :-1]] + shared["positions"]

    def stage(layers, x):
        def one(x, p):
            x = x + model.attention(p["attention"], model.norm(p["norm1"], x), config.heads)
            return x + model.mlp(p["mlp"], model.norm(p["norm2"], x)), None

        return lax.scan(one, x, layers)[0]

    def loss(shared, x, m):
        logits = model.norm(shared["norm"], x) @ shared["tokens"].T
        return nn.softmax_cross_entropy_with_integer_labels(logits, m[:, 1:]).mean()

    f = bf.shard_map(
        lambda *a: pipeline_value_and_grad(embed, stage, loss, *a, "stage"),
        mesh=AbstractMesh((2,), ("stage",)), in_specs=(P(), P("stage"), P()),
        out_specs=(P(), (P(), P("stage"))),
    )  # fmt: skip
    value, (of_shared, of_layers) = f(shared, layers, tokens)
    want, grads = bf.value_and_grad(lambda p: model.loss(p, tokens.reshape(-1, 7), config))(params)
    same(value, want)
    same(of_layers, tree.map(lambda *xs: bnp.stack(xs), *grads.pop("blocks")))
    same(of_shared, grads)


def test_errors():
    mesh, args = AbstractMesh((2,), ("stage",)), (SHARED, STACK, ids(3))
    with pytest.raises(
        errors.ArgumentError, match="schedule is one of 1f1b, interleaved, zb-h1, gpipe, not 'zero'"
    ):
        step("zero", mesh)(*args)
    for schedule in ("gpipe", "1f1b"):
        with pytest.raises(errors.ShapeError, match=r"a stage takes .*4,3,6.* and returns .*4,3,12"):
            step(schedule, mesh, stage=lambda _, x: bnp.concatenate([x, x], -1))(*args)
        with pytest.raises(errors.ArgumentError, match="a stage returns one array, not a tuple"):
            step(schedule, mesh, stage=lambda _, x: (x, x))(*args)
        with pytest.raises(errors.DtypeError, match=r"parameters must be floating, not i32\[4\]"):
            step(schedule, mesh)(SHARED, STACK | {"heads": np.arange(LAYERS)}, args[2])
        # what is not the same on all ranks, and would be taken as if it were
        specs, out = (P(), P("stage")), (P(), (P(), P("stage")))
        for wrong in ((P(None, "stage"), P("stage"), P()), (*specs, P(None, "stage"))):
            local = lambda *a, schedule=schedule: pipeline_value_and_grad(
                embed, stage, loss, *a, "stage", schedule=schedule
            )
            with pytest.raises(errors.ShardingError, match="varying over 'stage' is not invariant"):
                bf.shard_map(local, mesh=mesh, in_specs=wrong, out_specs=out)(*args)
        with pytest.raises(errors.ShapeError, match=r"the loss of a microbatch is a scalar, not f32\[4,3\]"):
            bf.shard_map(
                lambda *a, schedule=schedule: pipeline_value_and_grad(
                    embed, stage, lambda s, x, m: x.mean(-1), *a, "stage", schedule=schedule
                ),
                mesh=mesh, in_specs=(*specs, P()), out_specs=out,
            )(*args)  # fmt: skip
    with pytest.raises(errors.ShardingError, match="have different types over 'model'"):
        step(
            "1f1b", AbstractMesh((2, 2), ("stage", "model")),
            stage=lambda _, x: x * lax.axis_index("model"), layers_spec=P("stage"),
        )(*args)  # fmt: skip
