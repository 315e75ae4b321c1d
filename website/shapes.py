"""Shapes and dtypes of results, measured: a small call of each function of arrays.

In: a function. Out: calls as text, with the types of their results. A call of ``calls.toml`` is evaluated as it is
written there; without one, arguments are tried by the number of required parameters. Everything shown has run.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp

CALLS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "calls.toml").read_text())


class Call(NamedTuple):
    """A call and the type of its result.

    Attributes:
      source: the call, with arrays by their types.
      result: the type of the result.
    """

    source: str
    result: str


class _Kind:
    """Arrays of a dtype: ``f32[3, 4]`` has values between 0.1 and 0.9."""

    def __init__(self, name: str, dtype: str):
        self.name, self.dtype = name, dtype

    def __getitem__(self, shape: Any) -> bf.Array:
        shape = shape if isinstance(shape, tuple) else (shape,)
        n = int(np.prod(shape, dtype=int))
        if self.dtype == "bool":
            values: np.ndarray = np.arange(n) % 2 == 0
        elif self.dtype.startswith(("int", "uint")):
            values = np.arange(n) % 3
        else:
            values = 0.1 + 0.8 * ((np.arange(n) * 0.618) % 1)
        if len(shape) >= 2 and shape[-1] == shape[-2] and self.dtype == "float32":  # positive definite
            square = values.reshape(shape)
            values = (square + np.swapaxes(square, -1, -2)) / 2 + 2 * np.eye(shape[-1])
        return jnp.asarray(values.reshape(shape), dtype=self.dtype)


f32, i32, b1, c64, u8 = (
    _Kind(*pair)
    for pair in (
        ("f32", "float32"),
        ("i32", "int32"),
        ("bool", "bool"),
        ("c64", "complex64"),
        ("u8", "uint8"),
    )
)

ARRAYS = ("f32[3, 4]", "f32[4, 4]", "i32[3, 4]", "f32[4]", "b1[3, 4]", "c64[3, 4]")
SECOND = ("f32[4]", "f32[3, 4]", "f32[4, 4]", "i32[4]", "i32[3, 4]", "b1[3, 4]", "2", "(3, 4)")
BY_NAME = {
    "key": ("key",), "rng_key": ("key",), "keys": ("key",), "shape": ("(3, 4)",), "shapes": ("(3, 4)",),
    "axis": ("0",), "axes": ("(0,)",), "dtype": ("'float32'",), "n": ("2", "f32[4]"), "k": ("2", "i32[4]"),
    "num": ("2",), "M": ("4",), "N": ("4",),
}  # fmt: skip


def names() -> dict[str, Any]:
    """The namespace in which calls are evaluated."""
    return {
        "bf": bf, "jnp": jnp, "np": np, "f32": f32, "i32": i32, "b1": b1, "c64": c64, "u8": u8, "lax": bf.lax,
        "nn": bf.nn, "key": bf.random.key(0), "random": bf.random,
    }  # fmt: skip


def typed(value: Any) -> str:
    """The type of a result: of arrays, and of containers of them."""
    if isinstance(value, bf.Array):
        text = str(bf.typeof(value)).lstrip("~")
        return text
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        inside = ", ".join(f"{n}={typed(v)}" for n, v in value._asdict().items())
        return f"{type(value).__name__}({inside})"
    if isinstance(value, (tuple, list)):
        left, right = "()" if isinstance(value, tuple) else "[]"
        return left + ", ".join(map(typed, value)) + right
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {typed(v)}" for k, v in value.items()) + "}"
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype}{list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value).__name__
    return type(value).__name__


def _holds_array(value: Any) -> bool:
    return any(isinstance(v, (bf.Array, np.ndarray)) for v in bf.tree.leaves(value))


def _evaluate(function: Any, source: str) -> Any:
    space = names() | {"f": function}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return eval(source[2:] if source.startswith("= ") else f"f({source})", space)


def _shown(name: str, source: str, value: Any) -> Call:
    text = re.sub(r"\bf\(", f"{name}(", source[2:]) if source.startswith("= ") else f"{name}({source})"
    text = re.sub(r"(\d), (?=\d+\])", r"\1,", text.replace("b1[", "bool["))
    return Call(re.sub(r"(\d), (?=\d+\])", r"\1,", text), typed(value))


@functools.cache
def _candidates(n: int) -> list[tuple[str, ...]]:
    if n == 1:
        return [(a,) for a in ARRAYS]
    return [(a, *rest) for a in ARRAYS[:5] for rest in itertools.product(SECOND, repeat=n - 1)]


def measured(path: str, name: str, function: Any) -> list[Call]:
    """Calls of a function with the types of their results.

    Args:
      path: its public name, by which ``calls.toml`` has calls for it.
      name: the name to show.
      function: the function.

    Returns:
      calls; none if no arguments were found that it takes.
    """
    if (given := CALLS.get(path.removeprefix("blufunc."))) is not None:
        sources = [given] if isinstance(given, str) else given
        return [_shown(name, source, _evaluate(function, source)) for source in sources]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if (
        any(p.default is p.empty and p.kind is p.KEYWORD_ONLY for p in parameters)
        or not 0 < len(required) <= 4
    ):
        return []
    fixed = [BY_NAME.get(p.name) for p in required]
    free = [i for i, given in enumerate(fixed) if given is None]
    for choice in _candidates(len(free)) if free else [()]:
        for named in itertools.product(*(given for given in fixed if given is not None)):
            arguments, by_name, by_choice = [], iter(named), iter(choice)
            for given in fixed:
                arguments.append(next(by_choice) if given is None else next(by_name))
            source = ", ".join(arguments)
            try:
                value = _evaluate(function, source)
            except Exception:  # no types that it takes: the next ones
                continue
            if not _holds_array(value):
                return []
            found = [_shown(name, source, value)]
            if any(p.name == "axis" and p not in required for p in parameters):
                for more in ("axis=0", "axis=1"):
                    try:
                        other = _evaluate(function, f"{source}, {more}")
                    except Exception:  # it takes another axis
                        continue
                    if typed(other) != found[0].result:
                        found.append(_shown(name, f"{source}, {more}", other))
                        break
            return found
    return []
