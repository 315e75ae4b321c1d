"""Settings for a block or a function, under the names that JAX has for them.

Face over ``config``. Each sets flags for this thread until the end of the block; as a decorator, during each call. A
function that was traced before runs the program of that trace, except that each matmul precision has
programs of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import _GeneratorContextManager, contextmanager
from typing import Any

from blufunc.config import PRECISIONS, STAGES, config, platform_of
from blufunc.core.arrays.backend import Device
from blufunc.core.ir.trace import state


def debug_nans(on: bool = True) -> _GeneratorContextManager[None]:
    """Look for NaN in every result: ``config.debug_nans``."""
    return config.overridden(debug_nans=on)


def debug_infs(on: bool = True) -> _GeneratorContextManager[None]:
    """Look for infinities in every result: ``config.debug_infs``."""
    return config.overridden(debug_infs=on)


def debug_key_reuse(on: bool = True) -> _GeneratorContextManager[None]:
    """Refuse random keys that are used twice: ``config.debug_key_reuse``."""
    return config.overridden(debug_key_reuse=on)


def enable_checks(on: bool = True) -> _GeneratorContextManager[None]:
    """Verify every jaxpr, kernel and plan: ``config.check``."""
    return config.overridden(check=on)


@contextmanager
def log_compiles(on: bool = True) -> Iterator[None]:
    """Print why functions are traced, and what is compiled, by ``config.debug``."""
    logged = ("retrace", "compile")
    stages = [s for s in STAGES if (on if s in logged else config.shows(s))]
    with config.overridden(debug=",".join(stages)):
        yield


def default_device(device: Device | str | None) -> _GeneratorContextManager[None]:
    """Make new arrays on a device or platform (``"gpu"``); None is the CPU."""
    return config.overridden(default_device="" if device is None else platform_of(str(device)))


def default_matmul_precision(precision: str | None) -> _GeneratorContextManager[None]:
    """Multiply float32 matrices in a precision, by its name in JAX or here.

    Raises:
      ValueRangeError: there is no such precision.
    """
    name = "default" if precision is None else str(precision)
    return config.overridden(matmul_precision=PRECISIONS.get(name, name))


@contextmanager
def _promotion(flag: str, value: str) -> Iterator[None]:
    # among the scopes of the thread, too: functions under ``jit`` are then traced for each value
    before = state.context
    with config.overridden(**{flag: value}):
        state.context = (*before, f"{flag}={value}")
        try:
            yield
        finally:
            state.context = before


def numpy_rank_promotion(value: str) -> _GeneratorContextManager[None]:
    """Allow, warn about or refuse operands of different ranks, none of them 0.

    Functions under ``jit`` are traced again inside. Operators of ``numpy`` alone promote: those of ``lax`` take
    arrays of one rank.
    """
    return _promotion("numpy_rank_promotion", value)


def numpy_dtype_promotion(value: str) -> _GeneratorContextManager[None]:
    """Promote dtypes as usual (``standard``), or those of Python scalars only."""
    return _promotion("numpy_dtype_promotion", value)


def enable_x64(new_val: bool = True) -> _GeneratorContextManager[None]:
    """No effect if False: an explicit 64-bit dtype is honoured always.

    Raises:
      UnsupportedError: True, in the block: it would change the dtype of what has none.
    """
    return _checked("jax_enable_x64", new_val)


def checking_leaks(on: bool = True) -> _GeneratorContextManager[None]:
    """No effect: a tracer that leaks is an error as soon as it is used."""
    return _checked("jax_check_tracer_leaks", on)


check_tracer_leaks = checking_leaks


def threefry_partitionable(new_val: bool = True) -> _GeneratorContextManager[None]:
    """No effect: random bits are partitionable always.

    Raises:
      UnsupportedError: False, in the block.
    """
    return _checked("jax_threefry_partitionable", new_val)


def default_prng_impl(new_val: str = "threefry2x32") -> _GeneratorContextManager[None]:
    """No effect: there is one generator.

    Raises:
      UnsupportedError: the name of another one, in the block.
    """
    return _checked("jax_default_prng_impl", new_val)


@contextmanager
def explain_cache_misses(on: bool = True) -> Iterator[None]:
    """Print why functions are traced again, by ``config.debug``."""
    stages = [s for s in STAGES if (on if s == "retrace" else config.shows(s))]
    with config.overridden(debug=",".join(stages)):
        yield


@contextmanager
def _checked(name: str, value: Any) -> Iterator[None]:
    config.update(name, value)  # raises for values that a flag cannot have
    yield


class set_mesh:
    """Make a mesh current, from now on or in a ``with`` block, which gets the mesh."""

    def __init__(self, mesh: Any):
        self.mesh = mesh
        mesh.__enter__()

    def __enter__(self) -> Any:
        return self.mesh

    def __exit__(self, *exc: object) -> None:
        self.mesh.__exit__(*exc)
