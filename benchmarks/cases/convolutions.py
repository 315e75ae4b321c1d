"""Convolutions, pools and norms of images: cases of the breadth suite."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cases.case import BF16, F32, Case, Sizes, normal, positive, weight

LAYOUTS = {
    "NHWC": ("NHWC", "HWIO", "NHWC"),
    "NCHW": ("NCHW", "OIHW", "NCHW"),
    "NWC": ("NWC", "WIO", "NWC"),
    "NDHWC": ("NDHWC", "DHWIO", "NDHWC"),
}


def convolution(
    x: tuple[int, ...],
    outputs: int,
    window: tuple[int, ...],
    dtype: Any = BF16,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
    layout: str = "NHWC",
    causal: bool = False,
    gradient: bool = False,
) -> Case:
    """A convolution with "SAME" or causal padding, or its gradients."""
    axes = len(window)
    last = layout.endswith("C")
    features = x[-1] if last else x[1]
    w = (*window, features // groups, outputs) if last else (outputs, features // groups, *window)
    reach = [dilation * (n - 1) for n in window]
    pads = [(r, 0) if causal else (r // 2, r // 2) for r in reach]
    spatial = x[1:-1] if last else x[2:]
    out = tuple((n + sum(p) - r - 1) // stride + 1 for n, p, r in zip(spatial, pads, reach, strict=True))
    y = (x[0], *out, outputs) if last else (x[0], outputs, *out)

    def forward(m: Any, x: Any, w: Any) -> Any:
        return m.lax.conv_general_dilated(
            x, w, (stride,) * axes, pads, rhs_dilation=(dilation,) * axes,
            dimension_numbers=LAYOUTS[layout], feature_group_count=groups,
        )  # fmt: skip

    def ours(m: Any, x: Any, w: Any, ct: Any = None) -> Any:
        if not gradient:
            return forward(m, x, w)
        return m.vjp(lambda x, w: forward(m, x, w), x, w)[1](ct)

    first = (0, axes + 1, *range(1, axes + 1))  # features second, as PyTorch has them

    def prepare(t: Any, x: Any, w: Any, ct: Any = None) -> tuple:
        if not last:
            return (x, w) if ct is None else (x, w, ct)
        w = w.permute(axes + 1, axes, *range(axes)).contiguous()
        if axes > 1:
            w = w.to(memory_format=t.channels_last if axes == 2 else t.channels_last_3d)
        views = [a.permute(first) for a in (x, ct) if a is not None]
        if axes == 1:  # cuDNN's
            views = [v.contiguous() for v in views]
        return (views[0], w, *views[1:])

    def torch(t: Any, x: Any, w: Any, ct: Any = None) -> Any:
        padded = [r if causal else r // 2 for r in reach]
        both = ([stride] * axes, padded, [dilation] * axes)
        if gradient:
            dx, dw, _ = t.ops.aten.convolution_backward(
                ct, x, w, None, *both, False, [0] * axes, groups, [True, True, False]
            )
            return (_last(dx), dw.permute(*range(2, axes + 2), 1, 0)) if last else (dx, dw)
        y = t.ops.aten.convolution(x, w, None, *both, False, [0] * axes, groups)
        return _last(y) if last else y

    def _last(y: Any) -> Any:
        return y.permute(0, *range(2, axes + 2), 1)

    def make() -> tuple:
        args = normal(*x, dtype=dtype), weight(*w, dtype=dtype, seed=1)
        return (*args, normal(*y, dtype=dtype, seed=2)) if gradient else args

    # PyTorch pads both ends of an axis by the same
    return Case(ours, make, None if causal else torch, prepare)


def transposed(x: tuple[int, ...], outputs: int, gradient: bool = False) -> Case:
    """A transposed convolution of 4 x 4 windows with stride 2, as generators have it."""
    batch, height, width, features = x

    def forward(m: Any, x: Any, w: Any) -> Any:
        return m.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=LAYOUTS["NHWC"])

    def ours(m: Any, x: Any, w: Any, ct: Any = None) -> Any:
        return m.vjp(lambda x, w: forward(m, x, w), x, w)[1](ct) if gradient else forward(m, x, w)

    def prepare(t: Any, x: Any, w: Any, ct: Any = None) -> tuple:
        w = w.flip(0, 1).permute(2, 3, 0, 1).contiguous(memory_format=t.channels_last)
        views = [a.permute(0, 3, 1, 2) for a in (x, ct) if a is not None]
        return (views[0], w, *views[1:])

    def torch(t: Any, x: Any, w: Any, ct: Any = None) -> Any:
        both = ([2, 2], [1, 1], [1, 1], True, [0, 0], 1)
        if not gradient:
            return t.ops.aten.convolution(x, w, None, *both).permute(0, 2, 3, 1)
        dx, dw, _ = t.ops.aten.convolution_backward(ct, x, w, None, *both, [True, True, False])
        return dx.permute(0, 2, 3, 1), dw.permute(2, 3, 0, 1).flip(0, 1)

    def make() -> tuple:
        args = normal(*x, dtype=BF16), weight(4, 4, features, outputs, dtype=BF16, seed=1)
        ct = normal(batch, 2 * height, 2 * width, outputs, dtype=BF16, seed=2)
        return (*args, ct) if gradient else args

    return Case(ours, make, torch, prepare)


def pool(kind: str, x: tuple[int, ...], window: int, stride: int, gradient: bool, dtype: Any = BF16) -> Case:
    """A pool of images with features last, or its gradient."""
    pad = window // 2 if stride < window else 0

    def forward(m: Any, x: Any) -> Any:
        sizes, steps = (1, window, window, 1), (1, stride, stride, 1)
        pads = ((0, 0), (pad, pad), (pad, pad), (0, 0))
        start, combine = (-np.inf, m.lax.max) if kind == "max" else (0.0, m.lax.add)
        y = m.lax.reduce_window(x, np.asarray(start, x.dtype), combine, sizes, steps, pads)
        return y if kind == "max" else y / window**2

    def ours(m: Any, x: Any, ct: Any = None) -> Any:
        return m.vjp(lambda x: forward(m, x), x)[1](ct)[0] if gradient else forward(m, x)

    def torch(t: Any, x: Any, ct: Any = None) -> Any:
        f = t.nn.functional.max_pool2d if kind == "max" else t.nn.functional.avg_pool2d
        x = x.permute(0, 3, 1, 2)
        if not gradient:
            return f(x, window, stride, pad).permute(0, 2, 3, 1)
        x = x.detach().requires_grad_()
        y = f(x, window, stride, pad)
        return t.autograd.grad(y, x, ct.permute(0, 3, 1, 2))[0].permute(0, 2, 3, 1)

    def make() -> tuple:
        y = (x[0], x[1] // stride, x[2] // stride, x[3])
        args = (normal(*x, dtype=dtype),)
        return (*args, normal(*y, dtype=dtype, seed=1)) if gradient else args

    return Case(ours, make, torch)


def batch_norm(x: tuple[int, ...], dtype: Any) -> Case:
    """Batch norm of images with features last, ReLU, and all gradients."""

    def forward(m: Any, x: Any, scale: Any, bias: Any) -> Any:
        wide = x.astype(m.numpy.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        y = (wide - mean) * m.lax.rsqrt(variance + 1e-5) * scale + bias
        return m.nn.relu(y).astype(x.dtype)

    def ours(m: Any, x: Any, scale: Any, bias: Any, ct: Any) -> Any:
        y, back = m.vjp(lambda *a: forward(m, *a), x, scale, bias)
        return y, back(ct)

    def torch(t: Any, x: Any, scale: Any, bias: Any, ct: Any) -> Any:
        x = x.permute(0, 3, 1, 2).detach().requires_grad_()
        scale, bias = scale.detach().requires_grad_(), bias.detach().requires_grad_()
        y = t.relu(t.nn.functional.batch_norm(x, None, None, scale, bias, True))
        dx, *others = t.autograd.grad(y, (x, scale, bias), ct.permute(0, 3, 1, 2))
        return y.permute(0, 2, 3, 1), (dx.permute(0, 2, 3, 1), *others)

    def make() -> tuple:
        return (
            normal(*x, dtype=dtype), positive(x[-1]), normal(x[-1], seed=1), normal(*x, dtype=dtype, seed=2)
        )  # fmt: skip

    return Case(ours, make, torch)


def group_norm(x: tuple[int, ...], groups: int, dtype: Any) -> Case:
    """Group norm of images with features last, SiLU, and all gradients."""

    def forward(m: Any, x: Any, scale: Any, bias: Any) -> Any:
        wide = x.astype(m.numpy.float32).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
        mean, variance = wide.mean((1, 3), keepdims=True), wide.var((1, 3), keepdims=True)
        y = ((wide - mean) * m.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        return m.nn.silu(y * scale + bias).astype(x.dtype)

    def ours(m: Any, x: Any, scale: Any, bias: Any, ct: Any) -> Any:
        y, back = m.vjp(lambda *a: forward(m, *a), x, scale, bias)
        return y, back(ct)

    def torch(t: Any, x: Any, scale: Any, bias: Any, ct: Any) -> Any:
        x = x.permute(0, 3, 1, 2).detach().requires_grad_()
        scale, bias = scale.to(x.dtype).requires_grad_(), bias.to(x.dtype).requires_grad_()
        y = t.nn.functional.silu(t.nn.functional.group_norm(x, groups, scale, bias))
        dx, ds, db = t.autograd.grad(y, (x, scale, bias), ct.permute(0, 3, 1, 2))
        return y.permute(0, 2, 3, 1), (dx.permute(0, 2, 3, 1), ds.float(), db.float())

    def make() -> tuple:
        return (
            normal(*x, dtype=dtype), positive(x[-1]), normal(x[-1], seed=1), normal(*x, dtype=dtype, seed=2)
        )  # fmt: skip

    return Case(ours, make, torch)


def resize(x: tuple[int, ...], factor: int) -> Case:
    """Bilinear interpolation by gathers of four corners, features last."""
    batch, height, width, features = x

    def ours(m: Any, x: Any) -> Any:
        jnp = m.numpy

        def corners(n: int) -> tuple:
            at = jnp.clip((jnp.arange(n * factor) + 0.5) / factor - 0.5, 0, n - 1)
            low = jnp.floor(at).astype(jnp.int32)
            return low, jnp.minimum(low + 1, n - 1), at - low

        top, bottom, down = corners(height)
        left, right, across = corners(width)
        across = across[:, None].astype(x.dtype)
        down = down[:, None, None].astype(x.dtype)
        row = lambda r: x[:, r][:, :, left] * (1 - across) + x[:, r][:, :, right] * across
        return row(top) * (1 - down) + row(bottom) * down

    def torch(t: Any, x: Any) -> Any:
        y = t.nn.functional.interpolate(x.permute(0, 3, 1, 2), scale_factor=factor, mode="bilinear")
        return y.permute(0, 2, 3, 1)

    return Case(ours, lambda: (normal(*x),), torch)


def nearest(x: tuple[int, ...], dtype: Any) -> Case:
    """Nearest upsampling by 2, and the gradient."""

    def ours(m: Any, x: Any, ct: Any) -> Any:
        up = lambda x: m.numpy.repeat(m.numpy.repeat(x, 2, axis=1), 2, axis=2)
        y, back = m.vjp(up, x)
        return y, back(ct)[0]

    def torch(t: Any, x: Any, ct: Any) -> Any:
        x = x.permute(0, 3, 1, 2).detach().requires_grad_()
        y = t.nn.functional.interpolate(x, scale_factor=2, mode="nearest")
        dx = t.autograd.grad(y, x, ct.permute(0, 3, 1, 2))[0]
        return y.permute(0, 2, 3, 1), dx.permute(0, 2, 3, 1)

    ct = (x[0], 2 * x[1], 2 * x[2], x[3])
    return Case(ours, lambda: (normal(*x, dtype=dtype), normal(*ct, dtype=dtype, seed=1)), torch)


def pixel_shuffle(x: tuple[int, ...]) -> Case:
    """Blocks of features to pixels."""
    batch, height, width, features = x

    def ours(m: Any, x: Any) -> Any:
        x = x.reshape(batch, height, width, features // 4, 2, 2).transpose(0, 1, 4, 2, 5, 3)
        return x.reshape(batch, 2 * height, 2 * width, features // 4)

    def torch(t: Any, x: Any) -> Any:
        return t.nn.functional.pixel_shuffle(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)

    return Case(ours, lambda: (normal(*x, dtype=BF16),), torch)


def of_images(n: Sizes) -> dict[str, Case]:
    """All cases of this module."""
    b, side = n(64, 2), n(56, 8)
    image = n((64, 224, 224, 3), (2, 16, 16, 3))
    c = n(64, 8)
    kinds: dict[str, tuple[tuple, dict]] = {
        "conv 3x3, bf16": (((b, side, side, c), c, (3, 3)), {}),
        "conv 3x3, f32": (((b, side, side, c), c, (3, 3)), {"dtype": F32}),
        "conv 3x3, bf16, NCHW": (((b, c, side, side), c, (3, 3)), {"layout": "NCHW"}),
        "conv 1x1, bf16": (((b, side // 2, side // 2, 8 * c), 2 * c, (1, 1)), {}),
        "conv 3x3/2, f32": (((b, side // 2, side // 2, 2 * c), 4 * c, (3, 3)), {"dtype": F32, "stride": 2}),
        "conv 7x7/2 stem, bf16": ((image, c, (7, 7)), {"stride": 2}),
        "conv depthwise 3x3, bf16": (((b, side, side, 2 * c), 2 * c, (3, 3)), {"groups": 2 * c}),
        "conv depthwise 7x7, f32": (
            ((b // 2, side, side, c), c, (7, 7)),
            {"groups": c, "dtype": F32},
        ),
        "conv 32 groups 3x3, bf16": (((b, side // 2, side // 2, 4 * c), 4 * c, (3, 3)), {"groups": n(32, 4)}),
        "conv dilated 3x3, bf16": (((b // 2, side, side, 2 * c), 2 * c, (3, 3)), {"dilation": 4}),
        "conv 1-d causal depthwise, bf16": (
            ((n(8, 2), n(2048, 16), n(2048, 8)), n(2048, 8), (4,)),
            {"groups": n(2048, 8), "layout": "NWC", "causal": True},
        ),
        "conv 1-d of 9, f32": (((n(16, 2), n(1024, 16), n(256, 8)), n(256, 8), (9,)), {"dtype": F32, "layout": "NWC"}),
        "conv 1-d dilated causal, bf16": (
            ((n(16, 2), n(4096, 32), n(128, 8)), n(128, 8), (3,)),
            {"layout": "NWC", "causal": True, "dilation": 8},
        ),
        "conv 3-d 3x3x3, bf16": (
            ((n(4, 1), n(16, 4), side, side, n(32, 8)), n(32, 8), (3, 3, 3)),
            {"layout": "NDHWC"},
        ),
    }  # fmt: skip
    forward_only = {"conv 3x3, bf16, NCHW", "conv 3x3/2, f32"}
    cases = {}
    for name, (shape, options) in kinds.items():
        cases[name] = convolution(*shape, **options)
        if name not in forward_only:
            cases[f"{name}, gradients"] = convolution(*shape, gradient=True, **options)
    low = (n(64, 2), n(16, 4), n(16, 4), n(256, 8))
    maps = (b, n(112, 8), n(112, 8), c)
    half = (n(32, 2), side, side, n(256, 16))
    return cases | {
        "conv transposed 4x4/2, bf16": transposed(low, low[-1] // 2),
        "conv transposed 4x4/2, bf16, gradients": transposed(low, low[-1] // 2, gradient=True),
        "max pool 3x3/2, bf16": pool("max", maps, 3, 2, gradient=False),
        "max pool 3x3/2, bf16, gradient": pool("max", maps, 3, 2, gradient=True),
        "avg pool 2x2, f32": pool("avg", maps, 2, 2, gradient=False, dtype=F32),
        "avg pool 7x7, bf16, gradient": pool("avg", maps, 7, 7, gradient=True)
        if maps[1] % 7 == 0
        else pool("avg", maps, 4, 4, gradient=True),
        "batch norm and ReLU, bf16, gradients": batch_norm(half, BF16),
        "batch norm and ReLU, f32, gradients": batch_norm((b, side, side, c), F32),
        "group norm and SiLU, bf16, gradients": group_norm(half, n(32, 4), BF16),
        "bilinear resize by 2, f32": resize((n(16, 1), side, side, c), 2),
        "nearest upsampling, bf16, gradient": nearest((n(32, 2), side, side, c), BF16),
        "pixel shuffle, bf16": pixel_shuffle((n(32, 2), side, side, n(256, 8))),
    }
