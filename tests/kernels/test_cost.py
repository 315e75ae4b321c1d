"""Cost model: bytes and operations counted by hand, and the tables' text."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, vmap
from blufunc.kernels.backends.cpu.program import Draft
from blufunc.kernels.cost import cost_of, cost_of_equations
from blufunc.kernels.inspect import roofline as machines
from blufunc.kernels.machine import Machine
from blufunc.kernels.tables import count, duration, run_lengths, size, table
from blufunc.kernels.timings import medians
from tests.emulation import fake_cuda


def shapes(*types):
    return [bf.ShapeDtypeStruct(t, "float32") if isinstance(t, tuple) else t for t in types]


def cost(f, *args):
    jaxpr = bf.jit(f).lower(*shapes(*args)).jaxpr
    return cost_of(Draft(jaxpr, (False,) * len(jaxpr.invars)).schedule)


def ids(*shape):
    return bf.ShapeDtypeStruct(shape, "int32")


def bf16(*shape):
    return bf.ShapeDtypeStruct(shape, "bfloat16")


# name: function, arguments, bytes read, bytes written, operations, launches
COUNTED = {
    "add": (lambda x: x + 1, [(1000,)], 4000, 4000, 1000, 1),
    "two operands": (lambda x, y: x * y, [(1000,), (1000,)], 8000, 4000, 1000, 1),
    "the same twice": (lambda x: x * x, [(1000,)], 4000, 4000, 1000, 1),
    "a chain": (lambda x: bnp.exp(x * 2), [(1000,)], 4000, 4000, 9000, 1),
    "half precision": (lambda x: x + x, [bf16(1000)], 2000, 2000, 1000, 1),
    "a row for all": (lambda x, b: x + b, [(50, 20), (20,)], 4080, 4000, 1000, 1),
    "a part": (lambda x: x[:10] * 2, [(1000,)], 40, 40, 10, 1),
    "transposed": (lambda x: x.T, [(30, 40)], 4800, 4800, 0, 1),
    "sum": (lambda x: x.sum(), [(1000,)], 4000, 4, 1000, 1),
    "softmax": (lambda x: bf.nn.softmax(x), [(64, 100)], 25600, 25600, None, 1),
    "product": (lambda x, w: x @ w, [(20, 30), (30, 50)], 4 * (600 + 1500), 4000, 2 * 20 * 30 * 50, 1),
    "batch of products": (
        lambda x, w: x @ w,
        [(7, 20, 30), (7, 30, 50)],
        28 * 2100,
        28 * 1000,
        14 * 30000,
        1,
    ),
    "nothing": (lambda x: x, [(10,)], 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts(name):
    f, args, reads, writes, flops, launches = COUNTED[name]
    c = cost(f, *args)
    assert (c.reads, c.writes, c.launches) == (reads, writes, launches)
    assert c.flops == flops if flops is not None else c.flops > reads
    assert c.bytes == reads + writes and sum(s.bytes for s in c.steps) == c.bytes


def test_a_gather_reads_the_rows_that_it_takes():
    c = cost(lambda t, i: t[i] * 2, (5000, 16), ids(3))
    assert 3 * 16 * 4 <= c.reads < 500 and c.writes < 500


def test_products_are_counted_apart():
    c = cost(lambda x, w, b: bnp.tanh(x @ w + b), (20, 30), (30, 50), (50,))
    assert c.products == 2 * 20 * 30 * 50
    assert c.flops - c.products == 20 * 50 * (1 + 8)
    assert [s.kind for s in c.steps] == ["library", "kernel"] and c.kernels == 1


def test_complex_products_are_four():
    x = bf.ShapeDtypeStruct((20, 20), "complex64")
    assert cost(lambda x: x @ x, x).products == 4 * 2 * 20**3


def test_convolution():
    c = cost(lambda x, k: lax.conv(x, k, (1, 1), "VALID"), (2, 3, 10, 10), (5, 3, 3, 3))
    assert c.products == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_reference_operations_count_what_they_touch():
    c = cost(lambda x: bnp.linalg.eigvals(x), (10, 10))
    assert [(s.kind, s.reads, s.writes) for s in c.steps] == [("reference", 400, 80)]


# -- control flow ----------------------------------------------------------------------------------


def test_a_scan_costs_its_body_each_time():
    def f(x):
        return lax.scan(lambda c, _: (c[::-1] * 2 + 1, None), x, None, length=7)[0]

    (step,) = cost(f, (1000,)).steps
    assert (step.kind, step.reads, step.writes, step.flops) == ("control", 28000, 28000, 14000)


def test_a_loop_at_points_moves_its_ends_and_computes_each_turn():
    def f(x):
        return lax.fori_loop(0, 7, lambda i, c: lax.fori_loop(0, 3, lambda i, c: c * 2 + 1, c) + 1, x)

    (step,) = cost(f, (1000,)).steps
    assert (step.kind, step.reads, step.writes, step.flops) == ("kernel", 4000, 4000, 7 * (2 * 3 + 1) * 1000)
    assert not step.unbounded


def test_a_loop_at_points_without_bound_says_so():
    def f(x):
        return vmap(lambda x: lax.while_loop(lambda x: x < 100, lambda x: x * 2, x))(x)

    (step,) = cost(f, (1000,)).steps
    assert (step.kind, step.flops, step.unbounded) == ("kernel", 2000, True)


def test_a_branch_costs_as_much_as_the_dearest():
    def f(p, x):
        return lax.cond(p, lambda x: x + 1, lambda x: bnp.cumsum(x) + x, x)

    dear = cost(lambda x: bnp.cumsum(x) + x, (1000,))
    (step,) = [s for s in cost(f, bf.ShapeDtypeStruct((), "bool"), (1000,)).steps if s.kind == "control"]
    assert (step.reads, step.writes) == (dear.reads, dear.writes) and not step.unbounded


def test_a_loop_without_bound_says_so():
    def f(x):
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: x + 1, x)

    (step,) = cost(f, (1000,)).steps
    assert step.unbounded and step.reads == 8000  # once for the condition, once for the body


# -- other ways to run -----------------------------------------------------------------------------


def test_equation_by_equation_everything_is_moved():
    jaxpr = bf.jit(lambda x: bnp.exp(x * 2) + 1).lower(*shapes((1000,))).jaxpr
    c = cost_of_equations(jaxpr)
    assert [s.ops for s in c.steps] == [("mul",), ("exp",), ("add",)]
    assert c.bytes == 3 * 8000 and {s.kind for s in c.steps} == {"reference"}


def test_what_the_host_must_compute_for_a_device():
    jaxpr = bf.jit(lambda x: bnp.sort(x) + 1).lower(*shapes((100,))).jaxpr
    made = Draft(jaxpr, (False,)).schedule
    c = cost_of(made, on_host=lambda eqn: eqn.prim.name == "sort")
    assert [s.kind for s in c.steps] == ["host", "kernel"]


def test_the_least_time_is_the_longer_of_moving_and_computing():
    m = Machine("m", bandwidth=1e9, flops=1e9, products=1e12)
    assert cost(lambda x: x + 1, (1000,)).seconds(m) == pytest.approx(8e-6)
    assert cost(lambda x: bnp.exp(bnp.sin(x)), (1000,)).seconds(m) == pytest.approx(16e-6)
    assert cost(lambda x: x @ x, (1000, 1000)).seconds(m) == pytest.approx(8e6 / 1e9)


def test_lines_say_what_is_backward():
    def f(x):
        return bnp.sum(bnp.sin(x) * 2)

    steps = cost(bf.grad(f), (1000,)).steps
    assert all(line.startswith("test_cost.py:") for s in steps for line in s.lines)
    assert any(line.endswith("(f) backward") for s in steps for line in s.lines)


def test_the_text_has_every_step_and_the_sum():
    text = str(cost(lambda x, w: bnp.tanh(x @ w), (20, 30), (30, 50)))
    assert (
        "dot_general" in text
        and "tanh" in text
        and text.endswith("2 launches, 19.9 KiB moved, 68 k operations")
    )
    assert str(cost(lambda x: x, (10,))) == "nothing is computed"


def test_the_machine_is_measured_once(monkeypatch):
    monkeypatch.setitem(machines._COPIED, "cpu", 1 << 16)
    monkeypatch.setitem(machines._MULTIPLIED, "cpu", 32)
    machines.machine_of.cache_clear()
    device = bf.devices("cpu")[0]
    try:
        m = machines.machine_of(device)
        assert m is machines.machine_of(device)
        assert m.name == "cpu:0" and m.bandwidth > 1e6 and m.products > 1e6
        assert str(m).startswith("cpu:0: ")
    finally:
        machines.machine_of.cache_clear()


def test_a_device_is_measured_by_programs_of_its_own(monkeypatch):
    fake_cuda.install(monkeypatch)
    monkeypatch.setitem(machines._COPIED, "cuda", 1 << 8)
    monkeypatch.setitem(machines._MULTIPLIED, "cuda", 16)
    m = machines.machine_of.__wrapped__(bf.devices("cuda")[0])
    assert m.name == "cuda:0" and m.bandwidth > 0 and m.products > 0


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write, value, text",
    [
        (size, 0, "0 B"),
        (size, 1023, "1023 B"),
        (size, 1536, "1.5 KiB"),
        (size, 3 << 30, "3.0 GiB"),
        (count, 12, "12"),
        (count, 1234, "1.23 k"),
        (count, 5.6e12, "5.6 T"),
        (duration, 2.5, "2.5 s"),
        (duration, 4.1e-3, "4.1 ms"),
        (duration, 41.34e-6, "41.3 us"),
    ],
)
def test_units(write, value, text):
    assert write(value) == text


def test_rows_of_names():
    assert run_lengths(["mul", "mul", "add"]) == "mul x2 add"
    assert run_lengths([f"op{i}" for i in range(20)], 4) == "op0 op1 ... (20 in all) op18 op19"
    assert run_lengths([]) == ""


def test_a_table_aligns_its_columns():
    assert table(("name", "n"), [("a", "10"), ("long name", "5")], ("n",)) == (
        "name        n\na          10\nlong name   5"
    )


def test_medians():
    times = medians(["a", "b"], [[1.0, 0.1], [3.0, 0.3], [2.0, 0.2]])
    assert [(t.name, round(t.ms)) for t in times] == [("a", 2000), ("b", 200)]
    assert np.isclose(times[1].ms, 200)
