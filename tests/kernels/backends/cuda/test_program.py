"""CUDA programs on a fake device, and on a real one, against the CPU."""

import threading

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn, tree
from blufunc.config import Config, config
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import ConcreteArray, from_numpy
from blufunc.core.ir import dtypes
from blufunc.kernels import precision as precisions
from blufunc.kernels.backends.cuda import replay
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.library import cublaslt, matmul
from blufunc.kernels.backends.cuda.library.attention import launch as cuda_attention_launch
from examples.gpt import model as gpt
from examples.gpt import train as gpt_train
from tests.core.ops.test_op_table import assert_close, results
from tests.emulation import fake_cuda
from tests.op_table.rows import OPS
from tests.transforms.programs import LAX, PROGRAMS


def program_of(f, *args, **options):
    """Program of a function under jit, after one call with these arguments."""
    jitted = bf.jit(f, **options)
    jitted(*args)
    (entry,) = jitted._entries.values()
    return next(iter(entry.programs.values()))


def uniform(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng((seed, *shape)).uniform(-1, 1, shape).astype(dtype)


def on(device, *xs):
    return [from_numpy(np.asarray(x), device) for x in xs]


def same(got, want, rtol=1e-5):
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape and g.dtype == w.dtype
        if dtypes.is_inexact(w.dtype):
            wide = np.complex128 if dtypes.is_complex(w.dtype) else np.float64
            np.testing.assert_allclose(g.astype(wide), w.astype(wide), rtol=rtol, atol=rtol)
        else:
            np.testing.assert_array_equal(g, w)


# -- what operations and programs mean -------------------------------------------------------------

PAIRS = [(op, d) for op in OPS for d in op.dtypes]
CASES = [pytest.param(op, d, id=f"{op.id}-{d}") for op, d in PAIRS]
PARTS = 32
# Signs of vectors differ between libraries; tests/kernels/backends/cuda/library/test_cupy_ops.py checks
# them.
DETERMINED = [(op, d) for op, d in PAIRS if op.prim.name not in ("eigh", "svd")]


def agree(op, dtype, got, want, tolerance):
    for g, w in zip(results(got), results(want), strict=True):
        assert g.dtype == w.dtype, op.id
        assert_close(g, w, dtype, op.tol * tolerance, f"{op.id} in {dtype}")


@pytest.mark.sampled(55)
@pytest.mark.parametrize("op, dtype", CASES)
def test_operations(op, dtype, cuda):
    """Each operation, eagerly and under jit."""
    values = op.sample(dtype)
    want = op.apply(*on(backend.host_device(), *values))
    for run in (op.apply, bf.jit(op.apply)):
        agree(op, dtype, run(*on(cuda, *values)), want, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_operations_on_a_device(part):
    """Many operations in one program, which compiles faster than many programs."""
    pairs, device = DETERMINED[part::PARTS], bf.devices("cuda")[0]
    values = [op.sample(dtype) for op, dtype in pairs]
    run = bf.jit(lambda args: [op.apply(*xs) for (op, _), xs in zip(pairs, args, strict=True)])
    found = run([on(device, *xs) for xs in values])
    for (op, dtype), xs, got in zip(pairs, values, found, strict=True):
        agree(op, dtype, got, op.apply(*on(backend.host_device(), *xs)), 64)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.id) for op in OPS[::8] if op.prim.name not in ("eigh", "svd")]
)
def test_single_operations_on_a_device(op):
    device, values = bf.devices("cuda")[0], op.sample(op.dtypes[-1])
    want = op.apply(*on(backend.host_device(), *values))
    agree(op, op.dtypes[-1], op.apply(*on(device, *values)), want, 64)


def control_flow(name, device, rtol=1e-9):
    p = PROGRAMS[name]
    f = bf.jit(lambda *args: p.run(LAX, *args))
    args = p.args(0)
    want, there = f(*args), bf.device_put(args, device)
    for _ in range(4):  # later calls may be graphs
        same(f(*there), want, rtol)


@pytest.mark.second
@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", PROGRAMS)
def test_control_flow(name, cuda):
    """Loops and branches, whose closed-over arrays are passed as arguments."""
    control_flow(name, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_control_flow_on_a_device(name):
    control_flow(name, bf.devices("cuda")[0], 1e-6)  # float32 samples


def normalised(x, w, b):
    return nn.gelu(nn.layer_norm(x, w, b))


def recurrence(x, w):
    return lax.scan(lambda c, a: (bnp.tanh(c @ w + a), c), bnp.zeros(3), x)


FUNCTIONS = {
    "softmax": (lambda x: nn.softmax(x), uniform(5, 33)),
    "norm": (normalised, uniform(6, 48), uniform(48), uniform(48, seed=1)),
    "gradient of a norm": (
        lambda x, w, b: bf.grad(lambda *a: (normalised(*a) ** 2).sum(), (0, 1, 2))(x, w, b),
        *(uniform(6, 48), uniform(48), uniform(48, seed=1)),
    ),
    "products in both directions": (
        lambda x, y: (x @ y, y.T @ x.T, bnp.einsum("ij,ji->i", x, y)),
        *(uniform(4, 6), uniform(6, 4)),
    ),
    "attention": (
        lambda q, k, v: bnp.einsum("bhqk,bkhd->bqhd", nn.softmax(bnp.einsum("bqhd,bkhd->bhqk", q, k)), v),
        *(uniform(2, 5, 3, 4, seed=s) for s in range(3)),
    ),
    "products of reversed and strided views": (
        lambda x, y: x[::-1, ::2] @ y[::-1, 1:4], *(uniform(5, 8), uniform(4, 7))
    ),
    "products of slices": (lambda x: x[3:5, 1:3] @ x[0:2, 5:8], uniform(6, 9)),
    "products of broadcasts": (
        lambda x, w: bnp.broadcast_to(x[:, None], (3, 4, 5)) @ w, uniform(3, 5), uniform(5, 2)
    ),
    "products without elements": (lambda x, y: (x @ y, y @ x), uniform(3, 0), uniform(0, 3)),
    "integers": (lambda x, y: x @ y, *(np.arange(12, dtype=np.int32).reshape(3, 4),) * 1, np.ones((4, 2), np.int32)),
    "half": (lambda x: (x @ x.T).sum(0), uniform(4, 6).astype(dtypes.bfloat16)),
    "scatter": (lambda x, i: x.at[i].add(2 * x[i]), uniform(7, 3), np.array([1, 5, 1], np.int32)),
    "scatter of views": (
        lambda x, i, u: x.T.at[i].add(u.T), uniform(3, 7), np.array([1, 5, 1], np.int32), uniform(3, 3, seed=1)
    ),
    "sort and cumsum": (lambda x: (bnp.sort(x.T), bnp.cumsum(x, 0), bnp.argsort(x)), uniform(5, 4)),
    "factor": (lambda x: bnp.linalg.cholesky(x @ x.T + 4 * bnp.eye(3)), uniform(3, 3)),
    "arguments and numbers as they are": (lambda x, y: (x, y, x, 3.0, x + y), uniform(3), uniform(3)),
    "views": (lambda x: (x.T, x[1:], x.reshape(-1), x[None]), uniform(3, 4)),
    "a barrier": (lambda x: (lax.optimization_barrier((x * 2, x.T, 1.0)), x * 2 + 1), uniform(3, 4)),
    "a barrier on what dies": (
        lambda x: (lax.optimization_barrier(bnp.tanh(x @ x) @ x), bnp.sin((x @ x) @ (x @ x)) @ x), uniform(4, 4)
    ),
    "no elements": (
        lambda x: (x[:0] * 2, bnp.concatenate([x, x[:0]]), x[:, :0].sum(1), bnp.tanh(x[1:1]).sum(0)), uniform(3, 4)
    ),
    "nothing to do": (lambda x: (), uniform(3)),
    "keys": (lambda n: bf.random.normal(bf.random.fold_in(bf.random.key(3), n), (5,)), np.int32(4)),
    "stacked scans": (
        lambda x, w: lax.scan(lambda c, a: (bnp.tanh(c @ w + a), c.sum()), bnp.zeros(3), x),
        *(uniform(5, 3), uniform(3, 3)),
    ),
    "gradient of a scan": (
        lambda x, w: bf.grad(lambda w: (recurrence(x, w)[1] ** 2).sum())(w), uniform(5, 3), uniform(3, 3)
    ),
    "a callback": (
        lambda x: bf.pure_callback(np.sin, bf.ShapeDtypeStruct((3,), np.float32), x * 2) + 1, uniform(3)
    ),
}  # fmt: skip


def function(name, device):
    f, *xs = FUNCTIONS[name]
    jitted = bf.jit(f)
    want, there = jitted(*on(backend.host_device(), *xs)), on(device, *xs)
    for _ in range(4):
        same(jitted(*there), want)
    same(there, xs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, cuda):
    """Repeated calls, of which later ones may be graphs; arguments do not change."""
    function(name, cuda)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_on_a_device(name):
    function(name, bf.devices("cuda")[0])


# -- how they are done -----------------------------------------------------------------------------


def test_products_go_to_the_library_without_copies(fake, cuda):
    x, w = on(cuda, uniform(8, 16), uniform(16, 4))
    p = program_of(lambda x, w: bnp.einsum("ij,jk->ki", x, w) + bnp.einsum("ji,kj->ik", w, x), x, w)
    assert fake.products == 2 and fake.launches == 0
    assert [s.eqn.prim.name for s in p.schedule.steps] == ["dot_general", "dot_general+accumulate"]


@pytest.mark.parametrize(
    "equation", ["bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "bkhd,bhqk->bhdq", "bhkq,bkhd->bhqd"]
)
def test_copies_for_products_keep_rows(cuda, equation):
    """Operands with unmergeable batch axes are copied, keeping their innermost axis."""
    sizes = {"b": 2, "q": 3, "k": 4, "h": 5, "d": 6}
    operands = equation.split("->")[0].split(",")
    xs = [uniform(*[sizes[c] for c in text], seed=n) for n, text in enumerate(operands)]
    f = lambda x, y: bnp.einsum(equation, x, y)
    p = program_of(f, *on(cuda, *xs))
    same(bf.jit(f)(*on(cuda, *xs)), np.einsum(equation, *xs))
    for work in p._free[0][0].works:
        product = getattr(work.run, "__self__", None)
        for side in (product._lhs, product._rhs) if product else ():
            assert side._copier is None or side._order[-1] == len(side._order) - 1


def test_identical_matmuls_share_library_plans(fake, cuda, monkeypatch):
    """Except plans that contain the address of a vector or matrix."""
    made, plan = [], fake_cuda.cublaslt.Plan
    monkeypatch.setattr(
        fake_cuda.cublaslt, "Plan", lambda gemm, *rest: made.append(gemm) or plan(gemm, *rest)
    )
    x, w, b = uniform(8, 8), uniform(8, 8, seed=1), uniform(8, seed=2)

    def f(x, w, b):
        for _ in range(3):
            x = bnp.tanh(x @ w) + x
        return x @ w + b, (x + 1) @ w + b

    y = x
    for _ in range(3):
        y = np.tanh(y @ w) + y
    g, arrays = bf.jit(f), on(cuda, x, w, b)
    for _ in range(5):
        for got, want in zip(g(*arrays), (y @ w + b, (y + 1) @ w + b), strict=True):
            same(got, want)
    assert fake.replays and [gemm.bias for gemm in made] == [False, True, True]


def test_identical_copies_are_one_program(fake, cuda, monkeypatch):
    """Copies for two matmuls, and for both operands of one, in calls and in a graph."""

    def refuse(gemm, device, addresses):  # the fallback requires dense operands
        raise errors.UnsupportedError("no algorithm.")

    monkeypatch.setattr(fake_cuda.cublaslt, "Plan", refuse)
    x, y, z = (uniform(8, 12, seed=n) for n in range(3))
    part = lambda x: x[:, 2:10]
    arrays = on(cuda, x, y, z)
    f = bf.jit(lambda x, y, z: (part(x) @ part(y), part(z) @ part(x), part(y)[:, 1:5] @ z[:4]))
    p = f.lower(*arrays).compile(cuda).program
    assert len(p._copiers) == 2
    for _ in range(5):
        for got, (a, b) in zip(
            f(*arrays),
            ((part(x), part(y)), (part(z), part(x)), (part(y)[:, 1:5], z[:4])),
            strict=True,
        ):
            same(got, a @ b)
    assert fake.replays


PRECISIONS = [
    (None, "default", "f32"), ("default", "tf32", "tf32"), (None, "tf32", "tf32"), ("high", "default", "tf32"),
    ("highest", "tf32", "f32"), (("high", "highest"), "default", "f32"), (("high", "high"), "default", "tf32"),
    ("TF32_TF32_F32", "default", "tf32"), ("F32_F32_F32", "tf32", "f32"), (None, "float32_tc", "f32"),
]  # fmt: skip


def test_products_that_the_library_refuses_are_done_otherwise(fake, cuda, monkeypatch, capsys):
    def refuse(gemm, device, addresses):
        raise errors.UnsupportedError("no algorithm.")

    monkeypatch.setattr(fake_cuda.cublaslt, "Plan", refuse)
    monkeypatch.setattr(config, "debug", "fusion")
    x, w = on(cuda, uniform(8, 16), uniform(16, 4))
    f = bf.jit(lambda x, w: bnp.tanh(x @ w))
    for _ in range(2):
        same(f(x, w), np.tanh(uniform(8, 16) @ uniform(16, 4)))
    assert not fake.products and capsys.readouterr().err.count("runs without cuBLASLt") == 1


def test_timings_are_of_the_steps_and_change_nothing(fake, cuda):
    x, w = on(cuda, uniform(8, 16), uniform(16, 8))
    f = bf.jit(lambda x, w: (bnp.tanh(x @ w), x * 2), donate_argnums=0)
    p = f.lower(x, w).compile(cuda).program
    for buffers in (None, [x.buffer, w.buffer]):
        times = p.timings(buffers, repeats=2)
        assert len(times) == len(p.schedule.steps)
        assert [t.name for t in times if t.name == "dot_general"] and all(t.ms == 1 for t in times)
    same(x, uniform(8, 16))


@pytest.mark.parametrize("precision, flag, compute", PRECISIONS)
def test_precision(precision, flag, compute, monkeypatch):
    monkeypatch.setattr(config, "matmul_precision", flag)
    assert matmul.compute_of(dtypes.float32, precision) == compute
    assert matmul.compute_of(dtypes.bfloat16, precision) == "f32"
    assert matmul.compute_of(dtypes.float64, precision) == "f64"


def test_a_wrong_precision_is_named():
    with pytest.raises(errors.ValueRangeError, match=r"best.*\n.*'highest'"):
        matmul.compute_of(dtypes.float32, "best")


@pytest.mark.parametrize("flag", sorted(precisions.PRECISIONS))
def test_every_precision_is_a_value_of_the_flag(flag):
    Config().update("matmul_precision", flag)


def test_programs_are_those_of_the_precision_that_is_set(cuda, monkeypatch):
    """Functions under jit, calls with definitions, and single operations; no retrace."""
    made = []
    plan = cublaslt.Plan
    monkeypatch.setattr(cublaslt, "Plan", lambda gemm, *rest: made.append(gemm.compute) or plan(gemm, *rest))
    x, w = on(cuda, uniform(8, 16), uniform(16, 8))
    jitted, inner = bf.jit(lambda x, w: x @ w), bf.jit(lambda x, w: bf.jit(lambda y: y @ w)(x * 2))
    single, traced = lambda x, w: x @ w, lambda x, w: bf.checkpoint(lambda y: y @ w)(x)
    for f in (jitted, inner, single, traced):
        for precision, compute in (("default", "f32"), ("tf32", "tf32")):
            made.clear()
            monkeypatch.setattr(config, "matmul_precision", precision)
            same(f(x, w), np.asarray(f(*on(backend.host_device(), x, w))), 1e-6)
            assert set(made) == {compute}
        made.clear()
        monkeypatch.setattr(config, "matmul_precision", "default")
        f(x, w)
        assert not made or f is traced  # the existing program
    assert jitted.trace_count == inner.trace_count == 1


def test_what_is_shown_is_of_the_precision_that_is_set(cuda, monkeypatch):
    """Except compiled programs, which keep their precision."""
    (q,) = on(cuda, uniform(2, 40, 2, 16))
    lowered = bf.jit(lambda q: nn.dot_product_attention(q, q, q)).lower(q)
    compiled = lowered.compile()
    source = compiled.source()
    assert "no kernel for attention" in lowered.sight().notes[0]
    monkeypatch.setattr(config, "matmul_precision", "tf32")
    assert not lowered.sight().notes
    assert compiled.source() == source != lowered.source()


def test_a_single_operation_is_compiled_once(fake, cuda):
    x, y = on(cuda, uniform(4, 3), uniform(4, 3, seed=1))
    for _ in range(3):
        x = x * y
    assert len(fake.compiled) == 1 and fake.launches == 3


def test_a_reshape_alone_is_a_view(fake, cuda):
    (x,) = on(cuda, uniform(4, 3))
    assert x.reshape(2, 6).buffer.ptr == x.buffer.ptr
    assert not fake.launches


# -- donation ---------------------------------------------------------------------------------------


def test_donated_memory_is_reused(cuda):
    x, y = on(cuda, uniform(64, 8), uniform(64, 8, seed=1))
    before = x.buffer.ptr
    out = bf.jit(lambda x, y: x * 2 + y, donate_argnums=0)(x, y)
    assert out.buffer.ptr == before and x.is_deleted()
    same(out, uniform(64, 8) * 2 + uniform(64, 8, seed=1))


def test_shared_memory_is_not_reused(cuda):
    step = bf.jit(lambda x: x * 2, donate_argnums=0)
    (x,) = on(cuda, uniform(64, 8))
    view = x.reshape(-1)
    step(x)
    same(view, uniform(64, 8).reshape(-1))
    (x,) = on(cuda, uniform(64, 8))
    seen = x.buffer
    step(x)
    same(cuda_memory.to_host(seen), uniform(64, 8))


def test_what_is_donated_of_many_arrays(fake, cuda):
    """Donated twice, donated and used, donated with a view; the others stay in place."""
    step = bf.jit(lambda state, x: ({k: 2 * v + x[0] for k, v in state.items()}, x), donate_argnums=0)
    state = {k: on(cuda, uniform(4, 4, seed=n))[0] for n, k in enumerate("abcdefgh")}
    want = {k: np.asarray(v) for k, v in state.items()}
    state["twice"], want["twice"] = state["a"], want["a"]
    view, places = state["c"].reshape(-1), {k: v.buffer.ptr for k, v in state.items()}
    used = [state["b"]]
    for _ in range(5):  # later calls may be graphs
        first = np.asarray(used[0])
        state, (same_,) = step(state, used)
        want = {k: 2 * v + first for k, v in want.items()}
        same((state, same_), (want, first))
        used = [same_]
    assert {k for k, v in state.items() if v.buffer.ptr != places[k]} == {"a", "b", "c"}
    same(view, uniform(4, 4, seed=2).reshape(-1))


def test_arguments_returned_as_they_are_can_be_donated(cuda):
    (x,) = on(cuda, uniform(64, 8))
    y, z = bf.jit(lambda x: (x, x))(x)
    bf.jit(lambda x: x * 2, donate_argnums=0)(y)
    same((x, z), (uniform(64, 8),) * 2)


def test_donated_arguments_in_any_order(cuda):
    step = bf.jit(lambda a, b, c: (b + c, a * b, c.T @ a), donate_argnums=(0, 1, 2))
    xs = [uniform(4, 4, seed=s) for s in range(3)]
    state = on(cuda, *xs)
    for _ in range(6):
        state = step(*state)
        a, b, c = xs
        xs = [b + c, a * b, c.T @ a]
    same(list(state), xs, 1e-4)


# -- graphs ------------------------------------------------------------------------------------------


def train(state, batch, rate):
    """Training step of a small network with a step counter."""
    (w1, b1, w2), n = state
    x, y = batch

    def loss(w1, b1, w2):
        return ((bnp.tanh(x @ w1 + b1) @ w2 - y) ** 2).mean()

    value, grads = bf.value_and_grad(loss, (0, 1, 2))(w1, b1, w2)
    return (tuple(p - rate * g for p, g in zip((w1, b1, w2), grads)), n + 1), value


def training(device, steps):
    weights = (uniform(12, 16), np.zeros(16, np.float32), uniform(16, 1))
    state = (tuple(on(device, *weights)), *on(device, np.int32(0)))
    step = bf.jit(train, donate_argnums=0)
    losses = []
    for n in range(steps):
        batch = tuple(on(device, uniform(8, 12, seed=n), uniform(8, 1, seed=n)))
        state, value = step(state, batch, 0.1 / (n + 1))
        losses.append(value)
    (entry,) = step._entries.values()
    return state, losses, next(iter(entry.programs.values()))


def test_a_training_step_becomes_a_graph(fake, cuda):
    """The state stays in place; batches and losses move, and losses keep values."""
    state, losses, program = training(cuda, 12)
    want_state, want_losses, _ = training(backend.host_device(), 12)
    same((state, losses), (want_state, want_losses), 1e-4)
    assert fake.replays >= 8 and program.why_no_graph is None


TINY = gpt.Config(layers=2, heads=2, width=32, context=16, vocab=64)


def language_model(steps):
    """First losses of a language model on the default device, parameters, and program."""
    optimizer = gpt_train.make_optimizer(10, 1e-2)
    params = gpt.init(bf.random.key(0), TINY)
    state, losses, step = optimizer.init(params), [], gpt_train.make_step(TINY, optimizer)
    for n in range(steps):
        tokens = np.random.default_rng(n).integers(0, TINY.vocab, (2, 17)).astype(np.int32)
        params, state, value = step(params, state, bf.device_put(tokens))
        losses.append(float(value))
    (entry,) = step._entries.values()
    return losses, params, next(iter(entry.programs.values()))


def without_key_bias(params):
    """Parameters without the key bias, whose gradient is noise that Adam amplifies."""
    for block in params["blocks"]:
        block["attention"]["qkv"]["bias"] = block["attention"]["qkv"]["bias"].reshape(3, -1)[[0, 2]]
    return params


@pytest.mark.slow
def test_a_language_model_trains_as_on_the_cpu(fake, monkeypatch):
    want_losses, want, _ = language_model(5)
    monkeypatch.setattr(config, "default_device", "cuda")
    losses, params, program = language_model(5)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    monkeypatch.setattr(config, "default_device", "cpu")
    same(*map(without_key_bias, (params, want)), 1e-3)
    assert fake.replays >= 2 and program.why_no_graph is None


@pytest.mark.gpu
def test_a_language_model_trains_on_a_device(monkeypatch):
    want_losses, want, _ = language_model(5)
    monkeypatch.setattr(config, "default_device", "cuda")
    losses, params, program = language_model(5)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-4)
    same(*map(without_key_bias, (params, want)), 1e-2)
    assert program.why_no_graph is None


def test_graphs_can_be_switched_off(fake, cuda, monkeypatch):
    monkeypatch.setattr(config, "cuda_graphs", False)
    _, losses, _ = training(cuda, 6)
    assert not fake.replays and len(losses) == 6


@pytest.mark.gpu
def test_a_training_step_on_a_device():
    state, losses, program = training(bf.devices("cuda")[0], 12)
    want_state, want_losses, _ = training(backend.host_device(), 12)
    same((state, losses), (want_state, want_losses), 1e-3)
    assert program.why_no_graph is None and program._free[0][1].replayed >= 8


def long(x, y):
    return bnp.tanh(bnp.tanh(bnp.tanh(x @ y) @ y) @ y)


def test_large_arguments_that_move_have_a_graph_each(fake, cuda, monkeypatch):
    monkeypatch.setattr(replay, "STAGED_BYTES", 0)
    (y,) = on(cuda, uniform(4, 4, seed=9))
    xs = on(cuda, *[uniform(4, 4, seed=s) for s in range(2)])
    f = bf.jit(long)
    for n in range(12):
        same(f(xs[n % 2], y), bf.jit(long)(*on(backend.host_device(), xs[n % 2], y)))
    assert fake.replays >= 6


def test_a_graph_keeps_no_arguments(fake, cuda):
    f = bf.jit(long)
    x, y = on(cuda, uniform(4, 4), uniform(4, 4, seed=1))
    for _ in range(5):
        out = f(x, y)
    assert fake.replays
    live = fake.source.live.copy()
    held = {x.buffer.ptr, y.buffer.ptr, out.buffer.ptr}
    del x, y, out
    assert set(live) - set(fake.source.live) >= held


def test_addresses_that_never_come_again_end_the_captures(fake, cuda, monkeypatch):
    monkeypatch.setattr(replay, "STAGED_BYTES", 0)
    f = bf.jit(long)
    (y,) = on(cuda, uniform(4, 4, seed=9))
    kept = []
    for n in range(40):
        kept.append(f(*on(cuda, uniform(4, 4, seed=n)), y))
    same(kept[-1], bf.jit(long)(uniform(4, 4, seed=39), uniform(4, 4, seed=9)))
    assert not fake.replays


def test_steps_of_the_host_rule_out_graphs(fake, cuda):
    def f(x):
        y = bf.pure_callback(np.sin, bf.ShapeDtypeStruct((4, 4), np.float32), x @ x)
        return long(x, y)

    (x,) = on(cuda, uniform(4, 4))
    p = program_of(f, x)
    for _ in range(4):
        p([x.buffer])
    assert not fake.replays and "host" in p.why_no_graph


def test_a_failed_capture_is_reported_and_not_retried(fake, cuda, monkeypatch, capsys):
    def capture(run, device=0, keep=(), streams=1):
        raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    monkeypatch.setattr(fake_cuda.cuda_graph, "capture", capture)
    monkeypatch.setattr(config, "debug", "launch")
    f = bf.jit(long)
    x, y = on(cuda, uniform(4, 4), uniform(4, 4, seed=1))
    want = bf.jit(long)(uniform(4, 4), uniform(4, 4, seed=1))
    for _ in range(6):
        same(f(x, y), want)
    assert capsys.readouterr().err.count("long runs kernel by kernel") == 1


def test_scans_are_part_of_graphs(fake, cuda):
    def f(x, w):
        return lax.scan(lambda c, a: (bnp.tanh(c @ w + a), c.sum()), bnp.zeros(3), x)

    jitted = bf.jit(f)
    x, w = on(cuda, uniform(5, 3), uniform(3, 3))
    long_enough = bf.jit(lambda x, w: (f(x, w), long(w, w), long(w, w + 1)))
    want = long_enough(uniform(5, 3), uniform(3, 3))
    for _ in range(5):
        same(jitted(x, w), want[0])
        same(long_enough(x, w), want)
    assert fake.replays


# -- memory -------------------------------------------------------------------------------------------


def test_nothing_is_left_over(fake, cuda):
    """Calls free all memory except their results."""
    f = bf.jit(lambda x: (bnp.tanh(x @ x) @ x).sum(0))
    (x,) = on(cuda, uniform(32, 32))
    f(x)
    before = cuda_memory.pool().live_bytes()
    for _ in range(3):
        f(x)
    assert cuda_memory.pool().live_bytes() == before


def test_the_planned_peak_is_what_a_call_takes(fake, cuda):
    f = lambda x: bnp.tanh(bnp.sin(x @ x) @ (x + 1)).sum(0)
    (x,) = on(cuda, uniform(256, 256))
    p = program_of(f, x)
    cuda_memory.pool().reset_peak()
    p([x.buffer])
    assert abs(cuda_memory.pool().peak_bytes() - p.memory.peak_bytes) <= 0.02 * p.memory.peak_bytes


def test_out_of_memory_tells_the_plan_and_the_process_goes_on(fake, cuda):
    fake.source.total = 1 << 20
    (x,) = on(cuda, uniform(256, 256))
    f = bf.jit(lambda x: bnp.tanh(x @ x) @ bnp.sin(x @ x).T @ (x @ bnp.cos(x) @ x))
    with pytest.raises(errors.OutOfMemoryError, match="planned peak") as e:
        f(x)
    assert "test_program.py" in str(e.value)
    same(x + 1, uniform(256, 256) + 1)


def test_programs_that_rest_give_their_memory_to_others(fake, cuda):
    (x,) = on(cuda, uniform(256, 256))
    first = bf.jit(lambda x: (bnp.tanh(x @ x) @ x).sum(0))
    want = first(x)
    fake.source.total = (
        cuda_memory.pool().live_bytes() + 4096
    )  # too little unless the first program frees its arena
    second = bf.jit(lambda x: (bnp.sin(x @ x) @ x).sum(0))
    second(x)
    fake.source.total = 1 << 30
    same(first(x), want)


def test_arguments_at_odd_addresses_are_copied(cuda):
    (x,) = on(cuda, uniform(7, 3))
    p = program_of(lambda x: x * 2, *on(cuda, uniform(3)))
    row = x.buffer.view((3,), np.dtype(np.float32), 12)
    (out,) = p([row])
    same(cuda_memory.to_host(out), uniform(7, 3)[1] * 2)


def test_a_program_that_calls_itself(fake, cuda):
    """Reentrant through a callback: each call has its own memory."""
    depth = []

    def callback(y):
        if len(depth) < 2:
            depth.append(1)
            f(*on(cuda, np.asarray(y) + 5))
        return np.asarray(y)

    def g(x):
        a = bnp.tanh(x @ x)
        b = bf.pure_callback(callback, bf.ShapeDtypeStruct((4, 4), np.float32), x)
        return (a @ b) + a

    f = bf.jit(g)
    (x,) = on(cuda, uniform(4, 4))
    a = np.tanh(uniform(4, 4) @ uniform(4, 4))
    same(f(x), a @ uniform(4, 4) + a)
    assert len(depth) == 2


def test_threads(fake, cuda):
    """Concurrent calls of one program are isolated."""
    f = bf.jit(lambda x: bnp.tanh(x @ x).sum(0))
    xs = [uniform(16, 16, seed=s) for s in range(4)]
    found = {}

    def work(i):
        found[i] = [np.asarray(f(*on(cuda, xs[i]))) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, x in enumerate(xs):
        same(found[i], [np.tanh(x @ x).sum(0)] * 5)


# -- users' kernels -----------------------------------------------------------------------------------


def test_users_kernels(fake, cuda):
    kernel = bf.cuda_kernel(
        "if (i < x_size) { out[i] = 2 * x[i] + y[i]; }", reference=lambda x, y: 2 * x + y, name="scaled"
    )

    def scaled(device, pointers):
        x, y, out = (device.array(p, (12,), np.dtype(np.float32)) for p in pointers)
        out[:] = 2 * x + y

    fake.sources_of_users["scaled"] = scaled
    x, y = on(cuda, uniform(3, 4), uniform(4, 3))
    f = bf.jit(lambda x, y: bnp.tanh(kernel(x + 1, y.T)) @ bnp.sin(y) @ x)
    a, b = uniform(3, 4), uniform(4, 3)
    want = np.tanh(2 * (a + 1) + b.T) @ np.sin(b) @ a
    for _ in range(5):
        same(f(x, y), want)
    assert fake.replays
    same(kernel(x, x), 3 * a)


@pytest.mark.gpu
def test_users_kernels_on_a_device():
    kernel = bf.cuda_kernel(
        "if (i < x_size) { out[i] = 2 * x[i] + y[i]; }", reference=lambda x, y: 2 * x + y, name="scaled"
    )
    x, y = on(bf.devices("cuda")[0], uniform(3, 4), uniform(4, 3))
    a, b = uniform(3, 4), uniform(4, 3)
    same(bf.jit(lambda x, y: kernel(x + 1, y.T))(x, y), 2 * (a + 1) + b.T)


# -- devices -------------------------------------------------------------------------------------------


def test_the_default_device_is_the_cpu_unless_told_otherwise(fake, monkeypatch):
    assert bnp.ones(3).device.platform == "cpu"
    monkeypatch.setattr(config, "default_device", "cuda")
    x = bnp.ones(3)
    assert x.device.platform == "cuda" and (x + np.ones(3, np.float32)).device == x.device
    assert bf.default_backend() == "cuda"


@pytest.mark.parametrize("name", ["cuda:7", "cuda:x", "tpu"])
def test_a_default_device_that_there_is_not(fake, monkeypatch, name):
    monkeypatch.setattr(config, "default_device", name)
    with pytest.raises(errors.ValueRangeError, match="cuda"):
        bnp.ones(3)


def test_arrays_go_there_and_back(cuda):
    x = bf.device_put({"a": uniform(3, 4), "n": 3}, cuda)
    assert x["a"].device == cuda and x["n"].device == cuda
    back = bf.device_put(x["a"], bf.devices("cpu")[0])
    assert back.device.platform == "cpu"
    same(back, uniform(3, 4))
    assert not bf.device_get(x["a"]).flags.writeable


def test_arrays_of_the_default_device_go_where_the_others_are(cuda):
    (x,) = on(cuda, uniform(3, 4))
    y = bnp.asarray(uniform(3, 4, seed=1))
    for z in (x + y, y + x, x + np.asarray(y), bf.jit(lambda y, x: x + y)(y, x), bf.jit(lambda x: x + y)(x)):
        assert z.device == cuda
        same(z, uniform(3, 4) + uniform(3, 4, seed=1))
    out = bf.jit(lambda y, x: x + y, donate_argnums=0)(y, x)
    assert out.device == cuda and y.is_deleted()
    same(out, z)


def test_arrays_on_two_chosen_devices_do_not_meet(fake):
    cpu, cuda = bf.devices("cpu")[0], bf.devices("cuda")[0]
    other = backend.Device("cuda", 1, cuda.backend)
    x = bf.device_put(uniform(3), cuda)
    y = ConcreteArray(x.buffer, x.aval, other)
    with pytest.raises(errors.ArgumentError, match=r"cuda:0 and on cuda:1"):
        x + y
    assert (x + bf.device_put(uniform(3), cpu)).device == cuda


@pytest.mark.parametrize("name", ["dot_general", "sin"])
def test_a_replaced_definition_is_the_one_that_runs(name, cuda):
    """Even if the plan, or a kernel, would have computed the operation itself."""
    prim = {"dot_general": lax.dot_general_p, "sin": lax.sin_p}[name]
    f = lambda x: (x @ x) if name == "dot_general" else bnp.sin(x)
    x = uniform(4, 4)
    with bf.override(prim, impl=lambda *args, **params: np.full((4, 4), 7, np.float32)):
        same(bf.jit(f)(*on(cuda, x)), np.full((4, 4), 7, np.float32))
    same(bf.jit(f)(*on(cuda, x)), f(*on(backend.host_device(), x)))


# -- attention ---------------------------------------------------------------------------------------


def packed_attention(qkv, causal=True):
    q, k, v = (qkv[:, :, i] for i in range(3))
    return nn.dot_product_attention(q, k, v, is_causal=causal)


def test_repeated_keys_are_copied_where_tensor_maps_are_made(cuda, fake, monkeypatch):
    """Tensor maps do not support strides of 0."""
    q = uniform(1, 40, 4, 16, seed=1).astype(dtypes.bfloat16)
    k, v = (uniform(1, 40, 1, 16, seed=s).astype(dtypes.bfloat16) for s in (2, 3))
    seen: list = []
    made = cuda_attention_launch.Forward
    keep = lambda shape, dtype, strides, *rest: seen.append(strides) or made(shape, dtype, strides, *rest)
    monkeypatch.setattr(cuda_attention_launch, "Forward", keep)

    def f(q, k, v):
        k, v = (bnp.broadcast_to(x, q.shape) for x in (k, v))
        return nn.dot_product_attention(q, k, v, is_causal=True)

    same(bf.jit(f)(*on(cuda, q, k, v)), f(*on(backend.host_device(), q, k, v)), 3e-2)
    assert all(s.token > 0 and s.head > 0 for strides in seen for s in strides) and seen


@pytest.mark.parametrize("heads, key_heads, causal", [(2, 2, True), (4, 2, True), (2, 2, False)])
def test_attention_is_one_kernel_in_each_direction(heads, key_heads, causal, cuda):
    """Forward and backward for dense operands, without storing all attention weights."""
    q = uniform(2, 40, heads, 16, seed=1).astype(dtypes.bfloat16)
    k, v = (uniform(2, 40, key_heads, 16, seed=s).astype(dtypes.bfloat16) for s in (2, 3))
    w = uniform(2, 40, heads, 16, seed=4).astype(dtypes.bfloat16)
    f = lambda q, k, v, w: (nn.dot_product_attention(q, k, v, is_causal=causal) * w).astype("float32").sum()
    run = bf.value_and_grad(f, (0, 1, 2))
    program = program_of(run, *on(cuda, q, k, v, w))
    names = [s.eqn.prim.name for s in program.schedule.steps if hasattr(s, "eqn")]
    assert names == ["attention", "attention_grad"]
    got, want = bf.jit(run)(*on(cuda, q, k, v, w)), run(*on(backend.host_device(), q, k, v, w))
    same(got, want, 3e-2)
    same(run(*on(cuda, q, k, v, w)), want, 3e-2)  # and eagerly


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_attention_in_mixed_precision(precision, cuda):
    """One kernel reads and casts parts of one array; float32 has no kernel yet."""
    qkv = uniform(2, 40, 3, 2, 16)
    f = lambda x: (packed_attention(x) ** 2).sum()
    f = bf.autocast(f) if precision == "bf16" else f
    schedule = program_of(bf.grad(f), *on(cuda, qkv)).schedule
    names = [s.eqn.prim.name for s in schedule.steps if hasattr(s, "eqn")]
    assert (names == ["attention", "attention_grad+packed"]) is (precision == "bf16")
    assert precision == "fp32" or len(schedule.steps) == 5  # casts, forward, cotangent, backward, gradient
    same(bf.jit(bf.grad(f))(*on(cuda, qkv)), bf.grad(f)(*on(backend.host_device(), qkv)), 4e-2)


def test_packed_operands_are_read_where_they_are(cuda):
    """Unused results also get memory."""
    qkv = uniform(2, 40, 3, 2, 16).astype(dtypes.bfloat16)
    f = lambda x: packed_attention(x).astype("float32").sum()
    schedule = program_of(f, *on(cuda, qkv)).schedule
    (attention,) = [s for s in schedule.steps if hasattr(s, "eqn")]
    assert len({value for value, _ in attention.operands}) == 1 and attention.results[1] is None
    same(bf.jit(f)(*on(cuda, qkv)), f(*on(backend.host_device(), qkv)), 2e-2)
    of_query = bf.grad(lambda q, k, v: nn.dot_product_attention(q, k, v).astype("float32").sum())
    qkv = [uniform(2, 40, 2, 16, seed=s).astype(dtypes.bfloat16) for s in range(3)]
    same(bf.jit(of_query)(*on(cuda, *qkv)), of_query(*on(backend.host_device(), *qkv)), 2e-2)


def test_attention_without_a_kernel_is_its_definition(cuda):
    """20 features are not a multiple of 16."""
    q, k, v = (uniform(2, 40, 2, 20, seed=s).astype(dtypes.bfloat16) for s in range(3))
    f = lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True)
    program = program_of(f, *on(cuda, q, k, v))
    assert not [s for s in program.schedule.steps if hasattr(s, "eqn") and s.eqn.prim.name == "attention"]
    same(bf.jit(f)(*on(cuda, q, k, v)), f(*on(backend.host_device(), q, k, v)), 2e-2)


MODS = {
    "mask": lambda ids, table: {"mask_mod": nn.masks.document(ids), "is_causal": True},
    "score": lambda ids, table: {"score_mod": nn.score_mods.relative_bias(table)},
    "both": lambda ids, table: {
        "mask_mod": nn.masks.sliding_window(9), "score_mod": lambda s, b, h, q, k: bnp.tanh(s) + table[h, k % 5],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MODS)
def test_functions_of_pairs_are_in_the_kernel(name, cuda):
    """Arrays that they read become operands; each direction is one kernel."""
    q = uniform(2, 40, 4, 16, seed=1).astype(dtypes.bfloat16)
    k, v = (uniform(2, 40, 2, 16, seed=s).astype(dtypes.bfloat16) for s in (2, 3))
    ids, table = np.repeat(np.arange(10), 8).reshape(2, 40).astype(np.int32), uniform(4, 5)

    def f(q, k, v, ids, table):
        return (nn.dot_product_attention(q, k, v, **MODS[name](ids, table)) ** 2).astype("float32").sum()

    run, args = bf.value_and_grad(f, (0, 1, 2)), (q, k, v, ids, table)
    names = [s.eqn.prim.name for s in program_of(run, *on(cuda, *args)).schedule.steps if hasattr(s, "eqn")]
    assert [n for n in names if n.startswith("attention")] == ["attention", "attention_grad"]
    same(bf.jit(run)(*on(cuda, *args)), run(*on(backend.host_device(), *args)), 4e-2)


def test_learnt_tables_have_their_gradient_without_a_kernel(cuda):
    q, k, v = (uniform(2, 40, 4, 16, seed=s).astype(dtypes.bfloat16) for s in range(3))
    f = lambda q, t: nn.dot_product_attention(q, k, v, score_mod=nn.score_mods.relative_bias(t)).astype(
        "float32"
    )
    run, args = bf.grad(lambda q, t: (f(q, t) ** 2).sum(), (0, 1)), (q, uniform(4, 5))
    steps = program_of(run, *on(cuda, *args)).schedule.steps
    names = [s.eqn.prim.name for s in steps if hasattr(s, "eqn")]
    assert names == ["attention", "attention_grad", "dot_general", "dot_general", "scatter_add"]
    same(bf.jit(run)(*on(cuda, *args)), run(*on(backend.host_device(), *args)), 4e-2)


def test_functions_of_pairs_with_closures_under_vmap_are_one_kernel(cuda):
    """Closed-over host arrays are constants; vmap adds a batch axis."""
    ids, slopes = np.repeat(np.arange(10), 8).reshape(2, 40).astype(np.int32), nn.score_mods.alibi_slopes(4)
    mods = {"mask_mod": nn.masks.document(ids), "score_mod": nn.score_mods.alibi(slopes)}
    f = bf.vmap(lambda q: nn.dot_product_attention(q, q, q, **mods))
    x = uniform(3, 2, 40, 4, 16).astype(dtypes.bfloat16)
    names = [s.eqn.prim.name for s in program_of(f, *on(cuda, x)).schedule.steps if hasattr(s, "eqn")]
    assert names == ["attention"]
    same(bf.jit(f)(*on(cuda, x)), f(*on(backend.host_device(), x)), 3e-2)
    same(f(*on(cuda, x)), f(*on(backend.host_device(), x)), 3e-2)
