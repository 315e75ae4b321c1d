"""Exported programs: values and derivatives are those of the source."""

import collections
import json
import subprocess
import sys

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, export, extend, lax, nn, random
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir import dtypes
from blufunc.export import __main__ as command
from blufunc.export import files, programs, rules, structures, values
from tests.kernels.random_loops import Program, inputs
from tests.op_table.rows import OPS


def reloaded(fun, *args, **kwargs):
    """A function as it comes back from bytes."""
    return export.deserialize(export.export(bf.jit(fun))(*args, **kwargs).serialize())


def assert_identical(got, want):
    got, want = bf.tree.leaves(got), bf.tree.leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape and g.aval.weak_type == w.aval.weak_type
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


@pytest.fixture
def x(rng):
    return from_numpy(rng.uniform(-1, 1, (3, 4)).astype(np.float32))


# -- every operation -------------------------------------------------------------------------------


@pytest.mark.sampled(24)
@pytest.mark.parametrize("op", [pytest.param(op, id=op.id) for op in OPS])
def test_operations(op):
    """Each row, and its reverse derivative, give the bits of the original."""
    dtype = op.dtypes[0]
    xs = [from_numpy(np.asarray(v)) for v in op.sample(dtype)]
    loaded = reloaded(op.apply, *xs)
    assert_identical(loaded.call(*xs), bf.jit(op.apply)(*xs))
    if op.grad:
        wrt = [i for i, a in enumerate(xs) if dtypes.is_inexact(a.dtype)] if op.wrt is None else op.wrt

        def gradient(*points):
            merged = dict(enumerate(xs)) | dict(zip(wrt, points, strict=True))
            fun = lambda *ys: op.apply(*(merged | dict(zip(wrt, ys, strict=True))).values())
            out, pull = bf.vjp(fun, *points)
            return pull(out)

        points = [xs[i] for i in wrt]
        try:
            want = bf.jit(gradient)(*points)
        except errors.GradError:  # with respect to some operands only
            return
        assert_identical(reloaded(gradient, *points).call(*points), want)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_control_flow(seed):
    """Random loops and branches, also exported a second time."""
    program, arguments = Program(seed, smooth=True), inputs(seed)
    want = bf.jit(program)(*arguments)
    loaded = reloaded(program, *arguments)
    assert_identical(loaded.call(*arguments), want)
    assert_identical(export.deserialize(loaded.serialize()).call(*arguments), want)
    assert str(reloaded(loaded.call, *arguments).jaxpr.eqns[0].prim) == "jit"


QUERY = np.linspace(-1, 1, 2 * 5 * 2 * 4).reshape(2, 5, 2, 4).astype(np.float32)

PROGRAMS = {
    "attention": lambda q: nn.dot_product_attention(q, q, q, is_causal=True),
    "attention with functions": lambda q: nn.dot_product_attention(
        q, q, q, mask_mod=lambda b, h, i, j: i >= j, score_mod=lambda s, b, h, i, j: s + 0.5 * h
    ),
    "cross entropy": lambda q: nn.linear_cross_entropy(q[0, :, 0], q[1, :, 1] * 3, bnp.arange(5), z_loss=0.1),
    "gelu": nn.gelu,
    "softmax": lambda q: nn.softmax(q) + nn.logsumexp(q),
    "solve": lambda q: bnp.linalg.solve(q[0, :4, 0] + 3 * bnp.eye(4), q[0, :4, 1]),
    "svd": lambda q: bnp.linalg.svd(q[0, :, 0], full_matrices=False)[1],
    "recurrence": lambda q: lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (q, q))[1],
    "checkpoint": bf.checkpoint(
        lambda q: bnp.sin(q @ q[0, 0].T), policy=bf.checkpoint_policies.dots_saveable
    ),
    "named": bf.checkpoint(
        lambda q: bnp.sin(bf.checkpoint_name(bnp.cos(q), "h")),
        policy=bf.checkpoint_policies.save_only_these_names("h"),
    ),
    "autocast": lambda q: bf.autocast(lambda q: nn.softmax(q @ bnp.swapaxes(q, -1, -2)))(q),
    "pool": lambda q: nn.max_pool(q, (2, 1)),
    "gather": lambda q: q[:, bnp.array([0, 3, 3]), 1],
    "scatter": lambda q: q.at[:, bnp.array([0, 3, 3]), 1].add(1.0),
    "dropout": lambda q: q * random.bernoulli(random.key(3), 0.5, q.shape),
    "while": lambda q: lax.while_loop(lambda c: c.sum() < 30.0, lambda c: c + c * c + 0.5, q, max_steps=9),
    "linear solve": lambda q: lax.custom_linear_solve(
        lambda v: v * 2.0, q, lambda _, b: b / 2.0, symmetric=True
    ),
    "collective": lambda q: bf.vmap(lambda v: v - lax.pmean(v, "i"), axis_name="i")(q),
    "complex": lambda q: bnp.abs(bnp.fft.fft(q)),
    "special": lambda q: bf.scipy.special.betainc(2.0, 3.0, q**2 / 2),
    "constants": lambda q: (
        q * bnp.asarray(np.arange(4, dtype=np.float32)) + bnp.float64(1e-300).astype("float32")
    ),
    "user's function of scalars": lambda q: bf.elementwise(lambda a: bnp.where(a > 0, a, 0.1 * a))(q),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    """Values, gradients to order 2, and batches are those of the source."""
    fun, q = PROGRAMS[name], from_numpy(QUERY)
    loaded = reloaded(fun, q)
    assert_identical(loaded.call(q), bf.jit(fun)(q))
    total = lambda f: bf.jit(bf.grad(lambda q: bnp.sum(f(q) ** 2)))
    twice = lambda f: bf.jit(bf.grad(lambda q: bnp.sum(bf.grad(lambda q: bnp.sum(f(q) ** 3))(q) ** 2)))
    stacked = bnp.stack([q, q * 0.5])
    for derive, at in ((total, q), (twice, q), (bf.vmap, stacked), (lambda f: bf.vmap(total(f)), stacked)):
        got, want = derive(loaded.call)(at), derive(fun)(at)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * (1 + np.abs(want).max()))


def test_results_hold_the_dtype_and_weak_types(x):
    loaded = reloaded(lambda a, n: (a * n, n + 1, a.astype("bfloat16"), n), x, 2.0)
    assert [str(a) for a in loaded.in_avals] == ["f32[3,4]", "~f32[]"]
    assert [str(a) for a in loaded.out_avals] == ["f32[3,4]", "~f32[]", "bf16[3,4]", "~f32[]"]
    assert_identical(
        loaded.call(x, 2.0), bf.jit(lambda a, n: (a * n, n + 1, a.astype("bfloat16"), n))(x, 2.0)
    )


def test_constants_of_every_dtype():
    """Constants keep their bits, and one that is used twice is stored once."""
    arrays = [
        np.arange(6).astype(d).reshape(2, 3) if d != dtypes.key else random.split(random.key(1), 3)
        for d in sorted(dtypes.ALL - {dtypes.float0}, key=str)
    ]
    held = [from_numpy(a) if isinstance(a, np.ndarray) else a for a in arrays]
    nan = from_numpy(np.array([np.nan, -0.0, np.inf, -np.inf], np.float32))
    fun = lambda: [*held, nan, nan + 1, bnp.float32(-0.0), bnp.float32(np.nan)]
    exported = export.export(bf.jit(fun))()
    assert_identical(export.deserialize(exported.serialize()).call(), bf.jit(fun)())
    assert len(exported.jaxpr.consts) == len(held) + 1


# -- custom derivatives ----------------------------------------------------------------------------


@bf.custom_jvp
def doubled(v, w):
    return v * w


@doubled.defjvp
def _doubled_jvp(primals, tangents):
    v, w = primals
    return doubled(v, w), 10.0 * doubled(tangents[0], w) + tangents[1] * v


@bf.custom_vjp
def clipped(v, scale):
    return v * scale


clipped.defvjp(
    lambda v, scale: (clipped(v, scale), (v, scale, "unused", 3)),
    lambda kept, ct: (bnp.clip(ct * kept[1], -1, 1) * kept[3], None),
)


@pytest.mark.parametrize("fun", [doubled, clipped], ids=["jvp", "vjp"])
def test_custom_rules(fun, x):
    """Rules of the user hold in loaded programs, under every transform and to order 2."""
    call = lambda v: bnp.sum(fun(v, v + 1.0) ** 2)
    loaded = reloaded(call, x).call
    twice = reloaded(loaded, x).call
    mapped = reloaded(bf.vmap(lambda v: fun(v, v + 1.0)), x).call
    for f in (loaded, twice):
        assert_identical(f(x), bf.jit(call)(x))
        np.testing.assert_allclose(bf.grad(f)(x), bf.grad(call)(x), rtol=1e-6)
        np.testing.assert_allclose(
            bf.grad(lambda v, f=f: bnp.sum(bf.grad(f)(v) ** 2))(x),
            bf.grad(lambda v: bnp.sum(bf.grad(call)(v) ** 2))(x),
            rtol=1e-5,
        )
        stack = bnp.stack([x, 2 * x])
        np.testing.assert_allclose(bf.vmap(bf.grad(f))(stack), bf.vmap(bf.grad(call))(stack), rtol=1e-6)
    np.testing.assert_allclose(
        bf.grad(lambda v: mapped(v).sum())(x), bf.grad(lambda v: fun(v, v + 1.0).sum())(x), rtol=1e-6
    )


def test_rules_of_blufunc_are_references(x):
    """Recognizers find them, and the file has no second definition."""
    exported = export.export(bf.jit(nn.softmax))(x)
    document = programs.encoded(exported.jaxpr)
    assert [row["kind"] for row in document.tables["rules"]] == ["own"]
    (eqn,) = [e for e in programs.decoded(document).eqns if e.prim.name == "custom_jvp_call"]
    (was,) = [e for e in exported.jaxpr.eqns if e.prim.name == "custom_jvp_call"]
    assert eqn.params["rule"].owner is was.params["rule"].owner


def test_endless_rules_end(x):
    """A rule that calls the next order is stored to a depth."""

    def power(n):
        f = bf.custom_jvp(lambda v: bnp.sin(v + n))
        f.defjvp(lambda p, t: (f(*p), t[0] * power(n + 1)(*p)))
        return f

    loaded = reloaded(lambda v: power(0)(v), 1.0).call
    derived = loaded
    for _ in range(rules.DEPTH):
        derived = bf.grad(derived)
    np.testing.assert_allclose(derived(1.0), np.sin(1.0 + rules.DEPTH), rtol=1e-6)
    with pytest.raises(errors.GradError, match=f"depth of {rules.DEPTH}"):
        bf.grad(derived)(1.0)


def test_rule_that_fails_is_an_error_when_it_is_needed(x):
    @bf.custom_jvp
    def broken(v):
        return v * 2.0

    @broken.defjvp
    def broken_jvp(primals, tangents):
        raise RuntimeError("no table of it")

    loaded = reloaded(lambda v: broken(v).sum(), x)
    assert_identical(loaded.call(x), (x * 2.0).sum())
    with pytest.raises(errors.GradError, match="no table of it"):
        bf.grad(loaded.call)(x)


def test_custom_vmap_is_its_function(x):
    @bf.custom_batching.custom_vmap
    def f(v):
        return v * 2.0

    f.def_vmap(lambda size, batched, v: (v * 2.0, True))
    loaded = reloaded(lambda v: f(v), x)
    assert_identical(bf.vmap(loaded.call)(bnp.stack([x, x])), bnp.stack([x, x]) * 2.0)


# -- the object ------------------------------------------------------------------------------------


def test_attributes(x):
    def step(params, x, *, scale=2.0):
        return {"out": x * params[0] * scale}, None

    exported = export.export(bf.jit(step))([bf.ShapeDtypeStruct((3, 4), "float32")], x, scale=3.0)
    loaded = export.deserialize(exported.serialize())
    for one in (exported, loaded):
        assert one.fun_name == "step" and one.platforms == ("cpu", "cuda") and one.nr_devices == 1
        assert [str(a) for a in one.in_avals] == ["f32[3,4]", "f32[3,4]", "~f32[]"]
        assert one.in_tree == bf.tree.structure((([x], x), {"scale": 3.0}))
        assert one.out_tree == bf.tree.structure(({"out": x}, None))
        assert one.in_shardings == (None,) * 3 and one.effects == frozenset() and one.has_vjp()
    assert str(loaded) == str(exported) and "params[0]: f32[3,4]" in str(loaded) and "mul" in loaded.as_text()
    assert exported.serialize() == loaded.serialize()


def test_vjp(x):
    fun = lambda v, n: (bnp.sin(v) * n, v.sum())
    pulled = reloaded(fun, x, 3).vjp()
    assert pulled.fun_name == "vjp_<lambda>" and len(pulled.in_avals) == 4
    ct, _ = export.deserialize(pulled.serialize()).call(x, bnp.int32(3), x, bnp.float32(2.0))
    np.testing.assert_allclose(ct, np.cos(x) * 3 * np.asarray(x) + 2.0, rtol=1e-6)


def test_static_arguments_are_left_out(x):
    jitted = bf.jit(lambda v, n, *, power: v * n**power, static_argnums=1, static_argnames="power")
    loaded = export.deserialize(export.export(jitted)(x, 3, power=2).serialize())
    assert_identical(loaded.call(x), x * 9)


def test_lines_are_labels(x):
    """Equations keep file name, function, number and scopes; no source."""

    def located(v):
        with bf.named_scope("layer"):
            return bnp.log(v)

    loaded = reloaded(located, x)
    line = located.__code__.co_firstlineno + 2
    text = loaded.jaxpr.pretty_print(source_info=True)
    assert f"# <exported test_export.py>:{line} (located) in layer" in text
    second = export.deserialize(loaded.serialize())
    assert second.jaxpr.pretty_print(source_info=True) == text
    with bf.debug_nans(True), pytest.raises(errors.NanError, match=rf"exported test_export.py>:{line}"):
        loaded.call(x)


def test_fresh_process_without_the_source(tmp_path, x):
    """Another process gets the same values and gradient from the bytes alone."""
    params = {"w": x, "b": [bnp.ones(4)]}

    def model(params, v):
        y = nn.softmax(v @ params["w"] + params["b"][0])
        return lax.scan(lambda c, row: (c * row + 1.0, c), y[0], y)[0]

    v = x[:, :3]
    (tmp_path / "program.bf").write_bytes(export.export(bf.jit(model))(params, v).serialize())
    np.savez(tmp_path / "in.npz", w=np.asarray(x), v=np.asarray(v))
    script = (
        "import sys, numpy as np, blufunc as bf\n"
        "from blufunc import export\n"
        "a = np.load('in.npz')\n"
        "p = {'w': a['w'], 'b': [np.ones(4, 'float32')]}\n"
        "f = export.deserialize(open('program.bf', 'rb').read()).call\n"
        "g = bf.grad(lambda p: f(p, a['v']).sum())(p)\n"
        "np.savez('out.npz', y=f(p, a['v']), g=g['w'])\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    out = np.load(tmp_path / "out.npz")
    np.testing.assert_array_equal(out["y"], bf.jit(model)(params, v))
    np.testing.assert_allclose(
        out["g"], bf.grad(lambda p: model(p, v).sum())(params)["w"], rtol=1e-6, atol=1e-7
    )


# -- pytrees ---------------------------------------------------------------------------------------


Point = collections.namedtuple("Point", "x y")


@bf.tree_util.register_pytree_node_class
class Scaled:
    def __init__(self, value, scale):
        self.value, self.scale = value, scale

    def tree_flatten(self):
        return (self.value,), self.scale

    @classmethod
    def tree_unflatten(cls, scale, children):
        return cls(children[0], scale)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(structures, "_by_class", {})
    monkeypatch.setattr(structures, "_by_name", {})
    export.register_namedtuple_serialization(Point, serialized_name="Point")
    export.register_pytree_node_serialization(
        Scaled, serialized_name="Scaled", serialize_auxdata=lambda s: json.dumps(s).encode(),
        deserialize_auxdata=json.loads,
    )  # fmt: skip


TREES = {
    "containers": lambda x: [(x, None), {"b": x, "a": {1: x, 2: []}}, collections.OrderedDict(z=x, y=())],
    "defaultdict": lambda x: collections.defaultdict(list, {"k": x}),
    "leaf": lambda x: x,
    "classes": lambda x: [Point(x, Scaled(x, 3)), Scaled(Point(x, x), 2.5)],
}


@pytest.mark.parametrize("name", TREES)
def test_structures(name, x, registered):
    """Arguments and results of all containers, and of classes that are registered."""
    given = TREES[name](x)
    loaded = reloaded(lambda t: bf.tree.map(lambda v: v + 1, t), given)
    got = loaded.call(given)
    assert bf.tree.structure(got) == bf.tree.structure(given)
    assert_identical(got, bf.tree.map(lambda v: v + 1, given))


def test_classes_that_are_not_registered(x, registered, monkeypatch):
    blob = export.export(bf.jit(lambda p: p.x))(Point(x, x)).serialize()
    monkeypatch.setattr(structures, "_by_name", {})
    with pytest.raises(errors.UnsupportedError, match=r"'Point'.*\n.*\n.*no class of this process"):
        export.deserialize(blob)
    monkeypatch.setattr(structures, "_by_class", {})
    with pytest.raises(errors.UnsupportedError, match=r"register_namedtuple_serialization\(Point"):
        export.export(bf.jit(lambda p: p.x))(Point(x, x))
    with pytest.raises(errors.UnsupportedError, match=r"register_pytree_node_serialization\(Scaled"):
        export.export(bf.jit(lambda p: p.value))(Scaled(x, 2))


def test_registration_errors(registered):
    with pytest.raises(errors.ArgumentError, match="registered already"):
        export.register_namedtuple_serialization(Point, serialized_name="Other")
    with pytest.raises(errors.ArgumentError, match="no namedtuple"):
        export.register_namedtuple_serialization(Scaled, serialized_name="Other")
    options = {"serialize_auxdata": repr, "deserialize_auxdata": str}
    with pytest.raises(errors.ArgumentError, match="no pytree class"):
        export.register_pytree_node_serialization(int, serialized_name="int", **options)
    with pytest.raises(errors.UnsupportedError, match="from_children"):
        export.register_pytree_node_serialization(
            dict, serialized_name="d", from_children=lambda a, c: a, **options
        )


# -- primitives of users ---------------------------------------------------------------------------


def test_users_primitive(x):
    """A user's primitive is found by its name, or is an error."""
    cube = extend.Elementwise("test_export_cube", None, "float", lower=lambda v: v * v * v)
    blob = export.export(bf.jit(lambda v: cube.bind(v)))(x).serialize()
    assert_identical(export.deserialize(blob).call(x), bf.jit(lambda v: cube.bind(v))(x))
    document, _ = files.from_bytes(blob)
    document.tables["primitives"] = [["test_export_gone", "users.module"]]
    with pytest.raises(errors.UnsupportedError, match=r"test_export_gone.*\n.*\n.*users.module"):
        programs.decoded(document)


def test_two_primitives_of_one_name(x):
    first, second = (extend.Elementwise("test_export_twin", np.positive, "float") for _ in range(2))
    assert export.export(bf.jit(lambda v: first.bind(v)))(x).serialize()
    with pytest.raises(errors.UnsupportedError, match="two primitives have the name test_export_twin"):
        export.export(bf.jit(lambda v: second.bind(v)))(x)


def test_parameters_that_are_python(x):
    class Odd(extend.Primitive):
        name = "test_export_odd"

        def abstract(self, a, *, how):
            return a

        def impl(self, a, *, how):
            return how(a)

    odd = Odd()
    with pytest.raises(
        errors.UnsupportedError, match=r"how=.*which is the ufunc sin.*\n.*at:.*test_export.py"
    ):
        export.export(bf.jit(lambda v: odd.bind(v, how=np.sin)))(x)


def test_blufunc_primitives_have_different_names():
    """A primitive of blufunc is found by its name among those of its module."""
    homes = programs._homes(len(sys.modules))
    by_id = {id(v): v for m in list(sys.modules.values()) for v in list(vars(m).values()) if id(v) in homes}
    for identity, prim in by_id.items():
        assert programs.primitive_named(prim.name, homes[identity]) is prim


# -- refused ---------------------------------------------------------------------------------------


REFUSED = {
    "pure_callback": lambda v: bf.pure_callback(np.sin, v, v),
    "io_callback": lambda v: bf.io_callback(np.sin, v, v),
    "debug_callback": lambda v: bf.debug.print("{}", v),
    "check": lambda v: bf.experimental.checkify.check(v.sum() > -99.0, "negative"),
    "policy": bf.checkpoint(bnp.sin, policy=lambda prim, *a, **k: True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_python_is_refused(name, x):
    """Python code is an error that names the user's line."""
    with pytest.raises(errors.UnsupportedError, match=r"(?s)export: .*at:.*test_export\.py:\d+.*fix:"):
        export.export(bf.jit(lambda v: REFUSED[name](v)))(x)


def test_cuda_kernels_are_refused(x):
    kernel = bf.cuda_kernel("out[i] = 2.0f * v[i];", inputs=["v"], reference=lambda v: 2.0 * v, name="twice")
    with pytest.raises(errors.UnsupportedError, match="cuda_kernel of twice"):
        export.export(bf.jit(lambda v: kernel(v)))(x)


def test_bad_arguments(x):
    exported = export.export(bf.jit(lambda v: v + 1))(x)
    for attempt, error, match in [
        (lambda: export.export(lambda v: v), errors.ArgumentError, r"export\(bf.jit\(f\)\)"),
        (lambda: export.export(bf.jit(abs), platforms=["tpu"]), errors.ArgumentError, "platforms"),
        (lambda: export.export(bf.jit(abs), disabled_checks=[1]), errors.UnsupportedError, "disabled"),
        (lambda: export.symbolic_shape("a, b"), errors.UnsupportedError, "one program for each size"),
        (lambda: exported.serialize(vjp_order=-1), errors.ArgumentError, "vjp_order"),
        (exported.mlir_module, errors.UnsupportedError, "as_text"),
        (lambda: exported.call(x, x), errors.TreeError, "another structure"),
        (lambda: exported.call(x[0]), errors.ShapeError, r"takes f32\[3,4\] for v, not f32\[4\]"),
        (
            lambda: exported.call(bf.device_put(x, bf.memory.Space.Host)),
            errors.ArgumentError,
            r"for v, not f32<host>\[3,4\](?s:.*)bf\.device_put\(x, bf\.memory\.Space\.Device\)",
        ),
        (lambda: exported.call(x.astype("int32")), errors.DtypeError, "astype"),
        (lambda: export.deserialize("text"), errors.ArgumentError, "takes bytes"),
        (
            lambda: bf.jit(lambda v: export.export(bf.jit(lambda: v * 2))())(x),
            errors.ArgumentError,
            "outside",
        ),
    ]:
        with pytest.raises(error, match=match):
            attempt()


def test_platforms(x):
    assert export.export(bf.jit(abs), platforms=["gpu", "cuda"])(x).platforms == ("cuda",)
    only = export.deserialize(export.export(bf.jit(abs), platforms="cuda")(x).serialize())
    with pytest.raises(errors.UnsupportedError, match=r"exported for cuda, and .* is on"):
        only.call(x)


# -- damage and versions ---------------------------------------------------------------------------


def test_damage(x):
    """No byte can change without an error, and no length."""
    held = from_numpy(np.arange(12, dtype=np.float32).reshape(3, 4))
    blob = bytes(export.export(bf.jit(lambda v: v + held))(x).serialize())
    for i in [0, 3, 8, 9, 50, 120, 400, len(blob) // 2, len(blob) - 200, len(blob) - 1]:
        bad = bytearray(blob)
        bad[i] ^= 4
        with pytest.raises(errors.DataError):
            export.deserialize(bad)
    for cut in (b"", blob[:5], blob[:-1], blob + b"x", b"PK" + blob):
        with pytest.raises(errors.DataError, match="not a whole exported program"):
            export.deserialize(cut)


def test_other_files(tmp_path, x):
    bf.io.save(tmp_path / "weights.safetensors", {"w": x})
    with pytest.raises(errors.DataError, match="something else"):
        export.deserialize((tmp_path / "weights.safetensors").read_bytes())


def changed(exported, change):
    """The bytes of a program with other tables, as another version would write them."""
    document, about = exported.document()
    change(document.tables)
    return files.to_bytes(document, about | {"version": "9.0"})


def _equation(tables):
    return tables["jaxprs"][tables["main"]]["equations"][0]


OTHER_VERSIONS = {
    "a parameter": lambda t: _equation(t)[3].update(unknown=1),
    "a value": lambda t: _equation(t)[3].update(axes={"quaternion": [1]}),
    "a record": lambda t: _equation(t)[3].update(axes={"record": ["Unknown", {}]}),
    "a type": lambda t: t["types"].__setitem__(0, ["f7", [3, 4]]),
    "a result": lambda t: _equation(t).__setitem__(2, _equation(t)[2] * 2),
    "a variable": lambda t: _equation(t).__setitem__(1, [99]),
    "a jaxpr": lambda t: t.update(main=7),
    "a table": lambda t: t.pop("lines"),
}


@pytest.mark.parametrize("name", OTHER_VERSIONS)
def test_other_versions(name, x):
    """A file of another version fails when it is loaded."""
    exported = export.export(bf.jit(lambda v: v.sum()))(x)
    with pytest.raises(errors.DataError, match=rf"blufunc '9\.0' wrote it, and this is {bf.__version__}"):
        export.deserialize(changed(exported, OTHER_VERSIONS[name]))


def test_primitive_of_another_version(x):
    exported = export.export(bf.jit(lambda v: v.sum()))(x)
    for row in (["reduce_sums", "blufunc.core.ops.reduce"], ["reduce_sum", "blufunc.gone"]):
        blob = changed(exported, lambda t, row=row: t["primitives"].__setitem__(0, row))
        with pytest.raises(errors.UnsupportedError, match="another version of blufunc"):
            export.deserialize(blob)


def test_other_format(x, monkeypatch):
    exported = export.export(bf.jit(abs))(x)
    monkeypatch.setattr(files, "FORMAT", 2)
    blob = exported.serialize()
    monkeypatch.undo()
    with pytest.raises(errors.DataError, match="has format 2, and this version reads 1"):
        export.deserialize(blob)


def test_values_survive():
    """Each kind of parameter value is equal after it is read."""
    encode = values.Encoder(None, None)
    decode = values.Decoder(None, None, None)
    for value in [
        None, True, 3, -(2**70), "é", 1.5, float("inf"), -0.0, 1e-320, 2 - 1j, b"\0\xff", (1, (2.5, None), ()),
        [1, (2,)], frozenset({"a", "b"}), {"k": (1,)}, slice(1, None, 2), range(3), Ellipsis, np.float32(0.1),
        np.int64(2**40), np.dtype("float32"), dtypes.bfloat16, dtypes.key, bf.P("x", None), bf.P(("x", "y")),
        bf.AbstractMesh((2, 4), ("x", "y")), lax.FftType.RFFT, lax.Precision.HIGH,
        bf.checkpoint_policies.save_only_these_names("a"), bf.checkpoint_policies.dots_saveable,
    ]:  # fmt: skip
        text = json.loads(json.dumps(encode(value)))
        found = decode(text)
        assert found == value and type(found) is type(value) and repr(found) == repr(value)


# -- the command -----------------------------------------------------------------------------------


def test_command(tmp_path, x, capsys):
    path = tmp_path / "program.bf"
    path.write_bytes(export.export(bf.jit(nn.softmax))(x).serialize())
    assert command.main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("softmax(x: f32[3,4]) -> f32[3,4]") and "reduce_max" in out and "0 constants" in out
    path.write_bytes(b"nothing")
    assert command.main(["inspect", str(path)]) == 1
    assert "not a whole exported program" in capsys.readouterr().err
