"""Arrays: operators, methods, indexing; what functions take and return."""

from typing import assert_type

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import Array, lax, nn, random, scipy
from blufunc.scipy import linalg, special, stats
from blufunc.typing import ArrayLike, DTypeLike


def functions(x: ArrayLike, dtype: DTypeLike = jnp.float32) -> Array:
    return jnp.asarray(x, dtype) + jnp.exp(x) * lax.rsqrt(jnp.abs(x))


x = functions(np.ones((2, 3)))
assert_type(x + 1, Array)
assert_type(1.0 - x, Array)
assert_type(2**x, Array)
assert_type(x @ x.T, Array)
assert_type(-x, Array)
assert_type(x == 1, Array)
assert_type(x != x, Array)
assert_type(x < 0, Array)
assert_type((x > 0) & ~(x < 1), Array)
assert_type(x[0, :, None, ...], Array)
assert_type(x[x > 0], Array)
assert_type(x.shape, tuple[int, ...])
assert_type(x.ndim + x.size, int)
assert_type(x.at[0].set(1.0), Array)
assert_type(x.at[jnp.asarray([0, 1])].add(x, mode="drop"), Array)
assert_type(x.at[0, 1].get(mode="fill", fill_value=0), Array)
assert_type(x.sum(axis=(0, 1), keepdims=True), Array)
assert_type(x.reshape(3, -1).transpose().astype(jnp.bfloat16), Array)
assert_type(x.mean() > 0, Array)
assert_type(float(x.max()), float)
assert_type(list(x), list[Array])
assert_type(bool(x.any()) and len(x) > 1, bool)
rows, columns = x.shape
q, r = jnp.linalg.qr(x)
u, s, vh = jnp.linalg.svd(x, full_matrices=False)
assert_type(jnp.linalg.svd(x, compute_uv=False), Array)
assert_type(jnp.linalg.norm(x, axis=-1), Array)
assert_type(jnp.where(x > 0, x, 0.0), Array)
assert_type(jnp.where(x > 0), tuple[Array, ...])
assert_type(jnp.unique(x, size=2), Array)
values, counts = jnp.unique(x, return_counts=True, size=2)
assert_type(jnp.linspace(0, 1, 5), Array)
assert_type(jnp.linspace(0, 1, 5, retstep=True), tuple[Array, Array])
assert_type(jnp.concatenate([x, x], axis=0), Array)
assert_type(jnp.stack([x, 2 * x]), Array)
assert_type(jnp.einsum("ij,kj->ik", x, x), Array)
assert_type(jnp.add.reduce(x), Array)
assert_type(jnp.max(x, axis=0), Array)
assert_type(jnp.cumsum(x, axis=1), Array)
assert_type(jnp.zeros((2, rows)), Array)
assert_type(jnp.full(3, np.float32(2)), Array)
assert_type(jnp.fft.rfft(x), Array)
assert_type(jnp.clip(x, 0, 1), Array)
assert_type(lax.dynamic_slice(x, (0, 0), (1, 1)), Array)
assert_type(lax.select(x > 0, x, -x), Array)
assert_type(lax.top_k(x, 2), tuple[Array, Array])
assert_type(lax.sort((x, x), num_keys=1), tuple[Array, ...])
assert_type(lax.sort(x), Array)
assert_type(nn.softmax(x, axis=-1), Array)
assert_type(nn.dot_product_attention(x, x, x), Array)
assert_type(nn.initializers.he_normal()(random.key(0), (2, 3)), Array)
assert_type(special.erf(x) + special.logsumexp(x, axis=0), Array)
assert_type(linalg.cholesky(x), Array)
assert_type(scipy.linalg.solve(x, x), Array)
assert_type(stats.norm.logpdf(x, loc=1, scale=2.0), Array)
assert_type(bf.device_put(1.0), Array)
assert_type(bf.tree.map(jnp.zeros_like, {"a": x}), dict[str, Array])
