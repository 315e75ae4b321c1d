"""Eleven training steps, small enough to plan all of their layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax, nn, optim, tree

DEVICE = bf.DeviceSpec(flops=1e12, bandwidth=1e11)
LINK = bf.LinkSpec(1e10, 1e-6)
RATE = 0.1


class Small(NamedTuple):
    """A step, the shapes of its arguments, and the devices to lay it out for."""

    step: Any
    args: tuple
    devices: int


def floats(*shape: int) -> bf.ShapeDtypeStruct:
    return bf.ShapeDtypeStruct(shape, "float32")


def ints(*shape: int) -> bf.ShapeDtypeStruct:
    return bf.ShapeDtypeStruct(shape, "int32")


def sgd(loss: Any) -> Any:
    """The step of a loss of (params, *data), which donates the parameters."""

    def step(params, *data):
        value, grads = bf.value_and_grad(loss)(params, *data)
        return value, tree.map(lambda p, g: p - RATE * g, params, grads)

    return bf.jit(step, donate_argnums=0)


def mlp(params, x):
    return ((bnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - x) ** 2).mean()


def chain(params, x):
    for w in params:
        x = bnp.tanh(x @ w)
    return (x**2).mean()


def attend(params, x):
    """Attention of 4 heads on [B, T, C]."""
    q, k, v = (bnp.tensordot(x, params[n], 1).reshape(*x.shape[:2], 4, -1) for n in ("q", "k", "v"))
    return bnp.tensordot(nn.dot_product_attention(q, k, v).reshape(x.shape), params["o"], 1)


def attention(params, x):
    params = params | {"k": params["q"], "v": params["v"]}
    return ((attend(params, x) - x) ** 2).mean()


def transformer(params, x):
    for p in params:
        q, k, v = (bnp.tensordot(x, p["qkv"][:, i], 1).reshape(*x.shape[:2], 4, -1) for i in range(3))
        a = nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + bnp.tensordot(a, p["out"], 1)
        x = x + bnp.tensordot(nn.gelu(bnp.tensordot(x, p["up"], 1)), p["down"], 1)
    return (x**2).mean()


def language(params, tokens, targets):
    logits = bnp.tanh(params["table"][tokens]) @ params["head"]
    return nn.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def convolution(params, x):
    x = nn.relu(
        lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )
    return (bnp.mean(x, (1, 2)) @ params["head"]).var()


def mixture(params, x):
    weights = nn.softmax(x @ params["router"])
    hidden = nn.gelu(bnp.einsum("bc,ecf->ebf", x, params["up"]))
    return ((bnp.einsum("ebf,efc,be->bc", hidden, params["down"], weights) - x) ** 2).mean()


def scanned(params, x):
    def layer(x, p):
        return x + bnp.tanh(x @ p["up"]) @ p["down"], None

    return (lax.scan(layer, x, params)[0] ** 2).mean()


def gated(params, x):
    y = nn.rms_norm(x, params["scale"])
    return (((nn.silu(y @ params["gate"]) * (y @ params["up"])) @ params["down"] - x) ** 2).mean()


def factors(params, ratings):
    return ((params["users"] @ params["items"].T - ratings) ** 2).mean()


ADAM = optim.adam(1e-3)


def adam_step(params, state, x, labels):
    """Logistic regression whose optimizer has a state as large as two models."""

    def loss(params):
        return nn.softmax_cross_entropy_with_integer_labels(x @ params["w"], labels).mean()

    value, grads = bf.value_and_grad(loss)(params)
    updates, state = ADAM.update(grads, state, params)
    return optim.apply_updates(params, updates), state, value


REGRESSION = {"w": floats(512, 1024)}

SMALL = {
    "mlp": Small(
        sgd(mlp), ({"up": floats(128, 512), "bias": floats(512), "down": floats(512, 128)}, floats(256, 128)), 2
    ),
    "square layers": Small(sgd(chain), ([floats(256, 256)] * 4, floats(64, 256)), 2),
    "attention": Small(
        sgd(attention), ({"q": floats(64, 64), "v": floats(64, 64), "o": floats(64, 64)}, floats(8, 64, 64)), 4
    ),
    "two layers of a transformer": Small(
        sgd(transformer),
        ([{"qkv": floats(64, 3, 64), "out": floats(64, 64), "up": floats(64, 256), "down": floats(256, 64)}] * 2,
         floats(4, 32, 64)),
        2,
    ),
    "embedding and softmax": Small(
        sgd(language), ({"table": floats(2048, 64), "head": floats(64, 2048)}, ints(8, 32), ints(8, 32)), 4
    ),
    "convolution": Small(
        sgd(convolution), ({"kernel": floats(3, 3, 16, 64), "head": floats(64, 16)}, floats(8, 16, 16, 16)), 2
    ),
    "mixture": Small(
        sgd(mixture),
        ({"router": floats(64, 4), "up": floats(4, 64, 256), "down": floats(4, 256, 64)}, floats(256, 64)),
        4,
    ),
    "loop over layers": Small(
        sgd(scanned), ({"up": floats(6, 128, 512), "down": floats(6, 512, 128)}, floats(256, 128)), 4
    ),
    "gated": Small(
        sgd(gated),
        ({"scale": floats(128), "gate": floats(128, 512), "up": floats(128, 512), "down": floats(512, 128)},
         floats(512, 128)),
        2,
    ),
    "factors": Small(sgd(factors), ({"users": floats(1024, 64), "items": floats(512, 64)}, floats(1024, 512)), 4),
    "adam": Small(
        bf.jit(adam_step, donate_argnums=(0, 1)),
        (REGRESSION, bf.eval_shape(ADAM.init, REGRESSION), floats(256, 512), ints(256)),
        2,
    ),
}  # fmt: skip
