"""Native loops, branches and updates against the same programs as NumPy calls."""

import signal
import threading
import time
import warnings

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import extend, lax, random
from blufunc.config import config
from blufunc.core.arrays.array import from_numpy
from blufunc.errors import HostPrimitiveWarning
from blufunc.kernels.backends.cpu import planning, toolchain
from blufunc.kernels.backends.cpu import program as host_program

pytestmark = pytest.mark.skipif(toolchain.find() is None, reason="this machine has no C++ compiler")

X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
KEY = random.key(7)
PERMUTED = X[::-1].T.copy()


def fibonacci(x):
    return lax.fori_loop(0, 7, lambda i, c: (c[1], c[0] + c[1]), (x, x * 2))


def three_places(x):
    return lax.fori_loop(0, 5, lambda i, c: (c[1], c[2], bnp.sin(c[0])), (x, x + 1, x + 2))


def one_value_twice(x):
    def body(c, a):
        y = c[0] * a
        return (y, y), (y, c[0], a)

    return lax.scan(body, (x[0], x[0]), x)


def constants_as_carries(x):
    return lax.fori_loop(
        0, 3, lambda i, c: (bnp.float32(2), x, c[0] + c[1].sum()), (bnp.float32(0), x, bnp.float32(0))
    )


def reads_the_old(x):
    """Every round reads the carry after it was updated in part."""

    def body(i, c):
        new = c.at[i].set(c[i] * 2)
        return new + c.mean()

    return lax.fori_loop(0, 4, body, x)


def nested(x):
    def inner(c):
        i, y = c
        y = lax.cond(y.sum() > 0, lambda y: y - 1, lambda y: bnp.sin(y) + 0.5, y)
        return i + 1, lax.scan(lambda a, b: (bnp.tanh(a + b), a * b), y, bnp.stack([y, y]))[0]

    def outer(c, a):
        _, y = lax.while_loop(lambda c: (c[0] < 3) & (c[1].sum() < 100), inner, (bnp.int32(0), c + a))
        return y, y.max()

    return lax.scan(outer, x[0], x)


def steps_in_python(x):
    """Pivoted QR decompositions have no native form."""

    def body(c, a):
        q, r, p = lax.linalg.qr(bnp.outer(c, a) + bnp.diag(a + 3), pivoting=True)
        return bnp.tanh(c - a) + bnp.abs(r).sum(0), (bnp.abs(q @ r), p, lax.top_k(c, 3))

    return lax.scan(body, x[0], x)


def switches(x):
    cases = (lambda x: x + 1, lambda x: x * 0.5, lambda x: x[::-1], lambda x: bnp.cumsum(x))
    return lax.scan(lambda c, k: (lax.switch(k, cases, c), c), x[0], bnp.array([3, 2, 0, 1, 9, -4]))


def keys(x):
    def body(c, a):
        key, use = random.split(c)
        return key, (random.uniform(use, (3,)), random.bits(key, (2,), np.uint32))

    key, ys = lax.scan(body, KEY, None, length=4)
    return random.key_data(key), ys


def views(x):
    """Operands that are views of arguments."""
    total = lambda xs: lax.scan(lambda c, a: (c + a, c), bnp.zeros(xs.shape[1:]), xs)
    return (
        total(x.T),
        total(x[1:4]),
        total(x[::-1]),
        total(bnp.broadcast_to(x[0], (3, 4))),
        total(x.reshape(2, 10)),
    )


def barrier(x):
    def body(i, c):
        a, b, k = lax.optimization_barrier((c, c.T, 3.0))
        return a + b.T * k

    return lax.fori_loop(0, 3, body, x)


def caches(x):
    def body(i, c):
        table, x = c
        table = lax.dynamic_update_slice(table, x[None], (i, 0))
        return table, bnp.tanh(table.sum(0))

    return lax.fori_loop(0, 6, body, (bnp.zeros((6, 4)), x[0]))


def small_dtypes(x):
    half, small = x.astype(bnp.bfloat16), (x * 10).astype(np.int8)
    body = lambda i, c: (c[0] * bnp.bfloat16(1.25) + c[0][i], c[1] + c[1][i], ~c[2])
    return lax.fori_loop(0, 4, body, (half, small, x > 0))


def complex_numbers(x):
    return lax.fori_loop(0, 4, lambda i, z: z * z * 0.1 + 1j * z.at[i].set(1 - 2j), x + 1j * x)


def no_rounds(x):
    first = lax.fori_loop(0, 0, lambda i, c: c + 1, x)
    return (
        first,
        lax.while_loop(lambda c: c[0] < 0, lambda c: (c[0] + 1, c[1] * 2), (0, x)),
        lax.scan(lambda c, a: (c + a, c), x[0], x[:0]),
    )


def at_most(x):
    return lax.while_loop(lambda c: c[0] < 100, lambda c: (c[0] + 1, c[1] * 1.5), (0, x), max_steps=7)


def dropped(x):
    """Results that nothing reads, of a loop that needs them."""
    a, _ = lax.fori_loop(0, 4, lambda i, c: (c[0] + c[1], c[1] * 2), (x, x))
    return a


def used_afterwards(x):
    """The initial carry is an operand of a later step too."""
    y = bnp.exp(x)
    return lax.fori_loop(0, 3, lambda i, c: c.at[i].add(1), y) + y


def backwards(x):
    return lax.scan(lambda c, a: (c * 0.5 + a, (c, a * c)), x[0], x, reverse=True)


def empty_arrays(x):
    return lax.scan(lambda c, a: ((c[0], c[1] + a), c[0]), (bnp.zeros((0, 3)), x[0]), x)


def matmuls(x):
    w = bnp.outer(x[0], x[1])

    def body(c, a):
        c = bnp.tanh(w @ c + a)
        return c, (c @ w, bnp.einsum("i,j->ij", c, a), c @ a, (w @ w.T) @ c)

    return lax.scan(body, x[0], x)


LOOPS = {
    f.__name__: f
    for f in (
        fibonacci, three_places, one_value_twice, constants_as_carries, reads_the_old, nested, steps_in_python,
        switches, keys, views,
        barrier, caches, small_dtypes, complex_numbers, no_rounds, at_most, dropped, used_afterwards,
        backwards, empty_arrays, matmuls,
    )
}  # fmt: skip


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    monkeypatch.setattr(config, "check", True)  # a refused source is an error


def close(got, want):
    for g, w in zip(bf.tree.leaves(got), bf.tree.leaves(want), strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        wide = np.complex128 if w.dtype.kind == "c" else np.float64
        atol = 2e-5 * max(1.0, float(np.abs(w.astype(wide)).max(initial=0)))
        np.testing.assert_allclose(g.astype(wide), w.astype(wide), rtol=0, atol=atol)


def as_numpy(fun, *args):
    before = config.host_compiler
    config.host_compiler = "never"
    try:
        return bf.jit(lambda *args: fun(*args))(*args)
    finally:
        config.host_compiler = before


@pytest.mark.parametrize("name", LOOPS)
def test_values(name, native):
    fun = LOOPS[name]
    compiled = bf.jit(fun)
    for x in (X, X * 0.1):
        close(compiled(x), as_numpy(fun, x))
        close(compiled(x), as_numpy(fun, x))  # once more: an argument has kept its values


SMOOTH = [n for n in LOOPS if n not in ("keys", "small_dtypes", "no_rounds", "complex_numbers")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_and_batches(name, native):
    def loss(x):
        leaves = [y for y in bf.tree.leaves(LOOPS[name](x)) if np.issubdtype(y.dtype, np.floating)]
        return sum(bnp.sin(y).sum() for y in leaves)

    derive = bf.jacfwd(loss) if name == "nested" else bf.grad(loss)
    close(bf.jit(derive)(X), as_numpy(derive, X))
    many = bf.vmap(LOOPS[name])
    xs = np.stack([X, -X, X * 2])
    close(bf.jit(many)(xs), as_numpy(many, xs))


def program_of(fun, *args, **options):
    return bf.jit(fun, **options).lower(*args).compile().program


def rounds_of(program):
    (step,) = (
        s for s in program.schedule.steps if planning.is_control(getattr(s, "eqn", program.jaxpr.eqns[0]))
    )
    return planning.rounds_of(step.eqn)


@pytest.mark.parametrize(
    "update",
    [
        lambda x, i: x.at[i].set(1.0),
        lambda x, i: x.at[i, 2].add(3.0),
        lambda x, i: lax.dynamic_update_slice(x, bnp.ones((1, 4)), (i, 0)),
        lambda x, i: x.at[i].set(x[i] * 2),
        lambda x, i: x.at[i].set(0.5).at[i, 1].add(2.0),
    ],
)
def test_a_carry_that_dies_is_updated_in_place(update, native):
    fun = lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, update(c[1], c[0])), (0, x))[1]
    loop = rounds_of(program_of(fun, X))
    assert [planning.taken(loop, k) for k in range(loop.n_carry)][-1] == loop.n_carry - 1
    close(bf.jit(fun)(X), as_numpy(fun, X))


def test_the_initial_carry_is_overwritten_if_it_is_donated(native):
    fun = lambda x: lax.fori_loop(0, 5, lambda i, c: c.at[i].set(0), x)
    kept, given = program_of(fun, X), program_of(fun, X, donate_argnums=0)
    assert kept.schedule.plan.output_bytes == X.nbytes
    assert given.schedule.plan.output_bytes == 0


def test_small_loops_of_many_rounds_are_compiled():
    few = lambda x: lax.fori_loop(0, 3, lambda i, c: bnp.sin(c), x)
    many = lambda x: lax.fori_loop(0, 3000, lambda i, c: bnp.sin(c), x)
    assert not isinstance(program_of(few, X), host_program.HostProgram)
    assert isinstance(program_of(many, X), host_program.HostProgram)


# -- errors and signals --------------------------------------------------------------------------------


def calling(f, rounds=5):
    """A loop that calls a Python function in each round."""
    body = lambda i, c: c + bf.pure_callback(f, bf.ShapeDtypeStruct((), np.float32), i)
    return lambda: lax.fori_loop(0, rounds, body, bnp.float32(0))


def test_an_exception_of_a_callback_arrives(native):
    def failing(i):
        if i == 3:
            raise ValueError(f"round {i} failed")
        return np.float32(1)

    compiled = bf.jit(calling(failing))
    for _ in range(2):
        with pytest.raises(ValueError, match="round 3 failed"):
            compiled()
    assert bf.jit(calling(lambda i: np.float32(i)))() == 10


def test_a_callback_may_keep_what_it_is_given(native):
    seen = []

    def keeping(x):
        seen.append(np.asarray(x))
        return np.float32(0)

    body = lambda i, c: c + bf.pure_callback(keeping, bf.ShapeDtypeStruct((), np.float32), c) + 1
    bf.jit(lambda: lax.fori_loop(0, 4, body, bnp.zeros(3)))()
    np.testing.assert_array_equal([s[0] for s in seen], range(4))


def test_a_callback_may_run_a_native_loop(native):
    inner = bf.jit(lambda x: lax.fori_loop(0, 10, lambda i, c: c + x, bnp.float32(0)))
    assert bf.jit(calling(lambda i: np.asarray(inner(np.float32(i)))))() == 100


class Alarm(Exception):
    pass


@pytest.mark.parametrize("nested", [False, True])
def test_a_signal_ends_a_long_loop(nested, native):
    def ring(*_):
        raise Alarm

    turns = lambda x: lax.fori_loop(0, 1000, lambda i, c: bnp.sin(c) + i, x)
    once = lambda c: (turns(c[0]),) if nested else (bnp.sin(c[0]) + 1,)
    forever = bf.jit(lambda x, n: lax.while_loop(lambda c: c[0] < n, once, (x,)))
    x = from_numpy(np.zeros(4, np.float32)).sum()
    forever(x, np.float32(-1))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            forever(x, np.float32(np.inf))
        assert time.monotonic() - start < 2
    finally:
        signal.signal(signal.SIGALRM, before)
    assert forever(x, np.float32(-1))[0] == 0


def test_a_signal_before_a_step_in_python_arrives(native):
    """Python handles it as the step begins, before the first line."""

    def ring(*_):
        raise Alarm

    turns = lambda x: lax.fori_loop(0, 10_000, lambda i, c: bnp.sin(c) + i, x)
    body = lambda c: (c[0] + 1, bnp.sort(turns(c[1])))
    compiled = bf.jit(lambda x, n: lax.while_loop(lambda c: c[0] < n, body, (0, x)))
    compiled(X[0], 1)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(5):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            with pytest.raises(Alarm):
                compiled(X[0], 100_000)
    finally:
        signal.signal(signal.SIGALRM, before)
    compiled(X[0], 1)


def test_threads_run_loops_at_once(native):
    compiled = bf.jit(nested)
    want, found = as_numpy(nested, X), {}

    def run(n):
        found[n] = [compiled(X) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for results in found.values():
        for got in results:
            close(got, want)
    assert len(found) == 4


def test_the_interpreter_runs_beside_a_native_loop(native):
    long = bf.jit(lambda x, n: lax.fori_loop(0, n, lambda i, c: bnp.sin(c) + i, x))
    long(X, 1)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (bf.block_until_ready(long(X, 3_000_000)), done.set()))
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 5


def test_a_users_implementation_may_keep_what_it_is_given(native):
    seen = []

    def keeping(x, **_):
        seen.append(np.asarray(x))
        return np.sort(x)

    with bf.override(lax.sort_p, impl=lambda x, **_: [keeping(x)]):
        bf.jit(lambda: lax.fori_loop(0, 4, lambda i, c: bnp.sort(bnp.cos(c) * 0 + i), bnp.zeros(3)))()
    mine = extend.Elementwise("mine", keeping, "float")
    with warnings.catch_warnings(action="ignore"):  # that it runs on the host
        bf.jit(lambda: lax.fori_loop(0, 4, lambda i, c: mine.bind(bnp.cos(c) * 0 + i), bnp.zeros(3)))()
    np.testing.assert_array_equal([s[0] for s in seen], [0, 1, 2, 3] * 2)


# -- operations of users -------------------------------------------------------------------------------

REPLACED = {
    "elementwise": lax.sin_p, "movement": lax.rev_p, "reduction": lax.reduce_sum_p, "matmul": lax.dot_general_p,
    "scatter": lax.scatter_p, "window update": lax.dynamic_update_slice_p, "library": lax.sort_p,
}  # fmt: skip


def all_kinds(x):
    def body(c, a):
        y = bnp.sin(c) @ bnp.outer(a, a)
        z = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1].at[s[0]].set(a[0])), (0, y))[1]
        z = lax.cond(a.sum() > 0, bnp.sort, lambda q: q[::-1], z)
        return lax.dynamic_update_slice(z, z[:1] * 2, (1,)), z

    return lax.scan(body, x[0] * 0.1, x * 0.1)


@pytest.mark.parametrize("kind", REPLACED)
def test_replaced_operations_run_in_native_loops(kind, native):
    prim, calls = REPLACED[kind], []
    before = prim.impl

    def impl(*args, **params):
        calls.append(kind)
        return before(*args, **params)

    want = as_numpy(all_kinds, X)
    with bf.override(prim, impl=impl):
        close(bf.jit(all_kinds)(X), want)
    assert calls


def test_a_users_operation_in_a_native_loop_warns(native):
    mine = extend.Elementwise("mine_in_a_loop", lambda x: np.square(x), "float")
    branch = lambda c: lax.cond(c.sum() > 0, mine.bind, bnp.cos, c)
    with pytest.warns(HostPrimitiveWarning, match="mine_in_a_loop runs on the host"):
        bf.jit(lambda x: lax.fori_loop(0, 4, lambda i, c: branch(c) * 0.5, x))(X)


@pytest.mark.parametrize("prim", [lax.dot_general_p, lax.sin_p, lax.scatter_p], ids=str)
def test_replaced_definitions_are_called(prim, native):
    w = X.T @ X / 8  # rounds do not amplify the order of sums

    def step(i, c):
        return bnp.sin(c @ w).at[i].set(c[0]) + 1

    before = prim.impl
    with bf.override(prim, impl=lambda *args, **params: before(*args, **params) * 2):
        fun = lambda x: lax.fori_loop(0, 3, step, x)
        close(bf.jit(fun)(w), as_numpy(fun, w))
