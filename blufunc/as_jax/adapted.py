"""Functions of JAX whose keywords have no counterpart: adapted to blufunc's.

Under the face ``as_jax``. ``out_sharding`` constrains the result, as a sharding constraint does anywhere in blufunc.
Hints to XLA that change no result are accepted.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from blufunc import errors, lax
from blufunc.as_jax import array_names
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.avals import Unsharded
from blufunc.core.pytree import tree
from blufunc.parallel.programs.placement import with_sharding_constraint

_OUT_SHARDING = {
    "jax.numpy": """
        arange array asarray bincount broadcast_to dot einsum empty full full_like matmul ones ones_like percentile
        ravel repeat reshape tensordot zeros zeros_like
    """,
    "jax.numpy.linalg": "tensordot",
    "jax.nn.initializers": "ones zeros",
    "jax.lax": """
        broadcast broadcast_in_dim broadcasted_iota conv_general_dilated dot dot_general empty full full_like ragged_dot
        ragged_dot_general reduce reduce_sum reshape
    """,
    "jax.random": """
        ball bernoulli beta bits categorical cauchy chisquare dirichlet exponential f gamma generalized_normal geometric
        gumbel laplace loggamma logistic lognormal maxwell multivariate_normal normal orthogonal pareto permutation
        poisson rademacher randint rayleigh t triangular truncated_normal uniform wald
    """,
}

_SHARDING = ("full", "full_like")
"""Functions of ``jax.lax`` that call the keyword ``sharding``."""

_POSITIONS = {
    "jax.numpy": """
        argwhere bincount count_nonzero flatnonzero lexsort ravel_multi_index tril_indices triu_indices unravel_index
    """,
    "jax.numpy.linalg": "matrix_rank",
}
"""Functions of positions and counts, which have 64 bits in the wide mode."""

_HINTS: dict[tuple[str, str], dict[str, tuple]] = {
    ("jax.lax", "scan"): {"_split_transpose": (False, None)},
    ("jax.numpy", "einsum"): {"_dot_general": (None, lax.dot_general)},
}
"""Keywords that are hints, and accepted values, the default first."""


_OWN = {("jax.numpy", "reshape"): array_names.reshape}
"""Functions that differ in more than keywords."""


def find(module: str, name: str) -> Callable | None:
    """The adapted function of a module of JAX, or None."""
    own = _OWN.get((module, name))
    sharded = name in _OUT_SHARDING.get(module, "").split()
    hints = _HINTS.get((module, name), {})
    positions = name in _POSITIONS.get(module, "").split()
    if not sharded and not hints and not positions:
        return None
    try:
        function = own or getattr(importlib.import_module("blufunc" + module.removeprefix("jax")), name)
    except AttributeError:
        return None

    @functools.wraps(function)
    def adapted(*args: Any, **kwargs: Any) -> Any:
        for hint, means in hints.items():
            given = kwargs.pop(hint, means[0])
            if not any(getattr(given, "__wrapped__", given) is value for value in means):
                raise errors.UnsupportedError(
                    f"{module}.{name}({hint}={given!r:.60}) is not in blufunc.", where=source.here()
                )
        sharding = kwargs.pop(
            "sharding" if module == "jax.lax" and name in _SHARDING else "out_sharding", None
        )
        out = function(*args, **kwargs)
        if positions and dtypes.is_wide():
            out = tree.map(lambda x: x.astype("int64") if x.dtype == dtypes.int32 else x, out)
        if sharding is None or isinstance(sharding, Unsharded):
            return out
        return with_sharding_constraint(out, sharding)

    return adapted
