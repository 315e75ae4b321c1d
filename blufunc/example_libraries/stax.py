"""``stax``: layers as pairs of functions ``(init, apply)``.

A face above ``blufunc.nn``. ``init(key, input_shape)`` gives the output's shape and the parameters, and
``apply(params, inputs, **kwargs)`` the output. A batch size of -1 is unknown. Keys are split as in JAX, so that one key
gives one set of parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import blufunc.numpy as bnp
from blufunc import errors, lax, random
from blufunc.core.ir import source
from blufunc.nn import (
    elu,
    gelu,
    leaky_relu,
    log_softmax,
    relu,
    selu,
    sigmoid,
    softmax,
    softplus,
    standardize,
)
from blufunc.nn.initializers import glorot_normal, normal, ones, zeros
from blufunc.transforms.arguments import ShapeDtypeStruct
from blufunc.transforms.staging.eval_shape import eval_shape

Layer = tuple[Callable, Callable]

glorot = glorot_normal
randn = normal
logsoftmax = log_softmax


def _shape(f: Callable, *shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a result; an unknown size of the batch, -1, is passed through."""
    known = [tuple([1 if n == -1 else n for n in s]) for s in shapes]
    out = eval_shape(f, *[ShapeDtypeStruct(s, "float32") for s in known]).shape
    unknown = [d for d, n in enumerate(shapes[0]) if n == -1]
    return tuple([-1 if d in unknown else n for d, n in enumerate(out)])


# -- layers with parameters --------------------------------------------------------------------------


def Dense(out_dim: int, W_init: Callable = glorot_normal(), b_init: Callable = normal()) -> Layer:
    """A dense layer with ``out_dim`` features."""

    def init(rng, input_shape):
        k1, k2 = random.split(rng)
        return (*input_shape[:-1], out_dim), (W_init(k1, (input_shape[-1], out_dim)), b_init(k2, (out_dim,)))

    def apply(params, inputs, **kwargs):
        W, b = params
        return bnp.dot(inputs, W) + b

    return init, apply


def _convolution(
    convolve: Callable, numbers: Any, out_chan: int, filter_shape: Any, W_init: Any, b_init: Any
) -> Layer:
    """A layer of ``convolve(inputs, kernel)``, with a bias for each feature."""
    lhs, rhs, out = numbers
    W_init = W_init or glorot_normal(rhs.index("I"), rhs.index("O"))

    def init(rng, input_shape):
        sizes = iter(filter_shape)
        kernel = tuple(
            [out_chan if c == "O" else input_shape[lhs.index("C")] if c == "I" else next(sizes) for c in rhs]
        )
        k1, k2 = random.split(rng)
        bias = tuple([out_chan if c == "C" else 1 for c in out])
        shape = _shape(convolve, input_shape, kernel)
        return shape, (W_init(k1, kernel), b_init(k2, bias))

    def apply(params, inputs, **kwargs):
        W, b = params
        return convolve(inputs, W) + b

    return init, apply


def GeneralConv(
    dimension_numbers: Any,
    out_chan: int,
    filter_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    W_init: Callable | None = None,
    b_init: Callable = normal(1e-6),
) -> Layer:
    """A convolution with a bias."""
    strides = strides or (1,) * len(filter_shape)
    convolve = lambda x, w: lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=tuple(dimension_numbers)
    )
    return _convolution(convolve, dimension_numbers, out_chan, filter_shape, W_init, b_init)


Conv = functools.partial(GeneralConv, ("NHWC", "HWIO", "NHWC"))


def GeneralConvTranspose(
    dimension_numbers: Any,
    out_chan: int,
    filter_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    W_init: Callable | None = None,
    b_init: Callable = normal(1e-6),
) -> Layer:
    """A transposed convolution with a bias."""
    strides = strides or (1,) * len(filter_shape)
    convolve = lambda x, w: lax.conv_transpose(
        x, w, strides, padding, dimension_numbers=tuple(dimension_numbers)
    )
    return _convolution(convolve, dimension_numbers, out_chan, filter_shape, W_init, b_init)


Conv1DTranspose = functools.partial(GeneralConvTranspose, ("NHC", "HIO", "NHC"))
ConvTranspose = functools.partial(GeneralConvTranspose, ("NHWC", "HWIO", "NHWC"))


def BatchNorm(
    axis: Any = (0, 1, 2),
    epsilon: float = 1e-5,
    center: bool = True,
    scale: bool = True,
    beta_init: Callable = zeros,
    gamma_init: Callable = ones,
) -> Layer:
    """Batch normalization, by the statistics of the batch itself."""
    axis = (axis,) if bnp.isscalar(axis) else tuple(axis)

    def init(rng, input_shape):
        shape = tuple([n for d, n in enumerate(input_shape) if d not in axis])
        k1, k2 = random.split(rng)
        beta = beta_init(k1, shape) if center else ()
        gamma = gamma_init(k2, shape) if scale else ()
        return input_shape, (beta, gamma)

    def apply(params, x, **kwargs):
        beta, gamma = params
        z = standardize(x, axis, epsilon=epsilon)
        wide = lambda v: bnp.expand_dims(v, axis)
        z = z * wide(gamma) if scale else z
        return z + wide(beta) if center else z

    return init, apply


# -- layers without parameters -----------------------------------------------------------------------


def _plain(apply: Callable, shape: Callable = lambda s: s) -> Layer:
    """A layer of a function of the inputs alone."""
    return lambda rng, input_shape: (shape(input_shape), ()), lambda params, inputs, **kwargs: apply(inputs)


def elementwise(fun: Callable, **fun_kwargs: Any) -> Layer:
    """A layer that applies ``fun`` to its input."""
    return _plain(lambda inputs: fun(inputs, **fun_kwargs))


Tanh = elementwise(bnp.tanh)
Relu = elementwise(relu)
Exp = elementwise(bnp.exp)
LogSoftmax = elementwise(log_softmax, axis=-1)
Softmax = elementwise(softmax, axis=-1)
Softplus = elementwise(softplus)
Sigmoid = elementwise(sigmoid)
Elu = elementwise(elu)
LeakyRelu = elementwise(leaky_relu)
Selu = elementwise(selu)
Gelu = elementwise(gelu)
Identity = elementwise(lambda x: x)
Flatten = _plain(lambda x: bnp.reshape(x, (x.shape[0], -1)), lambda s: (s[0], math.prod(s[1:])))
FanInSum = _plain(lambda xs: functools.reduce(lambda a, b: a + b, xs), lambda shapes: shapes[0])


def FanOut(num: int) -> Layer:
    """Its input, ``num`` times."""
    return _plain(lambda x: [x] * num, lambda s: [s] * num)


def FanInConcat(axis: int = -1) -> Layer:
    """The concatenation of several inputs."""

    def shape(shapes):
        joined = list(shapes[0])
        joined[axis] = sum(s[axis] for s in shapes)
        return tuple(joined)

    return _plain(lambda xs: bnp.concatenate(xs, axis), shape)


def _pooling(reduce: Callable, initial: float, mean: bool) -> Callable:
    def pool(
        window_shape: Sequence[int],
        strides: Sequence[int] | None = None,
        padding: str = "VALID",
        spec: str | None = None,
    ) -> Layer:
        """Pooling over windows; ``spec`` names the axes, ``"NHWC"`` by default."""
        strides = strides or (1,) * len(window_shape)
        outside = (0, len(window_shape) + 1) if spec is None else (spec.index("N"), spec.index("C"))
        whole = lambda sizes: _around(sizes, outside)
        window, steps = whole(window_shape), whole(strides)

        def apply(x):
            sums = lambda v: lax.reduce_window(v, initial, reduce, window, steps, padding)
            return sums(x) / sums(bnp.ones_like(x)) if mean else sums(x)

        return _plain(apply, lambda s: _shape(apply, s))

    return pool


def _around(sizes: Sequence[int], outside: Sequence[int]) -> tuple[int, ...]:
    """The sizes, with 1 at the places of batch and features."""
    out = list(sizes)
    for d in sorted(outside):
        out.insert(d, 1)
    return tuple(out)


MaxPool = _pooling(lax.max, -math.inf, mean=False)
SumPool = _pooling(lax.add, 0.0, mean=False)
AvgPool = _pooling(lax.add, 0.0, mean=True)


def Dropout(rate: float, mode: str = "train") -> Layer:
    """Keep elements with probability ``rate``; all, unless mode is ``"train"``."""

    def init(rng, input_shape):
        return input_shape, ()

    def apply(params, inputs, **kwargs):
        rng = kwargs.get("rng")
        if rng is None:
            raise errors.ArgumentError(
                "a Dropout layer is applied without a key.",
                where=source.here(),
                fix="apply(params, x, rng=key)",
            )
        if mode != "train":
            return inputs
        keep = random.bernoulli(rng, rate, inputs.shape)
        return bnp.where(keep, inputs / rate, 0)

    return init, apply


# -- combinators -------------------------------------------------------------------------------------


def _keys(rng: Any, n: int) -> Any:
    return [None] * n if rng is None else random.split(rng, n)


def serial(*layers: Layer) -> Layer:
    """Layers one after the other."""
    inits, applies = zip(*layers, strict=True)

    def init(rng, input_shape):
        params = []
        for layer in inits:
            rng, own = random.split(rng)
            input_shape, param = layer(own, input_shape)
            params.append(param)
        return input_shape, params

    def apply(params, inputs, **kwargs):
        for f, param, key in zip(applies, params, _keys(kwargs.pop("rng", None), len(layers)), strict=True):
            inputs = f(param, inputs, rng=key, **kwargs)
        return inputs

    return init, apply


def parallel(*layers: Layer) -> Layer:
    """Layers side by side, each with an input and an output of its own."""
    inits, applies = zip(*layers, strict=True)

    def init(rng, input_shape):
        results = [
            f(k, s) for f, k, s in zip(inits, random.split(rng, len(layers)), input_shape, strict=True)
        ]
        shapes, params = zip(*results, strict=True)
        return list(shapes), list(params)

    def apply(params, inputs, **kwargs):
        keys = _keys(kwargs.pop("rng", None), len(layers))
        return [f(p, x, rng=k, **kwargs) for f, p, x, k in zip(applies, params, inputs, keys, strict=True)]

    return init, apply


def shape_dependent(make_layer: Callable) -> Layer:
    """A layer that is made once the shape of its input is known."""

    def init(rng, input_shape):
        return make_layer(input_shape)[0](rng, input_shape)

    def apply(params, inputs, **kwargs):
        return make_layer(inputs.shape)[1](params, inputs, **kwargs)

    return init, apply
