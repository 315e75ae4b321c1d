"""Names of algorithms for decompositions, which choose between equal results.

Core operations, below ``spectral``. LAPACK and cuSOLVER choose theirs; an enumerator states a preference that programs
written for JAX may have, and changes nothing.
"""

from __future__ import annotations

import enum
from typing import Any

from blufunc import errors
from blufunc.core.ir import source


class SvdAlgorithm(enum.Enum):
    """Algorithms of ``svd``."""

    DEFAULT = "default"
    QR = "QR"
    JACOBI = "Jacobi"
    POLAR = "polar"
    DIVIDE_AND_CONQUER = "divide_and_conquer"


class EighImplementation(enum.Enum):
    """Algorithms of ``eigh``."""

    QR = "qr"
    JACOBI = "jacobi"
    QDWH = "qdwh"


class EigImplementation(enum.Enum):
    """Libraries for ``eig``."""

    CUSOLVER = "cusolver"
    MAGMA = "magma"
    LAPACK = "lapack"


def check_algorithm(name: str, given: Any, kind: type[enum.Enum]) -> None:
    """Raise unless ``given`` is None or of the enumeration."""
    if given is not None and not isinstance(given, kind):
        raise errors.ArgumentError(
            f"{name}: {given!r:.60} is not one of {kind.__name__}.",
            where=source.here(),
            fix=f"lax.linalg.{next(iter(kind))}, or leave it out",
        )
