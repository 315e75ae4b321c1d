"""The demo's training step under each parallelism, on eight simulated devices.

Losses are those of one device, and collectives are those of the textbook.
"""

import dataclasses
import functools

import numpy as np
import pytest

import blufunc as bf
from blufunc import tree
from blufunc.config import config
from blufunc.parallel.programs import mesh_program
from blufunc.parallel.recipes import expert_capacity
from examples.gpt import devices, model, sharded, train
from tests.parallel.exchanged import by_axes, same

L, H, C, T, V, E = 2, 8, 16, 16, 32, 8
DENSE = model.Config(layers=L, heads=H, width=C, context=T, vocab=V)
MIXTURE = model.Config(layers=L, heads=H, width=C, context=T, vocab=V, experts=E)
B, STEPS = 16, 8
SHARDED_STEPS = 4  # the first learning rate is 0, so the fourth loss is the second that depends on gradients
TOKENS = np.random.default_rng(0).integers(0, V, (STEPS, B, T + 1)).astype(np.int32)


@pytest.fixture(autouse=True)
def one_device_again(monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 1)


def trained(cfg, axes, how, steps=SHARDED_STEPS):
    """The losses of the first steps on a mesh, or on one device."""
    optimizer = train.make_optimizer(STEPS, 1e-2)
    layout = devices.layout(axes, cfg, B, **how)
    params = model.init(bf.random.key(0), cfg)
    values = layout.placed({"params": params, "optimizer": optimizer.init(params)})
    step = train.make_step(cfg, optimizer, layout.plan)
    losses, (params, state) = [], (values["params"], values["optimizer"])
    for tokens in TOKENS[:steps]:
        params, state, loss = step(params, state, layout.divided(tokens))
        losses.append(float(loss))
    return losses


@functools.cache
def alone(groups=0):
    """Losses of one device; of a mixture of experts, for tokens in ``groups`` groups."""
    if not groups:
        return trained(DENSE, None, {}, STEPS)
    mixture = functools.partial(bf.parallel.mixture_of_experts, groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "wiring", lambda config, plan: model.Wiring(mixture=mixture))
        return trained(MIXTURE, None, {}, STEPS)


# -- the textbook ----------------------------------------------------------------------------------


def size(x):
    return sum(4 * leaf.size for leaf in tree.leaves(x))


PARAMS = bf.eval_shape(lambda key: model.init(key, DENSE), bf.random.key(0))
N, ALL, TABLE = len(tree.leaves(PARAMS)), size(PARAMS), size(PARAMS["tokens"])
BLOCK = PARAMS["blocks"][0]
IN_BLOCKS, BLOCKS = L * len(tree.leaves(BLOCK)), L * size(BLOCK)
SHARED = ALL - BLOCKS
AROUND = N - IN_BLOCKS  # arrays that are not in layers
ARRAYS = AROUND + len(tree.leaves(BLOCK))  # of a stage, whose layers are stacked
STREAM, IDS = 4 * B * T * C, 4 * B * T  # bytes of the vectors, and of one number, of all tokens
# Whole on each rank, while the rest is sharded over "model": norms, biases after sums, and positions.
WHOLE_IN_BLOCKS = 4 * C * L * 6
WHOLE, OF_WHOLE = L * 6 + 2 + 1, WHOLE_IN_BLOCKS + 4 * C * 2 + size(PARAMS["positions"])


def tensor_parallel(rows):
    """Sequence parallelism: two gathers and two scatters per layer and direction.

    The loss gathers once more, and scatters its cotangent, as the lookup does its result. The rest is small: per token
    its id, and the maximum and two sums over the vocabulary; and the rows of the table's gradient go to their owners.
    """
    return {
        ("all_gather", "model"): (4 * L + 1 + 1, ((4 * L + 1) * STREAM + IDS) // rows),
        ("psum_scatter", "model"): (4 * L + 2 + 1, (4 * L + 2) * STREAM // rows + TABLE),
        ("pmax", "model"): (1, IDS // rows),
        ("psum", "model"): (2, 2 * IDS // rows),
    }


def pipeline(M, n, rows):
    """Activations go on, and cotangents back, in M + n - 1 ticks each."""
    ticks = 2 * (M + n - 1)
    return {("ppermute", "stage"): (ticks, ticks * STREAM // M // rows)}


# Gradients are summed once, in buckets: of the parameters around the layers, and of those of two stages' layers.
OF_STAGES = {("psum", "stage", "data"): (1, SHARED), ("psum", "data"): (1, BLOCKS // 2)}


def ring(n):
    """Keys and values circulate in both directions, and their gradients return.

    Each takes n - 1 messages.
    """
    messages = 3 * (n - 1) * L
    return {("ppermute", "seq"): (messages, messages * 2 * STREAM // n)}


def stage_ring(M, n, fsdp=1):
    """Keys and values of a stage's layers are sent in each tick.

    Gradients are sums over the tokens of ranks, as over rows.
    """
    ticks, messages = M + 1, 3 * (n - 1) * L // 2
    part = STREAM // M // n // fsdp
    sums = {("psum", "stage", "seq"): (1, SHARED), ("psum", "seq"): (1, BLOCKS // 2)}
    if fsdp > 1:
        whole = ARRAYS, SHARED + BLOCKS // 2
        sums = {
            ("all_gather", "fsdp"): whole, ("psum_scatter", "fsdp"): whole,
            ("psum", "stage", "seq"): (AROUND, SHARED // fsdp),
            ("psum", "seq"): (ARRAYS - AROUND, BLOCKS // 2 // fsdp),
        }  # fmt: skip
    return {
        **pipeline(M, 2, n * fsdp),
        ("ppermute", "seq"): (ticks * messages, ticks * messages * 2 * part),
        **sums,
    }


def data_fsdp_model():
    """A mesh of two by two by two: "model" halves the parameters that it shards.

    The biases of hidden units have no dimension for "fsdp", and those of queries, keys and values have 3 rows, which 2
    devices pad to 4.
    """
    hidden, rows_more = L * 4 * 4 * C, L * 4 * C
    halves = (ALL - OF_WHOLE - hidden + rows_more) // 2
    parameters = N - L, halves + OF_WHOLE
    return {
        **tensor_parallel(4),
        ("all_gather", "fsdp"): parameters,
        ("psum_scatter", "fsdp"): parameters,
        ("psum", "data"): (N - WHOLE - L, halves // 2),
        ("psum", "data", "model"): (WHOLE, OF_WHOLE // 2),
        ("psum", "data", "fsdp"): (L, hidden // 2),
    }


def stage_model():
    """Two stages of two ranks each, two ranks of sequences, and two microbatches.

    In each of 3 ticks there are two sums per layer and direction, and one of the lookup; per microbatch, that of the
    loss's cotangent, and the maximum and two sums over the vocabulary.
    """
    M, n, part = 2, 2, STREAM // 2 // 2
    times = (M + n - 1) * (2 * 2 * L // n + 1)
    return {
        **pipeline(M, n, 2),
        ("psum", "model"): (times + 2 * M, (times + M) * part + 2 * IDS // 2),
        ("pmax", "model"): (M, IDS // 2),
    }


# Bytes of what each of these has of the parameters: of those around the layers, and of one stage's layers.
SHARED_OF_TWO = SHARED - TABLE // 2
STAGE_OF_TWO = (WHOLE_IN_BLOCKS + (BLOCKS - WHOLE_IN_BLOCKS) // 2) // 2


def data_stage_model():
    """Parameters that are sharded over "model" have their own buckets."""
    return {
        **stage_model(),
        ("psum", "stage", "data"): (2, SHARED_OF_TWO),
        ("psum", "data"): (2, STAGE_OF_TWO),
    }


def fsdp_stage_model():
    """As without a pipeline, the biases of hidden units have no "fsdp" dimension.

    3 rows are padded to 4 on 2 devices.
    """
    hidden, row = L // 2 * 4 * 4 * C // 2, L // 2 * 4 * C // 2
    parameters = ARRAYS - 1, SHARED_OF_TWO + STAGE_OF_TWO - hidden + row
    return {
        **stage_model(),
        ("all_gather", "fsdp"): parameters,
        ("psum_scatter", "fsdp"): parameters,
        ("psum", "fsdp"): (1, hidden),
        ("psum", "stage"): (AROUND, SHARED_OF_TWO // 2),
    }


def of_stages(axis, n, data=1):
    """Stage parameters, or their optimizer state, sharded over n ranks.

    Each array is gathered once and its gradient scattered once, for any number of microbatches. Parameters of which
    ranks hold shares are summed over the other axes share by share: those around the layers, and with data parallelism
    those of the layers.
    """
    whole = ARRAYS, SHARED + BLOCKS // 2
    sums = {("psum", "stage"): (AROUND, SHARED // n)}
    if data > 1:
        sums = {
            ("psum", "stage", "data"): (AROUND, SHARED // n), ("psum", "data"): (ARRAYS - AROUND, BLOCKS // 2 // n),
        }  # fmt: skip
    return pipeline(4, 2, n * data) | {("all_gather", axis): whole, ("psum_scatter", axis): whole} | sums


GRADIENTS = N, ALL  # the table is one of them: its lookup and the loss share one sum
LAST = BLOCK["mlp"]["down"]["bias"].size * 4  # not needed to compute a layer again

CASES = {
    "data": ({"data": 8}, {}, {("psum", "data"): GRADIENTS}),
    "data, two microbatches": (
        {"data": 8}, {"microbatches": 2}, {("psum", "data"): GRADIENTS},
    ),
    "ZeRO": (
        {"zero1": 8}, {}, {("psum_scatter", "zero1"): GRADIENTS, ("all_gather", "zero1"): GRADIENTS},
    ),
    "data, two microbatches, recomputed": (
        {"data": 8}, {"microbatches": 2, "recompute": True}, {("psum", "data"): GRADIENTS},
    ),
    "ZeRO-1, two microbatches": (
        {"zero1": 8}, {"microbatches": 2},
        {("psum_scatter", "zero1"): GRADIENTS, ("all_gather", "zero1"): GRADIENTS},
    ),
    "ZeRO-1, two microbatches, recomputed": (
        {"zero1": 8}, {"microbatches": 2, "recompute": True},
        {("psum_scatter", "zero1"): GRADIENTS, ("all_gather", "zero1"): GRADIENTS},
    ),
    "data x ZeRO-1, two microbatches": (  # the scattered sums are summed over the rest
        {"data": 2, "zero1": 4}, {"microbatches": 2},
        {
            ("psum_scatter", "zero1"): GRADIENTS, ("psum", "data"): (N, ALL // 4),
            ("all_gather", "zero1"): GRADIENTS,
        },
    ),
    "ZeRO-2, two microbatches": (
        {"zero2": 8}, {"microbatches": 2},
        {("psum_scatter", "zero2"): (2 * N, 2 * ALL), ("all_gather", "zero2"): GRADIENTS},
    ),
    "FSDP": (
        {"fsdp": 8}, {}, {("all_gather", "fsdp"): GRADIENTS, ("psum_scatter", "fsdp"): GRADIENTS},
    ),
    "FSDP, two microbatches": (
        {"fsdp": 8}, {"microbatches": 2},
        {("all_gather", "fsdp"): (2 * N, 2 * ALL), ("psum_scatter", "fsdp"): (2 * N, 2 * ALL)},
    ),
    "FSDP x ZeRO-1, two microbatches": (  # shares of sums are scattered, and of new parameters gathered, once more
        {"fsdp": 2, "zero1": 4}, {"microbatches": 2},
        {
            ("all_gather", "fsdp"): (2 * N, 2 * ALL), ("psum_scatter", "fsdp"): (2 * N, 2 * ALL),
            ("all_gather", "zero1"): (N, ALL // 2), ("psum_scatter", "zero1"): (N, ALL // 2),
        },
    ),
    "FSDP, recomputed": (  # two gathers and one scatter a layer
        {"fsdp": 8}, {"recompute": True},
        {
            ("all_gather", "fsdp"): (N + IN_BLOCKS - L, ALL + BLOCKS - L * LAST),
            ("psum_scatter", "fsdp"): GRADIENTS,
        },
    ),
    "tensor and sequence": (
        {"model": 8}, {}, tensor_parallel(1) | {("psum", "model"): (WHOLE + 2, OF_WHOLE + 2 * IDS)},
    ),
    "context, ring": ({"seq": 8}, {}, ring(8) | {("psum", "seq"): GRADIENTS}),
    "data x context, ring": (
        {"data": 2, "seq": 4}, {},
        {
            ("ppermute", "seq"): (3 * 3 * L, 3 * 3 * L * 2 * STREAM // 2 // 4), ("psum", "data", "seq"): GRADIENTS,
        },
    ),
    "context, all_gather": (
        {"seq": 8}, {"routing": "all_gather"},
        {
            ("all_gather", "seq"): (2 * L, 2 * L * 2 * STREAM),
            ("psum_scatter", "seq"): (L, L * 2 * STREAM),
            ("psum", "seq"): GRADIENTS,
        },
    ),
    "context, all_to_all": (
        {"seq": 8}, {"routing": "all_to_all"},
        {("all_to_all", "seq"): (4 * L, 2 * L * (3 + 1) * STREAM // 8), ("psum", "seq"): GRADIENTS},
    ),
    "pipeline, 1f1b": ({"stage": 2, "data": 4}, {"microbatches": 4}, pipeline(4, 2, 4) | OF_STAGES),
    "pipeline, gpipe": (
        {"stage": 2, "data": 4}, {"microbatches": 4, "schedule": "gpipe"}, pipeline(4, 2, 4) | OF_STAGES,
    ),
    "data x fsdp x model": ({"data": 2, "fsdp": 2, "model": 2}, {}, data_fsdp_model()),
    "stage x FSDP, 1f1b": ({"stage": 2, "fsdp": 4}, {"microbatches": 4}, of_stages("fsdp", 4)),
    "stage x FSDP, gpipe, recomputed": (
        {"stage": 2, "fsdp": 4}, {"microbatches": 4, "schedule": "gpipe", "recompute": True}, of_stages("fsdp", 4),
    ),
    "stage x ZeRO-1": ({"stage": 2, "zero1": 4}, {"microbatches": 4}, of_stages("zero1", 4)),
    "stage x data x FSDP": (
        {"stage": 2, "data": 2, "fsdp": 2}, {"microbatches": 4}, of_stages("fsdp", 2, data=2),
    ),
    "stage x data x ZeRO-1": (
        {"stage": 2, "data": 2, "zero1": 2}, {"microbatches": 4}, of_stages("zero1", 2, data=2),
    ),
    "data x stage x model": (
        {"data": 2, "stage": 2, "model": 2}, {"microbatches": 2}, data_stage_model(),
    ),
    "stage x context": ({"stage": 2, "seq": 4}, {"microbatches": 2}, stage_ring(2, 4)),
    "stage x context x FSDP": (
        {"stage": 2, "seq": 2, "fsdp": 2}, {"microbatches": 4, "schedule": "gpipe"}, stage_ring(4, 2, fsdp=2),
    ),
    "FSDP x stage x model": (
        {"fsdp": 2, "stage": 2, "model": 2}, {"microbatches": 2}, fsdp_stage_model(),
    ),
}  # fmt: skip


@pytest.fixture
def programs(monkeypatch):
    """The local programs that are made."""
    made, localise = [], mesh_program.localise

    def noted(*args):
        result = localise(*args)
        made.append(result[0])
        return result

    monkeypatch.setattr(mesh_program, "localise", noted)
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_one_device_and_the_exchanges_those_of_the_textbook(name, programs):
    axes, how, textbook = CASES[name]
    np.testing.assert_allclose(trained(DENSE, axes, how), alone()[:SHARDED_STEPS], rtol=1e-6)
    (program,) = programs  # one, as the results of a step lie as its arguments do
    assert by_axes(program) == textbook


@pytest.mark.slow
@pytest.mark.parametrize("axis, share", [("zero1", 1), ("zero2", 8)])
def test_what_is_added_up_over_microbatches_is_whole_or_a_share(axis, share, programs):
    # why there are two: ZeRO-1 reduces gradients once and stores them whole, ZeRO-2 stores a share, and reduces each
    trained(DENSE, {axis: 8}, {"microbatches": 2})
    (loop,) = [e for e in programs[0].eqns if e.prim.name == "scan"]
    sums = [v.aval for v in loop.outvars[: loop.params["n_carry"]]]
    assert sum(4 * a.size for a in sums) == ALL // share and len(sums) == N


@pytest.mark.slow
def test_parameters_tokens_and_features_divided_at_once(programs):
    axes, how = {"fsdp": 2, "seq": 2, "model": 2}, {"recompute": True}
    np.testing.assert_allclose(trained(DENSE, axes, how), alone()[:SHARDED_STEPS], rtol=1e-6)
    messages = 4 * L  # forwards, again, and backwards twice
    assert by_axes(programs[0])["ppermute", "seq"] == (messages, messages * 2 * STREAM // 2 // 2 // 2)


MIXTURE_PARAMS = bf.eval_shape(lambda key: model.init(key, MIXTURE), bf.random.key(0))
EXPERTS = [{k: block["experts"][k] for k in ("up", "down")} for block in MIXTURE_PARAMS["blocks"]]
PLACES = 4 * C * E * expert_capacity(B * T // 8, E, 2, 1.25)  # of one rank's tokens at all experts
STATISTICS = L * 2 * 4 * E


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "textbook"),
    [
        (
            {"expert": 8},  # to the experts and back, forwards and backwards
            {
                ("all_to_all", "expert"): (4 * L, 4 * L * PLACES),
                ("psum", "expert"): (
                    len(tree.leaves(MIXTURE_PARAMS)) - len(tree.leaves(EXPERTS)) + L,
                    size(MIXTURE_PARAMS) - size(EXPERTS) + STATISTICS,
                ),
            },
        ),
        (
            {"data": 8},
            {("psum", "data"): (len(tree.leaves(MIXTURE_PARAMS)) + L, size(MIXTURE_PARAMS) + STATISTICS)},
        ),
    ],
    ids=["expert", "data"],
)
def test_mixtures_of_experts(axes, textbook, programs):
    np.testing.assert_allclose(trained(MIXTURE, axes, {}), alone(8)[:SHARDED_STEPS], rtol=1e-6)
    assert by_axes(programs[0]) == textbook


DEEP = dataclasses.replace(DENSE, layers=4)
DEEP_MIXTURE = dataclasses.replace(MIXTURE, layers=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_of", "axes", "how"),
    [
        (DEEP, {"stage": 2, "fsdp": 2}, {"schedule": "zb-h1"}),
        (DEEP, {"stage": 2, "data": 2}, {"schedule": "interleaved", "chunks": 2, "sharded_ends": True}),
        (DEEP_MIXTURE, {"stage": 2, "data": 2}, {"schedule": "1f1b"}),
        (DEEP_MIXTURE, {"stage": 2, "expert": 2}, {"schedule": "zb-h1", "sharded_ends": True}),
    ],
    ids=["zb-h1", "interleaved", "experts", "sharded experts"],
)
def test_schedules_of_pipelines(config_of, axes, how, monkeypatch):
    """A rank's tokens of a microbatch are a group of the balance loss."""
    monkeypatch.setattr(config, "host_compiler", "never")
    how = {"microbatches": 4, **how}
    found = trained(config_of, axes, how)
    mixture = functools.partial(bf.parallel.mixture_of_experts, groups=2)
    monkeypatch.setattr(sharded, "wiring", lambda config, plan: model.Wiring(mixture=mixture))
    np.testing.assert_allclose(found, trained(config_of, None, {"microbatches": 4}), rtol=1e-6)


def test_interleaved_layers_are_in_order_in_files_and_for_evaluation(monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "never")
    how = {"microbatches": 2, "schedule": "interleaved", "chunks": 2}
    layout = devices.layout({"stage": 2}, DEEP, B, **how)
    values = {"params": model.init(bf.random.key(0), DEEP)}
    placed = layout.placed(values)
    same(layout.whole(placed), values)
    loss = train.make_evaluate(DEEP, B, layout)(placed["params"], TOKENS[0])
    assert loss == pytest.approx(float(model.loss(values["params"], TOKENS[0], DEEP)), rel=1e-6)
    assert layout.packed == ["stage:2:2"]
    other = devices.layout({"stage": 4}, DEEP, B)
    moved = other.restored(lambda _: tree.map(np.asarray, placed), values, layout.packed)
    same(other.whole(moved), values)


@pytest.mark.slow
def test_experts_parameters_and_features_divided_at_once():
    got = trained(MIXTURE, {"expert": 2, "fsdp": 2, "model": 2}, {})
    np.testing.assert_allclose(got, alone(4)[:SHARDED_STEPS], rtol=1e-6)


@pytest.mark.slow
def test_the_losses_fall():
    assert alone()[-1] < alone()[0] - 0.1 and alone(8)[-1] < alone(8)[0] - 0.1
