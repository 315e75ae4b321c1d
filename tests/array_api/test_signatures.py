"""Names and signatures: every call of the array API standard is accepted."""

import inspect

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc.numpy import fft, linalg
from tests.array_api.signatures import ATTRIBUTES, CONSTANTS, DTYPES, FFT, INFO, LINALG, MAIN, METHODS

P = inspect.Parameter
X = bnp.ones((2, 2))


def functions():
    """Each function and method of the standard: its holder and its signature."""
    places = {"": (bnp, MAIN), "linalg": (linalg, LINALG), "fft": (fft, FFT)}
    places |= {"array": (X, METHODS), "info": (bnp.__array_namespace_info__(), INFO)}
    for place, (holder, text) in places.items():
        for line in text.strip().splitlines():
            yield pytest.param(holder, line, id=f"{place}.{line.partition('(')[0]}".lstrip("."))


def parsed(line):
    """The signature that a line of the table writes down."""
    scope = {}
    exec(f"def {line}: pass", scope)
    return inspect.signature(scope[line.partition("(")[0]])


def accepts(parameters, wanted, position):
    """True if blufunc's parameters accept the standard's ``wanted`` at its position."""
    positional = [p for p in parameters if p.kind in (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)]
    if wanted.kind is P.VAR_POSITIONAL or any(p.kind is P.VAR_POSITIONAL for p in parameters):
        return any(p.kind is P.VAR_POSITIONAL for p in parameters)
    if wanted.kind is P.POSITIONAL_ONLY:
        return position < len(positional)
    named = [p for p in parameters if p.name == wanted.name and p.kind is not P.POSITIONAL_ONLY]
    in_place = wanted.kind is P.KEYWORD_ONLY or positional[position : position + 1] == named
    return bool(named) and in_place


# Parameters whose defaults differ in spelling only.
SAME_DEFAULTS = {
    ("astype", "copy"),  # arrays are immutable: a copy makes no difference
    ("arange", "step"),
    ("std", "correction"),
    ("var", "correction"),
    ("qr", "mode"),
    *[(name, "norm") for name in (line.partition("(")[0] for line in FFT.strip().splitlines())],
}


@pytest.mark.parametrize("holder, line", list(functions()))
def test_signature(holder, line):
    name, wanted = line.partition("(")[0], parsed(line)
    ours = list(inspect.signature(getattr(holder, name)).parameters.values())
    for position, p in enumerate(wanted.parameters.values()):
        if p.kind is P.KEYWORD_ONLY or not (p.kind is P.POSITIONAL_ONLY and len(ours) > position):
            assert accepts(ours, p, position), f"{name} does not take {p}"
        else:
            assert accepts(ours, p, position), f"{name} does not take {p} in position {position}"
        mine = next((q for q in ours if q.name == p.name), None)
        if mine is not None and p.default is not p.empty and (name, p.name) not in SAME_DEFAULTS:
            assert mine.default == p.default, f"{name}: the default of {p.name}"
        if mine is not None and p.default is not p.empty:
            assert mine.default is not p.empty
    extra = [q for q in ours if q.name not in wanted.parameters and q.kind is not P.POSITIONAL_ONLY]
    required = [q for q in extra if q.default is q.empty and q.kind is P.KEYWORD_ONLY]
    assert not required, f"{name} asks for more: {required}"


def test_defaults_of_another_spelling():
    x = bnp.asarray([1.0, 3.0])
    assert bnp.arange(0, 3, step=1).tolist() == bnp.arange(0, 3).tolist()
    assert float(bnp.var(x, correction=0.0)) == float(bnp.var(x)) and float(bnp.std(x)) == 1.0
    for f in (fft.fft, fft.ifft, fft.rfft, fft.hfft, fft.fftn):
        np.testing.assert_array_equal(f(x), f(x, norm="backward"))
    assert linalg.qr(X, mode="reduced")[0].shape == (2, 2)
    assert bnp.astype(x, "float32", copy=True).dtype == "float32"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name):
    assert hasattr(X, name)


def test_constants_and_dtypes():
    for name, value in CONSTANTS.items():
        assert getattr(bnp, name) == value
    assert np.isnan(bnp.nan)
    for name in DTYPES:
        assert getattr(bnp, name) == np.dtype(name) and bnp.zeros(1, dtype=getattr(bnp, name)).dtype == name
        assert getattr(bnp, name) == bnp.zeros(1, dtype=name).dtype
    assert all(name in bnp.__all__ for name in (*CONSTANTS, *DTYPES, "nan", "linalg", "fft"))
    assert all(line.partition("(")[0] in bnp.__all__ for line in MAIN.strip().splitlines())
