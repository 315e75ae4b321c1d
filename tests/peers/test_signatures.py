"""Keyword calls port: shared functions take JAX's parameters, in order."""

import importlib
import inspect
from types import ModuleType

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'blufunc[peers]'")
if jax.__version_info__ < (0, 10):
    pytest.skip("the signatures are those of JAX 0.10", allow_module_level=True)

P = inspect.Parameter

FACES = [
    "numpy", "numpy.linalg", "numpy.fft", "lax", "lax.linalg", "nn", "nn.initializers", "random", "scipy.special",
    "scipy.cluster.vq", "scipy.fft", "scipy.integrate", "scipy.interpolate", "scipy.linalg", "scipy.ndimage",
    "scipy.optimize", "scipy.signal", "scipy.sparse.linalg", "scipy.spatial.transform", "scipy.stats", "image",
]  # fmt: skip

# Parameters of JAX that nothing here takes, wherever they stand.
NOWHERE = {
    "out_sharding": "arrays have a device and no sharding",
    "sharding": "arrays have a device and no sharding",
    "accuracy": "a hint for XLA's elementwise functions",
    "use_magma": "chooses a library for one kind of device",
    "_dot_general": "private",
    "_split_transpose": "private",
}

# Functions that leave a parameter of JAX out.
ABSENT = {
    ("numpy.array", "args"): "positional options are errors in both",
    ("numpy.dtype", "align"): "a function here: np.dtype's options are for records",
    ("numpy.dtype", "copy"): "a function here: np.dtype's options are for records",
    ("numpy.ufunc", "reduce"): "chosen by the function",
    ("numpy.ufunc", "accumulate"): "chosen by the function",
    ("numpy.ufunc", "at"): "chosen by the function",
    ("numpy.ufunc", "reduceat"): "chosen by the function",
    ("lax.mul", "out_dtype"): "operands and results have one dtype",
}

# Functions of which JAX's signature says nothing: ufuncs, and what it passes on to NumPy.
OPAQUE = {
    "numpy": "add bitwise_and bitwise_or bitwise_xor fromfile fromiter load logaddexp logaddexp2 logical_and "
    "logical_or logical_xor maximum minimum multiply negative set_printoptions subtract",
    "lax": "random_gamma_grad",
}


def place(root, face):
    """The module, or class, of the name ``face``."""
    found = importlib.import_module(root)
    for part in face.split("."):
        try:
            found = importlib.import_module(f"{found.__name__}.{part}")
        except ImportError:
            found = getattr(found, part)
    return found


def signature(f):
    try:
        return list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # builtins and types without one
        return None


def functions():
    """``(name, our parameters, JAX's)`` of all that both have."""
    for face in FACES:
        ours, jaxs = place("blufunc", face), place("jax", face)
        pairs = [(face, ours, jaxs)]
        if face == "scipy.stats":
            pairs += [
                (f"{face}.{n}", m, getattr(jaxs, n))
                for n, m in vars(ours).items()
                if isinstance(m, ModuleType) and not n.startswith("_") and hasattr(jaxs, n)
            ]
        for name, mine, theirs in pairs:
            for f in sorted(n for n in dir(mine) if not n.startswith("_")):
                ours_f, jaxs_f = getattr(mine, f), getattr(theirs, f, None)
                if isinstance(ours_f, ModuleType) or not (callable(ours_f) and callable(jaxs_f)):
                    continue
                if f in OPAQUE.get(name, "").split():
                    continue
                a, b = signature(ours_f), signature(jaxs_f)
                if a is not None and b is not None:
                    yield pytest.param(f"{name}.{f}", a, b, id=f"{name}.{f}")


def wanted(name, theirs):
    """JAX's parameters less those that are left out on purpose."""
    return [
        p
        for p in theirs
        if p.name not in NOWHERE and (name, p.name) not in ABSENT and p.kind is not P.VAR_KEYWORD
    ]


@pytest.mark.peer
@pytest.mark.parametrize("name, ours, theirs", list(functions()))
def test_parameters(name, ours, theirs):
    positional = [p for p in ours if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD, P.VAR_POSITIONAL)]
    keyword = {p.name for p in ours if p.kind in (P.KEYWORD_ONLY, P.POSITIONAL_OR_KEYWORD)}
    required = {p.name for p in theirs if p.default is P.empty}
    position = 0
    for p in wanted(name, theirs):
        if p.kind is P.KEYWORD_ONLY:
            assert p.name in keyword, f"{name} does not take {p.name}="
            continue
        assert position < len(positional), f"{name} takes no {p.name} in position {position}"
        mine = positional[position]
        position += 1
        if p.kind is P.VAR_POSITIONAL:
            assert mine.kind is p.kind and mine.name == p.name, f"{name} takes no *{p.name}"
        elif p.kind is P.POSITIONAL_OR_KEYWORD:
            assert mine.name == p.name, f"{name}: {mine.name} stands where JAX has {p.name}"
            assert mine.kind is P.POSITIONAL_OR_KEYWORD, f"{name} does not take {p.name}= by name"
        if mine.default is P.empty and p.kind is P.POSITIONAL_OR_KEYWORD:
            assert p.name in required, f"{name} asks for {mine.name}, which is optional in JAX"
    names = {p.name for p in theirs}
    extra = [
        p.name for p in ours if p.name not in names and p.default is P.empty and p.kind is P.KEYWORD_ONLY
    ]
    assert not extra, f"{name} asks for {extra}, which JAX does not have"


@pytest.mark.peer
def test_exceptions_are_needed():
    """No exception outlives its reason."""
    found = {name: (a, b) for name, a, b in (p.values for p in functions())}
    for name, parameter in ABSENT:
        a, b = found[name]
        assert parameter in {p.name for p in b} - {p.name for p in a}
    used = {p.name for _, b in found.values() for p in b}
    assert set(NOWHERE) <= used, set(NOWHERE) - used
    for face, names in OPAQUE.items():
        for n in names.split():
            kinds = {p.kind for p in signature(getattr(place("jax", face), n))}
            assert P.VAR_POSITIONAL in kinds, f"JAX says by now what {face}.{n} takes"
