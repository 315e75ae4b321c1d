"""Special cases of the array API standard 2024.12: infinities, NaN, signed zeros.

Data, for ``test_special_cases.py`` and the tests of the CUDA prelude. A line is ``function: operands -> result``.
Operands are numbers, or classes of them: ``f`` finite, ``+f`` and ``-f`` finite and not 0, ``p`` and ``m`` positive
and negative with the infinities, ``num`` all but NaN, ``any`` all, ``0?`` and ``inf?`` of either sign, and those in
``CLASSES``. Results are numbers, ``x1`` or ``x2``, or several with ``|`` where the standard lets implementations
choose. ``inf*cos`` is infinity times the cosine of the last operand.
"""

import itertools
import math

import numpy as np

CLASSES = {
    "f": [-2.5, -1.0, -0.0, 0.0, 1.0, 2.5],
    "nzf": [-30.0, -2.5, 0.5, 2.0, 200.0],
    "+f": [0.5, 1.0, 3.0],
    "-f": [-0.5, -1.0, -3.0],
    "p": [0.5, 1.0, 3.0, math.inf],
    "m": [-0.5, -1.0, -3.0, -math.inf],
    "num": [-math.inf, -2.5, -0.0, 0.0, 1.0, math.inf],
    "any": [-math.inf, -2.5, -0.0, 0.0, 1.0, math.inf, math.nan],
    "nz": [-math.inf, -2.5, 1.0, math.inf],
    "0?": [0.0, -0.0],
    "inf?": [math.inf, -math.inf],
    ">1": [1.5, 3.0],
    "<-1": [-1.5, -3.0],
    "<1": [0.5, -2.0, 0.0],
    "not1": [-math.inf, -2.5, -0.0, 0.0, 2.0, math.inf],
    "big": [1.5, -3.0],
    "small": [0.5, -0.25, 0.0],
    "odd": [1.0, 3.0, 7.0],
    "-odd": [-1.0, -3.0],
    "even": [2.0, 0.5, 4.5],
    "-even": [-2.0, -0.5],
    "frac": [0.5, -1.5],
    "int": [-2.0, 3.0, 7.0],
}
NAMES = {"pi": math.pi, "pi/2": math.pi / 2, "pi/4": math.pi / 4, "3pi/4": 3 * math.pi / 4}

REAL = """
abs: nan -> nan; -0 -> 0; inf? -> inf
acos: nan -> nan; >1 -> nan; <-1 -> nan; 1 -> 0
acosh: nan -> nan; <1 -> nan; 1 -> 0; inf -> inf
add: nan any -> nan; any nan -> nan; inf -inf -> nan; -inf inf -> nan; inf inf -> inf; -inf -inf -> -inf
add: inf f -> inf; -inf f -> -inf; f inf -> inf; f -inf -> -inf; -0 -0 -> -0; -0 0 -> 0; 0 -0 -> 0; 0 0 -> 0
add: 0? +f -> x2; 0? -f -> x2; +f 0? -> x1; 2.5 -2.5 -> 0
asin: nan -> nan; >1 -> nan; <-1 -> nan; 0? -> x1
asinh: nan -> nan; 0? -> x1; inf? -> x1
atan: nan -> nan; 0? -> x1; inf -> pi/2; -inf -> -pi/2
atan2: nan any -> nan; any nan -> nan; +f 0? -> pi/2; 0 +f -> 0; 0 0 -> 0; 0 -0 -> pi; 0 -f -> pi
atan2: -0 +f -> -0; -0 0 -> -0; -0 -0 -> -pi; -0 -f -> -pi; -f 0? -> -pi/2; +f inf -> 0; +f -inf -> pi
atan2: -f inf -> -0; -f -inf -> -pi; inf f -> pi/2; -inf f -> -pi/2; inf inf -> pi/4; inf -inf -> 3pi/4
atan2: -inf inf -> -pi/4; -inf -inf -> -3pi/4
atanh: nan -> nan; <-1 -> nan; >1 -> nan; -1 -> -inf; 1 -> inf; 0? -> x1
ceil: nan -> nan; int -> x1; inf? -> x1; 0? -> x1
copysign: nan +f -> nan; 2 -0 -> -2; 2 0 -> 2; -2 inf -> 2; inf -f -> -inf
cos: nan -> nan; 0? -> 1; inf? -> nan
cosh: nan -> nan; 0? -> 1; inf? -> inf
divide: nan any -> nan; any nan -> nan; inf? inf? -> nan; 0? 0? -> nan; +f 0 -> inf; +f -0 -> -inf
divide: -f 0 -> -inf
divide: -f -0 -> inf; 0 +f -> 0; 0 -f -> -0; -0 +f -> -0; -0 -f -> 0; inf +f -> inf; inf -f -> -inf
divide: -inf +f -> -inf; -inf -f -> inf; +f inf -> 0; +f -inf -> -0; -f inf -> -0; -f -inf -> 0
exp: nan -> nan; 0? -> 1; inf -> inf; -inf -> 0
expm1: nan -> nan; 0? -> x1; inf -> inf; -inf -> -1
floor: nan -> nan; int -> x1; inf? -> x1; 0? -> x1
floor_divide: nan any -> nan; any nan -> nan; inf? inf? -> nan; 0? 0? -> nan; +f 0 -> inf; +f -0 -> -inf
floor_divide: -f 0 -> -inf; -f -0 -> inf; 0 +f -> 0; 0 -f -> -0; -0 +f -> -0; -0 -f -> 0
floor_divide: inf +f -> inf|nan; inf -f -> -inf|nan; -inf +f -> -inf|nan; -inf -f -> inf|nan
floor_divide: +f inf -> 0; +f -inf -> -0|-1; -f inf -> -0|-1; -f -inf -> 0
hypot: inf? any -> inf; any inf? -> inf; nan f -> nan; f nan -> nan; nan nan -> nan
log: nan -> nan; -f -> nan; 0? -> -inf; 1 -> 0; inf -> inf
log10: nan -> nan; -f -> nan; 0? -> -inf; 1 -> 0; inf -> inf
log1p: nan -> nan; <-1 -> nan; -1 -> -inf; 0? -> x1; inf -> inf
log2: nan -> nan; -f -> nan; 0? -> -inf; 1 -> 0; inf -> inf
logaddexp: nan any -> nan; any nan -> nan; inf num -> inf; num inf -> inf; -inf -inf -> -inf
maximum: nan any -> nan; any nan -> nan; inf num -> inf; -inf num -> x2
minimum: nan any -> nan; any nan -> nan; inf num -> x2; -inf num -> -inf
multiply: nan any -> nan; any nan -> nan; inf? 0? -> nan; 0? inf? -> nan; inf inf -> inf; inf -inf -> -inf
multiply: inf +f -> inf; inf -f -> -inf; -inf +f -> -inf; -inf -f -> inf; 0 -f -> -0; -0 -f -> 0; -0 +f -> -0
nextafter: nan any -> nan; any nan -> nan; -0 0 -> 0; 0 -0 -> -0; 1 1 -> 1; inf inf -> inf
pow: not1 nan -> nan; any 0? -> 1; nan nz -> nan; big inf -> inf; big -inf -> 0; -1 inf? -> 1; 1 num -> 1
pow: small inf -> 0
pow: 0.5 -inf -> inf; -0.25 -inf -> inf; inf p -> inf; inf m -> 0; -inf odd -> -inf; -inf even -> inf
pow: -inf -odd -> -0
pow: -inf -even -> 0; 0 p -> 0; 0 m -> inf; -0 odd -> -0; -0 even -> 0; -0 -odd -> -inf; -0 -even -> inf
pow: -f frac -> nan|x1
reciprocal: nan -> nan; inf -> 0; -inf -> -0; 0 -> inf; -0 -> -inf
remainder: nan any -> nan; any nan -> nan; inf? any -> nan; any 0? -> nan; 0 +f -> 0; -0 +f -> 0; 0 -f -> -0
remainder: -0 -f -> -0
remainder: +f inf -> x1; +f -inf -> -inf; -f inf -> inf; -f -inf -> x1
round: nan -> nan; 0.5 -> 0; -0.5 -> -0; 1.5 -> 2; 2.5 -> 2; -2.5 -> -2; int -> x1; inf? -> x1; 0? -> x1
sign: nan -> nan; m -> -1; p -> 1; 0? -> 0
sin: nan -> nan; 0? -> x1; inf? -> nan
sinh: nan -> nan; 0? -> x1; inf? -> x1
sqrt: nan -> nan; -f -> nan; 0? -> x1; inf -> inf
square: nan -> nan; inf? -> inf; 0? -> 0
subtract: nan any -> nan; any nan -> nan; inf inf -> nan; -inf -inf -> nan; inf -inf -> inf; -inf inf -> -inf
subtract: inf f -> inf; f inf -> -inf; -0 0 -> -0; 0 0 -> 0; 0 -0 -> 0; 2.5 2.5 -> 0
tan: nan -> nan; 0? -> x1; inf? -> nan
tanh: nan -> nan; 0? -> x1; inf -> 1; -inf -> -1
trunc: nan -> nan; int -> x1; inf? -> x1; 0? -> x1; 0.5 -> 0; -0.5 -> -0
"""

COMPLEX = """
abs: inf? any -> inf; any inf? -> inf; 0? 0? -> 0; f nan -> nan; nan f -> nan; nan nan -> nan
acos: 0? 0 -> pi/2 -0; 0? nan -> pi/2 nan; f inf -> pi/2 -inf; nzf nan -> nan nan; -inf +f -> pi -inf
acos: inf +f -> 0 -inf; -inf inf -> 3pi/4 -inf; inf inf -> pi/4 -inf; inf? nan -> nan inf?; nan f -> nan nan
acos: nan inf -> nan -inf; nan nan -> nan nan
acosh: 0? 0 -> 0 pi/2; 0 nan -> nan pi/2|-pi/2; f inf -> inf pi/2; nzf nan -> nan nan; -inf +f -> inf pi
acosh: inf +f -> inf 0; -inf inf -> inf 3pi/4; inf inf -> inf pi/4; inf? nan -> inf nan; nan f -> nan nan
acosh: nan inf -> inf nan; nan nan -> nan nan
asinh: 0 0 -> 0 0; +f inf -> inf pi/2; f nan -> nan nan; inf +f -> inf 0; inf inf -> inf pi/4; inf nan -> inf nan
asinh: nan 0 -> nan 0; nan nzf -> nan nan; nan inf -> inf? nan; nan nan -> nan nan
atanh: 0 0 -> 0 0; 0 nan -> 0 nan; 1 0 -> inf 0; +f inf -> 0 pi/2; nzf nan -> nan nan; inf +f -> 0 pi/2
atanh: inf inf -> 0 pi/2; inf nan -> 0 nan; nan f -> nan nan; nan inf -> 0? pi/2; nan nan -> nan nan
cosh: 0 0 -> 1 0; 0 inf -> nan 0?; 0 nan -> nan 0?; nzf inf -> nan nan; nzf nan -> nan nan; inf 0 -> inf 0
cosh: inf nzf -> inf*cos inf*sin; inf inf -> inf? nan; inf nan -> inf nan; nan 0? -> nan 0?; nan nzf -> nan nan
cosh: nan nan -> nan nan
exp: 0? 0 -> 1 0; f inf -> nan nan; f nan -> nan nan; inf 0 -> inf 0; inf nzf -> inf*cos inf*sin
exp: -inf nzf -> 0*cos 0*sin; -inf inf -> 0? 0?; inf inf -> inf? nan; -inf nan -> 0? 0?; inf nan -> inf? nan
exp: nan 0 -> nan 0; nan nzf -> nan nan; nan nan -> nan nan
expm1: 0? 0 -> 0 0; f inf -> nan nan; f nan -> nan nan; inf 0 -> inf 0; inf nzf -> inf*cos inf*sin
expm1: -inf nzf -> -1 0*sin; -inf inf -> -1 0?; inf inf -> inf? nan; -inf nan -> -1 0?; inf nan -> inf? nan
expm1: nan 0 -> nan 0; nan nzf -> nan nan; nan nan -> nan nan
log: -0 0 -> -inf pi; 0 0 -> -inf 0; f inf -> inf pi/2; f nan -> nan nan; -inf +f -> inf pi; inf +f -> inf 0
log: -inf inf -> inf 3pi/4; inf inf -> inf pi/4; inf? nan -> inf nan; nan f -> nan nan; nan inf -> inf nan
log: nan nan -> nan nan
log1p: -1 0 -> -inf 0; f inf -> inf pi/2; f nan -> nan nan; -inf +f -> inf pi; inf +f -> inf 0
log1p: -inf inf -> inf 3pi/4; inf inf -> inf pi/4; inf? nan -> inf nan; nan f -> nan nan; nan inf -> inf nan
log1p: nan nan -> nan nan
sign: 0? 0? -> 0 0; inf nzf -> 1 0; nzf -inf -> 0 -1; inf? inf? -> nan nan; nan any -> nan nan; any nan -> nan nan
sinh: 0 0 -> 0 0; 0 inf -> 0? nan; 0 nan -> 0? nan; +f inf -> nan nan; +f nan -> nan nan; inf 0 -> inf 0
sinh: inf +f -> inf*cos inf*sin; inf inf -> inf? nan; inf nan -> inf? nan; nan 0 -> nan 0; nan nzf -> nan nan
sinh: nan nan -> nan nan
sqrt: 0? 0 -> 0 0; any inf -> inf inf; f nan -> nan nan; -inf +f -> 0 inf; inf +f -> inf 0; -inf nan -> nan inf?
sqrt: inf nan -> inf nan; nan f -> nan nan; nan nan -> nan nan
tan: 0 0 -> 0 0; +f inf -> 0 1; nzf nan -> nan nan; inf inf -> 0? 1; nan inf -> 0? 1; nan nan -> nan nan
tanh: 0 0 -> 0 0; 0 inf -> 0 nan; nzf inf -> nan nan; 0 nan -> 0 nan; nzf nan -> nan nan; inf +f -> 1 0
tanh: -inf +f -> -1 0; inf inf -> 1 0?; inf nan -> 1 0?; nan 0 -> nan 0; nan nzf -> nan nan; nan nan -> nan nan
"""


def number(token):
    """The number that a token names."""
    sign = -1.0 if token.startswith("-") and token[1:] in NAMES else 1.0
    name = token[1:] if sign < 0 else token
    return sign * NAMES[name] if name in NAMES else float(token)


def values(token):
    """The numbers that a token stands for."""
    return CLASSES[token] if token in CLASSES else [number(token)]


def wanted(token, operands):
    """The results that a token allows."""
    for t in token.split("|"):
        if t in ("x1", "x2"):
            yield operands[int(t[1]) - 1]
        elif "*" in t:
            factor, function = t.split("*")
            yield float(factor) * getattr(math, function)(operands[-1])
        else:
            yield from values(t)


def same(got, want):
    """Equal to rounding, with the same sign."""
    if math.isnan(want):
        return math.isnan(got)
    if want == 0 or math.isinf(want):
        return got == want and math.copysign(1, got) == math.copysign(1, want)
    return math.isclose(got, want, rel_tol=1e-6)


def rows_of(left):
    """The operands, or parts of a complex operand, that tokens stand for."""
    return list(itertools.product(*map(values, left)))


def assert_parts(name, rows, right, results):
    """Compare the parts of complex results, or real results, with tokens."""
    for row, got in zip(rows, np.asarray(results).tolist(), strict=True):
        parts = (got.real, got.imag) if len(right) == 2 else (got,)
        for part, token in zip(parts, right, strict=True):
            assert any(same(part, w) for w in wanted(token, row)), (name, row, got, right)


def cases(table):
    """``(function, tokens of operands, tokens of results)`` of each case."""
    for line in table.strip().splitlines():
        name, rest = line.split(":", 1)
        for case in rest.split(";"):
            left, right = case.split("->")
            yield name, left.split(), right.split()
