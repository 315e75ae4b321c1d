"""Model families as one source for blufunc and JAX.

Each function takes the library as its first argument. A family is a function ``(lib, size) -> (step, make)``: ``lib``
is ``blufunc`` or ``jax``, ``size`` is ``"tiny"``, ``"full"`` or, for transformers, ``"short"``: full, with few layers;
``step`` is what a user would pass to ``jit``, and ``make()`` returns its arguments. Only the library differs between
two runs, so a ratio compares libraries and not two ports. ``tests/kernels/test_golden_programs.py`` keeps the
compiler's output for the tiny ones; ``benchmarks/peers/family.py`` times the full ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

Step = tuple[Callable, Callable[[], tuple]]
Family = Callable[[Any, str], Step]


class Decoder(NamedTuple):
    """Sizes of a Llama-like decoder.

    Touvron et al., arXiv:2302.13971; grouped heads, arXiv:2305.13245.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    batch: int
    length: int


LLAMA = {
    "tiny": Decoder(2, 128, 4, 2, 384, 512, 2, 64),
    "short": Decoder(2, 2048, 16, 4, 5632, 32000, 2, 2048),
    "full": Decoder(8, 2048, 16, 4, 5632, 32000, 4, 2048),
}


def llama(lib: Any, size: str, attention: dict | None = None) -> Step:
    """Training step: RMSNorm, RoPE, grouped-query attention, SwiGLU, AdamW.

    Matmuls are in bfloat16, parameters and optimizer state in float32. ``attention`` are keyword arguments of
    ``dot_product_attention``, such as JAX's ``implementation="cudnn"``.
    """
    s, np, low = LLAMA[size], lib.numpy, lib.numpy.bfloat16
    head = s.width // s.heads

    def weight(key, *shape):
        return lib.random.normal(key, shape) / math.sqrt(shape[0])

    def layer(key):
        q, k, v, o, gate, up, down = lib.random.split(key, 7)
        return {
            "norm1": np.ones(s.width),
            "q": weight(q, s.width, s.heads * head),
            "k": weight(k, s.width, s.kv_heads * head),
            "v": weight(v, s.width, s.kv_heads * head),
            "o": weight(o, s.heads * head, s.width),
            "norm2": np.ones(s.width),
            "gate": weight(gate, s.width, s.hidden),
            "up": weight(up, s.width, s.hidden),
            "down": weight(down, s.hidden, s.width),
        }

    def norm(scale, x):
        x = x.astype(np.float32)
        return (x * lib.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale).astype(low)

    def rotate(x, cos, sin):
        a, b = np.split(x.astype(np.float32), 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(low)

    def matmul(x, w):
        return x @ w.astype(low)

    def block(p, x, cos, sin):
        h = norm(p["norm1"], x)
        q, k, v = (
            matmul(h, p[n]).reshape(s.batch, s.length, heads, head)
            for n, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads))
        )
        y = lib.nn.dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, **(attention or {})
        )
        x = x + matmul(y.reshape(s.batch, s.length, -1), p["o"])
        h = norm(p["norm2"], x)
        return x + matmul(lib.nn.silu(matmul(h, p["gate"])) * matmul(h, p["up"]), p["down"])

    def loss(params, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        angles = np.arange(s.length)[:, None] / 10000.0 ** (np.arange(0, head, 2) / head)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        x = params["tokens"].astype(low)[inputs]
        for p in params["layers"]:
            x = block(p, x, cos, sin)
        logits = matmul(norm(params["norm"], x), params["head"]).astype(np.float32)
        chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (lib.nn.logsumexp(logits, axis=-1) - chosen).mean()

    def make():
        tokens_key, head_key, *keys = lib.random.split(lib.random.key(0), 2 + s.layers)
        params = {
            "tokens": weight(tokens_key, s.vocab, s.width),
            "layers": [layer(k) for k in keys],
            "norm": np.ones(s.width),
            "head": weight(head_key, s.width, s.vocab),
        }
        tokens = lib.random.randint(lib.random.key(1), (s.batch, s.length + 1), 0, s.vocab)
        return params, moments(lib, params), tokens

    return adamw(lib, loss), make


def moments(lib: Any, params: Any) -> tuple:
    """State of ``adamw``: both moments and the step count."""
    zeros = lambda: lib.tree.map(lib.numpy.zeros_like, params)
    return zeros(), zeros(), lib.numpy.zeros((), lib.numpy.int32)


def adamw(lib: Any, loss: Callable, rate: float = 1e-4, decay: float = 0.1) -> Callable:
    """AdamW step around a loss (Loshchilov & Hutter, arXiv:1711.05101).

    Returns:
      ``step(params, state, *batch) -> (params, state, value)``.
    """

    def step(params, state, *batch):
        value, grads = lib.value_and_grad(loss)(params, *batch)
        first, second, n = state
        n = n + 1
        first = lib.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = lib.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, grads)
        left, right = 1 - 0.9**n, 1 - 0.95**n
        update = lambda p, m, v: p - rate * (m / left / (lib.numpy.sqrt(v / right) + 1e-8) + decay * p)
        return lib.tree.map(update, params, first, second), (first, second, n), value

    return step


def gpt2(lib: Any, size: str) -> Step:
    """Training step of GPT-2: layer norm, biases, GELU, learnt positions.

    Radford et al., 2019.
    """
    layers, width, heads, vocab, batch, length = {
        "tiny": (2, 128, 2, 512, 2, 64),
        "short": (4, 768, 12, 50304, 8, 1024),
        "full": (12, 768, 12, 50304, 32, 1024),
    }[size]
    np, low = lib.numpy, lib.numpy.bfloat16

    def linear(key, inputs, outputs):
        return {"w": 0.02 * lib.random.normal(key, (inputs, outputs)), "b": np.zeros(outputs)}

    def layer(key):
        qkv, out, up, down = lib.random.split(key, 4)
        return {
            "norm1": (np.ones(width), np.zeros(width)),
            "qkv": linear(qkv, width, 3 * width),
            "out": linear(out, width, width),
            "norm2": (np.ones(width), np.zeros(width)),
            "up": linear(up, width, 4 * width),
            "down": linear(down, 4 * width, width),
        }

    def apply(p, x):
        return x @ p["w"].astype(low) + p["b"].astype(low)

    def norm(p, x):
        x = x.astype(np.float32)
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return ((x - mean) * lib.lax.rsqrt(variance + 1e-5) * p[0] + p[1]).astype(low)

    def loss(params, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = (params["tokens"][inputs] + params["positions"]).astype(low)
        for p in params["layers"]:
            qkv = apply(p["qkv"], norm(p["norm1"], x)).reshape(batch, length, 3, heads, -1)
            y = lib.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
            x = x + apply(p["out"], y.reshape(batch, length, width))
            x = x + apply(p["down"], lib.nn.gelu(apply(p["up"], norm(p["norm2"], x))))
        logits = (norm(params["norm"], x) @ params["tokens"].T.astype(low)).astype(np.float32)
        chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return (lib.nn.logsumexp(logits, axis=-1) - chosen).mean()

    def make():
        a, b, *keys = lib.random.split(lib.random.key(0), 2 + layers)
        params = {
            "tokens": 0.02 * lib.random.normal(a, (vocab, width)),
            "positions": 0.02 * lib.random.normal(b, (length, width)),
            "layers": [layer(k) for k in keys],
            "norm": (np.ones(width), np.zeros(width)),
        }
        tokens = lib.random.randint(lib.random.key(1), (batch, length + 1), 0, vocab)
        return params, moments(lib, params), tokens

    return adamw(lib, loss), make


def vit(lib: Any, size: str) -> Step:
    """Loss and gradients of a vision transformer (arXiv:2010.11929)."""
    layers, width, heads, side, patch, batch = {
        "tiny": (2, 64, 2, 32, 8, 2),
        "short": (4, 768, 12, 224, 16, 64),
        "full": (12, 768, 12, 224, 16, 128),
    }[size]
    np, low = lib.numpy, lib.numpy.bfloat16
    n = (side // patch) ** 2

    def weight(key, *shape):
        return lib.random.normal(key, shape) / math.sqrt(shape[0])

    def norm(p, x):
        x = x.astype(np.float32)
        return ((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p).astype(low)

    def loss(params, images, labels):
        x = images.reshape(batch, side // patch, patch, side // patch, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, n, -1).astype(low) @ params["patches"].astype(low)
        x = x + params["positions"].astype(low)
        for p in params["layers"]:
            qkv = (norm(p["norm1"], x) @ p["qkv"].astype(low)).reshape(batch, n, 3, heads, -1)
            y = lib.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
            x = x + y.reshape(batch, n, width) @ p["out"].astype(low)
            hidden = lib.nn.gelu(norm(p["norm2"], x) @ p["up"].astype(low), approximate=False)
            x = x + hidden @ p["down"].astype(low)
        logits = x.mean(1).astype(np.float32) @ params["head"]
        return -np.take_along_axis(lib.nn.log_softmax(logits), labels[:, None], axis=-1).mean()

    def layer(key):
        qkv, out, up, down = lib.random.split(key, 4)
        return {
            "norm1": np.ones(width),
            "qkv": weight(qkv, width, 3 * width),
            "out": weight(out, width, width),
            "norm2": np.ones(width),
            "up": weight(up, width, 4 * width),
            "down": weight(down, 4 * width, width),
        }

    def make():
        a, b, c, *keys = lib.random.split(lib.random.key(0), 3 + layers)
        params = {
            "patches": weight(a, 3 * patch * patch, width),
            "positions": 0.02 * lib.random.normal(b, (n, width)),
            "layers": [layer(k) for k in keys],
            "head": weight(c, width, 1000),
        }
        images = lib.random.normal(lib.random.key(1), (batch, side, side, 3))
        labels = lib.random.randint(lib.random.key(2), (batch,), 0, 1000)
        return params, images, labels

    return lib.value_and_grad(loss), make


def cnn(lib: Any, size: str) -> Step:
    """Loss and gradients of residual convolutions with batch norm and pooling, NHWC."""
    blocks, channels, side, batch = {"tiny": (1, 8, 16, 2), "full": (4, 64, 56, 64)}[size]
    np = lib.numpy

    def conv(x, w):
        return lib.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lib.lax.rsqrt(variance + 1e-5)

    def loss(params, images, labels):
        x = conv(images, params["stem"])
        for a, b in params["blocks"]:
            x = x + norm(conv(lib.nn.relu(norm(conv(x, a))), b))
        x = lib.lax.reduce_window(x, -math.inf, lib.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        logits = x.mean((1, 2)) @ params["head"]
        return -np.take_along_axis(lib.nn.log_softmax(logits), labels[:, None], axis=-1).mean()

    draw = lambda i, *shape: lib.random.normal(lib.random.key(i), shape) / math.sqrt(math.prod(shape[:-1]))

    def make():
        params = {
            "stem": draw(0, 3, 3, 3, channels),
            "blocks": [
                (draw(2 * i + 1, 3, 3, channels, channels), draw(2 * i + 2, 3, 3, channels, channels))
                for i in range(blocks)
            ],
            "head": draw(99, channels, 10),
        }
        images = lib.random.normal(lib.random.key(1), (batch, side, side, 3))
        labels = lib.random.randint(lib.random.key(2), (batch,), 0, 10)
        return params, images, labels

    return lib.value_and_grad(loss), make


def gaussian_process(lib: Any, size: str) -> Step:
    """The negative log marginal likelihood of a Gaussian process, and its gradients."""
    n = {"tiny": 48, "full": 2048}[size]
    np = lib.numpy

    def loss(params, x, y):
        scale, noise = np.exp(params["scale"]), np.exp(params["noise"])
        distances = ((x[:, None] - x[None]) ** 2).sum(-1)
        kernel = np.exp(-0.5 * distances / scale**2) + noise * np.eye(n)
        factor = np.linalg.cholesky(kernel)
        z = lib.lax.linalg.triangular_solve(factor, y[:, None], left_side=True, lower=True)[:, 0]
        return 0.5 * z @ z + np.log(np.diagonal(factor)).sum()

    def make():
        x = lib.random.normal(lib.random.key(0), (n, 3))
        return {"scale": np.zeros(()), "noise": np.full((), -2.0)}, x, np.sin(x[:, 0])

    return lib.value_and_grad(loss), make


def ode(lib: Any, size: str) -> Step:
    """Runge-Kutta steps of Lorenz systems, in one ``fori_loop``."""
    systems, steps = {"tiny": (16, 20), "full": (1024, 10000)}[size]
    np = lib.numpy

    def field(s):
        x, y, z = s
        return np.stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8 / 3 * z])

    def rk4(_, s, h=0.01):
        a = field(s)
        b = field(s + h / 2 * a)
        c = field(s + h / 2 * b)
        d = field(s + h * c)
        return s + h / 6 * (a + 2 * b + 2 * c + d)

    make = lambda: (lib.random.normal(lib.random.key(0), (3, systems)),)
    return lambda s: lib.lax.fori_loop(0, steps, rk4, s), make


def softmax(lib: Any, size: str) -> Step:
    """Softmax of rows and its gradient."""
    shape = {"tiny": (64, 512), "full": (16384, 4096)}[size]
    make = lambda: (lib.random.normal(lib.random.key(0), shape),)
    return lambda x: lib.vjp(lib.nn.softmax, x)[1](x), make


def layer_norm(lib: Any, size: str) -> Step:
    """Layer norm of rows and all of its gradients, in bfloat16."""
    shape = {"tiny": (64, 256), "full": (16384, 4096)}[size]
    np = lib.numpy

    def norm(x, scale, bias):
        wide = x.astype(np.float32)
        mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
        return ((wide - mean) * lib.lax.rsqrt(variance + 1e-5) * scale + bias).astype(x.dtype)

    def make():
        x = lib.random.normal(lib.random.key(0), shape).astype(np.bfloat16)
        return x, np.ones(shape[1]), np.zeros(shape[1])

    return lambda *a: lib.vjp(norm, *a)[1](a[0]), make


def scan(lib: Any, size: str) -> Step:
    """Loss and gradients of an LSTM over time (Hochreiter & Schmidhuber, 1997)."""
    steps, batch, width = {"tiny": (8, 4, 16), "full": (512, 64, 512)}[size]
    np = lib.numpy

    def cell(params, carry, x):
        h, c = carry
        i, f, g, o = np.split(x @ params["x"] + h @ params["h"] + params["b"], 4, axis=-1)
        c = lib.nn.sigmoid(f) * c + lib.nn.sigmoid(i) * np.tanh(g)
        h = lib.nn.sigmoid(o) * np.tanh(c)
        return (h, c), h

    def loss(params, xs):
        start = np.zeros((batch, width)), np.zeros((batch, width))
        _, hs = lib.lax.scan(functools.partial(cell, params), start, xs)
        return (hs * hs).mean()

    draw = lambda i, *shape: lib.random.normal(lib.random.key(i), shape) / math.sqrt(width)

    def make():
        params = {"x": draw(0, width, 4 * width), "h": draw(1, width, 4 * width), "b": np.zeros(4 * width)}
        return params, draw(2, steps, batch, width)

    return lib.value_and_grad(loss), make


def dropout(lib: Any, size: str) -> Step:
    """Dropout after a residual sum, and its gradient: random bits next to arithmetic."""
    shape = {"tiny": (64, 128), "full": (16384, 4096)}[size]

    def loss(x, y, key):
        kept = lib.random.bernoulli(key, 0.9, shape)
        return (lib.numpy.where(kept, x / 0.9, 0.0) + y).sum()

    draw = lambda i: lib.random.normal(lib.random.key(i), shape)
    return lib.grad(loss, argnums=(0, 1)), lambda: (draw(0), draw(1), lib.random.key(2))


def sort(lib: Any, size: str) -> Step:
    """Sorts, top-k, and a gather by the resulting order."""
    shape = {"tiny": (16, 64), "full": (4096, 4096)}[size]

    def program(x):
        order = lib.numpy.argsort(x, axis=-1)
        top, _ = lib.lax.top_k(x, 8)
        return lib.numpy.take_along_axis(x, order, axis=-1), top

    return program, lambda: (lib.random.normal(lib.random.key(0), shape),)


def collectives(lib: Any, size: str) -> Step:
    """Loss and gradients with weights sharded over mesh axis "m", by ``shard_map``."""
    batch, width, hidden = {"tiny": (8, 32, 64), "full": (8192, 2048, 8192)}[size]
    P = lib.sharding.PartitionSpec
    mesh = lib.make_mesh((len(lib.devices()),), ("m",))

    def network(x, up, down):
        return lib.lax.psum(lib.nn.gelu(x @ up) @ down, "m")

    divided = lib.shard_map(network, mesh=mesh, in_specs=(P(), P(None, "m"), P("m", None)), out_specs=P())

    def loss(params, x):
        return (divided(x, *params) ** 2).mean()

    draw = lambda i, *shape: lib.random.normal(lib.random.key(i), shape) / math.sqrt(shape[0])
    make = lambda: ((draw(0, width, hidden), draw(1, hidden, width)), draw(2, batch, width))
    return lib.value_and_grad(loss), make


FAMILIES: dict[str, Family] = {
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "cnn": cnn,
    "gaussian_process": gaussian_process,
    "ode": ode,
    "softmax": softmax,
    "layer_norm": layer_norm,
    "scan": scan,
    "dropout": dropout,
    "sort": sort,
    "collectives": collectives,
}
