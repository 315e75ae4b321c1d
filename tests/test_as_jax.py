"""The name ``jax``: import hook, stubs, primitives by tables, and x64.

Each test runs in a process of its own.
"""

import subprocess
import sys
import textwrap

import pytest


def run(code, *arguments):
    """The output of a program that has the name ``jax``."""
    program = textwrap.dedent(code)
    command = [sys.executable, "-c", "from blufunc import as_jax\nas_jax.install()\n" + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split("\n")[:-1]


def test_the_name():
    out = run(
        """
        import jax, jax.numpy as jnp
        from jax.experimental import io_callback
        import jax.scipy.stats.norm as norm
        import blufunc as bf
        as_jax.install()
        print(jax.__version__, jax.Array is bf.Array, jnp.sin is bf.numpy.sin, norm.__name__)
        print(hasattr(jax, "explain"), hasattr(jax.numpy, "no_such_name"), jax.lax.linalg.qr is bf.lax.linalg.qr)
        for name in ("jax.no_such_module", "jax.numpy.no_such_module"):
            try:
                __import__(name)
            except ModuleNotFoundError as e:
                print(e.name)
        """
    )
    assert out == [
        "0.10.2 True True jax.scipy.stats.norm",
        "False False True",
        "jax.no_such_module",
        "jax.numpy.no_such_module",
    ]


def test_jax_itself_is_not_mixed_in():
    code = """
        import sys, types
        sys.modules["jax"] = types.ModuleType("jax")
        from blufunc import as_jax, errors
        try:
            as_jax.install()
        except errors.UnsupportedError as e:
            print(e.what)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert "JAX is already imported" in done.stdout, done.stderr


@pytest.mark.slow
def test_scripts_and_modules(tmp_path):
    (tmp_path / "script.py").write_text("import jax, sys\nprint(jax.numpy.arange(3).sum(), sys.argv[1:])")
    for how in (["script.py"], ["-m", "script"]):
        command = [sys.executable, "-m", "blufunc.as_jax", *how, "a", "b"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout == "3 ['a', 'b']\n", done.stderr
    done = subprocess.run([sys.executable, "-m", "blufunc.as_jax"], capture_output=True, text=True)
    assert done.returncode and "usage:" in done.stderr


def test_stubs_say_so():
    out = run(
        """
        import jax
        from jax import core
        print(isinstance(core.Token, type), isinstance(jax.numpy.ones(2), jax.Array | core.Token))
        print(isinstance(jax.numpy.ones(2), core.Token))
        try:
            core.Token()
        except NotImplementedError as e:
            print(e.what)
        """
    )
    assert out == ["True True", "False", "jax.core.Token is not in blufunc."]


def test_primitives_by_tables():
    out = run(
        """
        import jax, jax.numpy as jnp
        from jax.extend.core import Primitive
        from jax.interpreters import ad, batching, mlir

        scaled_p = Primitive("scaled")
        scaled_p.def_impl(lambda x, *, by: x * by[0])
        scaled_p.def_abstract_eval(lambda x, *, by: jax.core.ShapedArray(x.shape, x.dtype))
        mlir.register_lowering(scaled_p, mlir.lower_fun(lambda x, *, by: x * by[0], multiple_results=False))
        def pushed(ps, ts, *, by):
            assert type(ps) is tuple and type(ts) is tuple  # they match axes of vmap that are tuples
            return scaled_p.bind(*ps, by=by), scaled_p.bind(ad.instantiate_zeros(*ts), by=by)
        ad.primitive_jvps[scaled_p] = pushed
        def transposed(ct, x, *, by):
            assert ad.is_undefined_primal(x)
            return [scaled_p.bind(ct, by=by)]
        ad.primitive_transposes[scaled_p] = transposed
        def batched(args, dims, *, by):
            return scaled_p.bind(*args, by=by), dims[0]
        batching.primitive_batchers[scaled_p] = batched

        f = lambda x: scaled_p.bind(x, by=[3.0])  # parameters need not be hashable
        x = jnp.arange(3.0)
        for g in (f, jax.jit(f), jax.vmap(f), jax.jit(jax.vmap(f))):
            print(g(x))
        print(jax.vmap(jax.grad(f))(x), jax.jit(jax.vmap(jax.grad(jax.jit(f))))(x))
        print(jax.grad(lambda x: jax.jit(f)(x).sum())(x), jax.jvp(f, (x,), (x,))[1])
        print(jax.make_jaxpr(f)(x).jaxpr.eqns[0].primitive)
        """
    )
    assert out[:4] == ["[0. 3. 6.]"] * 4
    assert out[4:] == ["[3. 3. 3.] [3. 3. 3.]", "[3. 3. 3.] [0. 3. 6.]", "scaled"]


def test_lowerings_that_call_python():
    out = run(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.extend.core import Primitive
        from jax.interpreters import batching, mlir

        def made(name, lower):
            prim = Primitive(name)
            prim.multiple_results = True
            prim.def_impl(lambda x: [x.at[...].multiply(2.0), x.sum()])  # arrays have at, buffers have not
            prim.def_abstract_eval(lambda x: [x, jax.core.ShapedArray((), x.dtype, sharding=None)])
            if lower is not None:
                mlir.register_lowering(prim, lower)
            return prim

        calls = []
        def on_host(x, key):
            calls.append(type(x) is not np.ndarray and key.dtype == bool)
            return np.asarray(x) * 2, np.asarray(x).sum()

        def lower(ctx, x):
            assert ctx.primitive is twice_p and [a.shape for a in ctx.avals_out] == [(3,), ()]
            out, token, alive = mlir.emit_python_callback(
                ctx, on_host, None, [x, x], [*ctx.avals_in, jax.core.ShapedArray((), jax.dtypes.float0)],
                ctx.avals_out, has_side_effect=False, sharding=None)
            ctx.module_context.add_keepalive(alive)
            (more,) = mlir.lower_fun(lambda x: x + 1, multiple_results=False)(ctx, out[0])
            return [[more], out[1]]

        def dialect(ctx, x):
            from jaxlib.mlir.dialects import stablehlo
            return stablehlo.AddOp(x, x).results

        twice_p, plus_p, plain_p = made("twice", lower), made("plus", dialect), made("plain", None)
        x = jnp.arange(3.0)
        print(*twice_p.bind(x), *jax.jit(twice_p.bind)(x), calls)
        for prim in (twice_p, plain_p):  # a loop has the lowering, or else the definition
            print(*jax.lax.fori_loop(0, 2, lambda i, c: tuple(prim.bind(c[0])), (x, 0.0)))
        try:
            jax.jit(plus_p.bind)(x)
        except NotImplementedError as error:
            print(error.what, "emit_python_callback" in error.why)
        """
    )
    assert out == [
        "[0. 2. 4.] 3.0 [1. 3. 5.] 3.0 [True]",
        "[ 3.  7. 11.] 9.0",
        "[0. 4. 8.] 6.0",
        "plus has a lowering to MLIR, which blufunc does not speak. True",
    ]


def test_definitions_of_other_types():
    """Results of another size than the promised one would be read beyond their end."""
    out = run(
        """
        import itertools
        import jax, jax.numpy as jnp
        from jax.extend.core import Primitive
        from jax.interpreters import mlir

        wrong = {
            "shape": lambda x: jnp.sort(x[:100]), "dtype": lambda x: x.astype("int32"), "rank": lambda x: x[0],
            "none": lambda x: x * 2,
        }
        ways = {
            "rule": lambda p, f: mlir.register_lowering(p, lambda ctx, x: [f(x)]),
            "lower_fun": lambda p, f: mlir.register_lowering(p, mlir.lower_fun(f, multiple_results=False)),
            "impl": lambda p, f: p.def_impl(f),
        }
        for (kind, f), (way, register) in itertools.product(wrong.items(), ways.items()):
            prim = Primitive(kind)
            prim.def_abstract_eval(lambda x: x)
            register(prim, f)
            try:
                print(way, jax.jit(prim.bind)(jnp.ones(300))[:2])
            except TypeError as error:
                print(way, error.what)
        """
    )
    found_types = {"shape": "f32[100]", "dtype": "i32[300]", "rank": "f32[]"}
    assert out == [
        *(
            f"{way} the definition (lower=) of {kind} returns {found}, and abstract says f32[300]."
            for kind, found in found_types.items()
            for way in ("rule", "lower_fun", "impl")
        ),
        *(f"{way} [2. 2.]" for way in ("rule", "lower_fun", "impl")),
    ]


def test_lowerings_of_a_platform():
    out = run(
        """
        import jax
        from jax.extend.core import Primitive
        from jax.interpreters import mlir

        for platforms in (["cpu"], ["cpu", None], [None, "cpu"], ["cuda", "cpu"]):
            prim = Primitive("of_a_platform")
            prim.def_abstract_eval(lambda x: x)
            for platform in platforms:
                by = {None: 1.0, "cpu": 2.0, "cuda": 3.0}[platform]
                mlir.register_lowering(prim, lambda ctx, x, by=by: [x * by], platform=platform)
            print(jax.jit(prim.bind)(1.0))
        prim = Primitive("of_a_platform")
        prim.def_abstract_eval(lambda x: x)
        mlir.register_lowering(prim, lambda ctx, x: [x], platform="cuda")
        try:
            jax.jit(prim.bind)(1.0)
        except NotImplementedError as error:
            print(error)
        """
    )
    assert out[:4] == ["2.0", "1.0", "1.0", "2.0"] and "no lowering rule" in out[4]


def test_errors_of_callbacks():
    out = run(
        """
        import jax, jax.numpy as jnp
        from jax.experimental import io_callback
        class Own(Exception):
            pass
        def fails(*xs):
            raise Own("the words")
        x = jnp.float32(1)
        like = jax.ShapeDtypeStruct((), "float32")
        inner = lambda *xs: jax.jit(lambda x: jax.pure_callback(fails, like, x))(x)
        for f in (
            lambda x: jax.pure_callback(fails, like, x),
            jax.jit(lambda x: io_callback(fails, like, x)),
            jax.jit(lambda x: (jax.debug.callback(fails, x), x)[1]),
            jax.jit(lambda x: jax.pure_callback(inner, like, x)),  # the error of the inner program
        ):
            try:
                jax.block_until_ready(f(x))
            except jax.errors.JaxRuntimeError as error:
                print(isinstance(error, RuntimeError), type(error.__cause__).__name__, error.what)
        """
    )
    assert out == [
        "True Own pure_callback: fails raised __main__.Own: the words",
        "True Own io_callback: fails raised __main__.Own: the words",
        "True Own debug.callback: fails raised __main__.Own: the words",
        "True Own pure_callback: fails raised __main__.Own: the words",
    ]


def test_x64_is_a_mode_of_the_name():
    out = run(
        """
        import jax, jax.numpy as jnp, numpy as np
        f = jax.jit(lambda x: x * 2.5)
        def kinds():
            return [str(x.dtype) for x in (
                f(1.0), jnp.zeros(2), jnp.arange(3), jnp.asarray(np.ones(2)), jnp.ones(2, "float32") * 1.5,
                jnp.arange(3) * 1.5, jax.random.normal(jax.random.key(0)), jnp.uint32(1) + jnp.int32(1),
                jnp.sum(jnp.ones(2, "int8")), jnp.mean(jnp.arange(3)), jax.nn.one_hot(1, 3), jax.grad(jnp.sin)(1.0))]
        print(kinds())
        jax.config.update("jax_enable_x64", True)
        print(kinds(), jax.config.jax_enable_x64, jnp.asarray(2**40))
        with jax.enable_x64(False):
            print(jnp.zeros(2).dtype)
        jax.config.update("jax_enable_x64", False)
        print(kinds())
        """
    )
    f32, f64 = "float32", "float64"
    narrow = [f32, f32, "int32", f32, f32, f32, f32, "int32", "int32", f32, f32, f32]
    wide = [f64, f64, "int64", f64, f32, f64, f64, "int64", "int64", f64, f64, f64]
    assert out == [str(narrow), f"{wide} True 1099511627776", f32, str(narrow)]


def test_partial_evaluation():
    out = run(
        """
        import jax, jax.numpy as jnp
        from jax.extend import linear_util as lu
        from jax.interpreters import partial_eval as pe
        f = lu.wrap_init(lambda x, y: [x * 2, x + y])
        f, tree = jax.api_util.flatten_fun_nokwargs(f, jax.tree.structure((0, 0)))
        pvals = [pe.PartialVal.known(jnp.float32(3)), pe.PartialVal.unknown(jax.core.ShapedArray((), "float32"))]
        jaxpr, outs, consts = pe.trace_to_jaxpr_nounits(f, pvals)
        print(outs[0].is_known(), outs[0].const, outs[1].pval, len(jaxpr.eqns), tree())
        """
    )
    assert out == ["True 6.0 f32[] 1 " + str(__import__("blufunc").tree.structure([0, 0]))]


@pytest.mark.parametrize("name", ["jax_no_such_flag", "jax_spmd_mode"])
def test_flags_are_not_ignored(name):
    out = run(
        f"""
        import jax
        try:
            jax.config.update({name!r}, 1)
        except Exception as e:
            print(type(e).__name__)
        """
    )
    assert len(out) == 1


def test_x64_blocks_keep_traces():
    """Each mode has its traces, and threads leave no mode set."""
    out = run(
        """
        import threading
        import jax, jax.numpy as jnp
        n = []
        f = jax.jit(lambda x: (n.append(1), x * 2, jnp.arange(3))[1:])
        for _ in range(3):
            print(*[y.dtype for y in f(1.5)], len(n))
            with jax.enable_x64(True):
                print(*[y.dtype for y in f(1.5)], len(n))
        begun, leave = threading.Event(), threading.Event()
        def other():
            with jax.enable_x64(True):
                begun.set()
                leave.wait(10)
        thread = threading.Thread(target=other)
        with jax.enable_x64(True):
            thread.start()
            begun.wait(10)
        leave.set()
        thread.join()
        print(jax.config.jax_enable_x64, jnp.ones(1).dtype)
        """
    )
    narrow, wide = "float32 int32", "float64 int64"
    assert out == [
        f"{narrow} 1",
        f"{wide} 2",
        f"{narrow} 2",
        f"{wide} 2",
        f"{narrow} 2",
        f"{wide} 2",
        "False float32",
    ]


def test_x64_positions_and_counts():
    """Positions, counts and defaults have the dtypes of JAX with x64 on."""
    out = run(
        """
        import jax, jax.numpy as jnp
        jax.config.update("jax_enable_x64", True)
        v, key = jnp.asarray([3.0, 1.0, 2.0, 2.0]), jax.random.key(0)
        b, i = v > 1, jnp.asarray([2, 0, 1], "int8")
        show = lambda *trees: print(*sorted({str(x.dtype) for x in jax.tree.leaves(trees)}))
        show(v.nonzero(), jnp.nonzero(b), jnp.where(b), jnp.nonzero(b, size=3), jnp.mask_indices(3, jnp.triu))
        show(jnp.unique(v, return_index=True, return_inverse=True, return_counts=True)[1:], jnp.unique_all(v)[1:])
        show(jnp.unique(v, return_counts=True, size=3)[1], jnp.intersect1d(v, v, return_indices=True)[1:])
        show(jnp.cumsum(b), jnp.trace(i[None]), jax.scipy.stats.mode(v)[1], jax.scipy.cluster.vq.vq(v, v)[0])
        show(jax.random.choice(key, 5, (2,)), jax.random.permutation(key, 5), jax.random.categorical(key, v))
        show(jnp.argpartition(v, 1), jnp.searchsorted(v, v), jnp.digitize(v, v), jax.lax.top_k(v, 2)[1])
        show(jax.scipy.stats.rankdata(v), jnp.hamming(3), jnp.bartlett(3), jnp.fft.fftfreq(3))
        show(jax.random.bits(key), jnp.trace(i[None].astype("uint8")), jnp.trace(i[None].astype("uint32")))
        print(*jnp.__array_namespace_info__().default_dtypes().values())
        """
    )
    assert out == ["int64"] * 5 + ["int32", "float64", "uint64", "float64 complex128 int64 int64"]


def test_modules_that_few_programs_import():
    out = run(
        """
        import gzip
        import jax, jax.numpy as jnp
        import jax.extend.backend, jax.extend.linear_util as lu, jax.extend.random, jax.extend.source_info_util as info
        from jax.experimental import layout, multihost_utils, serialize_executable, shard_alike
        compiled = jax.jit(lambda x, k: {"a": x * 2 + k}).lower(jnp.ones(3), 1.0).compile()
        print(serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))(jnp.ones(3), 1.0))
        print(jax.grad(lambda x: shard_alike.shard_alike(x, x * 2)[1].sum())(jnp.ones(2)))
        send = lambda x, *a: jax.lax.ragged_all_to_all(x, jnp.zeros(4), *a, axis_name="i")
        tables = [[[0, 1], [0, 1]], [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]]]
        print(jax.vmap(send, axis_name="i")(jnp.array([[1.0, 2, 2], [3, 4, 0]]), *map(jnp.array, tables)).tolist())
        print(jax.vmap(lambda x: jax.lax.pbroadcast(x, "i", 2), axis_name="i")(jnp.arange(4)))
        fwd, bwd = jax.fwd_and_bwd(lambda x, y: x * x * y, argnums=(0, 1))
        print(*map(float, bwd(fwd(3.0, 2.0)[1], 1.0)))
        key, count = (jnp.uint32(0), jnp.uint32(7)), jnp.arange(4, dtype="uint32")
        print(jax.extend.random.threefry_2x32(key, count).tolist())
        context, seen = jax.make_user_context(3), []
        f = jax.jit(lambda x: seen.append(context.value) or x)
        f(1.0), f(1.0)
        with context(4):
            f(1.0), f(2.0)
        print(seen)
        print(b"CPU" in gzip.decompress(jax.profiler.device_memory_profile()).upper(), jax.extend.backend.get_backend())
        with info.extend_name_stack("layer"), info.transform_name_stack("jvp"):
            print(info.current_name_stack())
        print(jax.lax.squeeze_p.bind(jnp.ones((1, 2)), dimensions=(0,)).shape, jax.lax.clz_p.bind(jnp.int32(3)))
        mesh = jax.make_mesh((1,), ("x",))
        local = multihost_utils.host_local_array_to_global_array(jnp.arange(4), mesh, jax.P("x"))
        print(multihost_utils.global_array_to_host_local_array(local, mesh, jax.P("x")))
        for wrong in (lambda: layout.Layout((1, 0)), lambda: jax.transfer_guard("disallow").__enter__()):
            try:
                wrong()
            except NotImplementedError as e:
                print(type(e).__name__)
        """
    )
    assert out[0].startswith("{'a': Array([3., 3., 3.]")
    assert out[1:6] == [
        "[2. 2.]",
        "[[1.0, 3.0, 0.0, 0.0], [2.0, 2.0, 4.0, 0.0]]",
        "[2 2 2 2]",
        "12.0 9.0",
        out[5],
    ]
    assert len(eval(out[5])) == 4 and len(set(eval(out[5]))) == 4
    assert out[6:] == [
        "[3, 4]",
        "True Platform(platform='cpu')",
        "layer/jvp()",
        "(2,) 30",
        "[0 1 2 3]",
        "UnsupportedError",
        "UnsupportedError",
    ]


def test_dtypes_of_64_bits_are_truncated_unless_x64_is_on():
    out = run(
        """
        import jax, jax.numpy as jnp, numpy as np
        x = np.ones(2)  # libraries pass the dtypes of arrays on
        kinds = lambda: [str(v.dtype) for v in (
            jnp.zeros(2, x.dtype), jnp.ones(2).astype("float64"), jax.random.uniform(jax.random.key(0), dtype=x.dtype),
            jnp.zeros(2, np.int64), jnp.asarray(x, jnp.complex128))]
        print(kinds())
        with jax.enable_x64(True):
            print(kinds())
            kept = jnp.zeros(2, x.dtype)
        print(kinds() == kinds(), kept.dtype, jax.dtypes.canonicalize_dtype(None), jnp.iinfo(np.int64).bits)
        print(jnp.finfo(np.float64).eps == np.finfo(np.float64).eps, jnp.finfo(jnp.float32).max.astype(np.float64) > 0)
        """
    )
    narrow = ["float32"] * 3 + ["int32", "complex64"]
    assert out[0] == str(narrow) and out[1] == str(["float64"] * 3 + ["int64", "complex128"])
    assert out[2:] == ["True float64 float32 64", "True True"]


def test_traces_of_libraries():
    out = run(
        """
        import jax, jax.numpy as jnp
        from jax.extend import linear_util as lu

        class Counter(jax.core.Tracer):
            def __init__(self, trace, value):
                super().__init__(trace, jax.typeof(value))
                self.value = value

        class Counting(jax.core.Trace):
            def __init__(self, parent):
                super().__init__()
                self.parent, self.seen = parent, []
            def process_primitive(self, primitive, tracers, params):
                self.seen.append(primitive.name)
                values = [t.value if isinstance(t, Counter) else t for t in tracers]
                out = primitive.bind_with_trace(self.parent, values, [jax.typeof(v) for v in values], params)
                return jax.tree.map(lambda v: Counter(self, v), out)

        @lu.transformation
        def counted(traces, *values):
            with jax.core.take_current_trace() as parent:
                trace = Counting(parent)
                traces.append(trace)
                with jax.core.set_current_trace(trace):
                    outs = yield [Counter(trace, v) for v in values], {}
                    yield [o.value for o in outs]

        traces = []
        print(counted(lu.wrap_init(lambda x: [jnp.sin(x) * x]), traces).call_wrapped(jnp.float32(0)), traces[0].seen)
        def fails(x):
            raise KeyError("x")
        try:
            counted(lu.wrap_init(fails), traces).call_wrapped(jnp.float32(0))
        except KeyError as error:  # the generators have ended here, though the error refers to them
            print(jax.core.trace_state_clean(), jnp.sin(jnp.float32(0)))
        """
    )
    assert out == ["[Array(0., dtype=float32)] ['sin', 'mul']", "True 0.0"]


@pytest.mark.slow
def test_what_libraries_read():
    out = run(
        """
        import inspect
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import PartitionSpec as P
        f = jax.jit(lambda a, b=2: a + b)
        print(inspect.signature(f, follow_wrapped=False), type(jnp.reshape(np.ones(4), (2, 2))) is np.ndarray)
        print("copy" in inspect.signature(jnp.reshape).parameters, jnp.reshape(jnp.ones(4), (2, 2), copy=True).shape)
        state = jax.core.get_opaque_trace_state()
        with jax.set_mesh(jax.make_mesh((1,), ("x",))):
            print(jax.core.get_opaque_trace_state() == state, jax.sharding.get_abstract_mesh().empty)
        print(jax.sharding.get_abstract_mesh().empty)
        with jax.named_scope("a"):
            jaxpr = jax.make_jaxpr(lambda x: jax.named_scope("b")(jnp.sin)(x))(1.0)
        print(jaxpr.jaxpr.eqns[0].source_info.name_stack)
        typed = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.invars[0].aval
        print(type(typed) is jax.core.ShapedArray, typed.weak_type, typed.strip_weak_type().weak_type)
        print(type(jax.dtypes.bfloat16(1)).__module__, __import__("jax.lib").lib.__version__ == jax.__version__)
        try:
            jax.devices("tpu")
        except RuntimeError as error:
            print("Unknown backend" in str(error))
        from jax._src.interpreters import ad
        def around(y):
            inner = jax.custom_vjp(lambda x: x * y)
            inner.defvjp(lambda x: (x, None), lambda _, g: (g,))
            return inner(2.0)
        try:
            jax.jit(jax.grad(jax.jit(around)))(3.0)
        except ad.CustomVJPException as error:
            print("closes over" in str(error), hasattr(jax.interpreters.ad, "CustomVJPException"))
        try:
            jax.grad(lambda x: x)(jnp.ones(2))
        except ad.CustomVJPException:
            print("every error of gradients")
        except TypeError:
            print("those of closures")
        """
    )
    assert out == [
        "(a, b=2) True",
        "True (2, 2)",
        "True False",
        "True",
        "b",
        "True True False",
        "ml_dtypes True",
        "True",
        "True False",
        "those of closures",
    ]
