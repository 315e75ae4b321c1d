"""Models of images: steps of training, cases of the breadth suite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from benchmarks.cases.case import BF16, LOW, Case, Sizes, integers, normal, weight
from benchmarks.cases.training import cross_entropy, torch_trained, trained
from benchmarks.peers import resnet

NHWC = ("NHWC", "HWIO", "NHWC")


def residual(n: Sizes, layout: str) -> Case:
    """Step of ResNet-50; PyTorch's is torchvision's, eager, with other weights."""
    size = n("full", "tiny")
    state: dict[str, Any] = {}

    def ours(m: Any, params: Any, momenta: Any, images: Any, labels: Any) -> Any:
        return resnet.training(m, size, layout)(params, momenta, images, labels)

    def make() -> tuple:
        params = resnet.parameters(size, layout)
        zeros = {k: {name: np.zeros_like(v) for name, v in p.items()} for k, p in params.items()}
        return params, zeros, *resnet.batch_of(size, layout, n(64, 2), n(224, 32))

    def torch(t: Any, params: Any, momenta: Any, *batch: Any) -> Any:
        if not state:
            state["step"] = resnet.of_torch(len(batch[0]), batch[0].shape[-2], compiled=False)
        return params, momenta, state["step"]()

    # only losses are compared: its first gradients amplify rounding 10^5 times, in every library
    return Case(
        ours, make, torch if layout == "NHWC" else None, carried=2, comparable=False, compared=1, **LOW
    )  # fmt: skip


def _conv(m: Any, x: Any, w: Any, stride: int = 1) -> Any:
    return m.lax.conv_general_dilated(
        x, w.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=NHWC
    )  # fmt: skip


def unet(n: Sizes) -> Case:
    """Step of a diffusion U-Net (arXiv:2006.11239).

    Group norm, attention at the lowest resolution, strided convolutions down, nearest upsampling, time embedding.
    """
    batch, side, width = n((16, 64, 128), (2, 8, 16))
    widths = (width, 2 * width, 2 * width)
    embedding = 4 * width
    heads = 4

    def make() -> tuple:
        seeds = iter(range(1000))
        draw = lambda *shape: weight(*shape, seed=next(seeds) % 7)
        ones = lambda c: {"scale": np.ones(c, np.float32), "bias": np.zeros(c, np.float32)}

        def block(inputs: int, outputs: int) -> dict:
            skip = {} if inputs == outputs else {"skip": draw(1, 1, inputs, outputs)}
            return skip | {
                "norm1": ones(inputs), "conv1": draw(3, 3, inputs, outputs), "time": draw(embedding, outputs),
                "norm2": ones(outputs), "conv2": draw(3, 3, outputs, outputs),
            }  # fmt: skip

        low = widths[-1]
        params = {
            "time": [draw(width, embedding), draw(embedding, embedding)],
            "first": draw(3, 3, 3, width),
            "down": [
                {"block": block(a, b), "conv": draw(3, 3, b, b)}
                for a, b in zip((width, *widths), widths, strict=False)
            ],
            "middle": [block(low, low), block(low, low)],
            "attention": {"norm": ones(low), "qkv": draw(low, 3 * low), "out": draw(low, low)},
            "up": [
                {"block": block(2 * b, a), "conv": draw(3, 3, b, b)}
                for a, b in reversed(list(zip((width, *widths), widths, strict=False)))
            ],
            "norm": ones(width),
            "last": draw(3, 3, width, 3),
        }
        images, noise = normal(batch, side, side, 3), normal(batch, side, side, 3, seed=1)
        return params, images, noise, integers(1000, batch)

    def norm(m: Any, p: Any, x: Any) -> Any:
        groups = min(32, x.shape[-1] // 4)
        wide = x.astype(m.numpy.float32).reshape(batch, -1, groups, x.shape[-1] // groups)
        mean, variance = wide.mean((1, 3), keepdims=True), wide.var((1, 3), keepdims=True)
        y = ((wide - mean) * m.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        return (y * p["scale"] + p["bias"]).astype(x.dtype)

    def block(m: Any, p: Any, x: Any, time: Any) -> Any:
        h = _conv(m, m.nn.silu(norm(m, p["norm1"], x)), p["conv1"])
        h = h + (time @ p["time"].astype(h.dtype))[:, None, None]
        h = _conv(m, m.nn.silu(norm(m, p["norm2"], h)), p["conv2"])
        return h + (_conv(m, x, p["skip"]) if "skip" in p else x)

    def attend(m: Any, p: Any, x: Any) -> Any:
        b, h, w, c = x.shape
        qkv = (norm(m, p["norm"], x) @ p["qkv"].astype(x.dtype)).reshape(b, h * w, 3, heads, c // heads)
        y = m.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        return x + y.reshape(x.shape) @ p["out"].astype(x.dtype)

    def loss(m: Any, params: Any, images: Any, noise: Any, times: Any) -> Any:
        jnp = m.numpy
        signal = jnp.cos(times / 1000 * (math.pi / 2))[:, None, None, None]
        noisy = signal * images + jnp.sqrt(1 - signal**2) * noise
        rates = jnp.exp(-math.log(1e4) * jnp.arange(width // 2) / (width // 2))
        angles = times[:, None] * rates
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(BF16)
        time = m.nn.silu(m.nn.silu(time @ params["time"][0].astype(BF16)) @ params["time"][1].astype(BF16))
        x = _conv(m, noisy.astype(BF16), params["first"])
        skips = []
        for p in params["down"]:
            x = block(m, p["block"], x, time)
            skips.append(x)
            x = _conv(m, x, p["conv"], 2)
        x = attend(m, params["attention"], block(m, params["middle"][0], x, time))
        x = block(m, params["middle"][1], x, time)
        for p in params["up"]:
            x = _conv(m, jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2), p["conv"])
            x = block(m, p["block"], jnp.concatenate([x, skips.pop()], -1), time)
        out = _conv(m, m.nn.silu(norm(m, params["norm"], x)), params["last"])
        return ((out.astype(jnp.float32) - noise) ** 2).mean()

    return Case(trained(loss), make, carried=1, **LOW)


def mixer(n: Sizes) -> Case:
    """Step of an MLP-mixer (arXiv:2105.01601), 4 layers."""
    layers, width, side, patch, batch = n((4, 768, 224, 16, 64), (2, 16, 16, 4, 2))
    tokens = (side // patch) ** 2
    between, across = width // 2, 4 * width

    def make() -> tuple:
        layer = lambda i: {
            "norm1": np.ones(width, np.float32), "mix1": weight(tokens, between, seed=i),
            "mix2": weight(between, tokens, seed=i + 1), "norm2": np.ones(width, np.float32),
            "up": weight(width, across, seed=i + 2), "down": weight(across, width, seed=i + 3),
        }  # fmt: skip
        params = {
            "patches": weight(patch * patch * 3, width), "layers": [layer(i) for i in range(layers)],
            "head": weight(width, 1000),
        }  # fmt: skip
        return params, normal(batch, side, side, 3), integers(1000, batch)

    def patches(x: Any, order: Any) -> Any:
        x = x.reshape(batch, side // patch, patch, side // patch, patch, 3)
        return order(x, (0, 1, 3, 2, 4, 5)).reshape(batch, tokens, -1)

    def norm(m: Any, scale: Any, x: Any) -> Any:
        wide = x.astype(m.numpy.float32)
        y = (wide - wide.mean(-1, keepdims=True)) * m.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-6)
        return (y * scale).astype(x.dtype)

    def loss(m: Any, params: Any, images: Any, labels: Any) -> Any:
        low = lambda w: w.astype(BF16)
        x = low(patches(images, m.numpy.transpose)) @ low(params["patches"])
        for p in params["layers"]:
            h = norm(m, p["norm1"], x).swapaxes(1, 2)
            x = x + (m.nn.gelu(h @ low(p["mix1"])) @ low(p["mix2"])).swapaxes(1, 2)
            x = x + m.nn.gelu(norm(m, p["norm2"], x) @ low(p["up"])) @ low(p["down"])
        return cross_entropy(m, x.astype("float32").mean(1) @ params["head"], labels)

    def torch_loss(t: Any, params: Any, images: Any, labels: Any) -> Any:
        f = t.nn.functional
        low = lambda w: w.bfloat16()
        norm = lambda s, x: f.layer_norm(x.float(), (width,), s, eps=1e-6).bfloat16()
        gelu = lambda x: f.gelu(x, approximate="tanh")
        x = low(patches(images, t.permute)) @ low(params["patches"])
        for p in params["layers"]:
            h = norm(p["norm1"], x).transpose(1, 2)
            x = x + (gelu(h @ low(p["mix1"])) @ low(p["mix2"])).transpose(1, 2)
            x = x + gelu(norm(p["norm2"], x) @ low(p["up"])) @ low(p["down"])
        return f.cross_entropy(x.float().mean(1) @ params["head"], labels.long())

    compiled = torch_trained(torch_loss, compiled=True)
    return Case(trained(loss), make, torch_trained(torch_loss), compiled=compiled, carried=1, **LOW)


def autoencoder(n: Sizes) -> Case:
    """Step of a variational autoencoder (arXiv:1312.6114), convolutions in float32."""
    batch, side, width, latent = n((128, 32, 32, 64), (2, 8, 4, 4))
    low = side // 4

    def make() -> tuple:
        params = {
            "conv1": weight(3, 3, 3, width), "conv2": weight(3, 3, width, 2 * width, seed=1),
            "mean": weight(low * low * 2 * width, latent, seed=2),
            "spread": weight(low * low * 2 * width, latent, seed=3),
            "in": weight(latent, low * low * 2 * width, seed=4),
            "up1": weight(4, 4, 2 * width, width, seed=5), "up2": weight(4, 4, width, 3, seed=6),
        }  # fmt: skip
        return params, normal(batch, side, side, 3), np.int32(1)

    def loss(m: Any, p: Any, x: Any, seed: Any) -> Any:
        jnp, relu = m.numpy, m.nn.relu
        up = lambda x, w: m.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC)
        h = relu(_conv(m, relu(_conv(m, x, p["conv1"], 2)), p["conv2"], 2)).reshape(batch, -1)
        mean, spread = h @ p["mean"], h @ p["spread"]
        z = mean + jnp.exp(0.5 * spread) * m.random.normal(m.random.key(seed), mean.shape)
        h = relu(z @ p["in"]).reshape(batch, low, low, 2 * width)
        y = up(relu(up(h, p["up1"])), p["up2"])
        divergence = -0.5 * (1 + spread - mean**2 - jnp.exp(spread)).sum(-1).mean()
        return ((y - x) ** 2).mean() + 1e-3 * divergence

    return Case(trained(loss), make, carried=1, tolerance=1e-2)


def adversarial(n: Sizes) -> Case:
    """Step of both networks of a DCGAN (arXiv:1511.06434), bfloat16."""
    batch, width, latent = n((64, 64, 128), (2, 4, 8))
    slope = 0.2

    def make() -> tuple:
        up, down = (8, 4, 2, 1), (1, 2, 4, 8)
        ups = zip(up, (*up[1:], 0), strict=True)
        downs = zip((0, *down[:-1]), down, strict=True)
        features = lambda k: k * width or 3
        kernels = lambda pairs: [
            weight(4, 4, features(a), features(b), seed=i) for i, (a, b) in enumerate(pairs)
        ]
        g = {"in": weight(latent, 16 * 8 * width), "ups": kernels(ups)}
        d = {"downs": kernels(downs), "out": weight(16 * 8 * width, 1)}
        return (g, d), normal(batch, 64, 64, 3), normal(batch, latent, seed=1)

    def norm(m: Any, x: Any) -> Any:
        wide = x.astype(m.numpy.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        return ((wide - mean) * m.lax.rsqrt(variance + 1e-5)).astype(x.dtype)

    def generator(m: Any, p: Any, z: Any) -> Any:
        x = (z.astype(BF16) @ p["in"].astype(BF16)).reshape(batch, 4, 4, 8 * width)
        for w in p["ups"]:
            x = m.nn.relu(norm(m, x))
            x = m.lax.conv_transpose(x, w.astype(BF16), (2, 2), "SAME", dimension_numbers=NHWC)
        return m.numpy.tanh(x)

    def discriminator(m: Any, p: Any, x: Any) -> Any:
        x = x.astype(BF16)
        for i, w in enumerate(p["downs"]):
            x = _conv(m, x, w, 2)
            x = m.nn.leaky_relu(norm(m, x) if i else x, slope)
        return (x.reshape(batch, -1) @ p["out"].astype(BF16)).astype(m.numpy.float32)

    def step(m: Any, both: Any, images: Any, z: Any) -> Any:
        g, d = both
        softplus = m.nn.softplus

        def critic(d: Any, g: Any) -> Any:
            fake = discriminator(m, d, generator(m, g, z))
            return softplus(-discriminator(m, d, images)).mean() + softplus(fake).mean()

        def maker(g: Any, d: Any) -> Any:
            return softplus(-discriminator(m, d, generator(m, g, z))).mean()

        one, of_d = m.value_and_grad(critic)(d, g)
        other, of_g = m.value_and_grad(maker)(g, d)
        descend = lambda p, q: p - 1e-4 * q
        return (m.tree.map(descend, g, of_g), m.tree.map(descend, d, of_d)), (one, other)

    return Case(step, make, carried=1, **LOW)


def flow(n: Sizes) -> Case:
    """Step of affine couplings and mixing matrices (arXiv:1605.08803), float32."""
    batch, width, hidden, layers = n((8192, 64, 256, 6), (8, 8, 16, 2))

    def make() -> tuple:
        layer = lambda i: {
            "mix": np.linalg.qr(normal(width, width, seed=i))[0].astype(np.float32),
            "in": weight(width // 2, hidden, seed=i), "mid": weight(hidden, hidden, seed=i + 1),
            "out": 0.1 * weight(hidden, width, seed=i + 2),
        }  # fmt: skip
        return [layer(i) for i in range(layers)], normal(batch, width, seed=50)

    def loss(m: Any, params: Any, x: Any) -> Any:
        jnp = m.numpy
        total = 0.0
        for p in params:
            x = x @ p["mix"]
            total = total + jnp.linalg.slogdet(p["mix"])[1]
            a, b = jnp.split(x, 2, axis=-1)
            h = m.nn.relu(m.nn.relu(a @ p["in"]) @ p["mid"]) @ p["out"]
            scale, shift = jnp.split(h, 2, axis=-1)
            scale = jnp.tanh(scale)
            x = jnp.concatenate([a, b * jnp.exp(scale) + shift], -1)
            total = total + scale.sum(-1)
        return (0.5 * (x * x).sum(-1) - total).mean()

    return Case(trained(loss), make, carried=1, tolerance=1e-2)


def radiance(n: Sizes) -> Case:
    """Step of a radiance field (arXiv:2003.08934): an MLP and compositing."""
    rays, points, hidden, bands = n((4096, 64, 128, 8), (8, 4, 16, 2))

    def make() -> tuple:
        encoded = 3 * 2 * bands
        params = [
            weight(encoded, hidden), weight(hidden, hidden, seed=1), weight(hidden, hidden, seed=2),
            weight(hidden, 4, seed=3),
        ]  # fmt: skip
        return params, normal(rays, 3), normal(rays, 3, seed=1), normal(rays, 3, seed=2)

    def loss(m: Any, params: Any, origins: Any, ways: Any, colors: Any) -> Any:
        jnp = m.numpy
        at = jnp.linspace(0.5, 4.0, points)
        x = origins[:, None] + at[:, None] * ways[:, None]
        x = (x[..., None] * 2.0 ** jnp.arange(bands)).reshape(rays, points, -1)
        h = jnp.concatenate([jnp.sin(x), jnp.cos(x)], -1).astype(BF16)
        for w in params[:-1]:
            h = m.nn.relu(h @ w.astype(BF16))
        h = (h @ params[-1].astype(BF16)).astype(jnp.float32)
        density, rgb = m.nn.softplus(h[..., 3]), m.nn.sigmoid(h[..., :3])
        alpha = 1 - jnp.exp(-density * (3.5 / points))
        clear = jnp.cumprod(1 - alpha + 1e-6, axis=-1) / (1 - alpha + 1e-6)
        found = ((alpha * clear)[..., None] * rgb).sum(1)
        return ((found - colors) ** 2).mean()

    return Case(trained(loss), make, carried=1, **LOW)


def of_vision(n: Sizes) -> dict[str, Case]:
    """All cases of this module."""
    return {
        "ResNet-50 step, NHWC, bf16": residual(n, "NHWC"),
        "ResNet-50 step, NCHW, bf16": residual(n, "NCHW"),
        "diffusion U-Net step, bf16": unet(n),
        "MLP-mixer step, bf16": mixer(n),
        "variational autoencoder step, f32": autoencoder(n),
        "DCGAN step, bf16": adversarial(n),
        "normalizing flow step, f32": flow(n),
        "radiance field step, bf16": radiance(n),
    }
