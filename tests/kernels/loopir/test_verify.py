"""The verifier of LoopIR: a table of broken kernels and their messages."""

from collections.abc import Callable

import pytest

from blufunc.core.ir import dtypes
from blufunc.core.ops import elementwise as ew
from blufunc.core.ops.shape import rev_p
from blufunc.errors import JaxprTypeError
from blufunc.kernels.loopir.index import Computed, Range, constant, of, unflat
from blufunc.kernels.loopir.ir import (
    Accumulate,
    Branch,
    Buffer,
    Keep,
    Kernel,
    Lanes,
    Loop,
    Prefix,
    Reduce,
    Rows,
    Scan,
    Set,
    Store,
    Total,
    Value,
    apply,
    branch,
    carried,
    const,
    fold,
    load,
    loop,
    number,
    read,
    within,
)
from blufunc.kernels.loopir.verify import check_kernel
from tests.kernels.loop_kernels import BOOL, CASES, F32, I32, U32, op

I, K, L, S = Range("i", 4), Range("k", 3), Range("l", 3), Range("s", 5)
X, Y, Z = Buffer("x", F32, 12), Buffer("y", F32, 12, written=True), Buffer("z", F32, 4, written=True)
IDS = Buffer("ids", I32, 12)
TOTAL, PLACE = Total("t", F32, "sum"), Total("p", F32, "argmax", I32)
KEPT, GROWS = Keep("kept", F32, K), Keep("grows", F32, K, "sum")
AT = of(I) * 3 + of(K)
ONE, ZERO_I32 = const(1, F32), const(0, I32)
VALUE = load(X, AT)
OLD = read(KEPT)
PREFIX = Prefix("so_far", F32, K, "sum")
SCANNED, SO_FAR = Scan(PREFIX, VALUE), read(PREFIX)

PUT = Store(Y, AT, VALUE)
SUMMED = Lanes(K, (Reduce(TOTAL, VALUE),))
WRITTEN = Lanes(K, (Set(KEPT, VALUE),))


TURN = Range("t", 1)
CARRY, ALIEN = carried("c", TURN, F32), carried("other", TURN, F32)
LESS = op(ew.lt_p, VALUE, 1)
TURNED = loop(Loop((CARRY,), TURN, None), [VALUE], op(ew.lt_p, CARRY, 1), [op(ew.add_p, CARRY, 1)])[0]


def lanes(*body, over=K):
    return Lanes(over, body)


def stores(value):
    """A kernel's body that stores a value at each lane."""
    return (lanes(Store(Y, AT, value)),)


def raw(name, args, attr, dtype):
    """A value that no constructor would make."""
    return Value(name, args, attr, dtype)


BROKEN: dict[str, tuple[tuple, str]] = {
    # scopes of loop variables
    "a load without its loop": ((Store(Z, of(I), VALUE),), r"x\[3\*i \+ k\] needs k, and no loop over it is open"),
    "a store without its loop": ((Store(Y, AT, ONE),), r"the index 3\*i \+ k needs k"),
    "a lane after its loop": ((lanes(PUT), lanes(PUT, over=L)), "needs k, and no loop over it is open"),
    "a position without its loop": ((lanes(Reduce(PLACE, ONE, of(S))),), "the index s needs s"),
    "a row after its loop": (
        (Rows(S, (lanes(Accumulate(GROWS, VALUE)),), of(S), 5), Store(Z, of(I), number(of(S), F32))),
        r"f32\(s\) needs s",
    ),
    "a limit without its loop": ((Rows(S, (), of(L), 5),), "the index l needs l"),
    "a computed index without its loop": (
        stores(load(X, of(Computed(load(IDS, of(L)), 0, 11)))),
        r"ids\[l\] needs l",
    ),
    "a fold over an open loop": (stores(fold("sum", K, VALUE)), "a loop over k is open already"),
    "a fold in a fold over the same": (stores(fold("sum", L, fold("sum", L, VALUE))), "a loop over l is open already"),
    "a fold's variable outside": (
        stores(op(ew.add_p, fold("sum", L, number(of(L), F32)), number(of(L), F32))),
        r"f32\(l\) needs l",
    ),
    "a loop over the grid's range": ((lanes(over=I),), "a loop over i is open already"),
    # loops and branches
    "a carry outside of its loop": (stores(op(ew.add_p, TURNED, CARRY)), r"t\.c needs t, and no loop over it is open"),
    "a carry of another loop": (
        stores(loop(Loop((CARRY,), TURN, None), [VALUE], op(ew.lt_p, ALIEN, 1), [CARRY])[0]),
        r"t\.other is no carry of loop",
    ),
    "a loop in itself": (
        stores(loop(Loop((CARRY,), TURN, 3), [VALUE], const(True, BOOL), [TURNED])[0]),
        "a loop over t is open already",
    ),
    "a condition that is a number": (
        stores(loop(Loop((CARRY,), TURN, None), [VALUE], CARRY, [CARRY])[0]),
        r"the guard t\.c is f32",
    ),
    "a carry that begins as another dtype": (
        stores(loop(Loop((CARRY,), TURN, 3), [ZERO_I32], const(True, BOOL), [CARRY])[0]),
        "takes f32 and is given i32",
    ),
    "a carry that becomes another dtype": (
        stores(loop(Loop((CARRY,), TURN, 3), [VALUE], const(True, BOOL), [ZERO_I32])[0]),
        "takes f32 and is given i32",
    ),
    "a loop without a condition": (
        stores(raw("result", (raw("loop", (VALUE, CARRY), Loop((CARRY,), TURN, 3), BOOL),), 0, F32)),
        "has 2 arguments for 1 carries",
    ),
    "a result that there is not": (
        stores(raw("result", TURNED.args, 1, F32)),
        "another dtype",
    ),
    "a result of no loop": (stores(raw("result", (VALUE,), 0, F32)), "which is no loop or branch"),
    "sides of two dtypes": (
        stores(branch(Branch((), TURN), LESS, [], [VALUE], [ZERO_I32])[0]),
        "takes f32 and is given i32",
    ),
    "a predicate that is a number": (stores(branch(Branch((), TURN), ONE, [], [ONE], [ONE])[0]), "guard 1.0 is f32"),
    # what stands where
    "lanes in lanes": ((lanes(lanes(PUT, over=L)),), "Lanes cannot stand in lanes"),
    "rows in lanes": ((lanes(Rows(S, (), of(S), 5)),), "Rows cannot stand in lanes"),
    "rows in rows": ((Rows(S, (Rows(L, (), of(L), 3),), of(S), 5),), "Rows cannot stand in rows"),
    "a reduction on the grid": ((Reduce(TOTAL, ONE),), "Reduce cannot stand in the grid"),
    "a set in rows": ((Rows(S, (Set(KEPT, ONE),), of(S), 5),), "Set cannot stand in rows"),
    # totals
    "a total before its loop": (
        (Store(Z, of(I), read(TOTAL)), SUMMED),
        r"z\[i\] = t: t is read where no loop before has reduced it",
    ),
    "a total in its loop": ((lanes(Reduce(TOTAL, VALUE), Store(Y, AT, read(TOTAL))),), "t is read where no loop"),
    "a total of its own": ((lanes(Reduce(TOTAL, read(TOTAL))),), "t is read where no loop"),
    "a total of rows after them": (
        (Rows(S, (SUMMED,), of(S), 5), Store(Z, of(I), read(TOTAL))),
        "t is read where no loop",
    ),
    "a total that is reduced twice": ((SUMMED, SUMMED), "t is reduced by another statement too"),
    "a position of a sum": ((lanes(Reduce(TOTAL, VALUE, of(K))),), "an arg-extremum has a position"),
    "an argmax without a position": ((lanes(Reduce(PLACE, VALUE)),), "an arg-extremum has a position"),
    "no reduction": ((lanes(Reduce(Total("m", F32, "mean"), VALUE)),), "mean is no reduction"),
    "a bitwise reduction of floats": (
        (lanes(Reduce(Total("a", F32, "and"), VALUE)),),
        "and takes integers and booleans, not f32",
    ),
    "an accumulator that is narrower": (
        (lanes(Reduce(Total("h", dtypes.bfloat16, "sum"), VALUE)),),
        "f32 is accumulated in bf16",
    ),
    "an accumulator of another kind": ((lanes(Reduce(Total("n", I32, "sum"), VALUE)),), "f32 is accumulated in i32"),
    # prefixes
    "a prefix that is not scanned": (stores(SO_FAR), "so_far is read where no scan of the loop has found it"),
    "a prefix before its scan": ((lanes(Store(Y, AT, SO_FAR), SCANNED),), "so_far is read where no scan"),
    "a prefix of another loop": ((lanes(SCANNED), *stores(SO_FAR)), "so_far is read where no scan"),
    "a prefix on the grid": ((lanes(SCANNED), Store(Z, of(I), SO_FAR)), "so_far needs k"),
    "a prefix of other lanes": ((lanes(Scan(PREFIX, ONE), over=L),), "so_far belongs to the lanes k, not l"),
    "a prefix that is scanned twice": ((lanes(SCANNED), lanes(SCANNED)), "so_far is scanned by another statement too"),
    "a scan of its own loop's prefix": (
        (lanes(SCANNED, Scan(Prefix("again", F32, K, "sum"), SO_FAR)),),
        "a scan takes no prefix of its own loop",
    ),
    "scans that go two ways": (
        (lanes(SCANNED, Scan(Prefix("back", F32, K, "sum", True), VALUE)),),
        "the scans of a loop go one way",
    ),
    "a scan by no reduction": ((lanes(Scan(Prefix("p", F32, K, "mean"), VALUE)),), "mean is no reduction"),
    "a scan of another kind": ((lanes(Scan(Prefix("p", I32, K, "sum"), VALUE)),), "f32 is accumulated in i32"),
    "a scan on the grid": ((SCANNED,), "Scan cannot stand in the grid"),
    # keeps
    "a keep that is not set": (stores(OLD), "kept is read before it is set"),
    "a keep that is set later in the loop": (
        (lanes(Store(Y, AT, OLD), Set(KEPT, VALUE)),),
        "kept is read before it is set",
    ),
    "a keep of other lanes": (
        (WRITTEN, lanes(Reduce(TOTAL, OLD), over=L)),
        "kept needs k, and no loop over it is open",
    ),
    "a keep on the grid": ((WRITTEN, Store(Z, of(I), OLD)), "kept needs k"),
    "a keep in a fold over its range": (
        (WRITTEN, Store(Z, of(I), fold("sum", K, OLD))),
        "kept belongs to the lanes k, not to the grid",
    ),
    "a set of other lanes": ((lanes(Set(KEPT, ONE), over=L),), "kept belongs to the lanes k, not l"),
    "a keep that was only set in rows": (
        (Rows(S, (WRITTEN,), of(S), 5), *stores(OLD)),
        "kept is read before it is set",
    ),
    "a set of what grows": ((lanes(Set(GROWS, ONE)),), "grows grows by sum, and is not set"),
    "growth of what is set": ((lanes(Accumulate(KEPT, ONE)),), "kept does not accumulate"),
    "a read before and after": (
        (WRITTEN, lanes(Store(Y, AT, OLD), Set(KEPT, ONE), Reduce(TOTAL, OLD))),
        "one read of kept is used both before and after it changes",
    ),
    "another dtype in a keep": ((lanes(Set(KEPT, const(1, I32))),), "i32 is kept as f32"),
    # places
    "a load beyond the end": (stores(load(X, AT + 1)), r"x\[3\*i \+ k \+ 1\] reaches 1 .. 12, of 12 elements"),
    "a load before the start": (stores(load(X, AT - 1)), "reaches -1 .. 10, of 12 elements"),
    "a store beyond the end": ((lanes(Store(Y, AT * 2, ONE)),), r"y\[6\*i \+ 2\*k\] reaches 0 .. 22"),
    "a gather without bounds": (stores(load(X, of(Computed(load(IDS, AT))))), "of 12 elements"),
    "rows beyond their limit": (
        (Rows(S, (lanes(Accumulate(GROWS, load(X, of(S) * 4 + of(K)))),), of(S), 4),),
        "reaches 0 .. 14, of 12 elements",
    ),
    "a gather by floats": (stores(load(X, of(Computed(VALUE, 0, 11)))), "an index is computed from .*, which is f32"),
    "an output that is read": (stores(load(Y, AT)), "the output y is read"),
    "an input that is written": ((lanes(Store(X, AT, ONE)),), "the input x is written"),
    "a buffer of another kernel": (stores(load(Buffer("w", F32, 12), AT)), "w is no buffer of the kernel"),
    "points that write the same": ((lanes(Store(Y, of(K), ONE)),), "every i writes the same element"),
    "lanes that write the same": ((lanes(Store(Z, of(I), ONE)),), "every k writes the same element"),
    # dtypes
    "a store of another dtype": ((Store(Z, of(I), const(1, I32)),), "i32 is stored to f32"),
    "a guard that is no boolean": ((lanes(Store(Y, AT, ONE, ONE)),), "the guard 1.0 is f32"),
    "a load's guard that is no boolean": (stores(load(X, AT, ONE)), "the guard 1.0 is f32"),
    "operands of two dtypes": (
        stores(apply(ew.add_p, [VALUE, ZERO_I32], {}, F32)),
        "add takes operands of one dtype, not f32.*, i32",
    ),
    "a result of another dtype": (
        (Store(Z, of(I), apply(ew.lt_p, [ONE, ONE], {}, F32)),),
        r"lt\(1.0, 1.0\) is f32, where its operation gives bool",
    ),
    "a primitive of arrays": (
        stores(apply(ew.bitcast_p, [VALUE], {"dtype": dtypes.int16}, dtypes.int16)),
        "bitcast is not elementwise",
    ),
    "a movement": (stores(apply(rev_p, [VALUE], {"dimensions": (0,)}, F32)), "rev"),
    "a load of another dtype": (stores(raw("load", (), (X, AT), I32)), "is i32, where its operation gives f32"),
    "a boolean number": (stores(number(of(K), dtypes.bool_)), "gives another dtype"),
    "a constant of another dtype": (stores(raw("const", (), ZERO_I32.attr, F32)), "where its operation gives i32"),
    "a fold of another dtype": (stores(raw("fold", (VALUE,), ("sum", L), dtypes.float64)), "gives f32"),
    "a fold for a position": (stores(fold("argmax", L, VALUE)), "argmax is no reduction of a fold"),
    "bits of other words": (
        stores(raw("bits", (ZERO_I32, ZERO_I32), (of(K), 32), U32)),
        "does not have two uint32 words",
    ),
    "bits of another width": (stores(raw("bits", (const(0, U32),) * 2, (of(K), 24), U32)), "a width among 8, 16, 32"),
    "no operation": (stores(raw("loda", (), (X, AT), F32)), "loda is no operation"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    body, message = BROKEN[name]
    kernel = Kernel("broken", (X, IDS, Y, Z), (I,), body)
    with pytest.raises(JaxprTypeError, match=message) as caught:
        check_kernel(kernel)
    assert "kernel broken(x: f32[12], ids: i32[12]) -> (y: f32[12], z: f32[4])" in str(caught.value)


TWICE = Store(Z, of(I), ONE)
FINISHES = {
    "a loop variable of the grid": (
        (TWICE,),
        (Store(Y, of(I), ONE),),
        "needs i, and no loop over it is open",
    ),
    "a total of the grid": ((SUMMED,), (Store(Z, constant(0), read(TOTAL)),), "t is read where no loop"),
    "a keep of the grid": ((WRITTEN,), (lanes(Store(Y, of(K), OLD)),), "kept is read before it is set"),
    "what nobody has written": ((), (Store(Z, constant(0), load(Y, constant(0))),), "the output y is read"),
    "what it writes itself": (
        (TWICE,),
        (lanes(Store(Z, of(K), load(Z, of(K)))),),
        "the output z is read",
    ),
    "lanes that write the same": (
        (),
        (lanes(Store(Z, constant(0), ONE)),),
        "every k writes the same element",
    ),
}


@pytest.mark.parametrize("name", FINISHES)
def test_broken_finish(name):
    body, finish, message = FINISHES[name]
    with pytest.raises(JaxprTypeError, match=message):
        check_kernel(Kernel("broken", (X, Y, Z), (I,), body, finish=finish))


def test_a_finish_over_another_range():
    with pytest.raises(JaxprTypeError, match="over a range that is not of the grid"):
        check_kernel(Kernel("broken", (X, Y, Z), (I,), (TWICE,), finish=(Store(Z, of(S), ONE),), over=(S,)))


def test_two_buffers_of_one_name():
    with pytest.raises(JaxprTypeError, match="two buffers are called x"):
        check_kernel(Kernel("k", (X, Buffer("x", I32, 1)), (), ()))


def test_a_range_twice_in_the_grid():
    with pytest.raises(JaxprTypeError, match="a range is twice in the grid"):
        check_kernel(Kernel("k", (X,), (I, I), ()))


NONE = Range("none", 0)
ALLOWED: dict[str, Callable[[], tuple]] = {
    "a fresh read after a change": lambda: (
        WRITTEN,
        lanes(Store(Y, AT, read(KEPT)), Set(KEPT, ONE), Reduce(TOTAL, read(KEPT))),
        Store(Z, of(I), read(TOTAL)),
    ),
    "one read in two loops": lambda: (WRITTEN, lanes(Set(KEPT, OLD)), *stores(OLD)),
    "a store by one lane": lambda: (lanes(Store(Z, of(I), ONE, within(of(K), 0, 1))),),
    "a guarded load outside": lambda: stores(load(X, AT + 99, op(ew.lt_p, ONE, 0))),
    "rows that stop in time": lambda: (Rows(S, (lanes(Accumulate(GROWS, load(X, of(S) * 3 + of(K)))),), of(S), 4),),
    "rows that none enters": lambda: (Rows(S, (lanes(Accumulate(GROWS, load(X, AT + 99))),), of(S) + 9, 4),),
    "bounds that overstate": lambda: stores(load(X, of(I) * 3 + of(K) // 2 * 2 + of(K) % 2)),
    "terms that depend on one another": lambda: stores(load(X, AT - (of(K) + 1) // 2)),
    "a loop over nothing": lambda: (
        lanes(Reduce(TOTAL, load(X, constant(50))), over=NONE),
        Store(Z, of(I), read(TOTAL)),
    ),
    "a wider accumulator": lambda: (lanes(Reduce(Total("d", dtypes.float64, "sum"), VALUE)),),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name):
    check_kernel(Kernel("allowed", (X, IDS, Y, Z), (I,), ALLOWED[name]()))


@pytest.mark.parametrize("name", CASES)
def test_kernels_written_by_hand(name):
    check_kernel(CASES[name]().kernel)


@pytest.mark.parametrize("blocks", [1, 100_000])
@pytest.mark.parametrize("missing", [0, 1])
def test_bounds_that_are_too_wide(blocks, missing):
    """``8 * (i / 4) + i mod 4``, ``i < 4 n + 2``, ends at ``8 n + 1``."""
    i = Range("i", 4 * blocks + 2)
    outer, inner = unflat(of(i), (blocks + 1, 4))
    index = outer * 8 + inner
    assert index.bounds() == (0, 8 * blocks + 3)
    x, y = Buffer("x", F32, 8 * blocks + 2 - missing), Buffer("y", F32, i.extent, written=True)
    kernel = Kernel("k", (x, y), (i,), (Store(y, of(i), load(x, index)),))
    if not missing:
        check_kernel(kernel)
        return
    with pytest.raises(JaxprTypeError, match=f"reaches 0 .. {8 * blocks + 1}, of {x.size} elements"):
        check_kernel(kernel)
