"""``checkify``: run-time checks that are values of a compiled program.

Face over ``transforms.extension.checks``.
"""

from __future__ import annotations

from blufunc.errors import CheckError as JaxRuntimeError
from blufunc.transforms.extension.checks import (
    Error,
    ErrorCategory,
    all_checks,
    automatic_checks,
    check,
    check_error,
    checkify,
    debug_check,
    div_checks,
    float_checks,
    index_checks,
    nan_checks,
    no_error,
    user_checks,
)

init_error = no_error()

__all__ = [
    "Error", "ErrorCategory", "JaxRuntimeError", "all_checks", "automatic_checks", "check", "check_error", "checkify",
    "debug_check", "div_checks", "float_checks", "index_checks", "init_error", "nan_checks", "user_checks",
]  # fmt: skip
