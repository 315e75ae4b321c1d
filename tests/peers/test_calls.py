"""Thousands of calls, one by one, in both libraries.

Values, dtypes, shapes, weak types and classes of exceptions agree, or ``DIFFERS`` says why not. Weak types are compared
where they mean something here: of numbers of rank 0.
"""

import fnmatch
import importlib
import re
import warnings

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax
from tests.peers.calls import ARGUMENTS, CALLS
from tests.peers.peer_row import error_of

pytestmark = pytest.mark.peer

TOLERANCE = {"float32": 3e-5, "complex64": 3e-5, "float16": 3e-3, "bfloat16": 2e-2}

DIFFERS: dict[str, tuple[str, ...]] = {
    "operations of bits and remainders of booleans have no meaning": (
        "np.*shift(t1, t1)", "np.divmod(t1, t1)", "np.floor_divide(t1, t1)", "np.fmod(t1, t1)", "np.mod(t1, t1)",
        "np.remainder(t1, t1)", "np.bitwise_count(t*", "np.bitwise_count(True)",
    ),
    "the quotient of integers by 0 is unspecified": ("np.divmod(*", "np.floor_divide(*", "*1 // *"),
    "JAX drops imaginary parts where it makes booleans": ("np.all(c1)", "np.any(c1)"),
    "functions of complex numbers that NumPy and SciPy do not have": (
        "np.exp2(c1)", "np.rint(c1)", "np.atan2(c1, f1)", "np.arctan2(c1, f1)", "np.logaddexp*(c1, f1)",
    ),
    "accepted for complex numbers, by their real parts or in lexical order as in NumPy": (
        "np.fabs(c1)", "np.isneginf(c1)", "np.isposinf(c1)", "np.signbit(c1)", "np.copysign(c1, f1)", "np.*arg*(c1)",
    ),
    "booleans and Python numbers are accepted as numbers, as in NumPy": (
        "np.round(t1)", "np.round(True)", "np.ediff1d(t1)", "np.ediff1d(True)", "np.dot(s1, *3*)", "np.poly*",
    ),
    "an array without axes has no positions along them": ("np.argwhere(*", "np.trim_zeros(*", "np.unwrap(*"),
    "an empty array has no median: ValueRangeError": ("np.median(e*", "np.nanmedian(e*"),
    "a function of Python numbers is weakly typed, also where JAX meets strong constants": tuple(
        f"{name}(* :: weak *"
        for name in (
            "np.log10", "np.log2", "np.rint", "jax.nn.gelu",
            *(f"jax.scipy.special.{n}" for n in "exp1 expi gamma log_ndtr ndtr ndtri spence sici".split()),
        )
    ),
    "infinite, where JAX has NaN; a reference in float64 agrees": ("jax.scipy.special.expi(*",),
    "floats of all widths and integers are accepted, as in SciPy": (
        "jax.scipy.special.log_ndtr(* :: accepts *", "jax.scipy.special.ndtr(* :: accepts *",
        "jax.scipy.special.ndtri(* :: accepts *",
    ),
    "JAX is off by 5e-7 at 1": ("jax.scipy.special.gammaln(1)",),
    "integers and reals are accepted, and converted as numpy's functions do": (
        "jax.scipy.special.spence(* :: accepts *", "jax.nn.glu(i1) :: accepts *", "jax.nn.sigmoid(* :: accepts *",
        "jax.nn.silu(* :: accepts *", "jax.nn.swish(* :: accepts *", "lax.conj(*", "lax.imag(* :: accepts *",
        "lax.real(* :: accepts *", "lax.reciprocal(* :: accepts *", "lax.pow(i1, i1)", "lax.is_finite(c1)",
        "lax.abs(u1)",
    ),
    "complex numbers have no order, and no gamma function or arctangent of two here": (
        "lax.max(c1, c1)", "lax.min(c1, c1)", "lax.atan2(c1, c1)", "lax.exp2(c1)", "jax.scipy.special.gamma(c1)",
    ),
    "another builtin class, which NumPy raises, or the error says more": (
        "np.repeat(?1, -1)", "np.delete(?1, 9)", "np.tensordot(?2, ?1, 2)", "lax.rev(?2, (4,))",
        'np.pad(?1, 1, mode="nothing")', "np.arange(0, 3, 0)", 'np.array(300, "uint8")',
        "np.zeros(-1)", "np.array(2**31)", "jax.grad(lambda x: x, argnums=2)(1.0)", "jax.jvp(np.sin, (1.0,), (f1,))",
        "jax.vjp(np.sin, 1.0)*(f1)", "jax.nn.glu(m2)", "jax.linear_transpose(*",
    ),
    "limits are Python numbers": ("np.finfo(*",),
    "booleans count as 0 and 1, as in NumPy": ("np.arange(True)",),
    "a fraction out of range is an error, as in NumPy": ("np.percentile(?1, 130)",),
    "integers stay integers, as in NumPy": ("np.convolve(i1, i1)", "np.correlate(i1, i1)"),
    "masks are accepted, as in NumPy": ("np.ix_(*",),
    "the order within the two parts of a partition is unspecified": ("np.partition(*", "np.argpartition(*"),
    "the quotient of integers by 0 in lax is unspecified, too": ("lax.div(i1, i1)", "lax.rem(i1, i1)"),
    "operands of lax have one dtype, and predicates are boolean": (
        "lax.pow(f1, i1)", "lax.pow(i1, 2)", "lax.select(i1, i1, i1)",
    ),
    "spacing has the sign of x in float16, too": ("np.spacing(h1)",),
    "the parts of infinity are 0 and infinity, as in NumPy": ("np.modf(n1)",),
    "arrays that do not broadcast are not equivalent, as in NumPy": ("np.array_equiv(e2, f2)",),
    "where nothing counts the extremum without NaN is NaN": ("np.nanm??(f2, where=t2)",),
}  # fmt: skip
"""Reasons for differences, and patterns of the calls that have them."""

PARTS = 24


class Outcome:
    """The result of a call: leaves, or an exception."""

    def __init__(self, text, names, leaves):
        self.error, self.leaves = None, ()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.leaves = [_leaf(x) for x in leaves(eval(text, names))]
        except Exception as error:
            self.error = error


def _leaf(x):
    if hasattr(x, "aval"):
        return np.asarray(x).astype(x.dtype), str(x.dtype), bool(x.aval.weak_type)
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(x), str(x.dtype), False
    return x, type(x).__name__, False


BASES = (
    TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError, OverflowError,
    ZeroDivisionError, FloatingPointError, RuntimeError, AssertionError,
)  # fmt: skip


def difference(ours, theirs):
    """How two outcomes differ, or None."""
    if theirs.error is not None or ours.error is not None:
        if theirs.error is None:
            return f"raises {type(ours.error).__name__}: {str(ours.error).splitlines()[0][:90]}"
        if ours.error is None:
            return f"accepts what raises {type(theirs.error).__name__}"
        wanted = [base for base in BASES if isinstance(theirs.error, base)]
        if any(isinstance(ours.error, base) for base in wanted):
            return None
        return f"raises {type(ours.error).__name__}, JAX {type(theirs.error).__name__}"
    if len(ours.leaves) != len(theirs.leaves):
        return f"{len(ours.leaves)} results, JAX {len(theirs.leaves)}"
    for (x, kind, weak), (y, other, other_weak) in zip(ours.leaves, theirs.leaves, strict=True):
        if kind != other:
            return f"dtype {kind}, JAX {other}"
        if weak != other_weak and not (isinstance(x, np.ndarray) and (x.ndim or x.dtype == bool)):
            return f"weak {weak}, JAX {other_weak}"
        if not isinstance(x, np.ndarray):
            if str(x) != str(y):
                return f"{x!r:.40}, JAX {y!r:.40}"
        elif x.shape != y.shape:
            return f"shape {x.shape}, JAX {y.shape}"
        elif _error(x, y) > TOLERANCE.get(kind, 0):
            return f"values {x.ravel()[:4]}, JAX {y.ravel()[:4]}"
    return None


def _error(x, y):
    if (x.dtype.kind == "V" and x.dtype.name == "bfloat16") or x.dtype == np.float16:
        x, y = x.astype(np.float32), y.astype(np.float32)
    return error_of(x, y)


def _namespaces():
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'blufunc[peers]'")
    for module in ("numpy", "scipy.linalg", "scipy.special", "scipy.stats"):
        importlib.import_module(f"jax.{module}")
    jax.config.update("jax_disable_most_optimizations", True)
    theirs = {"jax": jax, "np": jax.numpy, "lax": jax.lax, "onp": np}
    ours = {"jax": bf, "np": bnp, "lax": lax, "onp": np}
    for name, x in ARGUMENTS.items():
        ours[name], theirs[name] = bnp.asarray(x, dtype=x.dtype), jax.numpy.asarray(x)
    return jax, ours, theirs


def compared(calls):
    """The calls that JAX has, and the differences among them."""
    jax, ours, theirs = _namespaces()
    tried, found = 0, {}
    for text in calls:
        expected = Outcome(text, theirs, jax.tree.leaves)
        if isinstance(expected.error, AttributeError) and re.search("attribute|removed", str(expected.error)):
            continue  # a name that JAX does not have, or has removed
        tried += 1
        differs = difference(Outcome(text, ours, bf.tree.leaves), expected)
        if differs is not None:
            found[text] = differs
    return tried, found


def reason_of(text, what):
    """The reason for a difference of a call, or None."""
    for reason, patterns in DIFFERS.items():
        for pattern in patterns:
            if fnmatch.fnmatchcase(f"{text} :: {what}", pattern if " :: " in pattern else f"{pattern} :: *"):
                return reason
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_calls(part, record_property):
    calls = CALLS[part::PARTS]
    tried, found = compared(calls)
    unexplained = {text: what for text, what in found.items() if reason_of(text, what) is None}
    record_property("calls", (tried, len(found)))
    assert not unexplained, "\n".join(f"{text}: {what}" for text, what in unexplained.items())
    assert tried > 0.9 * len(calls)


def test_enough_calls():
    assert len(CALLS) >= 3_000 + PARTS and len(CALLS) == len(set(CALLS))
