"""A training step of ResNet-50 in one library.

    python -m benchmarks.peers.resnet --library jax

One source for blufunc and JAX: convolutions in bfloat16, features last (or second, by ``--layout``), statistics of
batch norm in float32, float32 parameters, SGD with momentum. PyTorch trains torchvision's model under autocast, with
features last in memory, eagerly or compiled.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks.peers import clock

BLOCKS = {"full": ((64, 3), (128, 4), (256, 6), (512, 3)), "tiny": ((8, 1), (16, 2))}
"""Features of each stage, and its blocks."""

CLASSES = {"full": 1000, "tiny": 10}


def parameters(size: str, layout: str) -> dict[str, Any]:
    """Parameters as NumPy arrays, by name."""
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {}

    def unit(name: str, inputs: int, outputs: int, kernel: int) -> None:
        w = rng.standard_normal((kernel, kernel, inputs, outputs)) * (2 / (kernel * kernel * inputs)) ** 0.5
        w = w.astype(np.float32)
        made[name] = {
            "w": np.ascontiguousarray(w.transpose(3, 2, 0, 1)) if layout == "NCHW" else w,
            "scale": np.ones(outputs, np.float32),
            "bias": np.zeros(outputs, np.float32),
        }

    stages = BLOCKS[size]
    unit("stem", 3, stages[0][0], 7)
    features = stages[0][0]
    for s, (width, blocks) in enumerate(stages):
        for b in range(blocks):
            name = f"{s}.{b}"
            unit(f"{name}.0", features, width, 1)
            unit(f"{name}.1", width, width, 3)
            unit(f"{name}.2", width, 4 * width, 1)
            if not b:
                unit(f"{name}.skip", features, 4 * width, 1)
            features = 4 * width
    w = rng.standard_normal((features, CLASSES[size])) / features**0.5
    made["head"] = {"w": w.astype(np.float32), "b": np.zeros(CLASSES[size], np.float32)}
    return made


def model(lib: Any, size: str, layout: str) -> Callable[..., Any]:
    """``loss(parameters, images, labels)`` in blufunc or JAX."""
    jnp, lax = lib.numpy, lib.lax
    numbers = (layout, "OIHW" if layout == "NCHW" else "HWIO", layout)
    axes = tuple(d for d, letter in enumerate(layout) if letter != "C")
    shape = tuple(-1 if letter == "C" else 1 for letter in layout)

    def unit(p: Any, x: Any, stride: int = 1) -> Any:
        y = lax.conv_general_dilated(
            x, p["w"].astype(jnp.bfloat16), (stride, stride), "SAME", dimension_numbers=numbers
        )
        wide = y.astype(jnp.float32)
        mean = wide.mean(axes)
        variance = (wide * wide).mean(axes) - mean * mean
        scale = lax.rsqrt(variance + 1e-5) * p["scale"]
        return ((wide - mean.reshape(shape)) * scale.reshape(shape) + p["bias"].reshape(shape)).astype(
            x.dtype
        )

    relu = lib.nn.relu

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = relu(unit(params["stem"], images.astype(jnp.bfloat16), 2))
        window = tuple(3 if letter in "HW" else 1 for letter in layout)
        strides = tuple(2 if letter in "HW" else 1 for letter in layout)
        x = lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, window, strides, "SAME")
        for s, (_, blocks) in enumerate(BLOCKS[size]):
            for b in range(blocks):
                name, stride = f"{s}.{b}", 2 if s and not b else 1
                y = relu(unit(params[f"{name}.0"], x))
                y = relu(unit(params[f"{name}.1"], y, stride))
                y = unit(params[f"{name}.2"], y)
                skip = x if b else unit(params[f"{name}.skip"], x, stride)
                x = relu(y + skip)
        x = x.astype(jnp.float32).mean(tuple(d for d, letter in enumerate(layout) if letter in "HW"))
        logits = x @ params["head"]["w"] + params["head"]["b"]
        logits = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
        chosen = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return (jnp.log(jnp.exp(logits).sum(-1)) - chosen).mean()

    return loss


def training(lib: Any, size: str, layout: str) -> Callable[..., Any]:
    """``step(parameters, momenta, images, labels)``, the new ones, and the loss."""
    loss = model(lib, size, layout)

    def step(params: Any, momenta: Any, images: Any, labels: Any) -> Any:
        value, grads = lib.value_and_grad(loss)(params, images, labels)
        momenta = lib.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
        return lib.tree.map(lambda p, m: p - 0.01 * m, params, momenta), momenta, value

    return step


def batch_of(size: str, layout: str, n: int, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels."""
    rng = np.random.default_rng(1)
    shape = (n, 3, pixels, pixels) if layout == "NCHW" else (n, pixels, pixels, 3)
    return rng.standard_normal(shape).astype(np.float32), rng.integers(0, CLASSES[size], n).astype(np.int32)


def of_library(lib: Any, size: str, layout: str, n: int, pixels: int) -> Callable[[], Any]:
    """A step of blufunc or JAX that keeps its state."""
    step = lib.jit(training(lib, size, layout), donate_argnums=(0, 1))
    params = lib.tree.map(lib.numpy.asarray, parameters(size, layout))
    momenta = lib.tree.map(lib.numpy.zeros_like, params)
    images, labels = map(lib.numpy.asarray, batch_of(size, layout, n, pixels))
    state = [params, momenta]

    def run() -> Any:
        state[0], state[1], value = step(*state, images, labels)
        return value

    return run


def of_torch(n: int, pixels: int, compiled: bool) -> Callable[[], Any]:
    """A step of PyTorch's model."""
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    net = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    images, labels = batch_of("full", "NCHW", n, pixels)
    x = torch.from_numpy(images).cuda().to(memory_format=torch.channels_last)
    y = torch.from_numpy(labels.astype(np.int64)).cuda()

    def loss(x: Any, y: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return torch.nn.functional.cross_entropy(net(x).float(), y)

    of = torch.compile(loss) if compiled else loss

    def run() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = of(x, y)
        value.backward()
        optimizer.step()
        return value

    return run


def main() -> None:
    """Emit one row."""
    p = argparse.ArgumentParser()
    p.add_argument("--library", choices=["blufunc", "jax", "torch", "torch_compiled"], default="blufunc")
    p.add_argument("--layout", choices=["NHWC", "NCHW"], default="NHWC")
    p.add_argument("--size", choices=list(BLOCKS), default="full")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--pixels", type=int, default=224)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--rounds", type=int, default=5)
    o = p.parse_args()
    begin = time.perf_counter()
    if o.library.startswith("torch"):
        import torch

        run = of_torch(o.batch, o.pixels, o.library == "torch_compiled")
    else:
        if o.library == "blufunc":
            os.environ.setdefault("BLUFUNC_DEFAULT_DEVICE", "cuda")
        lib = importlib.import_module(o.library)
        for name in ("numpy", "lax", "nn"):
            importlib.import_module(f"{o.library}.{name}")
        run = of_library(lib, o.size, o.layout, o.batch, o.pixels)
    values = []

    def rounds(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            last = run()
        if o.library.startswith("torch"):
            torch.cuda.synchronize()
        else:
            lib.block_until_ready(last)
        values.append(float(last))
        return (time.perf_counter() - start) / n

    rounds(1)
    first = time.perf_counter() - begin
    rounds(o.steps)
    times = [rounds(o.steps) for _ in range(o.rounds)]
    row = {
        "library": o.library,
        "layout": o.layout,
        "step_ms": 1e3 * statistics.median(times),
        "first_s": first,
    }
    clock.emit(**row, min_ms=1e3 * min(times), losses=[round(v, 4) for v in values])


if __name__ == "__main__":
    main()
