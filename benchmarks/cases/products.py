"""Matmuls of odd shapes, linear algebra, Fourier transforms.

Cases of the breadth suite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.cases.case import BF16, F32, Case, Sizes, definite, integers, normal


def einsum(equation: str, *shapes: tuple[int, ...], dtype: Any = F32, wide: bool = False) -> Case:
    """An einsum of random operands."""

    def ours(m: Any, *xs: Any) -> Any:
        return m.numpy.einsum(equation, *xs, **({"preferred_element_type": "float32"} if wide else {}))

    return Case(
        ours,
        lambda: tuple(normal(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)),
        lambda t, *xs: t.einsum(equation, *xs),
    )


def contractions(n: Sizes) -> dict[str, Case]:
    """Matmuls that are small, tall, skinny, odd, or of few bits."""
    tall = n(1 << 20, 128)
    odd = n((1000, 1001, 999), (10, 11, 9))
    batch = n(512, 4)

    def int8(m: Any, x: Any, y: Any) -> Any:
        return m.lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=m.numpy.int32)

    def gated(m: Any, x: Any, w: Any, v: Any) -> Any:
        return m.nn.silu(x @ w) * (x @ v)

    return {
        "65,536 matmuls of 16 x 16, f32": einsum("bij,bjk->bik", *[(n(65536, 8), n(16, 4), n(16, 4))] * 2),
        "4,096 matmuls of 48 x 48, bf16": einsum(
            "bij,bjk->bik", *[(n(4096, 4), n(48, 6), n(48, 6))] * 2, dtype=BF16
        ),
        "gram matrix of 1M x 64, f32": einsum("ni,nj->ij", (tall, n(64, 8)), (tall, n(64, 8))),
        "1M x 64 @ 64 x 8, f32": einsum("ni,ij->nj", (tall, n(64, 8)), (n(64, 8), 8)),
        "outer product of 8,192, f32": einsum("i,j->ij", (n(8192, 16),), (n(8192, 16),)),
        "matrix times vector, 8,192, bf16": einsum("ij,j->i", (n(8192, 16),) * 2, (n(8192, 16),), dtype=BF16),
        "batch of matrices times vectors, f32": einsum(
            "bij,bj->bi", (n(1024, 4), n(256, 8), n(256, 8)), (n(1024, 4), n(256, 8))
        ),
        "matmul of 1000 x 1001 x 999, f32": einsum("ij,jk->ik", odd[:2], odd[1:]),
        "matmul of 1000 x 1001 x 999, bf16": einsum("ij,jk->ik", odd[:2], odd[1:], dtype=BF16),
        "bilinear form of 37 x 41 x 29, f32": einsum(
            "bi,ijk,bj->bk", (n(4096, 4), 37), (37, 41, 29), (n(4096, 4), 41)
        ),
        "scores of 65 x 80, bf16": einsum(
            "bqhd,bkhd->bhqk", (batch, 65, 8, n(80, 8)), (batch, 65, 8, n(80, 8)), dtype=BF16
        ),
        "three factors, f32": einsum("ij,jk,kl->il", *[(n(2048, 8), n(2048, 8))] * 2, (n(2048, 8), n(64, 4))),
        "diagonals of products, f32": einsum("bij,bij->b", *[(n(4096, 4), n(64, 8), n(64, 8))] * 2),
        "int8 matmul of 4,096": Case(
            int8,
            lambda: tuple(
                integers(127, n(4096, 32), n(4096, 32), dtype=np.int8, seed=i, low=-127) for i in range(2)
            ),
            lambda t, x, y: t._int_mm(x, y),
            lambda t, x, y: (x, y.T.contiguous().T),
            tolerance=0.0,
        ),
        "gated matmuls, bf16": Case(
            gated,
            lambda: (
                normal(n(8192, 8), n(2048, 16), dtype=BF16, scale=0.02),
                normal(n(2048, 16), n(5632, 24), dtype=BF16, seed=1),
                normal(n(2048, 16), n(5632, 24), dtype=BF16, seed=2),
            ),
            lambda t, x, w, v: t.nn.functional.silu(x @ w) * (x @ v),
        ),
        "pairwise distances of 8,192 points": Case(
            lambda m, x, y: m.numpy.sqrt(((x[:, None] - y[None]) ** 2).sum(-1)),
            lambda: (normal(n(8192, 16), 3), normal(n(8192, 16), 3, seed=1)),
            lambda t, x, y: t.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"),
        ),
        "Kronecker product, f32": Case(
            lambda m, x, y: m.numpy.kron(x, y),
            lambda: (normal(n(64, 4), n(64, 4)), normal(n(64, 4), n(64, 4), seed=1)),
            lambda t, x, y: t.kron(x, y),
        ),
    }


def factorizations(n: Sizes) -> dict[str, Case]:
    """Batches of small systems, and single larger ones."""
    tiny_or = lambda full: tuple(min(d, 6) for d in full) if n.tiny else full
    many = lambda b, *shape: definite(*tiny_or((b, *shape)))

    def blind_qr(m: Any, x: Any) -> Any:
        q, r = m.numpy.linalg.qr(x)
        return m.numpy.abs(r)  # signs differ between libraries

    def logdet(m: Any, x: Any) -> Any:
        return m.value_and_grad(lambda x: m.numpy.linalg.slogdet(x)[1].sum())(x)

    def torch_logdet(t: Any, x: Any) -> Any:
        x = x.detach().requires_grad_()
        value = t.linalg.slogdet(x)[1].sum()
        return value, t.autograd.grad(value, x)[0]

    def least_squares(m: Any, a: Any, b: Any) -> Any:
        return m.numpy.linalg.solve(a.mT @ a, a.mT @ b)

    def triangular(m: Any, a: Any, b: Any) -> Any:
        return m.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)

    def tridiagonal(m: Any, lower: Any, main: Any, upper: Any, b: Any) -> Any:
        """The Thomas algorithm for many systems, as two scans."""

        def forward(s: Any, row: Any) -> Any:
            c, d = s
            low, mid, up, right = row
            scale = 1 / (mid - low * c)
            new = up * scale, (right - low * d) * scale
            return new, new

        zero = m.numpy.zeros_like(b[0])
        _, (c, d) = m.lax.scan(forward, (zero, zero), (lower, main, upper, b))

        def back(x: Any, row: Any) -> Any:
            c, d = row
            x = d - c * x
            return x, x

        return m.lax.scan(back, zero, (c, d), reverse=True)[1]

    length, systems = n(256, 8), n(16384, 4)
    return {
        "Cholesky, 4,096 of 64": Case(
            lambda m, a: m.numpy.linalg.cholesky(a), lambda: (many(4096, 64, 64),), lambda t, a: t.linalg.cholesky(a)
        ),
        "Cholesky, one of 2,048": Case(
            lambda m, a: m.numpy.linalg.cholesky(a), lambda: (many(2048, 2048),), lambda t, a: t.linalg.cholesky(a)
        ),
        "solve, 4,096 of 32, 4 sides": Case(
            lambda m, a, b: m.numpy.linalg.solve(a, b),
            lambda: (many(4096, 32, 32), normal(*tiny_or((4096, 32, 4)), seed=1)),
            lambda t, a, b: t.linalg.solve(a, b),
        ),
        "triangular solve, one of 2,048, 256 sides": Case(
            triangular,
            lambda: (many(2048, 2048), normal(*tiny_or((2048, 256)), seed=1)),
            lambda t, a, b: t.linalg.solve_triangular(a, b, upper=False),
        ),
        "inverse, 1,024 of 48": Case(
            lambda m, a: m.numpy.linalg.inv(a), lambda: (many(1024, 48, 48),), lambda t, a: t.linalg.inv(a)
        ),
        "log-determinant and gradient, 2,048 of 24": Case(logdet, lambda: (many(2048, 24, 24),), torch_logdet),
        "eigenvalues, 1,024 of 24": Case(
            lambda m, a: m.numpy.linalg.eigvalsh(a), lambda: (many(1024, 24, 24),), lambda t, a: t.linalg.eigvalsh(a)
        ),
        "singular values, 512 of 32 x 16": Case(
            lambda m, a: m.numpy.linalg.svd(a, compute_uv=False),
            lambda: (normal(*tiny_or((512, 32, 16))),),
            lambda t, a: t.linalg.svdvals(a),
        ),
        "QR, 1,024 of 64 x 16": Case(
            blind_qr,
            lambda: (normal(*tiny_or((1024, 64, 16))),),
            lambda t, a: t.linalg.qr(a).R.abs(),
        ),
        "normal equations, 1,024 of 100 x 20": Case(
            least_squares,
            lambda: (normal(n(1024, 4), 100, n(20, 4)), normal(n(1024, 4), 100, 1, seed=1)),
            lambda t, a, b: t.linalg.solve(a.mT @ a, a.mT @ b),
        ),
        "tridiagonal systems, 16,384 of 256": Case(
            tridiagonal,
            lambda: (
                normal(length, systems, scale=0.3),
                np.full((length, systems), 4.0, np.float32),
                normal(length, systems, seed=1, scale=0.3),
                normal(length, systems, seed=2),
            ),
        ),
        "matrix power, 1,024 of 32": Case(
            lambda m, a: m.numpy.linalg.matrix_power(a, 5),
            lambda: (many(1024, 32, 32),),
            lambda t, a: t.linalg.matrix_power(a, 5),
        ),
    }  # fmt: skip


def transforms(n: Sizes) -> dict[str, Case]:
    """Fourier transforms, and convolutions by them."""

    def convolved(m: Any, x: Any, k: Any) -> Any:
        """Long convolutions as state-space models have them: padded real transforms."""
        size = 2 * x.shape[-1]
        product = m.numpy.fft.rfft(x, size) * m.numpy.fft.rfft(k, size)
        return m.numpy.fft.irfft(product, size)[..., : x.shape[-1]]

    def torch_convolved(t: Any, x: Any, k: Any) -> Any:
        size = 2 * x.shape[-1]
        return t.fft.irfft(t.fft.rfft(x, size) * t.fft.rfft(k, size), size)[..., : x.shape[-1]]

    def poisson(m: Any, f: Any) -> Any:
        """Poisson's equation on a periodic grid."""
        size = f.shape[-1]
        k = m.numpy.fft.fftfreq(size) * size
        square = k[:, None] ** 2 + k[None, : size // 2 + 1] ** 2
        spectrum = m.numpy.fft.rfft2(f) / -m.numpy.where(square == 0, 1, square)
        return m.numpy.fft.irfft2(spectrum, f.shape[-2:])

    def torch_poisson(t: Any, f: Any) -> Any:
        size = f.shape[-1]
        k = t.fft.fftfreq(size, device=f.device) * size
        square = k[:, None] ** 2 + k[None, : size // 2 + 1] ** 2
        return t.fft.irfft2(t.fft.rfft2(f) / -t.where(square == 0, 1, square), s=f.shape[-2:])

    def spectrogram(m: Any, x: Any) -> Any:
        size, hop = n(1024, 16), n(256, 4)
        frames = (x.shape[-1] - size) // hop + 1
        where = m.numpy.arange(frames)[:, None] * hop + m.numpy.arange(size)
        return m.numpy.abs(m.numpy.fft.rfft(x[:, where] * m.numpy.hanning(size).astype(np.float32)))

    def torch_spectrogram(t: Any, x: Any) -> Any:
        size, hop = n(1024, 16), n(256, 4)
        window = t.hann_window(size, periodic=False, device=x.device)
        return t.stft(x, size, hop, window=window, center=False, return_complex=True).abs().mT

    return {
        "real transform of rows of 4,096": Case(
            lambda m, x: m.numpy.fft.rfft(x), lambda: (normal(n(4096, 8), n(4096, 16)),), lambda t, x: t.fft.rfft(x)
        ),
        "transform of columns of 1,000": Case(
            lambda m, x: m.numpy.fft.fft(x, axis=0),
            lambda: (normal(n(1000, 10), n(4096, 8)).astype(np.complex64),),
            lambda t, x: t.fft.fft(x, dim=0),
        ),
        "2-d transforms of 512 x 512": Case(
            lambda m, x: m.numpy.fft.fft2(x),
            lambda: (normal(n(32, 2), n(512, 8), n(512, 8)).astype(np.complex64),),
            lambda t, x: t.fft.fft2(x),
        ),
        "long convolution by transforms, f32": Case(
            convolved,
            lambda: (normal(n(8, 2), n(512, 4), n(4096, 16)), normal(n(512, 4), n(4096, 16), seed=1)),
            torch_convolved,
        ),
        "Poisson's equation by transforms": Case(
            poisson, lambda: (normal(n(32, 2), n(512, 8), n(512, 8)),), torch_poisson
        ),
        "spectrogram of 64 x 1M": Case(
            spectrogram, lambda: (normal(n(16, 2), n(1 << 18, 64)),), torch_spectrogram
        ),
    }  # fmt: skip


def of_products(n: Sizes) -> dict[str, Case]:
    """All cases of this module."""
    return contractions(n) | factorizations(n) | transforms(n)
