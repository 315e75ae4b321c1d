"""The examples in JAX's documentation of its functions, run in both libraries.

In: the docstrings of the installed JAX, whose statements after ``>>>`` are taken. Each docstring is one program per
library. Results of expressions, and exceptions, agree as in ``test_calls``, or ``DIFFERS`` says why not.
"""

import contextlib
import doctest
import fnmatch
import importlib
import io
import re
import warnings

import numpy as np
import pytest

import blufunc as bf
from tests.peers.test_calls import Outcome, difference

pytestmark = pytest.mark.peer

MODULES = (
    "jax", "jax.numpy", "jax.numpy.linalg", "jax.numpy.fft", "jax.lax", "jax.nn", "jax.nn.initializers", "jax.random",
    "jax.ops", "jax.tree", "jax.tree_util", "jax.flatten_util", "jax.scipy.linalg", "jax.scipy.special",
    "jax.scipy.signal", "jax.scipy.stats", "jax.scipy.ndimage", "jax.scipy.fft", "jax.scipy.integrate", "jax.image",
    "jax.scipy.spatial.transform", "jax.scipy.cluster.vq", "jax.experimental.ode", "jax.experimental.jet",
    "jax.experimental.checkify", "jax.debug", "jax.dtypes", "jax.core", "jax.errors", "jax.dlpack",
)  # fmt: skip

DIFFERS: dict[str, tuple[str, ...]] = {
    "not implemented: see docs/jax.md": (
        "jax.ds: *", "jax.freeze: *", "jax.fwd_and_bwd: *", "jax.debug.inspect_array_sharding: *",
        "jax.nn.scaled_*", "* :: raises UnsupportedError*",
    ),
    "internals of JAX": ("*import* :: raises ModuleNotFoundError: No module named 'blufunc._src'",),
    "the order within the parts of a partition is unspecified": ("jax.numpy.*partition: *",),
    "an array without axes has no positions along them": ("jax.numpy.argwhere: jnp.argwhere(1) *",),
    "integers stay integers, as in NumPy": ("jax.numpy.convolve: *", "jax.numpy.correlate: *"),
    "a deleted array can be printed": ("jax.numpy.copy: print(x) *",),
    "an edge between bins is rounded up, where a value lies": ("jax.numpy.histogram: print(counts) *",),
    "a tie between positions is rounded to the even one, as in NumPy": ("jax.numpy.percentile: *nearest*",),
    "one array is one condition, as in NumPy": ("jax.numpy.piecewise: *",),
    "polynomials are vectors, as in NumPy": ("jax.numpy.polyadd: *", "jax.numpy.polysub: *"),
    "complex numbers are rounded by round": ("jax.numpy.rint: jnp.rint(x3) *",),
    "roots of a polynomial with leading zeros are unspecified": ("jax.numpy.roots: *strip_zeros=False* *",),
    "arrays of one axis are trimmed": ("jax.numpy.trim_zeros: *",),
    "an array of NumPy without axes is no scalar, as in NumPy": ("jax.numpy.isscalar: *np.array(1.0)*",),
    "keys of JAX have no NumPy form": ("jax.random: key *",),
    "a difference of rounding errors": ("jax.numpy.expm1: jnp.exp(x1)-1 *",),
}  # fmt: skip
"""Reasons for differences, and patterns of ``name: statement :: difference``."""

PARTS = 12
PLAIN = (bool, int, float, complex, str, np.ndarray, np.generic)


def docstrings():
    """The documented functions of JAX, each docstring once, by name."""
    found = {}
    for module in MODULES:
        namespace = importlib.import_module(module)
        for name in sorted(dir(namespace)):
            text = getattr(getattr(namespace, name, None), "__doc__", None)
            if not name.startswith("_") and isinstance(text, str) and ">>>" in text:
                found.setdefault(text, f"{module}.{name}")
    return {name: text for text, name in found.items()}


def imports_of_ours(source):
    """A statement with imports of blufunc instead of JAX."""
    source = re.sub(r"\bimport jax\.([\w.]+) as", r"import blufunc.\1 as", source)
    source = re.sub(r"\bimport jax$", "import blufunc as jax", source, flags=re.M)
    return re.sub(r"\bfrom jax\b", "from blufunc", source)


def plain_leaves(library):
    """Flatten a result to what is compared: arrays and numbers."""
    return lambda tree: [x for x in library.tree.leaves(tree) if hasattr(x, "aval") or isinstance(x, PLAIN)]


def outcome(source, names, library):
    try:
        compile(source, "example", "eval")
    except SyntaxError:
        done = Outcome("None", names, lambda tree: [])
        try:
            exec(source, names)
        except Exception as error:
            done.error = error
        return done
    return Outcome(source, names, plain_leaves(library))


def compared(docs):
    """The number of examples, and the differences by example."""
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'blufunc[peers]'")
    tried, found = 0, {}
    for name, text in docs.items():
        theirs = {"jax": jax, "jnp": jax.numpy, "lax": jax.lax, "np": np}
        ours = {"jax": bf, "jnp": importlib.import_module("blufunc.numpy"), "lax": bf.lax, "np": np}
        module, _, own = name.rpartition(".")
        theirs[own] = getattr(importlib.import_module(module), own)
        with contextlib.suppress(ImportError, AttributeError):
            ours[own] = getattr(importlib.import_module(imports_of_ours(f"from {module}")[5:]), own)
        for example in doctest.DocTestParser().get_examples(text):
            if example.options.get(doctest.SKIP):
                continue
            source = example.source.strip()
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = outcome(source, theirs, jax)
                got = outcome(imports_of_ours(source), ours, bf)
            if isinstance(expected.error, (NameError, ImportError)):
                break  # a name that the example does not import
            tried += 1
            differs = difference(got, expected)
            if differs is not None:
                found[f"{name}: {source}"] = differs
            if expected.error is not None or got.error is not None:
                break  # what follows may need the name that is missing
    return tried, found


def reason_of(text):
    for why, patterns in DIFFERS.items():
        if any(fnmatch.fnmatchcase(text, p) for p in patterns):
            return why
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_examples(part, record_property):
    pytest.importorskip("jax")
    docs = docstrings()
    names = sorted(docs)[part::PARTS]
    tried, found = compared({n: docs[n] for n in names})
    record_property("examples", (tried, len(found)))
    unexplained = {k: what for k, what in found.items() if reason_of(f"{k} :: {what}") is None}
    assert not unexplained, "\n".join(f"{text}: {what}" for text, what in unexplained.items())
    assert tried >= len(names)
