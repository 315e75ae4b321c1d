"""``bf.parallel.search``: against all layouts, on simulated devices, and errors."""

import functools
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import AbstractMesh, DeviceSpec, LinkSpec, P, ShapeDtypeStruct, errors, tree
from blufunc.parallel.layouts.groups import pattern
from blufunc.parallel.layouts.program import Program, checked_arguments
from blufunc.parallel.layouts.strategies import options, stream_options
from blufunc.sharding import AxisType
from tests.parallel.layouts.small_programs import DEVICE, LINK, SMALL, floats, mlp, sgd

BEST = Path(__file__).parent / "best_layouts.json"
"""The best of all layouts of each program (``test_the_best_of_all_layouts``)."""

MARGIN = 1.05
X = floats(8, 8)


def program_of(small):
    return Program(small.step, checked_arguments(small.args), {}), AbstractMesh((small.devices,), ("x",))


def best_of(name):
    """The best layouts of a program, and its best streams."""
    found = json.loads(BEST.read_text())[name]
    layouts = tuple(tuple(tuple(axes) for axes in layout) for layout in found["layouts"])
    return layouts, tuple((axis, i) for axis, i in found["streams"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMALL)
def test_a_search_is_as_good_as_all_layouts(name):
    small = SMALL[name]
    found = bf.parallel.search(
        small.step,
        *small.args,
        mesh=AbstractMesh((small.devices,), ("x",)),
        device=DEVICE,
        links=LINK,
        plans=32,
    )
    program, mesh = program_of(small)
    best, streams = best_of(name)
    least = program.plan(mesh, best, DEVICE, {"x": LINK}, streams=streams).scheduled_seconds
    assert found.seconds <= MARGIN * least
    assert len(found) <= 32


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_best_of_all_layouts(name):
    small = SMALL[name]
    program, mesh = program_of(small)
    groups = range(len(program.groups.groups))
    seconds = {
        (layouts, streams): program.plan(
            mesh, layouts, DEVICE, {"x": LINK}, streams=streams
        ).scheduled_seconds
        for layouts in itertools.product(*(options(program.groups, mesh, g) for g in groups))
        for streams in ((), *stream_options(program.groups, mesh, layouts))
    }
    assert seconds[best_of(name)] == min(seconds.values())


# -- what is found, runs ------------------------------------------------------------------------------


def values_of(args, seed=0):
    rng = np.random.default_rng(seed)

    def values(x):
        if x.dtype == np.int32:
            return rng.integers(0, 16, x.shape).astype("int32")
        return (rng.normal(size=x.shape) / np.sqrt(x.shape[-2] if len(x.shape) > 1 else 1)).astype(x.dtype)

    return tree.map(values, args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (8,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "loop over layers", "adam"])
def test_the_layout_found_computes_what_one_device_computes(name, shape, eight):
    small = SMALL[name]
    names = ("data", "model")[: len(shape)]
    mesh = bf.make_mesh(shape, names, devices=eight[: np.prod(shape)])
    found = bf.parallel.search(small.step, *small.args, mesh=mesh, device=DEVICE, links=LINK, plans=8)
    values = values_of(small.args)
    if name == "adam":
        values = (values[0], tree.map(lambda x: x * 0, values[1]), *values[2:])
    want = small.step.fun(*values)
    got = found.jit()(*values)
    for a, b in zip(tree.leaves(want), tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(b), np.asarray(a), rtol=2e-4, atol=2e-5)
    assert got[1 if name != "adam" else 0][sorted(small.args[0])[-1]].sharding.spec in found.specs.values()


@pytest.mark.parametrize("name", ["adam", "two layers of a transformer"])
def test_the_code_says_the_same(name):
    small = SMALL[name]
    mesh = AbstractMesh((small.devices,), ("x",))
    found = bf.parallel.search(small.step, *small.args, mesh=mesh, device=DEVICE, links=LINK, plans=3)
    heads = found.best.program.groups.heads
    code = found.code().replace("bf.make_mesh", "bf.AbstractMesh")
    names = {found.best.program.fun.__name__: small.step.fun, **dict(zip(heads, small.args, strict=True))}
    exec(code, names)
    assert names["in_shardings"] == found.in_shardings
    assert names["out_shardings"] == found.out_shardings
    forecast = bf.plan(names["compiled"], mesh, *small.args, device=DEVICE, links=LINK)
    assert forecast.peak_bytes == found.peak_bytes
    assert forecast.scheduled_seconds == pytest.approx(found.seconds, rel=0.02)
    assert forecast.collectives.total_bytes == found.forecast.collectives.total_bytes


class Scaled:
    def method(self, p, x, scale=2.0):
        return scale * (x @ p).sum()

    __call__ = method


def third(scale, p, x, of=None):
    return Scaled().method(p, x, scale)


ODD_STEPS = {
    "a lambda": (lambda p, x: (x @ p).sum(), "step"),
    "an object": (Scaled(), "step"),
    "a bound method": (Scaled().method, "method"),
    "keywords": (functools.partial(Scaled().method, scale=3.0), "functools.partial(method, scale=3.0)"),
    "keywords of a lambda": (functools.partial(lambda p, x, n: n * x @ p, n=3), "functools.partial(step, n=3)"),
    "no literal": (functools.partial(third, 3.0, of=bnp.sin), "functools.partial(third, 3.0, of=of)"),
    "of a jit": (functools.partial(bf.jit(functools.partial(third, 3.0)), of=None), "functools.partial(step, of=None)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_STEPS)
def test_the_code_of_steps_without_a_name(name):
    step, written = ODD_STEPS[name]
    found = bf.parallel.search(step, X, X, mesh=AbstractMesh((4,), ("x",)), plans=1)
    code = found.code().replace("bf.make_mesh", "bf.AbstractMesh")
    assert f"    {written}," in code.splitlines() and ("import functools" in code) == ("partial" in written)
    own = step.func if isinstance(step, functools.partial) else step
    head = written.removeprefix("functools.partial(").partition(",")[0]
    names = {head: own, "p": X, "x": X, "of": bnp.sin}
    exec(code, names)
    want, got = bf.eval_shape(step, X, X), bf.eval_shape(names["compiled"], X, X)
    assert (want.shape, want.dtype) == (got.shape, got.dtype)


def several(*args):
    (up, down), x = args[:2], args[2]["x"]
    return bnp.tanh(x @ up) @ down


def several_after(args0, *args):
    return args0 @ several(*args)


@pytest.mark.parametrize(
    ("step", "heads"),
    [(several, ["args0", "args1", "args2"]), (several_after, ["args0", "args_0", "args_1", "args_2"])],
    ids=["args", "args after a parameter of that name"],
)
def test_the_code_of_a_step_of_any_number_of_arguments(step, heads):
    args = (*[floats(8, 8)] * (len(heads) - 3), floats(8, 32), floats(32, 8), {"x": floats(8, 8)})
    found = bf.parallel.search(
        step, *args, mesh=AbstractMesh((4,), ("x",)), device=DEVICE, links=LINK, plans=6
    )
    assert found.program.groups.heads == heads
    names = {step.__name__: step, **dict(zip(heads, args, strict=True))}
    exec(found.code().replace("bf.make_mesh", "bf.AbstractMesh"), names)
    assert names["in_shardings"] == found.in_shardings
    assert bf.eval_shape(names["compiled"], *args).shape == bf.eval_shape(step, *args).shape


def named_as_the_code(specs, mesh, bf, P):
    return bnp.tanh(mesh @ specs["up"]) @ specs['"down"'] + bf["a.b"] * P


def shardings(arguments, in_shardings):
    return arguments @ in_shardings


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (
            named_as_the_code,
            ({"up": floats(8, 32), '"down"': floats(32, 8)}, floats(8, 8), {"a.b": floats(8)}, floats(8, 8)),
        ),
        (shardings, (floats(8, 8), floats(8, 8))),
    ],
    ids=["parameters and keys", "step"],
)
def test_the_code_keeps_names_of_its_own_apart(step, args):
    found = bf.parallel.search(
        step, *args, mesh=AbstractMesh((4,), ("x",)), device=DEVICE, links=LINK, plans=6
    )
    best = next(r for r in found if r.specs)
    names = {step.__name__: step, **dict(zip(best.program.groups.heads, args, strict=True))}
    exec(best.code().replace("bf.make_mesh", "bf.AbstractMesh"), names)
    assert names["in_shardings"] == best.in_shardings
    assert bf.eval_shape(names["compiled"], *args).shape == bf.eval_shape(step, *args).shape


# -- memory and choices --------------------------------------------------------------------------------

WIDE = ({"up": floats(1024, 4096), "bias": floats(4096), "down": floats(4096, 1024)}, floats(64, 1024))
FOUR = {"mesh": AbstractMesh((4,), ("data",)), "device": DEVICE, "links": LINK}


def test_memory_excludes_layouts_and_the_table_says_so():
    free = bf.parallel.search(sgd(mlp), *WIDE, **FOUR, plans=6)
    whole = next(r for r in free if not any(map(any, r.layouts[:-1])))
    tight = bf.parallel.search(sgd(mlp), *WIDE, **FOUR, plans=6, memory=int(whole.peak_bytes * 0.6))
    assert tight.fits and tight.peak_bytes <= 0.6 * whole.peak_bytes
    assert "does not fit in" in str(tight) or tight.skipped
    limited = DeviceSpec(1e12, 1e11, memory=int(whole.peak_bytes * 0.6))
    assert bf.parallel.search(sgd(mlp), *WIDE, **FOUR | {"device": limited}, plans=6).memory == int(
        limited.memory
    )


def test_nothing_fits_says_what_would():
    with pytest.raises(errors.MemoryBudgetError, match=r"no layout of step fits memory=1\.0 MiB on 4") as e:
        bf.parallel.search(sgd(mlp), *WIDE, **FOUR, plans=6, memory=1 << 20)
    text = str(e.value)
    assert "the smallest peak that was found is" in text and "devices, of which each needs" in text
    with pytest.raises(errors.MemoryBudgetError, match="donate_argnums"):
        bf.parallel.search(sgd(mlp).fun, *WIDE, **FOUR, plans=6, memory=1 << 20)


def deep(params, x):
    for _ in range(8):
        x = bnp.tanh(x @ params["w"])
    return (x**2).mean()


@pytest.mark.slow
def test_recomputation_is_part_of_the_answer_if_memory_requires_it():
    args = {"w": floats(64, 64)}, floats(4096, 64)
    free = bf.parallel.search(sgd(deep), *args, **FOUR, plans=6)
    least = min(r.peak_bytes for r in free)
    found = bf.parallel.search(sgd(deep), *args, **FOUR, plans=6, memory=int(0.8 * least))
    assert found.fits and found.memory_budget is not None and found.peak_bytes <= 0.8 * least
    assert f"memory_budget={found.memory_budget}" in found.code() and "(recomputing)" in str(found)


def test_the_budget_of_the_step_is_that_of_what_is_found():
    args = {"w": floats(64, 64)}, floats(4096, 64)
    free = bf.parallel.search(sgd(deep), *args, **FOUR, plans=1)
    budget = int(0.8 * free.peak_bytes)
    found = bf.parallel.search(bf.jit(sgd(deep).fun, memory_budget=budget), *args, **FOUR, plans=1)
    assert found.memory_budget is None and found.peak_bytes <= budget
    assert found.jit().budget == budget and f"    memory_budget={budget}," in found.code()
    tight = bf.parallel.search(
        bf.jit(sgd(deep).fun, memory_budget=4 * free.peak_bytes), *args, **FOUR, plans=1, memory=budget
    )
    assert tight.jit().budget == tight.memory_budget < 4 * free.peak_bytes


def test_choices_of_the_step_are_searched():
    def loss(params, x):
        return (bnp.tanh(bnp.tanh(x @ params["w"]) @ params["w"]) ** 2).mean()

    def step(params, x, microbatches=1):
        rows = x.reshape(microbatches, -1, x.shape[-1])
        grads = tree.map(bnp.zeros_like, params)
        for i in range(microbatches):
            grads = tree.map(bnp.add, grads, bf.grad(loss)(params, rows[i]))
        return tree.map(lambda p, g: p - g, params, grads)

    args = {"w": floats(64, 64), "v": floats(8)}, floats(4096, 64)
    choices = {"microbatches": (1, 4)}
    step = bf.jit(step, donate_argnums=0)
    free = bf.parallel.search(step, *args, **FOUR, choices=choices, plans=9)
    assert free.options == {"microbatches": 1}
    small = min(free, key=lambda r: r.peak_bytes)
    assert small.options == {"microbatches": 4}
    tight = bf.parallel.search(step, *args, **FOUR, choices=choices, plans=9, memory=small.peak_bytes)
    assert tight.options == small.options and tight.memory_budget is None
    assert "microbatches=4" in tight.code() and "microbatches=4" in str(tight)


def test_one_device_and_numbers_of_devices():
    small = SMALL["mlp"]
    alone = bf.parallel.search(small.step, *small.args, mesh=1, device=DEVICE, links=LINK)
    assert len(alone) == 1 and not alone.specs and alone.label == "one device"
    links = {4: LinkSpec(1e11, 1e-6), 8: LinkSpec(1e9, 1e-5)}
    found = bf.parallel.search(small.step, *small.args, mesh=8, device=DEVICE, links=links, plans=12)
    assert {str(r.mesh) for r in found} == {"data=8", "data=4, model=2", "data=2, model=4"}


# -- groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (1, 1)], ids=str)
def test_axes_of_one_device_are_left_out(sizes):
    small = SMALL["mlp"]
    wide = next((n for n, size in enumerate(sizes) if size > 1), 0)
    names = ("data", "model")
    how = {"device": DEVICE, "links": LINK, "plans": 8}
    found = bf.parallel.search(small.step, *small.args, mesh=AbstractMesh(sizes, names), **how)
    alone = bf.parallel.search(
        small.step, *small.args, mesh=AbstractMesh((sizes[wide],), (names[wide],)), **how
    )
    assert found.seconds == alone.seconds and found.specs == alone.specs


def test_a_batch_that_no_axis_divides():
    small = SMALL["mlp"]
    params, x = small.args
    odd = floats(63, x.shape[1])
    found = bf.parallel.search(
        small.step,
        params,
        odd,
        mesh=AbstractMesh((4, 2), ("data", "model")),
        device=DEVICE,
        links=LINK,
        plans=8,
    )
    assert found.specs  # parameters are sharded


def test_layers_share_a_layout_unless_each_is_the_input_of_the_next():
    groups = program_of(SMALL["two layers of a transformer"])[0].groups
    assert [g.name for g in groups.groups][:4] == [
        "params.*.down",
        "params.*.out",
        "params.*.qkv",
        "params.*.up",
    ]
    assert len(program_of(SMALL["square layers"])[0].groups.groups) == 5
    assert pattern("a.3.b.10") == "a.*.b.*" and pattern("a3.b") == "a3.b"


def test_optimizer_state_belongs_to_its_parameters():
    groups = program_of(SMALL["adam"])[0].groups
    roles = {g.name: (g.role, g.owner) for g in groups.groups}
    assert roles["state.mu.w"] == roles["state.nu.w"] == ("state", 0)
    assert roles["x"][0] == roles["labels"][0] == "data"
    assert groups.carried[:4] == [0, 1, 2, 3] and groups.carried[4:] == [None]


# -- annotated steps -----------------------------------------------------------------------------------


def over(axis, size=4):
    """A product by a ``shard_map`` over an axis."""
    specs = {"in_specs": (P(), P(axis)), "out_specs": P(axis)}
    return bf.shard_map(lambda p, x: x @ p, mesh=AbstractMesh((size,), (axis,)), **specs)


def looped(p, x):
    return bf.lax.scan(lambda x, _: (bf.constrain(x @ p, P(None, "data")), None), x, None, length=3)[0]


@pytest.mark.parametrize(
    "step",
    [lambda p, x: bf.constrain(x, P("data")) @ p, looped, over("data")],
    ids=["constrain", "constrain in a loop", "shard_map"],
)
def test_steps_that_name_axes_of_the_mesh(step):
    found = bf.parallel.search(lambda p, x: step(p, x).sum(), X, X, **FOUR)
    assert found.failed is None and len(found) == 9
    assert found.specs.items() >= {"x": P(None, "data") if step is looped else P("data")}.items()
    with pytest.raises(
        errors.MemoryBudgetError, match="no layout of"
    ):  # what would fit is planned on other meshes
        bf.parallel.search(lambda p, x: step(p, x).sum(), X, X, **FOUR, memory=100)


# -- bad input -----------------------------------------------------------------------------------------

ON = AbstractMesh((4,), ("x",))
WRONG = {
    "function": (lambda: bf.parallel.search(3, X, mesh=ON), errors.ArgumentError, "takes a function"),
    "mesh": (
        lambda: bf.parallel.search(bnp.sin, X, mesh="x"),
        errors.ArgumentError,
        "mesh is a mesh or a number",
    ),
    "no devices": (lambda: bf.parallel.search(bnp.sin, X, mesh=0), errors.ArgumentError, "mesh is 0 devices"),
    "argument": (
        lambda: bf.parallel.search(lambda x, mode: x, X, "train", mesh=ON),
        errors.ArgumentError,
        r"args\[1\] is 'train', not an array",
    ),
    "static arguments": (
        lambda: bf.parallel.search(bf.jit(lambda x, n: x, static_argnums=1), X, 3, mesh=ON),
        errors.ArgumentError,
        "has static arguments",
    ),
    "explicit axes": (
        lambda: bf.parallel.search(bnp.sin, X, mesh=AbstractMesh((4,), ("x",), axis_types=AxisType.Explicit)),
        errors.ShardingError,
        "the axes x are Explicit",
    ),
    "device": (
        lambda: bf.parallel.search(bnp.sin, X, mesh=ON, device=3),
        errors.ArgumentError,
        "a DeviceSpec",
    ),
    "links": (
        lambda: bf.parallel.search(bnp.sin, X, mesh=ON, links={"y": LINK}),
        errors.ShardingError,
        r"links are of the axes \['y'\]",
    ),
    "links that are none": (
        lambda: bf.parallel.search(bnp.sin, X, mesh=4, links=5),
        errors.ArgumentError,
        "links is a LinkSpec, or several by the number of devices that they connect, not 5",
    ),
    "links of too few devices": (
        lambda: bf.parallel.search(bnp.sin, X, mesh=16, links={8: LINK}),
        errors.ShardingError,
        "links of 16 devices",
    ),
    "an annotation of another axis": (
        lambda: bf.parallel.search(lambda x: bf.constrain(x, P("y")), X, mesh=ON),
        errors.ShardingError,
        r"annotation P\('y', None\) names the axis 'y', and the program is for the mesh x=4",
    ),
    "an annotation of another axis, and too little memory": (
        lambda: bf.parallel.search(lambda x: bf.constrain(x, P("y")), X, mesh=ON, memory=8),
        errors.ShardingError,
        "names the axis 'y'",
    ),
    "a shard_map of another axis": (
        lambda: bf.parallel.search(over("y"), X, X, mesh=ON),
        errors.ShardingError,
        "shard_map names the axis 'y'",
    ),
    "a shard_map of another mesh": (
        lambda: bf.parallel.search(over("x", 8), X, X, mesh=ON),
        errors.ShardingError,
        "shard_map is for the mesh x=8",
    ),
    "choices": (
        lambda: bf.parallel.search(bnp.sin, X, mesh=ON, choices={"a": 3}),
        errors.ArgumentError,
        "choices are sequences",
    ),
    "plans": (lambda: bf.parallel.search(bnp.sin, X, mesh=ON, plans=0), errors.ArgumentError, "plans is 0"),
    "memory": (lambda: bf.parallel.search(bnp.sin, X, mesh=ON, memory="much"), errors.ArgumentError, "much"),
    "memory that is no integer": (
        lambda: bf.parallel.search(bnp.sin, X, mesh=ON, memory=1e12),
        errors.ArgumentError,
        r"search: memory=1000000000000.0(.|\n)*memory=\"12GB\"",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input(name):
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call()


def test_specs_are_those_of_a_person():
    small = SMALL["loop over layers"]
    found = bf.parallel.search(small.step, *small.args, mesh=ON, device=DEVICE, links=LINK, plans=8)
    assert found.specs == {"params.down": P(None, "x"), "params.up": P(None, None, "x")}
    assert found.in_specs == ({"down": P(None, "x"), "up": P(None, None, "x")}, P())
    assert found.out_specs == (None, found.in_specs[0])
    assert isinstance(found[0].seconds, float) and found.best is found[0] and len(found[:2]) == 2
    assert ShapeDtypeStruct is type(small.args[1])
