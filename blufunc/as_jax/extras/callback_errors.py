"""Errors of callbacks as JAX raises them: ``JaxRuntimeError`` for any error.

Under the face ``as_jax``. Programs for JAX catch that class, and look for the name and the words of their own error
in its text. Under blufunc's own name the error itself passes through.
"""

from __future__ import annotations

from blufunc import errors

__all__ = ["CallbackError", "as_raised"]


class CallbackError(errors.DeviceError):
    """A function that a program calls raised an error, which is the cause of this one."""


def as_raised(api: str, name: str, error: Exception, where: str | None) -> Exception:
    """The error of a program whose callback ``name`` raised ``error``."""
    if isinstance(error, errors.JaxRuntimeError):
        return error
    cls = type(error)
    kind = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return CallbackError(f"{api}: {name} raised {kind}: {error}", where=where)
