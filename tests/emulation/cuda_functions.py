"""Reference functions for the CUDA renderer: small ones run, others compile.

A row is a function with the shapes and dtypes of its arguments. ``kernels`` returns the kernels that the compiler
would generate.
"""

import dataclasses

import ml_dtypes
import numpy as np

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn
from blufunc.core.programs.simplify import inline_bodies, simplify
from blufunc.kernels.backends.cuda.target import CUDA
from blufunc.kernels.fusion.fuse import Region, fuse
from blufunc.kernels.lower.region import lower
from blufunc.kernels.precision import ALGORITHMS
from blufunc.kernels.rewrites.loops.pointwise_control_flow import with_point_control
from blufunc.kernels.rewrites.split_float32 import parts_of
from blufunc.nn import vocabulary_loss_call

F32, F64, F16, I32, BOOL, C64 = (
    np.dtype(d) for d in ("float32", "float64", "float16", "int32", "bool", "complex64")
)
BF16 = np.dtype(ml_dtypes.bfloat16)
SMALL = dataclasses.replace(
    CUDA,
    chunks=lambda rows, lanes: min(rows, 3),
    tile_chunks=lambda rows, tiles: min(rows, 4),
    total_chunks=lambda size: min(size, 5),
)
"""Few chunks, so that they hold more than a row."""


def kernels(function, shapes, target=CUDA):
    """The kernels of a function of arrays of ``shapes``: pairs of shape and dtype."""
    jaxpr = bf.make_jaxpr(function)(*[bf.ShapeDtypeStruct(s, d) for s, d in shapes])
    jaxpr, origins = inline_bodies(simplify(getattr(jaxpr, "jaxpr", jaxpr)))
    fusion = fuse(with_point_control(jaxpr, origins))
    return [x.kernel for s in fusion.steps if isinstance(s, Region) for x in lower(s, fusion, target)]


def backward(function):
    """Values and cotangents."""
    return lambda *args: bf.vjp(function, *args[:-1])[1](args[-1])


def cross_entropy(logits, labels):
    """The mean over rows."""
    return nn.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def chunk_loss(logits, labels):
    """Loss of a chunk and gradient of its logits, as in ``linear_cross_entropy``."""
    how = vocabulary_loss_call.How(label_smoothing=0.1, z_loss=1e-4)
    losses, *parts = vocabulary_loss_call.chunk_losses(how, logits.astype("float32"), labels)
    shares = bnp.where(labels == 2, 0.0, 0.25)
    gradient = vocabulary_loss_call.chunk_gradient(how, None, parts, labels, shares)
    return losses, gradient.astype(logits.dtype)


def adamw(p, g, m, v):
    """One update."""
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * (m / (bnp.sqrt(v) + 1e-8) + 0.1 * p), m, v


def heads(x):
    """Heads before positions."""
    return bnp.transpose(x.reshape(*x.shape[:2], -1, 16), (0, 2, 1, 3))


def scaled(x, axis=1):
    """An array, and its float16 part with a scale per row (or column)."""
    return x, *parts_of(x, (axis,), ALGORITHMS["F16_F16_F32_SCALED"])


def crowded(x, scale, bias, g, more):
    """Gradient of a layer norm and its residual, with maxima of its rows and columns."""
    found = backward(nn.layer_norm)(x, scale, bias, g)
    total = found[0] + more
    largest = bnp.abs(total)
    rows = 1 / (1 + largest.max(1, keepdims=True))
    return total, (total * rows).astype("float16"), total.sum(0), largest.max(0), *found[1:]


def gelu_gradient(x, b, g):
    """GELU gradient for TF32 training: as is, in scaled float16, and column sums."""
    made = backward(lambda x, b: nn.gelu(x + b))(x, b, g)
    return *scaled(made[0]), made[1]


def scaled_loss(x, low, rows, columns, labels):
    """Loss of the logits of a scaled matmul, and the gradient scaled for the next one."""
    scale = rows[:, None] * columns
    loss, gradient = bf.value_and_grad(cross_entropy)((x + low * 2**-11) * scale * scale, labels)
    return loss, *scaled(gradient)


def narrow_top(x):
    """A softmax as by ``autocast``: the maximum in the row's dtype, float32 sums."""
    y = bnp.exp(x.astype("float32") - x.max(1, keepdims=True).astype("float32"))
    return (y / y.sum(1, keepdims=True)).astype(x.dtype), y.sum(1)


def ranged(*shapes, dtype=F32):
    """All of one dtype."""
    return [(s, dtype) for s in shapes]


def newton(x):
    """Square roots, each with its own number of iterations."""
    root = lambda x: lax.while_loop(lambda y: bnp.abs(y * y - x) > 1e-4 * x, lambda y: 0.5 * (y + x / y), x)
    return bf.vmap(root)(bnp.abs(x) + 1) - 1


def escape(x):
    """Escape times: a complex loop with a bounded number of iterations."""

    def point(c):
        step = lambda s: (s[0] * s[0] + c, s[1] + 1)
        inside = lambda s: bnp.real(s[0] * bnp.conj(s[0])) < 4
        return lax.while_loop(inside, step, (bnp.zeros_like(c), 0), max_steps=20)[1]

    return bf.vmap(point)(x)


def switched(which, x):
    """One of three functions of all points."""
    sides = (bnp.exp, lambda x: x * 2, lambda x: lax.fori_loop(0, 3, lambda i, x: x * x - 1, x))
    return lax.switch(which, sides, x) + 1


def _scaled_mass(x, w):
    """A scalar per row, whose result may overwrite the row while it is still read."""
    top = x.max(1, keepdims=True)
    return bnp.exp(x - top).sum(1) * w, (x - top) * w[:, None], x * 2


SMALL_CASES = {
    "a row's mass in the place of a number of it": (_scaled_mass, ranged((3, 33000), (3,))),
    "a row's result in the place of a number of it": (
        lambda x, y: (bnp.tanh(y), bnp.exp(x + bnp.tanh(y)[:, None]).var(-1)),
        ranged((3, 4096), (3,)),
    ),
    "softmax of a warp": (nn.softmax, ranged((5, 128))),
    "softmax of part of a warp": (nn.softmax, ranged((8, 24))),
    "softmax, odd": (nn.softmax, ranged((7, 37))),
    "softmax of a block": (nn.softmax, ranged((3, 1540))),
    "softmax, too long to keep": (nn.softmax, ranged((2, 33000))),
    "softmax bf16": (nn.softmax, ranged((5, 264), dtype=BF16)),
    "softmax f64": (nn.softmax, ranged((5, 66), dtype=F64)),
    "log softmax": (nn.log_softmax, ranged((6, 130))),
    "layer norm": (nn.layer_norm, ranged((9, 768), (768,), (768,))),
    "layer norm f16": (nn.layer_norm, ranged((9, 256), (256,), (256,), dtype=F16)),
    "layer norm, long": (nn.layer_norm, ranged((2, 2048), (2048,), (2048,))),
    "layer norm of rows that are copied": (nn.layer_norm, ranged((2, 33000), (33000,), (33000,))),
    "layer norm backward": (backward(nn.layer_norm), ranged((37, 256), (256,), (256,), (37, 256))),
    "layer norm backward, 768": (backward(nn.layer_norm), ranged((11, 768), (768,), (768,), (11, 768))),
    "layer norm backward, rows ahead": (
        backward(nn.layer_norm),
        ranged((150, 768), (768,), (768,), (150, 768)),
    ),
    "layer norm backward, long": (backward(nn.layer_norm), ranged((7, 2048), (2048,), (2048,), (7, 2048))),
    "layer norm backward bf16": (
        backward(nn.layer_norm),
        ranged((17, 256), (256,), (256,), (17, 256), dtype=BF16),
    ),
    "cross-entropy": (cross_entropy, [((9, 1304), F32), ((9,), I32)]),
    "cross-entropy of long rows": (cross_entropy, [((3, 33000), F32), ((3,), I32)]),
    "cross-entropy of long rows with gradient": (
        bf.value_and_grad(cross_entropy),
        [((3, 33000), F32), ((3,), I32)],
    ),
    "cross-entropy of rows read again with gradient": (
        bf.value_and_grad(cross_entropy),
        [((2, 60000), F32), ((2,), I32)],
    ),
    "cross-entropy with gradient": (bf.value_and_grad(cross_entropy), [((9, 257), F32), ((9,), I32)]),
    "loss of a chunk with gradient": (chunk_loss, [((9, 1304), BF16), ((9,), I32)]),
    "gelu": (lambda x, b: nn.gelu(x + b), ranged((6, 48), (48,))),
    "gelu bf16": (lambda x, b: nn.gelu(x + b), ranged((6, 48), (48,), dtype=BF16)),
    "gelu backward, scaled too": (gelu_gradient, ranged((41, 192), (192,), (41, 192))),
    "layer norm, scaled too": (lambda *a: scaled(nn.layer_norm(*a)), ranged((9, 768), (768,), (768,))),
    "columns, scaled": (lambda x: scaled(bnp.tanh(x), 0), ranged((67, 130))),
    "gradient of cross-entropy of rows read again, scaled too": (
        lambda x, labels: scaled(bf.grad(cross_entropy)(x, labels)),
        [((2, 60000), F32), ((2,), I32)],
    ),
    "loss of scaled logits with gradient, scaled too": (
        scaled_loss,
        [*ranged((2, 33000), (2, 33000), (2,), (33000,)), ((2,), I32)],
    ),
    "softmax with a narrow top": (narrow_top, ranged((5, 264), dtype=BF16)),
    "softmax of long rows with a narrow top": (narrow_top, ranged((2, 40000), dtype=BF16)),
    "softmax of rows read again with a narrow top": (narrow_top, ranged((2, 120000), dtype=F16)),
    "layer norm backward, crowded": (
        crowded,
        ranged((50, 768), (768,), (768,), (50, 768), (50, 768)),
    ),
    "gelu backward, long, scaled too": (gelu_gradient, ranged((13, 3072), (3072,), (13, 3072))),
    "gelu backward": (backward(lambda x, b: nn.gelu(x + b)), ranged((41, 192), (192,), (41, 192))),
    "rows scaled": (lambda x, s: (s * x.sum(1), x * s[:, None]), ranged((9, 1100), (9,))),
    "short rows scaled": (lambda x, s: (s * x.sum(1), x * s[:, None]), ranged((9, 100), (9,))),
    "sum over rows": (lambda x: x.sum(0), ranged((67, 130))),
    "sum over rows, narrow": (lambda x: x.sum(0), ranged((131, 10))),
    "sum over rows, 4 chunks": (lambda x: x.sum(0), ranged((40, 200))),
    "sum over columns": (lambda x: x.sum(1), ranged((13, 70))),
    "max over rows i32": (lambda x: x.max(0), ranged((23, 24), dtype=I32)),
    "all over rows": (lambda x: x.all(0), ranged((23, 24), dtype=BOOL)),
    "sum of everything": (lambda x: x.sum(), ranged((50, 41))),
    "norm": (lambda x: x / bnp.sqrt((x * x).sum()), ranged((64, 32))),
    "sum over the middle": (lambda x: x.sum(1), ranged((3, 17, 24))),
    "sums over outer and inner axes": (lambda x: x.mean((0, 2)), ranged((5, 6, 48))),
    "sums over outer and inner axes, odd": (
        lambda x: x.mean((0, 2)) * x[0, :, 0] + (x * x).sum((0, 2)),
        ranged((5, 6, 11)),
    ),
    "argmax": (lambda x: x.argmax(1), ranged((9, 100))),
    "argmax of a block": (lambda x: x.argmax(1), ranged((2, 3000))),
    "argmin of integers": (lambda x: x.argmin(1), ranged((19, 12), dtype=I32)),
    "heads": (heads, ranged((2, 6, 48))),
    "transpose": (lambda x: bnp.transpose(x), ranged((20, 36))),
    "transposes of a batch": (
        lambda x, y, b: bnp.transpose(x, (0, 2, 1)) * y + bnp.transpose(x * x, (0, 2, 1)) + b,
        ranged((3, 20, 40), (3, 40, 20), (20,)),
    ),
    "transpose bf16": (lambda x: bnp.transpose(x) * 2, ranged((64, 32), dtype=BF16)),
    "reversed": (lambda x: x[:, ::-1] + 1, ranged((5, 32))),
    "shifted": (lambda x: x[:, 1:] - x[:, :-1], ranged((5, 33))),
    "aligned pieces": (lambda x, y: bnp.concatenate([x, y], 1), ranged((5, 16), (5, 24))),
    "pieces": (lambda x, y: bnp.concatenate([x, y], 1), ranged((5, 3), (5, 9))),
    "pad": (lambda x: bnp.pad(x, ((1, 2), (4, 4))), ranged((5, 24))),
    "gather": (lambda t, i: t[i] * 2, [((30, 24), F32), ((7,), I32)]),
    "one hot": (lambda i: nn.one_hot(i, 12), ranged((7,), dtype=I32)),
    "split rotary": (lambda x: bnp.concatenate([-x[..., 16:], x[..., :16]], -1), ranged((3, 4, 32))),
    "complex": (lambda x: bnp.abs(x * x) + bnp.real(x), ranged((4, 12), dtype=C64)),
    "mask": (lambda x, m: bnp.where(m, x, -1.0), [((5, 32), F32), ((5, 32), BOOL)]),
    "casts": (lambda x: (x.astype(BF16) + 1).astype(F32), ranged((5, 32))),
    "integers": (lambda x: (x // 3) % 7, ranged((5, 32), dtype=I32)),
    "dropout": (lambda x: x * bf.random.bernoulli(bf.random.key(3), 0.5, x.shape), ranged((5, 32))),
    "adamw": (adamw, ranged(*[(24, 8)] * 4)),
    "scalar": (lambda x: x * 2 + 1, ranged(())),
    "loops that end apart": (newton, ranged((77,))),
    "loops in vectors": (newton, ranged((64,))),
    "loops bf16": (lambda x: lax.fori_loop(0, 4, lambda i, y: y * x + i, x), ranged((5, 24), dtype=BF16)),
    "loops of complex numbers": (escape, ranged((36,), dtype=C64)),
    "loops in rows": (lambda x: nn.softmax(newton(x.reshape(-1)).reshape(x.shape)), ranged((3, 40))),
    "a loop of one number": (
        lambda x: lax.while_loop(lambda y: y < 99, lambda y: 2 * y + 1, x * x),
        ranged(()),
    ),
    "branches": (switched, [((), I32), ((5, 32), F32)]),
}
"""Each is run."""

_X, _W = (16384, 768), (768,)
LARGE_CASES = {
    "softmax": (nn.softmax, ranged(_X)),
    "softmax of 4096": (nn.softmax, ranged((4096, 4096))),
    "softmax bf16": (nn.softmax, ranged(_X, dtype=BF16)),
    "layer norm": (nn.layer_norm, ranged(_X, _W, _W)),
    "layer norm of 4096": (nn.layer_norm, ranged((16384, 4096), (4096,), (4096,))),
    "layer norm bf16": (nn.layer_norm, ranged(_X, _W, _W, dtype=BF16)),
    "layer norm backward": (backward(nn.layer_norm), ranged(_X, _W, _W, _X)),
    "layer norm backward of 4096": (
        backward(nn.layer_norm),
        ranged((16384, 4096), (4096,), (4096,), (16384, 4096)),
    ),
    "layer norm backward bf16": (backward(nn.layer_norm), ranged(_X, _W, _W, _X, dtype=BF16)),
    "cross-entropy": (cross_entropy, [((8192, 50304), F32), ((8192,), I32)]),
    "cross-entropy with gradient": (bf.value_and_grad(cross_entropy), [((8192, 50304), F32), ((8192,), I32)]),
    "cross-entropy with gradient, longer": (
        bf.value_and_grad(cross_entropy),
        [((16384, 128256), F32), ((16384,), I32)],
    ),
    "loss of a chunk with gradient": (chunk_loss, [((4096, 50304), BF16), ((4096,), I32)]),
    "softmax of 65536": (nn.softmax, ranged((8192, 65536))),
    "layer norm of 262144": (nn.layer_norm, ranged((4096, 262144), (262144,), (262144,))),
    "gelu": (nn.gelu, ranged((16, 1024, 16384))),
    "gelu bf16": (lambda x, b: nn.gelu(x + b), ranged((16384, 3072), (3072,), dtype=BF16)),
    "gelu backward": (
        backward(lambda x, b: nn.gelu(x + b)),
        ranged((16384, 3072), (3072,), (16384, 3072)),
    ),
    "gelu backward, scaled too": (gelu_gradient, ranged((16384, 3072), (3072,), (16384, 3072))),
    "gelu backward, long, scaled too": (gelu_gradient, ranged((16384, 6144), (6144,), (16384, 6144))),
    "layer norm backward, crowded": (crowded, ranged(_X, _W, _W, _X, _X)),
    "layer norm, scaled too": (lambda *a: scaled(nn.layer_norm(*a)), ranged(_X, _W, _W)),
    "columns, scaled": (lambda x: scaled(x, 0), ranged((768, 3072))),
    "gradient of cross-entropy, scaled too": (
        lambda x, labels: scaled(bf.grad(cross_entropy)(x, labels)),
        [((8192, 50304), F32), ((8192,), I32)],
    ),
    "sum over rows": (lambda x: x.sum(0), ranged((16384, 50304))),
    "sum over columns": (lambda x: x.sum(1), ranged((16384, 50304))),
    "sum of everything": (lambda x: x.sum(), ranged((4096, 4096))),
    "loops": (newton, ranged((1 << 20,))),
    "loops of complex numbers": (escape, ranged((1 << 18,), dtype=C64)),
    "branches": (switched, [((), I32), ((1024, 1024), F32)]),
    "argmax": (lambda x: x.argmax(1), ranged((8192, 50304))),
    "adamw": (adamw, ranged(*[(768, 3072)] * 4)),
    "f64": (nn.softmax, ranged((1024, 512), dtype=F64)),
}
"""Each is compiled."""
