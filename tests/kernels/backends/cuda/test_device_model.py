"""Device model: limits by compute capability; each figure is defined once."""

import ast
from pathlib import Path

import pytest

import blufunc.kernels
from blufunc.kernels.backends.cuda import device_model
from blufunc.kernels.backends.cuda.device_model import HOPPER, SM_COUNT, Limits, limits_of

FIGURES = {SM_COUNT, device_model.SHARED_BYTES, device_model.L2_BYTES}


def _value(node):
    """Integer value of an expression of literals, or None."""
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
    except Exception:
        return None
    return value if type(value) is int else None


def _repeated(source):
    """Lines that repeat a figure of the H200 or the warp size."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Constant, ast.BinOp)) and _value(node) in FIGURES:
            found.add(node.lineno)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.strip("_") == "WARP":
            found.add(node.lineno)
    return sorted(found)


@pytest.mark.slow
def test_figures_of_a_device_are_in_the_device_model_alone():
    folder = Path(blufunc.kernels.__file__).parent
    found = {str(p.relative_to(folder)): _repeated(p.read_text()) for p in folder.rglob("*.py")}
    assert [name for name, lines in found.items() if lines] == ["backends/cuda/device_model.py"]


@pytest.mark.parametrize(
    "line", ["_SMS = 132", "f(132)", "x = 227 << 10", "_WARP = 2 ** 5", "_CACHE = 50 * 1048576"]
)
def test_a_figure_elsewhere_is_found(line):
    assert _repeated(f"n = 7\n{line}\n") == [2]


def test_limits_by_capability():
    assert limits_of((8, 0), 163 << 10) == Limits(163 << 10, cluster=1)
    assert limits_of((9, 0), 227 << 10) == HOPPER and HOPPER.bulk and not limits_of((8, 9), 99 << 10).bulk
