"""Greedy decoding by a Llama-like model, under ``jit``, against JAX.

    python -m benchmarks.suites.decoding --platform cuda [--only function] [--alone] [--profile]

One source for blufunc and JAX: a ``fori_loop`` over tokens that updates a key-value cache. The attention of a token is
written by hand, with a mask of the positions so far, or calls ``nn.dot_product_attention`` with the lengths. A row has
the time per token, and the share of the device's bandwidth that the weights and the valid part of the cache amount to.
Ahead of timing, logits of the first step are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.programs import device
from benchmarks.harness.timing import report, row

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes per second of device memory, by data sheet."""

TOLERANCE = 0.05
"""Largest difference of logits relative to the largest, in bfloat16."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a run.

    Attributes:
      length: positions of the cache.
      start: positions that are filled before the first token.
      tokens: decoded tokens.
    """

    layers: int = 8
    width: int = 2048
    heads: int = 16
    key_heads: int = 4
    features: int = 128
    hidden: int = 5632
    vocab: int = 32000
    batch: int = 8
    length: int = 512
    start: int = 16
    tokens: int = 256

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights of a layer."""
        attended = self.heads * self.features
        return {
            "norm": (self.width,),
            "qkv": (self.width, attended + 2 * self.key_heads * self.features),
            "out": (attended, self.width),
            "mlp_norm": (self.width,),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
        }

    def bytes_per_token(self) -> float:
        """Bytes of weights, and on average of the valid part of the cache."""
        weights = self.layers * sum(map(np.prod, self.shapes.values())) + self.width * (self.vocab + 1)
        position = 2 * self.layers * self.batch * self.key_heads * self.features
        return 2 * float(weights + position * (self.start + (self.tokens + 1) / 2))


TINY = Sizes(2, 64, 4, 2, 16, 96, 50, 2, 32, 4, 8)
"""Sizes to try programs out on a CPU."""

ATTENTION = ("by hand", "function")


def arguments(sizes: Sizes, dtype: Any) -> tuple[Any, ...]:
    """Parameters, caches, the first tokens, and their position, as NumPy arrays."""
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, dtype)
        uniform = rng.random(shape, np.float32) - np.float32(0.5)
        uniform *= np.float32((12 / shape[-2]) ** 0.5)
        return uniform.astype(dtype)

    cache = sizes.batch, sizes.length, sizes.key_heads, sizes.features
    params = {
        "layers": [{name: array(*s) for name, s in sizes.shapes.items()} for _ in range(sizes.layers)],
        "table": array(sizes.vocab, sizes.width),
        "norm": array(sizes.width),
        "head": array(sizes.width, sizes.vocab),
    }
    filled = np.arange(sizes.length)[:, None, None] < sizes.start
    caches = [
        tuple(np.where(filled, array(*cache), 0).astype(dtype) for _ in range(2)) for _ in range(sizes.layers)
    ]
    first = rng.integers(0, sizes.vocab, sizes.batch).astype(np.int32)
    return params, caches, first, np.int32(sizes.start)


def decoder(lib: Any, sizes: Sizes, attention: str) -> tuple[Callable, Callable]:
    """Functions of ``arguments``: the tokens [batch, tokens], and the first logits."""
    np_, lax, nn = lib.numpy, lib.lax, lib.nn
    B, K, N, H = sizes.batch, sizes.key_heads, sizes.heads, sizes.features

    def norm(x: Any, weight: Any) -> Any:
        wide = x.astype("float32")
        scale = lax.rsqrt(np_.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype) * weight

    def rotated(x: Any, position: Any) -> Any:
        """Rotary embedding of [batch, heads, features]."""
        frequency = 10000.0 ** (-np_.arange(0, H, 2, dtype="float32") / H)
        angle = position.astype("float32") * np_.concatenate([frequency, frequency])
        wide = x.astype("float32")
        turned = np_.concatenate([-wide[..., H // 2 :], wide[..., : H // 2]], -1)
        return (wide * np_.cos(angle) + turned * np_.sin(angle)).astype(x.dtype)

    def attend(q: Any, keys: Any, values: Any, position: Any) -> Any:
        if attention == "function":
            lengths = np_.full((B,), position + 1, np_.int32)
            return nn.dot_product_attention(q[:, None], keys, values, key_value_seq_lengths=lengths)
        q = q.reshape(B, K, N // K, H)
        scores = np_.einsum("bkgd,btkd->bkgt", q, keys, preferred_element_type="float32") * H**-0.5
        scores = np_.where(np_.arange(sizes.length) <= position, scores, -np_.inf)
        weights = nn.softmax(scores, axis=-1).astype(values.dtype)
        return np_.einsum("bkgt,btkd->bkgd", weights, values)

    def logits_of(params: Any, caches: Any, tokens: Any, position: Any) -> tuple[Any, Any]:
        x = params["table"][tokens]
        new = []
        for p, (keys, values) in zip(params["layers"], caches, strict=True):
            qkv = norm(x, p["norm"]) @ p["qkv"]
            qk, v = np_.split(qkv.reshape(B, N + 2 * K, H), [N + K], axis=1)
            q, k = np_.split(rotated(qk, position), [N], axis=1)
            keys = lax.dynamic_update_slice(keys, k[:, None], (0, position, 0, 0))
            values = lax.dynamic_update_slice(values, v[:, None], (0, position, 0, 0))
            y = attend(q, keys, values, position)
            x = x + y.reshape(B, N * H) @ p["out"]
            h = norm(x, p["mlp_norm"])
            x = x + (nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
            new.append((keys, values))
        return norm(x, params["norm"]) @ params["head"], new

    def decode(params: Any, caches: Any, first: Any, start: Any) -> Any:
        def token(i, state):
            out, token, caches = state
            logits, caches = logits_of(params, caches, token, start + i)
            token = np_.argmax(logits, axis=-1).astype(np_.int32)
            return lax.dynamic_update_slice(out, token[:, None], (0, i)), token, caches

        out = np_.zeros((B, sizes.tokens), np_.int32)
        return lax.fori_loop(0, sizes.tokens, token, (out, first, caches))[0]

    return decode, lambda *args: logits_of(*args)[0]


# -- measuring -------------------------------------------------------------------------------------


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after three: compilation, capture, and one replay."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measured(lib: Any, sizes: Sizes, attention: str, args: Any, repeats: int) -> tuple[float, Any, Any]:
    """Seconds per token, the first logits, and the tokens."""
    decode, first = decoder(lib, sizes, attention)
    logits = np.asarray(lib.jit(first)(*args)).astype(np.float32)
    compiled = lib.jit(decode)
    tokens = np.asarray(compiled(*args))
    seconds = timed(lambda: lib.block_until_ready(compiled(*args)), repeats)
    return seconds / sizes.tokens, logits, tokens


def compared(name: str, logits: Any, tokens: Any, others: tuple[Any, Any]) -> float:
    """Share of tokens that agree; logits of the first step must."""
    expected, other = others
    worst = np.abs(logits - expected).max() / np.abs(expected).max()
    assert worst <= TOLERANCE, f"{name}: logits differ by {worst}"
    return float((tokens == other).mean())


def record(what: str, library: str, seconds: float, sizes: Sizes, bandwidth: float) -> None:
    """Print the rate of a library, and its share of the bandwidth."""
    nbytes = sizes.bytes_per_token()
    print(
        f"{what:<10} {library:<8} {1e3 * seconds:8.4f} ms/token {sizes.batch / seconds:9.0f} tokens/s"
        f" {nbytes / seconds / 1e9:7.0f} GB/s {100 * nbytes / seconds / bandwidth:5.1f}% of bandwidth",
        flush=True,
    )


def profile(sizes: Sizes, attention: str, args: Any) -> None:
    """Print the device time of each step of one token's program, largest first."""
    import blufunc as bf
    from blufunc.explain import explain

    _, first = decoder(bf, sizes, attention)
    print(explain(first, *args, run=True), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the forms of attention with this in their names")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each side")
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu", help="cpu: tiny sizes")
    parser.add_argument("--alone", action="store_true", help="measure blufunc only")
    parser.add_argument("--profile", action="store_true", help="print the time of each step of a token")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["JAX_PLATFORMS"] = options.platform

    import blufunc

    cuda = options.platform == "cuda"
    if cuda:
        blufunc.config.update("default_device", "cuda")
    sizes = Sizes() if cuda else TINY
    name = device()["name"] if cuda else ""
    bandwidth = next((rate for card, rate in BANDWIDTH.items() if card in name), 1e11)
    host = arguments(sizes, np.dtype(blufunc.numpy.bfloat16))
    rows = []
    for attention in ATTENTION:
        if options.only in attention:
            rows += compared_forms(attention, sizes, host, bandwidth, options)
    report("decoding", rows, options.platform, name)


def compared_forms(attention: str, sizes: Sizes, host: Any, bandwidth: float, options: Any) -> list[dict]:
    """The row of one form of attention, after printing one line per library."""
    import jax

    import blufunc

    args = blufunc.tree.map(blufunc.numpy.asarray, host)
    if options.profile:
        profile(sizes, attention, args)
    ours, *results = measured(blufunc, sizes, attention, args, options.repeats)
    record(attention, "blufunc", ours, sizes, bandwidth)
    del args
    if options.alone:
        return []
    args = jax.tree.map(jax.numpy.asarray, host)
    theirs, *expected = measured(jax, sizes, attention, args, options.repeats)
    record(attention, "jax", theirs, sizes, bandwidth)
    agree = compared(attention, *results, expected)
    print(f"{attention}: {100 * agree:.1f}% of the tokens are those of JAX", flush=True)
    made = row(f"a token, attention {attention}", 1e3 * ours, 1e3 * theirs, unit="ms")
    share = lambda seconds: sizes.bytes_per_token() / seconds / bandwidth
    rate = {"tokens_s": sizes.batch / ours, "share": share(ours), "jax_share": share(theirs)}
    return [made | rate | {"GB_token": sizes.bytes_per_token() / 1e9}]


if __name__ == "__main__":
    main()
