"""Sums fused into matmuls: plans, values, and the memory that they overwrite."""

import dataclasses
import gc

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.core.arrays import backend
from blufunc.core.ir import dtypes
from blufunc.kernels.backends.cuda import program as cuda_program
from blufunc.kernels.backends.cuda.driver import memory as cuda_memory
from blufunc.kernels.backends.cuda.library.control_flow import bodies
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.inspect.program import Sight
from examples.gpt import model as gpt
from tests.emulation import fake_cuda
from tests.kernels.backends.cuda.test_program import TINY, on, same, uniform

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32


def draft(fun, *args, donate=()):
    """The schedule of a function of arrays on a device, and the names of its steps."""
    traced = bf.jit(fun, donate_argnums=donate).trace(*args)
    made = Draft(traced.jaxpr, (False,) * len(traced.entry.consts) + traced.donated, "sm_90").schedule
    return made, [s.eqn.prim.name if hasattr(s, "eqn") else "kernel" for s in made.steps]


def half(*shape, seed=0, dtype=BF16):
    return uniform(*shape, seed=seed).astype(dtype)


X, W, B, V = uniform(2, 8, 16), uniform(16, 24), uniform(24), uniform(24, 4)
Y = uniform(2, 8, 24, seed=5)
BIAS, SUM, DOT, KERNEL = "dot_general+bias", "dot_general+accumulate", "dot_general", "kernel"

FUSED = {
    "a bias": ([BIAS], lambda x, w, b: x @ w + b, X, W, B),
    "a bias first": ([BIAS], lambda x, w, b: b + x @ w, X, W, B),
    "a bias of one row": ([BIAS], lambda x, w, b: x @ w + b[None, None], X, W, B),
    "a bias, and the sum moved": (
        [BIAS, DOT], lambda x, w, b, v: (x @ w + b).reshape(16, 24)[2:5] @ v, X, W, B, V
    ),
    "a bias, transposed operands": (
        [BIAS], lambda x, w, b: bnp.einsum("kbm,nk->bmn", x, w) + b, uniform(16, 2, 8), uniform(24, 16), B
    ),
    "a bias, batches": (
        [BIAS], lambda x, w, b: bnp.einsum("bmk,bkn->bmn", x, w) + b, X, uniform(2, 16, 24), B
    ),
    "a bias of several axes": (
        [BIAS], lambda x, w, b: bnp.einsum("bmk,khn->bmhn", x, w) + b, X, uniform(16, 3, 5), uniform(3, 5)
    ),
    "a bias in bfloat16": ([BIAS], lambda x, w, b: x @ w + b, half(8, 16), half(16, 24), half(24)),
    "a bias in float16": (
        [BIAS], lambda x, w, b: x @ w + b, *[half(*s, dtype=F16) for s in ((8, 16), (16, 24), (24,))]
    ),
    "a bias in mixed precision": (
        [KERNEL, KERNEL, BIAS], bf.autocast(lambda x, w, b: x @ w + b), X, W, B
    ),
    "a bias in mixed precision, rounded": (
        [KERNEL, BIAS, DOT, KERNEL], bf.autocast(lambda x, w, b, v: (x @ w + b) @ v), X, W, B, V
    ),
    "a bias in mixed precision, moved and rounded": (
        [KERNEL, KERNEL, KERNEL, BIAS, DOT, KERNEL],
        bf.autocast(lambda x, w, b: (s := (x @ w + b).reshape(16, 24))[:, :12] @ s[:, 12:].T), X, W, B
    ),
    "a bias, of which kernels read parts": (
        [BIAS, "kernel", "kernel"],
        lambda x, w, b: [(s := x @ w + b)[..., :8].sum(0), bnp.tanh(s[..., 8:])], X, W, B,
    ),
    "a bias, of which a kernel reads a part": (
        [BIAS, "kernel"],
        lambda x, w, b: bnp.tanh((x @ w + b)[..., 3:]), X, W, B,
    ),
    "an array": ([SUM], lambda x, w, y: y + x @ w, X, W, Y),
    "an array of another shape": ([SUM], lambda x, w, y: x @ w + y.reshape(2, 8, 24), X, W, Y.reshape(-1)),
    "an array, transposed operands": (
        [SUM], lambda x, y, w: y + bnp.einsum("mi,mj->ij", x, w), uniform(8, 16), uniform(16, 24), uniform(8, 24)
    ),
    "an array, batches": (
        [SUM], lambda x, w, y: y + bnp.einsum("bkm,bnk->bmn", x, w), uniform(2, 16, 8), uniform(2, 24, 16), Y
    ),
    "an array in bfloat16": ([SUM], lambda x, w, y: x @ w + y, half(8, 16), half(16, 24), half(8, 24)),
    "an array in complex64": (
        [SUM], lambda x, w, y: x @ w + y, *[uniform(*s) * np.complex64(1 + 2j) for s in ((8, 16), (16, 4), (8, 4))]
    ),
    "float32 and a product of bfloat16": (
        [SUM], lambda x, w, y: y + (x @ w).astype(F32), half(8, 16), half(16, 24), uniform(8, 24)
    ),
    "a product of bfloat16 and zeros": (
        [DOT], lambda x, w: bnp.zeros((8, 24)) + (x @ w).astype(F32), half(8, 16), half(16, 24)
    ),
    "two products": ([DOT, SUM], lambda x, w, v: x @ w + v @ w, X, W, X + 1),
    "a sum of three products": ([DOT, SUM, SUM], lambda x, w, v: x @ w + v @ w + v[::-1] @ w, X, W, X + 1),
    "an operand of the product": ([SUM], lambda x: x + x @ x, uniform(8, 8)),
    "a vector and a matrix": ([SUM], lambda x, w, b: x @ w + b, uniform(16), W, B),
}  # fmt: skip


def agrees(name, device):
    """Later calls may be graphs; only the sum differs from the CPU's."""
    _, fun, *args = FUSED[name]
    rounded = any(a.dtype.itemsize == 2 for a in args) or "mixed" in name
    want, jitted, there = bf.jit(fun)(*on(backend.host_device(), *args)), bf.jit(fun), on(device, *args)
    for _ in range(4):
        same(jitted(*there), want, 0.1 if rounded else 1e-5)
    same(there, args)


@pytest.mark.parametrize("name", FUSED)
def test_products_that_add(name, fake, cuda):
    steps, fun, *args = FUSED[name]
    assert draft(fun, *args)[1] == steps
    agrees(name, cuda)
    assert len(fake.epilogues) >= sum("+" in s for s in steps)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_products_that_add_on_a_device(name):
    agrees(name, bf.devices("cuda")[0])


APART = {
    "the product is read by others": (lambda x, w, b: (x @ w + b, bnp.tanh(x @ w)), X, W, B),
    "the product is returned": (lambda x, w, y: ((p := x @ w) + y, p), X, W, Y),
    "the product is added to itself": (lambda x, w: (p := x @ w) + p, X, W),
    "a kernel reads the sum": (lambda x, w, b: nn.gelu(x @ w + b), X, W, B),
    "a kernel and the caller read the sum": (lambda x, w, b: ((s := x @ w + b), s.sum()), X, W, B),
    "a kernel reads what is moved": (lambda x, w, b: bnp.tanh((x @ w + b).reshape(-1)), X, W, B),
    "a kernel computes the array": (lambda x, w, y: bnp.tanh(y) + x @ w, X, W, Y),
    "the array is moved": (lambda x, w, y: x @ w + y.T, uniform(8, 16), W, uniform(24, 8)),
    "the vector is that of the rows": (lambda x, w, b: x @ w + b[:, None], X, W, uniform(8)),
    "the vector is that of the batch": (lambda x, w, b: x @ w + b[:, None, None], X, W, uniform(2)),
    "one number": (lambda x, w, b: x @ w + b, X, W, uniform()),
    "integers": (lambda x, w, y: x @ w + y, *[np.ones((4, 4), np.int32)] * 3),
    "without elements": (lambda x, w, b: x @ w + b, uniform(3, 0), uniform(0, 4), uniform(4)),
    "rounded operands": (lambda x, w, b: (x @ w).astype(BF16) + b, X, W, half(24)),
    "complex numbers and a vector": (
        lambda x, w, b: x @ w + b, *[uniform(*s) * np.complex64(2j) for s in ((4, 4), (4, 4), (4,))]
    ),
    "rounded otherwise by the caller": (lambda x, w, b: (x @ w + b).astype(BF16), X, W, B),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_products_that_do_not(name, cuda):
    fun, *args = APART[name]
    made, found = draft(fun, *args)
    assert not any("+" in s for s in found), str(made.fusion)
    same(bf.jit(fun)(*on(cuda, *args)), bf.jit(fun)(*on(backend.host_device(), *args)), 0.02)


def test_a_replaced_product_stays_as_it_is(cuda):
    with bf.override(lax.dot_general_p, impl=lambda *args, **params: np.full((8, 24), 7, np.float32)):
        same(bf.jit(lambda x, w, y: y + x @ w)(*on(cuda, X[0], W, Y[0])), Y[0] + 7)


def test_products_that_the_library_refuses_add_all_the_same(fake, cuda, monkeypatch):
    def refuse(gemm, device, addresses):
        raise errors.UnsupportedError("no algorithm.")

    monkeypatch.setattr(fake_cuda.cublaslt, "Plan", refuse)
    f = bf.jit(lambda x, w, b, y: (x @ w + b, x @ w[::-1] + y))
    for _ in range(4):
        same(f(*on(cuda, X, W, B, Y)), (X @ W + B, X @ W[::-1] + Y))
    assert not fake.products


# -- in whose memory -----------------------------------------------------------------------------------


def accumulate(total, x, w):
    return total + x.T @ w


def test_sums_are_written_over_what_is_donated(fake, cuda):
    args = uniform(64, 32), uniform(48, 64), uniform(48, 32)
    made, _ = draft(accumulate, *args, donate=0)
    assert made.plan.peak_bytes == sum(a.nbytes for a in args)
    step, want = bf.jit(accumulate, donate_argnums=0), args[0]
    total, *rest = on(cuda, *args)
    address = total.buffer.ptr
    for _ in range(5):
        total, want = step(total, *rest), want + args[1].T @ args[2]
        assert total.buffer.ptr == address
    same(total, want, 1e-4)


def test_sums_are_not_written_over_what_is_kept(cuda):
    args = uniform(64, 32), uniform(48, 64), uniform(48, 32)
    total, *rest = on(cuda, *args)
    for _ in range(4):
        same(bf.jit(accumulate)(total, *rest), args[0] + args[1].T @ args[2])
    same(total, args[0])


def test_sums_are_not_written_over_a_factor(cuda):
    """Nor if the factor is an alias of it, as after a barrier."""
    for fun in (lambda x: x + x @ x, lambda x: x @ lax.optimization_barrier(x) + x):
        (x,) = on(cuda, uniform(64, 64))
        same(bf.jit(fun, donate_argnums=0)(x), uniform(64, 64) + uniform(64, 64) @ uniform(64, 64), 1e-4)


def test_sums_of_many_products_take_one_array(cuda):
    """As gradients of microbatches do, in a loop of Python's."""

    def total(w, xs):
        return sum(bf.grad(lambda w, x: (bnp.tanh(x @ w)).sum())(w, x) for x in xs)

    args = uniform(32, 48), uniform(4, 4, 32)
    made, found = draft(total, *args)
    assert found.count(SUM) == 3
    assert made.plan.output_bytes == args[0].nbytes
    assert made.plan.arena_bytes < args[0].nbytes  # what is read between the products
    same(bf.jit(total)(*on(cuda, *args)), bf.jit(total)(*args), 1e-4)


@pytest.mark.slow
def test_a_long_sum_is_no_deep_recursion(cuda):
    xs = uniform(1200, 2, 2)
    _, found = draft(lambda xs: sum(xs[i] @ xs[i] for i in range(1, 1200)) + xs[0] @ xs[0], xs)
    assert found.count(SUM) == 1199


def microbatches(w, xs):
    """The sum of the gradients of many batches."""

    def step(total, x):
        loss, grad = bf.value_and_grad(bf.autocast(lambda w: bnp.tanh(x @ w).sum()))(w)
        return total + grad, loss

    return lax.scan(step, bnp.zeros(w.shape), xs)


SQUARES = uniform(8, 8) / 8, uniform(5, 8, 8)
CARRIES = {
    "a sum of gradients": (microbatches, uniform(16, 24), uniform(5, 8, 16)),
    "a constant": (
        lambda w, xs: lax.scan(lambda c, x: ((w, c[1] + w.T @ x), c[0] @ x), (w * 1, w @ w), xs), *SQUARES
    ),
    "the same twice": (
        lambda w, xs: lax.scan(lambda c, x: (((s := c[0] + x @ w), s), c[1] + s), (w, w), xs), *SQUARES
    ),
    "exchanged": (lambda w, xs: lax.scan(lambda c, x: ((c[1], c[0] + x @ w), c[0]), (w, w * 2), xs), *SQUARES),
    "what came in": (lambda w, xs: lax.scan(lambda c, x: ((x, c[1] + c[0] @ w), c[1]), (w, w), xs), *SQUARES),
    "backwards, nested": (
        lambda w, xs: lax.scan(
            lambda c, x: (lax.scan(lambda d, y: (d + x @ w, d[0]), c, x)[0] @ w, c), w, xs, reverse=True
        ), *SQUARES,
    ),
}  # fmt: skip


def carries(name, device, monkeypatch):
    monkeypatch.setattr(bodies, "LARGE", 1)
    fun, *args = CARRIES[name]
    want, jitted, there = bf.jit(fun)(*args), bf.jit(fun), on(device, *args)
    for _ in range(5):
        same(jitted(*there), want, 0.1 if fun is microbatches else 1e-4)
    same(there, args)


@pytest.mark.parametrize("name", CARRIES)
def test_scans_write_over_what_they_carry(name, cuda, monkeypatch):
    """They overwrite only their own memory: arguments, constants and inputs stay."""
    carries(name, cuda, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CARRIES)
def test_scans_write_over_what_they_carry_on_a_device(name, monkeypatch):
    carries(name, bf.devices("cuda")[0], monkeypatch)


@pytest.mark.slow
def test_gradients_of_microbatches_are_in_memory_once(fake, cuda, monkeypatch):
    args = on(cuda, uniform(160, 240), uniform(5, 8, 160))

    def peak():
        jitted = bf.jit(lambda w, xs: microbatches(w, xs))
        jitted(*args)
        gc.collect()  # memory of the program before, and of other tests
        cuda_memory.pool().reset_peak()
        jitted(*args)
        return cuda_memory.pool().peak_bytes()

    monkeypatch.setattr(bodies, "LARGE", 2 * args[0].nbytes)
    before = peak()
    monkeypatch.setattr(bodies, "LARGE", args[0].nbytes)
    assert before - peak() >= args[0].nbytes


def test_what_products_add_is_shown(cuda, monkeypatch):
    monkeypatch.setattr(bodies, "LARGE", 1)
    traced = bf.jit(microbatches).trace(uniform(160, 240), uniform(5, 8, 160))
    (body,) = Sight(traced.jaxpr, traced.donated, cuda).bodies
    assert body.sight.memory.output_bytes == 4  # the loss: the sum of gradients lies where it came in
    (row,) = [row for row in body.sight.cost.steps if row.name == SUM]
    assert row.kind == "library" and row.products == 2 * 160 * 240 * 8
    assert row.reads == 2 * 8 * (160 + 240) + 4 * 160 * 240 and row.writes == 4 * 160 * 240


# -- a whole model -------------------------------------------------------------------------------------


def test_of_a_model_the_projections_before_attention_add_their_biases(cuda, monkeypatch):
    """Attention is one step. Kernels read all other linear layers, and add biases."""

    def attention(
        q, k, v, is_causal
    ):  # a step that no kernel is fused with, of operands that are rounded after moving
        return sum(bnp.sort(x.astype(BF16), 1) for x in (q, k, v))

    monkeypatch.setattr(gpt.nn, "dot_product_attention", attention)
    params = bf.eval_shape(lambda key: gpt.init(key, TINY), bf.random.key(0))
    tokens = bf.ShapeDtypeStruct((2, TINY.context), np.int32)
    forward = bf.autocast(lambda params, tokens: gpt.forward(params, tokens, TINY))
    _, found = draft(forward, params, tokens)
    assert found.count(BIAS) == TINY.layers and SUM not in found
    monkeypatch.setattr(cuda_program, "TARGET", dataclasses.replace(cuda_program.TARGET, epilogues=False))
    _, before = draft(forward, params, tokens)
    assert before.count(KERNEL) == found.count(KERNEL) + TINY.layers
