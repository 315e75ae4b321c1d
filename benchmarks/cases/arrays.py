"""Reductions, scans, sorts, scatters, movement of arrays, random numbers.

Cases of the breadth suite.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from benchmarks.cases.case import BF16, F16, F32, Case, Sizes, distinct, integers, normal, positive


def reductions(n: Sizes) -> dict[str, Case]:
    """Reductions over last, first, middle and short axes, in several dtypes."""
    rows, columns = n(8192, 16), n(4096, 24)
    a, b, c = n((256, 512, 256), (4, 6, 8))
    flat = n(1 << 24, 1 << 8)
    square = lambda dtype=F32: lambda: (normal(rows, columns, dtype=dtype),)
    cube = lambda: (normal(a, b, c),)
    return {
        "sum of rows, bf16": Case(
            lambda m, x: x.astype(m.numpy.float32).sum(-1),
            square(BF16),
            lambda t, x: x.sum(-1, dtype=t.float32),
            tolerance=2e-3,
        ),
        "sum of columns, f32": Case(lambda m, x: x.sum(0), square(), lambda t, x: x.sum(0)),
        "sum of a middle axis, f32": Case(lambda m, x: x.sum(1), cube, lambda t, x: x.sum(1)),
        "sum of first and last axes, f32": Case(lambda m, x: x.sum((0, 2)), cube, lambda t, x: x.sum((0, 2))),
        "max of a last axis of 3, f32": Case(
            lambda m, x: x.max(-1), lambda: (normal(n(1 << 22, 64), 3),), lambda t, x: x.amax(-1)
        ),
        "sum of a first axis of 5, f16": Case(
            lambda m, x: x.sum(0), lambda: (normal(5, n(1 << 22, 64), dtype=F16),), lambda t, x: x.sum(0)
        ),
        "mean and variance of all, f32": Case(
            lambda m, x: (x.mean(), x.var()),
            lambda: (normal(flat),),
            lambda t, x: (x.mean(), x.var(correction=0)),
            tolerance=1e-2,  # the mean is near zero
        ),
        "argmax of a middle axis, f32": Case(
            lambda m, x: m.numpy.argmax(x, 1), cube, lambda t, x: x.argmax(1), tolerance=0.0
        ),
        "minimum of columns, bf16": Case(
            lambda m, x: x.min(0), square(BF16), lambda t, x: x.amin(0), tolerance=0.0
        ),
        "log-sum-exp of columns, f32": Case(
            lambda m, x: m.nn.logsumexp(x, axis=0), square(), lambda t, x: t.logsumexp(x, 0)
        ),
        "product of a middle axis, f32": Case(
            lambda m, x: x.prod(1), lambda: (positive(a // 4, n(8, 4), b * c),), lambda t, x: x.prod(1)
        ),
        "any and all of rows, bool": Case(
            lambda m, x: (x.any(-1), x.all(0)),
            lambda: (integers(2, rows, columns, dtype=np.int8).astype(bool),),
            lambda t, x: (x.any(-1), x.all(0)),
            tolerance=0.0,
        ),
        "sum of int8 rows": Case(
            lambda m, x: x.astype(m.numpy.int32).sum(-1),
            lambda: (integers(100, rows, columns, dtype=np.int8),),
            lambda t, x: x.sum(-1, dtype=t.int32),
            tolerance=0.0,
        ),
        "count of equal int32": Case(
            lambda m, x, y: (x == y).sum(),
            lambda: (integers(9, flat), integers(9, flat, seed=1)),
            lambda t, x, y: (x == y).sum(),
            tolerance=0.0,
        ),
    }


def row_operations(n: Sizes) -> dict[str, Case]:
    """Softmax, norms and losses, with gradients."""
    rows, width = n(8192, 8), n(2048, 24)
    pair = lambda dtype=F32: lambda: (
        normal(rows, width, dtype=dtype), normal(rows, width, dtype=dtype, seed=1)
    )  # fmt: skip
    grad = lambda f: lambda m, *args: m.vjp(functools.partial(f, m), *args[:-1])[1](args[-1])

    def back(f: Any) -> Any:
        def run(t: Any, *args: Any) -> Any:
            xs = [x.detach().requires_grad_() for x in args[:-1]]
            return t.autograd.grad(f(t, *xs), xs, args[-1])

        return run

    def norm(m: Any, x: Any, scale: Any, bias: Any) -> Any:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * m.lax.rsqrt(variance + 1e-5) * scale + bias

    def rms(m: Any, x: Any, scale: Any) -> Any:
        wide = x.astype(m.numpy.float32)
        return (wide * m.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

    def cross_entropy(m: Any, x: Any, labels: Any) -> Any:
        wide = x.astype(m.numpy.float32)
        chosen = m.numpy.take_along_axis(wide, labels[:, None], axis=-1)[:, 0]
        return (m.nn.logsumexp(wide, axis=-1) - chosen).mean()

    def torch_cross_entropy(t: Any, x: Any, labels: Any) -> Any:
        x = x.detach().requires_grad_()
        value = t.nn.functional.cross_entropy(x.float(), labels.long())
        return value, t.autograd.grad(value, x)[0]

    def masked(m: Any, x: Any) -> Any:
        mask = m.numpy.tril(m.numpy.ones(x.shape[-2:], bool))
        return m.nn.softmax(m.numpy.where(mask, x, -np.inf), axis=-1)

    def torch_masked(t: Any, x: Any) -> Any:
        mask = t.ones(x.shape[-2:], dtype=t.bool, device=x.device).tril()
        return t.softmax(x.masked_fill(~mask, -np.inf), -1)

    vocab = n(50304, 64)
    scores = n((32, 1024, 1024), (2, 8, 8))
    middle = n((64, 1000, 196), (2, 10, 6))
    return {
        "softmax of rows, bf16": Case(
            lambda m, x: m.nn.softmax(x, axis=-1),
            lambda: (normal(n(1024, 8), vocab, dtype=BF16),),
            lambda t, x: t.softmax(x, -1),
        ),
        "softmax gradient, f32": Case(
            grad(lambda m, x: m.nn.softmax(x, axis=-1)), pair(), back(lambda t, x: t.softmax(x, -1))
        ),
        "log-softmax of a middle axis, f32": Case(
            lambda m, x: m.nn.log_softmax(x, axis=1),
            lambda: (normal(*middle),),
            lambda t, x: t.log_softmax(x, 1),
        ),
        "softmax under a triangular mask, f32": Case(masked, lambda: (normal(*scores),), torch_masked),
        "layer norm gradients, f32": Case(
            grad(norm),
            lambda: (normal(rows, width), positive(width), normal(width), normal(rows, width, seed=1)),
            back(lambda t, x, s, b: t.nn.functional.layer_norm(x, x.shape[-1:], s, b)),
        ),
        "RMS norm, bf16": Case(
            rms,
            lambda: (normal(rows, n(4096, 24), dtype=BF16), positive(n(4096, 24))),
            lambda t, x, s: t.nn.functional.rms_norm(x, x.shape[-1:], s.to(x.dtype), 1e-6),
        ),
        "cross-entropy and gradient, bf16": Case(
            lambda m, x, labels: m.value_and_grad(functools.partial(cross_entropy, m))(x, labels),
            lambda: (normal(n(8192, 8), n(32000, 64), dtype=BF16), integers(n(32000, 64), n(8192, 8))),
            torch_cross_entropy,
        ),
        "GELU gradient, bf16": Case(
            grad(lambda m, x: m.nn.gelu(x, approximate=False)),
            pair(BF16),
            back(lambda t, x: t.nn.functional.gelu(x)),
        ),
    }


def scans_and_sorts(n: Sizes) -> dict[str, Case]:
    """Cumulative operations, sorts, and what is made of them."""
    rows, columns = n(4096, 8), n(4096, 32)
    square = lambda: (normal(rows, columns),)
    # distinct values: libraries order ties differently
    shuffled = lambda: (distinct(n(2048, 8), columns),)
    long = lambda: (np.random.default_rng(0).permutation(n(1 << 22, 1 << 8)).astype(np.float32),)
    vocab = n(50304, 128)

    def unique(m: Any, x: Any) -> Any:
        """Ranks of distinct values: a sort, flags and a sum of them."""
        x = m.numpy.sort(x)
        new = m.numpy.concatenate([m.numpy.ones(1, bool), x[1:] != x[:-1]])
        return x, m.numpy.cumsum(new.astype(m.numpy.int32))

    def torch_unique(t: Any, x: Any) -> Any:
        x = x.sort().values
        new = t.cat([t.ones(1, dtype=t.bool, device=x.device), x[1:] != x[:-1]])
        return x, new.to(t.int32).cumsum(0, dtype=t.int32)

    logits = lambda: (distinct(n(256, 4), vocab),)
    return {
        "cumsum of rows, f32": Case(
            lambda m, x: m.numpy.cumsum(x, -1), square, lambda t, x: x.cumsum(-1), tolerance=1e-2
        ),
        "cumsum of columns, f32": Case(
            lambda m, x: m.numpy.cumsum(x, 0), square, lambda t, x: x.cumsum(0), tolerance=1e-2
        ),
        "cumsum of 16M, f32": Case(
            lambda m, x: m.numpy.cumsum(x), lambda: (positive(n(1 << 24, 256)),), lambda t, x: x.cumsum(0)
        ),
        "cumulative product of rows, f32": Case(
            lambda m, x: m.numpy.cumprod(x, -1),
            lambda: (positive(n(65536, 8), n(256, 16)) ** 0.1,),
            lambda t, x: x.cumprod(-1),
        ),
        "cumulative log-sum-exp of rows, f32": Case(
            lambda m, x: m.lax.cumlogsumexp(x, axis=1), square, lambda t, x: x.logcumsumexp(1)
        ),
        "cumulative maximum of columns, f32": Case(
            lambda m, x: m.lax.cummax(x, axis=0), square, lambda t, x: x.cummax(0).values, tolerance=0.0
        ),
        "reverse cumsum gradient, bf16": Case(
            lambda m, x: m.vjp(lambda x: m.lax.cumsum(x, axis=1, reverse=True), x)[1](x)[0],
            lambda: (normal(rows, columns, dtype=BF16),),
            tolerance=0.1,
        ),
        "sort of rows, f32": Case(
            lambda m, x: m.numpy.sort(x, -1), shuffled, lambda t, x: x.sort(-1).values, tolerance=0.0
        ),
        "sort of columns, f32": Case(
            lambda m, x: m.numpy.sort(x, 0), square, lambda t, x: x.sort(0).values, tolerance=0.0
        ),
        "sort of 4M, f32": Case(
            lambda m, x: m.numpy.sort(x), long, lambda t, x: x.sort().values, tolerance=0.0
        ),
        "argsort of rows, f32": Case(
            lambda m, x: m.numpy.argsort(x, -1), shuffled, lambda t, x: x.argsort(-1), tolerance=0.0
        ),
        "sort of 4M keys with values": Case(
            lambda m, x, y: m.lax.sort((x, y), num_keys=1),
            lambda: (*long(), np.arange(n(1 << 22, 1 << 8), dtype=np.int32)),
            lambda t, x, y: (lambda s: (s.values, y[s.indices]))(x.sort()),
            tolerance=0.0,
        ),
        "top 50 of 50,304": Case(
            lambda m, x: m.lax.top_k(x, n(50, 5)), logits, lambda t, x: tuple(x.topk(n(50, 5))), tolerance=0.0
        ),
        "top 2 of 64, 65,536 rows": Case(
            lambda m, x: m.lax.top_k(x, 2),
            lambda: (distinct(n(65536, 8), 64),),
            lambda t, x: tuple(x.topk(2)),
            tolerance=0.0,
        ),
        "median of rows, f32": Case(
            lambda m, x: m.numpy.median(x, axis=-1), lambda: (normal(n(4096, 8), n(1023, 31)),),
            lambda t, x: x.median(-1).values, tolerance=0.0,
        ),
        "quantiles of columns, f32": Case(
            lambda m, x: m.numpy.quantile(x, np.array([0.1, 0.5, 0.9], np.float32), axis=0),
            lambda: (normal(n(1000, 31), n(4096, 8)),),
            lambda t, x: x.quantile(t.tensor([0.1, 0.5, 0.9], device=x.device), 0),
        ),
        "ranks of distinct of 4M int32": Case(
            unique, lambda: (integers(1 << 20, n(1 << 22, 1 << 8)),), torch_unique, tolerance=0.0
        ),
        "searchsorted 1M in 1M": Case(
            lambda m, a, v: m.numpy.searchsorted(a, v),
            lambda: (np.sort(normal(n(1 << 20, 256))), normal(n(1 << 20, 64), seed=1)),
            lambda t, a, v: t.searchsorted(a, v),
            tolerance=0.0,
        ),
    }  # fmt: skip


def indexing(n: Sizes) -> dict[str, Case]:
    """Gathers, scatters, segments, histograms."""
    table = lambda dtype=F32: normal(n(50_000, 64), n(512, 8), dtype=dtype)
    tokens = lambda: integers(n(50_000, 64), n(65536, 32))
    flat = n(1 << 24, 1 << 8)
    nodes, edges, features = n(65536, 16), n(1 << 20, 64), n(64, 4)

    def index_add(t: Any, x: Any, where: Any, size: int) -> Any:
        return t.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device).index_add_(0, where, x)

    long = lambda t, *args: tuple(a.long() if a.dtype in (t.int32, t.int8) else a for a in args)
    return {
        "gather of rows, bf16": Case(
            lambda m, x, i: x[i], lambda: (table(BF16), tokens()), lambda t, x, i: x[i], long, tolerance=0.0
        ),
        "gradient of a gather, f32": Case(
            lambda m, x, i, ct: m.vjp(lambda x: x[i], x)[1](ct)[0],
            lambda: (table(), tokens(), normal(n(65536, 32), n(512, 8), seed=1)),
            lambda t, x, i, ct: index_add(t, ct, i, len(x)),
            long,
        ),
        "take along rows, f32": Case(
            lambda m, x, i: m.numpy.take_along_axis(x, i, axis=1),
            lambda: (normal(n(4096, 8), n(4096, 16)), integers(n(4096, 16), n(4096, 8), n(1024, 4))),
            lambda t, x, i: x.gather(1, i),
            long,
            tolerance=0.0,
        ),
        "scatter-add of 16M into 1,024, f32": Case(
            lambda m, x, i: m.numpy.zeros(n(1024, 16)).at[i].add(x),
            lambda: (positive(flat), integers(n(1024, 16), flat)),
            lambda t, x, i: index_add(t, x, i, n(1024, 16)),
            long,
        ),
        "scatter-add of 4M into 1M, f32": Case(
            lambda m, x, i: m.numpy.zeros(n(1 << 20, 64)).at[i].add(x),
            lambda: (normal(flat // 4), integers(n(1 << 20, 64), flat // 4)),
            lambda t, x, i: index_add(t, x, i, n(1 << 20, 64)),
            long,
        ),
        "segment sum of rows, sorted, f32": Case(
            lambda m, x, i: m.ops.segment_sum(x, i, nodes, indices_are_sorted=True),
            lambda: (normal(edges, features), np.sort(integers(nodes, edges))),
            lambda t, x, i: index_add(t, x, i, nodes),
            long,
        ),
        "segment maximum of rows, f32": Case(
            lambda m, x, i: m.ops.segment_max(x, i, nodes),
            lambda: (normal(edges, features), integers(nodes, edges)),
            lambda t, x, i: t.full((nodes, features), -np.inf, device=x.device).scatter_reduce_(
                0, i[:, None].expand_as(x), x, "amax"
            ),
            long,
            tolerance=0.0,
        ),
        "scatter of rows, bf16": Case(
            lambda m, x, i, y: x.at[i].set(y, unique_indices=True),
            lambda: (
                table(BF16),
                np.random.default_rng(0).permutation(n(50_000, 64))[: n(16384, 16)].astype(np.int32),
                normal(n(16384, 16), n(512, 8), dtype=BF16, seed=1),
            ),
            lambda t, x, i, y: x.index_copy(0, i, y),
            long,
            tolerance=0.0,
        ),
        "histogram of 16M in 256 bins": Case(
            lambda m, x: m.numpy.histogram(x, 256, range=(-4.0, 4.0))[0],
            lambda: (normal(flat),),
            lambda t, x: x.histc(256, -4.0, 4.0),
            # values at an edge may fall on either side
            tolerance=1e-2,
        ),
        "bincount of 16M, int32": Case(
            lambda m, x: m.numpy.bincount(x, length=n(5000, 16)),
            lambda: (integers(n(5000, 16), flat),),
            lambda t, x: x.bincount(minlength=n(5000, 16)),
            tolerance=0.0,
        ),
        "one-hot of 65,536, bf16": Case(
            lambda m, i: m.nn.one_hot(i, n(1024, 16), dtype=m.numpy.bfloat16),
            lambda: (integers(n(1024, 16), n(65536, 32)),),
            lambda t, i: t.nn.functional.one_hot(i, n(1024, 16)).to(t.bfloat16),
            long,
            tolerance=0.0,
        ),
        "boolean mask to positions, 4M": Case(
            lambda m, x: m.numpy.nonzero(x, size=n(1 << 20, 32), fill_value=0)[0],
            lambda: (integers(2, n(1 << 22, 128)).astype(bool),),
            lambda t, x: x.nonzero()[: n(1 << 20, 32), 0],
            tolerance=0.0,
        ),
        "update of a slice in a buffer, bf16": Case(
            lambda m, x, y, i: m.lax.dynamic_update_slice(x, y, (0, i, 0)),
            lambda: (
                normal(n(32, 2), n(4096, 16), n(256, 8), dtype=BF16),
                normal(n(32, 2), n(512, 4), n(256, 8), dtype=BF16, seed=1),
                np.int32(n(1000, 3)),
            ),
            tolerance=0.0,
        ),
    }


def movement(n: Sizes) -> dict[str, Case]:
    """Transposes, pads, joins, casts and elementwise chains."""
    side = n(8192, 24)
    flat = n(1 << 24, 1 << 8)

    def chain(m: Any, x: Any) -> Any:
        w = m.numpy.where
        return w(x < -1, m.numpy.exp(x), w(x < 0, x * x, w(x < 1, m.numpy.sqrt(x), m.numpy.log(x))))

    def torch_chain(t: Any, x: Any) -> Any:
        w = t.where
        return w(x < -1, x.exp(), w(x < 0, x * x, w(x < 1, x.sqrt(), x.log())))

    def quantized(m: Any, x: Any) -> Any:
        scale = m.numpy.abs(x).max(-1, keepdims=True) / 127
        q = m.numpy.clip(m.numpy.round(x / scale), -127, 127).astype(m.numpy.int8)
        return q, scale

    def torch_quantized(t: Any, x: Any) -> Any:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().clip(-127, 127).to(t.int8), scale

    def xorshift(m: Any, x: Any) -> Any:
        for _ in range(8):
            x = x ^ (x << 13)
            x = x ^ (x >> 17)
            x = x ^ (x << 5)
        return x

    def rotary(m: Any, x: Any, cos: Any, sin: Any) -> Any:
        a, b = m.numpy.split(x, 2, axis=-1)
        return m.numpy.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def torch_rotary(t: Any, x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.chunk(2, -1)
        return t.cat([a * cos - b * sin, b * cos + a * sin], -1)

    heads = n((16, 2048, 16, 128), (2, 8, 2, 8))
    image = n((64, 224, 224, 3), (2, 8, 8, 3))
    return {
        "transpose, f32": Case(
            lambda m, x: x.T, lambda: (normal(side, side),), lambda t, x: x.T.contiguous(), tolerance=0.0
        ),
        "transpose of heads, bf16": Case(
            lambda m, x: x.transpose(0, 2, 1, 3),
            lambda: (normal(*heads, dtype=BF16),),
            lambda t, x: x.permute(0, 2, 1, 3).contiguous(),
            tolerance=0.0,
        ),
        "reversed axes of odd lengths, f32": Case(
            lambda m, x: x.transpose(3, 2, 1, 0),
            lambda: (normal(*n((63, 65, 67, 61), (3, 5, 7, 2))),),
            lambda t, x: x.permute(3, 2, 1, 0).contiguous(),
            tolerance=0.0,
        ),
        "bytes of images to normalized NCHW": Case(
            lambda m, x: ((x.astype(m.numpy.float32) / 255 - 0.45) / 0.22).transpose(0, 3, 1, 2),
            lambda: (integers(256, *image, dtype=np.uint8),),
            lambda t, x: ((x.float() / 255 - 0.45) / 0.22).permute(0, 3, 1, 2).contiguous(),
        ),
        "pad, roll and flip, f32": Case(
            lambda m, x: m.numpy.flip(m.numpy.roll(m.numpy.pad(x, ((1, 2), (3, 4))), 5, axis=1), 0),
            lambda: (normal(n(8000, 16), n(4000, 24)),),
            lambda t, x: t.nn.functional.pad(x, (3, 4, 1, 2)).roll(5, 1).flip(0),
            tolerance=0.0,
        ),
        "reflecting pad, f32": Case(
            lambda m, x: m.numpy.pad(x, ((0, 0), (0, 0), (8, 8), (8, 8)), mode="reflect"),
            lambda: (normal(*n((32, 3, 512, 512), (1, 3, 16, 16))),),
            lambda t, x: t.nn.functional.pad(x, (8, 8, 8, 8), mode="reflect"),
            tolerance=0.0,
        ),
        "concatenation of three, bf16": Case(
            lambda m, x, y, z: m.numpy.concatenate([x, y, z], -1),
            lambda: tuple(normal(n(32768, 8), c, dtype=BF16, seed=c) for c in n((512, 256, 128), (4, 3, 2))),
            lambda t, *xs: t.cat(xs, -1),
            tolerance=0.0,
        ),
        "interleaved stack, f32": Case(
            lambda m, x, y: m.numpy.stack([x, y], -1).reshape(-1),
            lambda: (normal(flat), normal(flat, seed=1)),
            lambda t, x, y: t.stack([x, y], -1).reshape(-1),
            tolerance=0.0,
        ),
        "every third element, f32": Case(
            lambda m, x: x[1::3] + 1, lambda: (normal(flat),), lambda t, x: x[1::3] + 1
        ),
        "chain of selections, f32": Case(chain, lambda: (normal(flat),), torch_chain, tolerance=1e-4),
        "float16 chain": Case(
            lambda m, x: m.numpy.tanh(x * 2 + 1) * m.nn.sigmoid(x) - m.numpy.abs(x),
            lambda: (normal(flat, dtype=F16),),
            lambda t, x: t.tanh(x * 2 + 1) * t.sigmoid(x) - x.abs(),
        ),
        "int8 quantization of rows, f32": Case(
            quantized, lambda: (normal(n(8192, 8), n(4096, 32)),), torch_quantized, tolerance=1e-2
        ),
        "f32 to bf16 and back": Case(
            lambda m, x: x.astype(m.numpy.bfloat16).astype(m.numpy.float32),
            lambda: (normal(flat),),
            lambda t, x: x.bfloat16().float(),
            tolerance=1e-2,  # XLA keeps excess precision
        ),
        "xorshift of uint32": Case(
            xorshift,
            lambda: (integers(1 << 32, flat, dtype=np.uint32),),
            tolerance=0.0,
        ),
        "rotary embedding, f32": Case(
            rotary,
            lambda: (
                normal(*heads),
                normal(heads[1], 1, heads[3] // 2, seed=1),
                normal(heads[1], 1, heads[3] // 2, seed=2),
            ),
            torch_rotary,
        ),
        "complex magnitude and phase": Case(
            lambda m, x, y: (lambda z: (m.numpy.abs(z), m.numpy.angle(z)))((x + 1j * y) ** 2),
            lambda: (normal(flat // 4), normal(flat // 4, seed=1)),
            lambda t, x, y: (lambda z: (z.abs(), z.angle()))(t.complex(x, y) ** 2),
            tolerance=1.0,  # a phase of pi may be -pi
        ),
        "second differences, f32": Case(
            lambda m, x: m.numpy.diff(x, 2, axis=-1) + m.numpy.gradient(x, axis=-1)[:, 1:-1],
            lambda: (normal(n(4096, 8), n(4096, 32)),),
            lambda t, x: x.diff(2, -1) + t.gradient(x, dim=-1)[0][:, 1:-1],
        ),
    }


def generated(n: Sizes) -> dict[str, Case]:
    """Random numbers, and arrays made from indices."""
    flat = n(1 << 24, 1 << 8)
    seed = lambda: (np.int32(3),)
    key = lambda m, s: m.random.key(s)
    like = lambda f: lambda t, s: f(t)
    return {
        "normal, 16M": Case(
            lambda m, s: m.random.normal(key(m, s), (flat,)),
            seed,
            like(lambda t: t.randn(flat, device="cuda")),
            comparable=False,
        ),
        "dropout of 16M, bf16": Case(
            lambda m, x, s: m.numpy.where(m.random.bernoulli(key(m, s), 0.9, x.shape), x / 0.9, 0),
            lambda: (normal(flat, dtype=BF16), np.int32(3)),
            lambda t, x, s: t.nn.functional.dropout(x, 0.1),
            comparable=False,
        ),
        "categorical of 1,024 x 50,304": Case(
            lambda m, x, s: m.random.categorical(key(m, s), x),
            lambda: (normal(n(1024, 4), n(50304, 32)), np.int32(3)),
            lambda t, x, s: t.multinomial(x.softmax(-1), 1),
            comparable=False,
            tolerance=0.0,
        ),
        "permutation of 1M": Case(
            lambda m, s: m.random.permutation(key(m, s), n(1 << 20, 64)),
            seed,
            like(lambda t: t.randperm(n(1 << 20, 64), device="cuda")),
            comparable=False,
            tolerance=0.0,
        ),
        "gamma of 1M": Case(
            lambda m, x, s: m.random.gamma(key(m, s), x),
            lambda: (positive(n(1 << 20, 64)), np.int32(3)),
            lambda t, x, s: t._standard_gamma(x),
            comparable=False,
        ),
        "integers of 16M": Case(
            lambda m, s: m.random.randint(key(m, s), (flat,), 0, 1000),
            seed,
            like(lambda t: t.randint(1000, (flat,), device="cuda", dtype=t.int32)),
            comparable=False,
            tolerance=0.0,
        ),
        "Mandelbrot escape times": _mandelbrot(n(2048, 16)),
    }


def _mandelbrot(size: int) -> Case:
    """Escape times of a grid: large arrays in a loop of 50 rounds."""

    def ours(m: Any, x: Any, y: Any) -> Any:
        jnp = m.numpy

        def step(_: Any, s: Any) -> Any:
            a, b, count = s
            inside = a * a + b * b < 4
            a, b = jnp.where(inside, a * a - b * b + x, a), jnp.where(inside, 2 * a * b + y, b)
            return a, b, count + inside

        zero = jnp.zeros((size, size))
        return m.lax.fori_loop(0, 50, step, (zero, zero, jnp.zeros((size, size), jnp.int32)))[2]

    def make() -> tuple:
        across = np.linspace(-2, 1, size, dtype=np.float32)
        return across, np.linspace(-1.5, 1.5, size, dtype=np.float32)[:, None]

    return Case(ours, make, tolerance=1.0)  # points at the border escape by a rounding


def of_arrays(n: Sizes) -> dict[str, Case]:
    """All cases of this module."""
    return reductions(n) | row_operations(n) | scans_and_sorts(n) | indexing(n) | movement(n) | generated(n)
