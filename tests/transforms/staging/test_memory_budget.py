"""``jit(memory_budget=)``: sizes, caches, and transforms, on the CPU."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.kernels.backends.cpu import toolchain
from blufunc.transforms.staging.memory_sizes import budget_in_bytes

compiled = pytest.mark.skipif(toolchain.find() is None, reason="there is no C++ compiler")

LAYERS, WIDTH, ROWS = 6, 32, 512


def loss(params, x):
    for w in params:
        x = bnp.tanh(x @ w)
    return (x**2).mean()


@pytest.fixture
def arguments():
    rng = np.random.default_rng(0)
    params = [bnp.asarray(rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 6) for _ in range(LAYERS)]
    return params, bnp.asarray(rng.normal(size=(ROWS, WIDTH)).astype(np.float32))


def tight(fun, *args, share=0.75, **options):
    """``fun`` with a share of its planned peak; and its peak without a budget."""
    peak = bf.jit(fun, **options).lower(*args).memory.peak_bytes
    return bf.jit(fun, memory_budget=int(share * peak), **options), peak


def assert_close(found, expected):
    for a, b in zip(bf.tree.leaves(found), bf.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    "given, expected",
    [
        (12, 12),
        (np.int64(5), 5),
        ("12GB", 12 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 64 kb ", 64_000),
        ("3MiB", 3 << 20),
        ("2tb", 2 * 10**12),
        ("100 B", 100),
    ],
)
def test_sizes(given, expected):
    assert budget_in_bytes(given) == expected


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "12", "GB", "12 GBs", "-1GB", "0B", "1e3MB", [1]])
def test_no_sizes(given):
    with pytest.raises(errors.ArgumentError, match=r"memory_budget=.* is not a memory size") as caught:
        bf.jit(lambda x: x, memory_budget=given)
    assert "12GiB" in caught.value.fix


@compiled
def test_results_are_those_without_a_budget(arguments):
    step, peak = tight(bf.value_and_grad(loss), *arguments)
    memory = step.lower(*arguments).memory
    assert memory.peak_bytes <= 0.75 * peak and memory.bought.default_peak_bytes == peak
    assert (
        "recomputed, or computed later, instead of saved" in memory.report()
        and "test_memory_budget.py" in memory.report()
    )
    assert_close(step(*arguments), bf.jit(bf.value_and_grad(loss))(*arguments))
    assert_close(step.lower(*arguments).compile()(*arguments), step(*arguments))


@compiled
def test_it_is_of_the_function_under_jit(arguments):
    """Each budget has one program and one trace; the decorator takes it too."""

    @bf.jit(memory_budget="1GB")
    def roomy(params, x):
        return bf.grad(loss)(params, x)

    step, peak = tight(bf.grad(loss), *arguments)
    for _ in range(3):
        assert_close(step(*arguments), roomy(*arguments))
    assert step.trace_count == roomy.trace_count == 1
    assert roomy.lower(*arguments).memory.bought is None
    assert roomy.lower(*arguments).memory.peak_bytes == peak
    assert step.lower(*arguments).memory.peak_bytes < peak


@pytest.mark.sampled(2)
@compiled
@pytest.mark.parametrize(
    "name, make",
    [
        ("vmap", lambda: lambda p, x: bf.vmap(bf.grad(loss), (None, 0))(p, bnp.stack([x, 2 * x]))),
        ("grad of grad", lambda: bf.grad(lambda p, x: bf.grad(lambda q: loss(q, x))(p)[0].sum())),
        ("checkpoint", lambda: bf.grad(bf.checkpoint(loss))),
        ("dots saveable", lambda: bf.grad(bf.checkpoint(loss, policy=bf.checkpoint_policies.dots_saveable))),
        ("jit inside", lambda: bf.grad(bf.jit(loss))),
        ("jvp", lambda: lambda p, x: bf.jvp(lambda y: bf.grad(loss)(p, y), (x,), (x,))),
    ],
)
def test_transforms(name, make, arguments):
    """Of what is under ``jit``: the budget is for the whole of it."""
    fun = make()
    step, peak = tight(fun, *arguments, share=0.93)
    memory = step.lower(*arguments).memory
    assert memory.bought is not None and memory.peak_bytes <= 0.93 * peak
    assert_close(step(*arguments), bf.jit(fun)(*arguments))


@compiled
def test_donated_arguments(arguments):
    def update(params, x):
        return [p - 0.1 * g for p, g in zip(params, bf.grad(loss)(params, x), strict=True)]

    expected = bf.jit(update)(*arguments)
    step, _ = tight(update, *arguments, donate_argnums=0)
    assert step.lower(*arguments).memory.output_bytes == 0
    assert_close(step(*arguments), expected)
    with pytest.raises(errors.BlufuncError, match="donated"):
        _ = arguments[0][0] + 1


@compiled
def test_arguments_that_are_kept_for_a_check_need_more(arguments, monkeypatch):
    """With ``debug_nans`` donated arguments outlive the call: no budget, no error."""

    def update(params, x):
        return [p - 0.1 * g for p, g in zip(params, bf.grad(loss)(params, x), strict=True)]

    expected = bf.jit(update)(*arguments)
    step, _ = tight(update, *arguments, donate_argnums=0)
    monkeypatch.setattr(bf.config, "debug_nans", True)
    assert_close(step(*arguments), expected)


@pytest.mark.slow
@compiled
def test_the_outer_program_has_the_say(arguments):
    inner = bf.jit(bf.grad(loss), memory_budget="1KB")
    assert_close(bf.jit(lambda p, x: inner(p, x))(*arguments), bf.jit(bf.grad(loss))(*arguments))
    with pytest.raises(errors.MemoryBudgetError, match="1000 bytes") as caught:
        inner(*arguments)
    assert "test_memory_budget.py" in caught.value.where


@compiled
def test_explain_mentions_it(arguments):
    step, _ = tight(bf.grad(loss), *arguments)
    assert "memory budget" in str(bf.explain(step, *arguments))


def test_numpy_calls_have_no_plan(arguments, monkeypatch):
    """An uncompiled program over budget is refused; others run."""
    monkeypatch.setattr(bf.config, "host_compiler", "never")
    step, peak = tight(bf.grad(loss), *arguments)
    with pytest.raises(errors.UnsupportedError, match="to be compiled") as caught:
        step(*arguments)
    assert "NumPy calls" in caught.value.why and caught.value.fix
    bf.jit(bf.grad(loss), memory_budget=peak)(*arguments)


@compiled
def test_small_programs_are_compiled_for_a_budget(monkeypatch):
    monkeypatch.setattr(bf.config, "host_compiler", "auto")
    monkeypatch.setattr(toolchain, "WORTH_CALLING", 1000)
    args = [bnp.ones((8, 8)) / 9] * LAYERS, bnp.ones((64, 8))
    assert bf.jit(bf.grad(loss)).lower(*args).memory.why_not_compiled
    step, _ = tight(bf.grad(loss), *args, share=0.9)
    assert not step.lower(*args).memory.why_not_compiled
    assert hasattr(step.lower(*args).compile().program, "schedule")
    assert_close(step(*args), bf.grad(loss)(*args))
