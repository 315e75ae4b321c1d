"""Reference functions with cumulative operations, for the CUDA renderer.

Rows of ``test_cstyle_cuda``, as in ``cuda_functions.py``: a function with the shapes and dtypes of its arguments.
"""

import blufunc.numpy as bnp
from blufunc import lax, nn
from tests.emulation.cuda_functions import BF16, F32, F64, I32, ranged


def scans(x, reverse=False):
    """Two scans of a row, and a function of them."""
    return lax.cumsum(x * 2, 1, reverse=reverse) + lax.cummax(x, 1, reverse=reverse)


def scanned_softmax(x):
    """A scan whose result is reduced, and read again."""
    return nn.softmax(bnp.cumsum(x * 2, -1))


SMALL_SCANS = {
    "scan of part of a warp": (scans, ranged((8, 24))),
    "scan of one thread each": (scans, ranged((32, 4))),
    "scan of a warp": (scans, ranged((5, 520))),
    "scan of a warp, odd": (lambda x: scans(x, True), ranged((7, 37))),
    "scan of a block": (lambda x: scans(x, True), ranged((2, 4096))),
    "scan of a block, odd": (scans, ranged((2, 1541))),
    "scan, too long to keep": (scanned_softmax, ranged((2, 33000))),
    "scan of a long row from the end": (lambda x: lax.cumprod(x, 1, reverse=True), ranged((2, 10007))),
    "scans kept": (scanned_softmax, ranged((3, 1540))),
    "scans both ways": (
        lambda x: lax.cumsum(lax.cumsum(x, 1), 1, reverse=True) * lax.cummax(x, 1),
        ranged((3, 1500)),
    ),
    "scan bf16": (lambda x: bnp.cumsum(x * 2, 1), ranged((5, 264), dtype=BF16)),
    "scan i32": (lambda x: lax.cummin(x, 1), ranged((3, 2050), dtype=I32)),
    "log scan": (lambda x: lax.cumlogsumexp(x, 1), ranged((3, 300))),
    "scan f64": (lambda x: lax.cumsum(x, 1, reverse=True), ranged((3, 2050), dtype=F64)),
    "scans and sums over rows": (lambda x: (bnp.cumsum(x, 1), bnp.cumsum(x, 1).sum(0)), ranged((11, 1030))),
    "scans and sums over short rows": (lambda x: bnp.cumsum(x, 1).sum(0), ranged((11, 96))),
    "scan of a row in chunks": (lambda x: bnp.cumsum(x * 2) - x, ranged((66000,))),
    "scan of a row in chunks, odd": (lambda x: lax.cummax(x, 1, reverse=True), ranged((2, 65537))),
    "scan over rows": (lambda x: bnp.cumsum(x * 2, 0) - x, ranged((77, 96))),
    "scan over rows, odd": (lambda x: lax.cumsum(x, 0, reverse=True), ranged((300, 35))),
    "scan over the middle": (lambda x: lax.cummax(x, 1) + x, ranged((3, 70, 33))),
    "scan and sum over rows": (
        lambda x: (lax.cumlogsumexp(x, 0), lax.cumlogsumexp(x, 0).sum(0)),
        ranged((67, 40)),
    ),
    "scans over rows bf16": (
        lambda x: lax.cumsum(lax.cummin(x, 0), 0).astype(F32),
        ranged((40, 64), dtype=BF16),
    ),
}
"""Each is run."""

LARGE_SCANS = {
    "scan": (lambda x: bnp.cumsum(x * 2, 1), ranged((4096, 4096))),
    "softmax of a scan": (scanned_softmax, ranged((4096, 4096))),
    "softmax of a long scan": (scanned_softmax, ranged((64, 1000000))),
    "scan bf16": (lambda x: lax.cumsum(x, 1, reverse=True), ranged((16384, 768), dtype=BF16)),
    "scan of a row": (lambda x: bnp.tanh(bnp.cumsum(x * 2)), ranged((10_000_000,))),
    "scan over rows": (lambda x: bnp.cumsum(x * 2, 0), ranged((4096, 4096))),
    "scans over rows": (lambda x: lax.cumlogsumexp(lax.cumsum(x, 1), 1), ranged((8, 16384, 1000))),
    "many scans over rows f64": (
        lambda x: [op(x, 0) for op in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)],
        ranged((2048, 2048), dtype=F64),
    ),
    "log scan": (lambda x: lax.cumlogsumexp(x, 1), ranged((4096, 4096))),
    "scan f64": (lambda x: lax.cumprod(x, 1), ranged((1024, 5000), dtype=F64)),
}
"""Each is compiled."""
