"""Index algebra against brute force, and the simplifications that fusion needs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blufunc.kernels.loopir.index import (
    UNBOUNDED,
    ZERO,
    Computed,
    Index,
    Quotient,
    Range,
    Remainder,
    constant,
    flat,
    of,
    ranges_of,
    strides_of,
    unflat,
)


def places(ranges):
    """All loop variables at all places, as arrays: one axis for each range."""
    return dict(zip(ranges, np.ix_(*[np.arange(r.extent) for r in ranges]), strict=True))


def values(index, ranges):
    """The index at all places, computed from the definitions of its atoms."""
    return np.broadcast_to(index.at(places(ranges)), [r.extent for r in ranges])


def atoms_of(index):
    """All atoms, also those inside of others."""
    for atom in index.terms:
        yield atom
        if isinstance(atom, (Quotient, Remainder)):
            yield from atoms_of(atom.index)


# -- arithmetic ------------------------------------------------------------------------------------

_STEPS = {
    "+": lambda x, y, n: x + y,
    "-": lambda x, y, n: x - y,
    "*": lambda x, y, n: x * (n - 4),
    "/": lambda x, y, n: x // n,
    "%": lambda x, y, n: x % n,
    "shift": lambda x, y, n: x + (n - 6),
}
_NUMBERS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 24])


@st.composite
def expressions(draw):
    """Ranges, and pairs of an index by some operations and its values as an array."""
    extents = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), min_size=1, max_size=3))
    ranges = [Range(f"r{i}", n) for i, n in enumerate(extents)]
    at = places(ranges)
    pool = [(of(r), at[r] + 0) for r in ranges]
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(list(_STEPS)))
        (x, a), (y, b) = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
        n = draw(_NUMBERS)
        step = _STEPS[kind]
        pool.append((step(x, y, n), step(a, b, n)))
    return ranges, pool


@given(expressions())
def test_operations_are_those_of_integers(drawn):
    ranges, pool = drawn
    for index, expected in pool:
        got = values(index, ranges)
        np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape), err_msg=str(index))


@given(expressions())
def test_bounds_hold_and_are_met_by_independent_atoms(drawn):
    ranges, pool = drawn
    for index, _ in pool:
        got, (low, high) = values(index, ranges), index.bounds()
        assert low <= got.min() <= got.max() <= high
        if all(isinstance(atom, Range) for atom in index.terms):
            assert (low, high) == (got.min(), got.max())


@given(expressions())
def test_normal_form(drawn):
    """No zero coefficient, no constant atom, and no further simplification."""
    _, pool = drawn
    for index, _ in pool:
        assert 0 not in index.terms.values()
        for atom in atoms_of(index):
            low, high = atom.bounds()
            assert low < high, (str(index), str(atom))
            if isinstance(atom, Remainder):
                inside_low, inside_high = atom.index.bounds()
                assert inside_low < 0 or inside_high >= atom.divisor
                assert atom.index % atom.divisor == Index({atom: 1}, 0)
            elif isinstance(atom, Quotient):
                assert atom.index // atom.divisor == Index({atom: 1}, 0)


@given(expressions(), st.data())
def test_equality_is_of_functions(drawn, data):
    """Equal indices are equal functions with equal hashes, however constructed."""
    ranges, pool = drawn
    (x, _), (y, _) = data.draw(st.sampled_from(pool)), data.draw(st.sampled_from(pool))
    assert x + y == y + x
    assert hash(x + y) == hash(y + x)
    assert x - x == ZERO
    if x == y:
        assert hash(x) == hash(y)
        np.testing.assert_array_equal(values(x, ranges), values(y, ranges))


@given(expressions(), expressions(), st.data())
def test_substitution_is_composition(outer, inner, data):
    """Substitution of indices is composition of functions."""
    ranges, pool = outer
    new_ranges, new_pool = inner
    at = places(new_ranges)
    replace, values_there = {}, {}
    for r in ranges:
        index, _ = data.draw(st.sampled_from(new_pool))
        replace[r] = index % r.extent  # a loop variable stays inside of its bounds
        values_there[r] = index.at(at) % r.extent
    for index, _ in pool:
        expected = index.at(values_there)
        got = values(index.substitute(replace), new_ranges)
        np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape), err_msg=str(index))


@given(expressions())
def test_coefficient_is_the_slope(drawn):
    ranges, pool = drawn
    for index, _ in pool:
        got = values(index, ranges)
        for axis, r in enumerate(ranges):
            slope = index.coefficient(r)
            if slope is not None:
                assert (np.diff(got, axis=axis) == slope).all()
            else:
                assert r in ranges_of(index)


@given(expressions())
def test_ranges_of_are_those_it_varies_with(drawn):
    ranges, pool = drawn
    for index, _ in pool:
        for axis, r in enumerate(ranges):
            if r not in ranges_of(index):
                assert not np.diff(values(index, ranges), axis=axis).any()


# -- maps between arrays ---------------------------------------------------------------------------


def _factors(draw, size):
    """A shape of ``size`` elements."""
    shape = []
    while size > 1:
        n = draw(st.sampled_from([d for d in range(2, size + 1) if size % d == 0]))
        shape.append(n)
        size //= n
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


@st.composite
def views(draw):
    """A NumPy view of ``arange``, and its elements' flat index, after random moves."""
    shape = draw(st.sampled_from([(4, 6), (24,), (2, 3, 4), (8, 3), (1, 5), (3, 2, 2, 2)]))
    array = np.arange(math.prod(shape)).reshape(shape)
    moves = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["reshape", "transpose", "slice", "broadcast", "reverse"]))
        before = array.shape
        if kind == "reshape":
            array = array.reshape(_factors(draw, array.size))
            moves.append(lambda at, a=array.shape, b=before: unflat(flat(at, a), b))
        elif kind == "transpose":
            order = draw(st.permutations(range(array.ndim)))
            array = array.transpose(order)
            moves.append(lambda at, o=order: tuple(at[o.index(d)] for d in range(len(o))))
        elif kind == "slice":
            spans = []
            for n in before:
                start = draw(st.integers(0, n - 1))
                spans.append((start, draw(st.integers(start + 1, n)), draw(st.integers(1, 3))))
            array = array[tuple(slice(*s) for s in spans)]
            moves.append(lambda at, s=spans: tuple(i * c + a for i, (a, _, c) in zip(at, s, strict=True)))
        elif kind == "broadcast" and array.size <= 60:
            array = np.broadcast_to(array, (draw(st.integers(2, 3)), *before))
            moves.append(lambda at: at[1:])
        elif kind == "reverse":
            array = np.flip(array)
            moves.append(lambda at, b=before: tuple(i * -1 + (n - 1) for i, n in zip(at, b, strict=True)))
    ranges = [Range(f"a{d}", n) for d, n in enumerate(array.shape)]
    at = tuple(of(r) for r in ranges)
    for move in reversed(moves):
        at = move(at)
    return array, ranges, flat(at, shape)


@given(views())
def test_moves_become_indices(view):
    array, ranges, index = view
    np.testing.assert_array_equal(values(index, ranges), array, err_msg=str(index))


@given(views(), st.data())
def test_moves_of_a_flat_loop(view, data):
    """The same, computed by one loop over all elements of the result."""
    array, ranges, index = view
    i = Range("i", array.size)
    at = unflat(of(i), array.shape)
    index = index.substitute(dict(zip(ranges, at, strict=True)))
    np.testing.assert_array_equal(values(index, [i]), array.reshape(-1), err_msg=str(index))


@given(st.data())
def test_flat_undoes_unflat(data):
    """A round trip through any shape is the identity, also of composite indices."""
    size = data.draw(st.sampled_from([1, 2, 12, 24, 36, 60, 64]))
    shape = _factors(data.draw, size)
    i = Range("i", size)
    assert flat(unflat(of(i), shape), shape) == of(i)
    ranges = [Range(f"a{d}", n) for d, n in enumerate(shape)]
    at = tuple(of(r) for r in ranges)
    assert unflat(flat(at, shape), shape) == at


@given(st.data())
def test_reshapes_there_and_back_are_the_identity(data):
    size = data.draw(st.sampled_from([12, 24, 36, 60, 64, 72]))
    start = _factors(data.draw, size)
    ranges = [Range(f"a{d}", n) for d, n in enumerate(start)]
    at, shape = tuple(of(r) for r in ranges), start
    for _ in range(data.draw(st.integers(1, 4))):
        new = _factors(data.draw, size)
        at, shape = unflat(flat(at, shape), new), new
    assert unflat(flat(at, shape), start) == tuple(of(r) for r in ranges)


# -- the simplifications that must happen ----------------------------------------------------------


def variables(*shape):
    """A loop variable for each axis."""
    return tuple(of(Range("abcdef"[d], n)) for d, n in enumerate(shape))


def test_merging_leading_axes_and_back():
    at = variables(32, 1024, 768)
    merged = unflat(flat(at, (32, 1024, 768)), (32768, 768))
    assert [str(i) for i in merged] == ["1024*a + b", "c"]
    assert unflat(flat(merged, (32768, 768)), (32, 1024, 768)) == at


def test_splitting_heads_is_affine():
    """[B, T, 3 C] as three of [B, H, T, D]: indices are linear in the loop variables."""
    b, h, t, d = variables(32, 12, 1024, 64)
    for part in range(3):
        channel = flat((h, d), (12, 64)) + 768 * part
        index = flat((b, t, channel), (32, 1024, 2304))
        assert all(isinstance(atom, Range) for atom in index.terms)
    heads = unflat(flat((b, t, channel), (32, 1024, 2304)), (32, 1024, 3, 12, 64))
    assert heads == (b, t, constant(2), h, d)


def test_merging_heads_is_affine():
    """[B, H, T, D] transposed and merged to [B T, C], read by rows and lanes."""
    r, h, d = variables(32768, 12, 64)
    b, t = unflat(r, (32, 1024))
    index = flat((b, h, t, d), (32, 12, 1024, 64))
    rows = Range("rows", 32768)
    index = flat((*unflat(of(rows), (32, 1024)), constant(0)), (32, 1024, 64))
    assert index == of(rows) * 64
    # blocks of 8 rows lie in one sequence: the quotient and the remainder by 1024 do not see the row in the block
    block, row = Range("block", 4096), Range("row", 8)
    b, t = unflat(of(block) * 8 + of(row), (32, 1024))
    assert str(b) == "(block) / 128"
    assert str(t) == "8*((block) % 128) + row"


I, J = Range("i", 12), Range("j", 4)
SIMPLE = [
    ("a multiple is divided", lambda i, j: (i * 4 + j) // 4, "i"),
    ("a multiple leaves no remainder", lambda i, j: (i * 4 + j) % 4, "j"),
    ("a remainder below the divisor", lambda i, j: i % 12, "i"),
    ("a quotient below the divisor", lambda i, j: i // 12, "0"),
    ("quotient and remainder", lambda i, j: i // 5 * 5 + i % 5, "i"),
    ("quotient and remainder, scaled", lambda i, j: i // 5 * 15 + i % 5 * 3 + j, "3*i + j"),
    ("quotient and remainder of a shift", lambda i, j: (i + 2) // 5 * 5 + (i + 2) % 5, "i + 2"),
    ("a quotient of a quotient", lambda i, j: i // 2 // 3, "(i) / 6"),
    ("a quotient of a remainder", lambda i, j: i % 6 // 2, "((i) / 2) % 3"),
    ("a remainder of a remainder", lambda i, j: i % 6 % 3, "(i) % 3"),
    ("a common factor", lambda i, j: (i * 6 + j) // 24, "(i) / 4"),
    ("a common factor's remainder", lambda i, j: (i * 6 + j) % 24, "6*((i) % 4) + j"),
    ("a shift by the divisor", lambda i, j: (i + 8) % 8, "(i) % 8"),
    ("a shift that crosses none", lambda i, j: (i * 4 + 3) // 4, "i"),
    ("a reversal twice", lambda i, j: (i * -1 + 11) * -1 + 11, "i"),
    ("what cancels", lambda i, j: i + j - i, "j"),
    ("a shift back", lambda i, j: (j + 4) // 4, "1"),
    ("below zero", lambda i, j: (j - 4) // 4, "-1"),
    ("a remainder below zero", lambda i, j: (j - 4) % 4, "j"),
]


@pytest.mark.parametrize(("made", "text"), [s[1:] for s in SIMPLE], ids=[s[0] for s in SIMPLE])
def test_simplified(made, text):
    assert str(made(of(I), of(J))) == text


FIVE = Range("five", 5)
NOT_SIMPLE = [
    ("what crosses the step", lambda i, j: (i * 4 + j) // 8),
    ("a remainder of what crosses the step", lambda i, j: (i * 4 + j) % 8),
    ("a remainder that does not divide", lambda i, j: i % 8 % 3),
    ("a quotient of such a remainder", lambda i, j: i % 8 // 3),
    ("two thirds of a quotient", lambda i, j: (i // 2 * 2) // 3),
    ("a quotient less another", lambda i, j: (j - i // 2) // 3),
    ("quotient and remainder of two", lambda i, j: i // 5 * 5 + (i + 1) % 5),
]


@pytest.mark.parametrize("made", [s[1] for s in NOT_SIMPLE], ids=[s[0] for s in NOT_SIMPLE])
def test_not_simplified_too_far(made):
    at = places([I, FIVE])
    got = values(made(of(I), of(FIVE)), [I, FIVE])
    np.testing.assert_array_equal(got, np.broadcast_to(made(at[I], at[FIVE]), got.shape))


def test_ranges_of_one_step_vanish():
    one = Range("one", 1)
    assert of(one) == ZERO
    assert of(I).substitute({I: of(one) + 3}) == constant(3)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)], ids=str)
def test_arrays_without_elements(shape):
    """There are no positions; the indices that stand for them are made all the same."""
    assert unflat(of(I), shape) == (ZERO,) * len(shape)
    assert flat((ZERO,) * len(shape), shape) == ZERO


def test_strides():
    assert strides_of((2, 3, 4)) == (12, 4, 1)
    assert strides_of(()) == ()
    assert flat((), ()) == ZERO


def test_flat_wants_an_index_for_each_axis():
    with pytest.raises(ValueError, match="zip"):
        flat((of(I),), (3, 4))


# -- what the program computed ---------------------------------------------------------------------


class Number:
    """Stands for a scalar of LoopIR."""

    def __init__(self, ranges=frozenset()):
        self.seen = frozenset(ranges)

    def ranges(self):
        return self.seen

    def substitute(self, replace):
        return Number(r for i in replace.values() for r in ranges_of(i))

    def __str__(self):
        return "n"


def test_computed_integers():
    clamped, unknown = Computed(Number({I}), 0, 7), Computed(Number())
    index = of(clamped) * 4 + of(J)
    assert str(index) == "4*[n] + j"
    assert index.bounds() == (0, 31)
    assert index // 4 == of(clamped)
    assert index % 4 == of(J)
    assert of(unknown).bounds() == (-UNBOUNDED, UNBOUNDED)
    assert ranges_of(index) == {I, J}
    assert index.coefficient(I) is None
    assert index.coefficient(J) == 1
    assert of(clamped) != of(Computed(clamped.value, 0, 7))
    for value, j in itertools.product(range(8), range(4)):
        assert (index % 6 // 2).at({J: j}, lambda atom, value=value: value) == (4 * value + j) % 6 // 2


def test_the_outermost_axis_needs_no_remainder():
    """Positions lie inside of the array, also where nothing more is known of them."""
    position = of(Computed(Number()))
    assert unflat(position, (1, 3, 4)) == (ZERO, position // 4, position % 4)


def test_substitution_reaches_computed_integers():
    clamped = Computed(Number({I}), 0, 7)
    assert of(clamped).substitute({J: of(I)}) == of(clamped)
    (moved,) = of(clamped).substitute({I: of(J)}).terms
    assert moved.bounds() == (0, 7)
    assert ranges_of(moved) == {J}


def test_an_index_without_its_computed_parts_has_no_value():
    with pytest.raises(AssertionError, match="has the computed part"):
        of(Computed(Number())).at({})
