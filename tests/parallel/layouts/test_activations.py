"""Sequence parallelism that a search finds: values, collectives, and runs."""

import re

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, P, errors, nn, tree
from blufunc.parallel.layouts.activations import annotated
from blufunc.parallel.layouts.program import Program, checked_arguments
from blufunc.parallel.layouts.strategies import layouts_of, strategies, stream_options
from tests.parallel.layouts.small_programs import DEVICE, LINK, RATE, SMALL, Small, floats, ints, sgd
from tests.parallel.layouts.test_search import values_of

MESH = AbstractMesh((2,), ("x",))
LAYERS = "two layers of a transformer"


def tensor_parallel(small, mesh=MESH):
    """A program, the layouts of a tensor-parallel strategy, and their streams."""
    program = Program(small.step, checked_arguments(small.args), {})
    tensor = next(s for s in strategies(program.groups, mesh) if s[-1].lines and s[-1].lines != (0,))
    layouts = layouts_of(program.groups, mesh, tensor)
    return program, layouts, stream_options(program.groups, mesh, layouts)


def counts(forecast):
    found = {}
    for r in forecast.collectives:
        if "[]" not in r.type:  # the loss
            found[r.operation] = found.get(r.operation, 0) + r.count
    return found


@pytest.mark.parametrize("name", [LAYERS, "loop over layers", "mlp"])
def test_sums_become_reduce_scatters_and_gathers_of_as_many_bytes(name):
    program, layouts, streams = tensor_parallel(SMALL[name])
    links = {"x": LINK}
    whole = program.plan(MESH, layouts, DEVICE, links)
    assert set(counts(whole)) == {"all_reduce"}
    for stream in streams:
        spread = program.plan(MESH, layouts, DEVICE, links, streams=stream)
        assert set(counts(spread)) == {"reduce_scatter", "all_gather"}
        assert spread.cost.products == whole.cost.products  # no matmul is repeated


def test_rows_and_tokens_are_both_free():
    program, layouts, streams = tensor_parallel(SMALL[LAYERS])
    assert streams == [(("x", 0),), (("x", 1),)]
    found = [program.annotations(MESH, layouts, s) for s in streams]
    of = lambda end: {spec for specs in found for key, spec in specs.items() if key.endswith(end)}
    assert of("(transformer): dot_general f32[4,32,64]") == {P("x"), P(None, "x")}
    assert of("(transformer): dot_general f32[4,32,256]") == {P(None, None, "x")}


def language(params, tokens):
    """Tokens of a slice, and a table of positions that is added."""
    x = params["table"][tokens[:, :-1]] + params["positions"]
    x = x + nn.gelu(x @ params["up"]) @ params["down"]
    return nn.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, tokens[:, 1:]).mean()


def test_tokens_need_no_dimension_of_an_argument():
    params = {
        "table": floats(256, 32),
        "positions": floats(16, 32),
        "up": floats(32, 128),
        "down": floats(128, 32),
    }
    small = Small(sgd(language), (params, ints(4, 17)), 2)
    program, layouts, streams = tensor_parallel(small)
    found = [program.annotations(MESH, layouts, s) for s in streams]
    embedded = {spec for specs in found for key, spec in specs.items() if ": gather f32[4,16,32]" in key}
    assert embedded == {P("x"), P(None, "x")}
    for stream in streams:
        spread = program.plan(MESH, layouts, DEVICE, {"x": LINK}, streams=stream)
        of_stream = {
            r.operation
            for r in spread.collectives
            if r.type in ("f32[4,16,32]", "f32[2,16,32]", "f32[4,8,32]")
        }
        assert of_stream == {"reduce_scatter", "all_gather"}


def test_a_layout_without_regions_has_no_stream():
    program, _, _ = tensor_parallel(SMALL[LAYERS])
    groups = program.groups
    for strategy in strategies(groups, MESH):
        if strategy[0].lines in ((0,), ()):  # data parallelism and FSDP
            assert stream_options(groups, MESH, layouts_of(groups, MESH, strategy)) == []
    odd = SMALL["mlp"]._replace(args=(SMALL["mlp"].args[0], floats(255, 128)))
    assert tensor_parallel(odd)[2] == []  # two devices do not divide 255 rows


def test_the_code_runs_and_computes_what_one_device_computes(eight):
    small = SMALL["loop over layers"]
    mesh = bf.make_mesh((2,), ("x",), devices=eight[:2])
    found = bf.parallel.search(small.step, *small.args, mesh=mesh, device=DEVICE, links=LINK, plans=12)
    row = next(r for r in found if r.streams)
    assert "tensor and sequence parallel" in row.label and "activations[" in row.lines
    values = values_of(small.args)
    heads = row.program.groups.heads
    names = {"step": small.step.fun, "devices": eight[:2], **dict(zip(heads, values, strict=True))}
    exec(row.code().replace("('x',))", "('x',), devices=devices)"), names)
    want = small.step.fun(*values)
    for compiled in (names["compiled"], row.jit()):
        got = compiled(*values)
        for a, b in zip(tree.leaves(want), tree.leaves(got), strict=True):
            np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=2e-4, atol=2e-5)
    planned = bf.plan(names["compiled"], mesh, *small.args, device=DEVICE, links=LINK)
    assert counts(planned) == counts(row.forecast)


def loss(params, x, on=lambda value, spec: value):
    h = on(bnp.tanh(on(x @ params["up"], P(None, "x"))), P(None, "x"))
    return (on(h @ params["down"], P("x")) ** 2).mean()


def by_hand(params, x):
    grads = bf.grad(lambda p: loss(p, x, bf.constrain))(params)
    return tree.map(lambda p, g: p - RATE * g, params, grads)


def test_constraints_on_these_lines_are_the_same_program():
    args = {"up": floats(64, 256), "down": floats(256, 64)}, floats(128, 64)
    program = Program(sgd(loss), checked_arguments(args), {})
    layouts = ((("x",), ()), ((), ("x",)), ((), ()))  # of down, up and x
    stream = stream_options(program.groups, MESH, layouts)[0]
    found = program.plan(MESH, layouts, DEVICE, {"x": LINK}, streams=stream)
    specs = {"up": P(None, "x"), "down": P("x")}
    written = bf.collectives(bf.shard(by_hand, MESH, (specs, P()), specs), *args)
    sums = lambda rows: sorted((r.operation, r.bytes, r.count) for r in rows if "[]" not in r.type)
    assert sums(found.collectives) == sums(written)


def test_annotations_of_other_lines_are_errors():
    line = loss.__code__.co_firstlineno + 2
    key = f"test_activations.py:{line} (loss): dot_general f32[128,64]"
    args = {"up": bnp.ones((64, 256)), "down": bnp.ones((256, 64))}, bnp.ones((128, 64))
    assert annotated(loss, {key: P("x")})(*args) == loss(*args)
    jaxpr = bf.make_jaxpr(annotated(loss, {key: P("x")}))(*args)
    assert len(re.findall("sharding_constraint", str(jaxpr))) == 1
    with pytest.raises(
        errors.ShardingError, match=r"no operation of loss is 'test_activations.py:1 \(loss\)"
    ):
        annotated(loss, {"test_activations.py:1 (loss): dot_general f32[2]": P("x")})(*args)
    with pytest.raises(errors.ArgumentError, match="activations are partition specs by source lines"):
        annotated(loss, {key: "x"})
    with pytest.raises(errors.ArgumentError, match="takes a function"):
        annotated(3, {})
