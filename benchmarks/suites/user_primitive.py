"""A user-defined elementwise primitive, against the same in ``blufunc.numpy``.

The primitive stands between two operations and has a definition, or a C form. Both programs are compiled by ``jit``
and timed alternately on the same array. A ratio above 1 is the overhead of the primitive. ``--device cuda`` measures
on the first GPU.
"""

from __future__ import annotations

import argparse
import warnings

import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from benchmarks.harness.timing import report, row, together
from blufunc import extend

SIZES = (1 << 20, 1 << 24)


def softsign(x):
    """The plain form."""
    return x / (1 + bnp.abs(x))


def _impl(x):
    return x / (1 + np.abs(x))


def primitives() -> dict[str, extend.Elementwise]:
    """Primitives to compare, by name."""
    slope = [lambda t, ans, x: t / bnp.square(1 + bnp.abs(x))]
    form = extend.CForm({"f": "{0} / (1 + bf_abs({0}))"})
    return {
        "definition": extend.Elementwise("softsign", _impl, "float", lower=softsign),
        "definition and derivative": extend.Elementwise("softsign_d", _impl, "float", slope, lower=softsign),
        "C form": extend.Elementwise("softsign_c", _impl, "float", slope, lower=form, cost=6),
        "impl alone": extend.Elementwise("softsign_np", _impl, "float", slope),
    }


def main() -> None:
    """Print a line for each primitive, size and mode."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    device = bf.devices(options.device)[0]
    warnings.simplefilter(
        "ignore", bf.errors.HostPrimitiveWarning
    )  # of the last, which is here for comparison
    rows = []
    for n in SIZES:
        x = bf.device_put(bnp.linspace(-3, 3, n), device)
        for mode in ("forward", "gradient"):
            plain = _program(softsign, mode)
            want = np.asarray(plain(x))
            for name, prim in primitives().items():
                mine = _program(prim.bind, mode)
                np.testing.assert_allclose(mine(x), want, 1e-5, 1e-6)
                calls = options.calls if n < 1 << 22 else max(3, options.calls // 4)
                ours, theirs = together(_calling(mine, x), _calling(plain, x), calls)
                what = f"{name}, {mode}, {n >> 20} Mi floats"
                rows.append(row(what, ours * 1e6, theirs * 1e6, peer="blufunc.numpy"))
    report("user_primitive", rows, options.device, str(device) if options.device == "cuda" else "")


def _calling(program, x):
    return lambda: program(x).block_until_ready()


def _program(f, mode: str):
    between = lambda x: f(x * 2) + 1
    return bf.jit(between if mode == "forward" else bf.grad(lambda x: between(x).sum()))


if __name__ == "__main__":
    main()
