"""Pooling: shapes, values, padding, gradients, and a small network that learns."""

import itertools

import numpy as np
import pytest

import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.transforms.autodiff.grad import grad, value_and_grad, vjp
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit
from tests.transforms.common import arr, close, draw


def windows(x, window, strides):
    """Each window of the two spatial axes in turn."""
    h, w = x.shape[1:3]
    for i, j in itertools.product(
        range(0, h - window[0] + 1, strides[0]), range(0, w - window[1] + 1, strides[1])
    ):
        yield x[:, i : i + window[0], j : j + window[1]]


@pytest.mark.parametrize("name, f", [("avg_pool", np.mean), ("max_pool", np.max), ("min_pool", np.min)])
@pytest.mark.parametrize("strides", [None, (2, 2), (1, 3)])
def test_values(name, f, strides):
    x = draw(2, 5, 6, 3)
    out = getattr(nn, name)(x, (2, 3), strides)
    want = [f(part, axis=(1, 2)) for part in windows(np.asarray(x), (2, 3), strides or (1, 1))]
    close(out.reshape(2, -1, 3), arr(np.stack(want, 1)))


def test_one_spatial_axis_or_three_and_any_batch_axes():
    assert nn.max_pool(bnp.ones((7, 2)), (3,), (2,)).shape == (3, 2)
    assert nn.max_pool(bnp.ones((4, 7, 2)), (3,), (2,), "SAME").shape == (4, 4, 2)
    assert nn.avg_pool(bnp.ones((2, 3, 4, 4, 4, 1)), (2, 2, 2), (2, 2, 2)).shape == (2, 3, 2, 2, 2, 1)


def test_padding_counts_in_means_unless_told():
    x = bnp.ones((1, 3, 3, 1))
    counted = nn.avg_pool(x, (2, 2), (2, 2), "SAME")
    assert counted[0, :, :, 0].tolist() == [[1, 0.5], [0.5, 0.25]]
    own = nn.avg_pool(x, (2, 2), (2, 2), "SAME", count_include_pad=False)
    assert own.tolist() == bnp.ones((1, 2, 2, 1)).tolist()
    assert nn.max_pool(-x, (2, 2), (2, 2), [(1, 0), (1, 0)]).tolist() == (-bnp.ones((1, 2, 2, 1))).tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "uint8", "bool"])
def test_dtypes(dtype):
    x = bnp.asarray([[1], [0], [1], [0]]).astype(dtype)
    assert nn.max_pool(x, (2,), (2,)).dtype == x.dtype
    assert nn.max_pool(x, (2,), (2,)).astype("int32").tolist() == [[1], [1]]
    assert nn.min_pool(x, (2,), (2,), [(1, 1)]).astype("int32").tolist() == [[1], [0], [0]]
    mean = nn.avg_pool(x, (2,), (2,))
    assert mean.dtype == (x.dtype if "float" in dtype else "float32") and mean.astype("float32").tolist() == [
        [0.5],
        [0.5],
    ]


def test_any_function():
    x = draw(1, 6, 2)
    close(nn.pool(x, 1, lambda a, b: a * b, (3,), (3,)), bnp.prod(x.reshape(1, 2, 3, 2), axis=2))


def test_gradients():
    x = draw(2, 4, 4, 3)
    up, spread = (vjp(lambda x, p=p: p(x, (2, 2), (2, 2)), x)[1](bnp.ones((2, 2, 2, 3), "float64"))[0]
                  for p in (nn.max_pool, nn.avg_pool))  # fmt: skip
    blocks = lambda a: np.asarray(a).reshape(2, 2, 2, 2, 2, 3)
    np.testing.assert_array_equal(blocks(up), blocks(x) == blocks(x).max((2, 4), keepdims=True))
    np.testing.assert_array_equal(np.asarray(spread), 0.25)
    f = lambda x: (nn.max_pool(x, (2, 2)) ** 2).sum()
    each = vmap(grad(f))(x)
    close(each, bnp.stack([grad(f)(x[i]) for i in range(2)]))
    close(jit(vmap(grad(f)))(x), each)


def test_a_small_network_learns():
    """Vertical and horizontal bars, by a convolution, a pooling and a linear map."""
    rng = np.random.default_rng(0)
    x = 0.3 * rng.standard_normal((64, 6, 6, 1))
    y = np.arange(64) % 2
    for i, (lies, at) in enumerate(zip(y, rng.integers(0, 6, 64), strict=True)):
        x[(i, at) if lies else (i, slice(None), at)] += 1
    x, y = bnp.asarray(x), bnp.asarray(y)
    params = {"w": bnp.asarray(0.3 * rng.standard_normal((3, 3, 1, 4))), "v": bnp.zeros((4, 2))}

    def loss(p):
        h = lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        h = nn.max_pool(nn.relu(h), (2, 2), (2, 2)).mean((1, 2))
        logits = 10 * h @ p["v"]
        return nn.softmax_cross_entropy_with_integer_labels(logits, y).mean(), (logits.argmax(-1) == y).mean()

    step = jit(value_and_grad(loss, has_aux=True))
    for _ in range(150):
        (value, accuracy), g = step(params)
        params = {k: params[k] - 0.1 * g[k] for k in params}
    assert float(value) < 0.2 and float(accuracy) > 0.95


WRONG = {
    "axes": lambda: nn.max_pool(bnp.ones(3), (2,)),
    "strides": lambda: nn.avg_pool(bnp.ones((4, 4, 1)), (2, 2), (2,)),
    "padding": lambda: nn.max_pool(bnp.ones((4, 4, 1)), (2, 2), (2, 2), [(0, 0)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    with pytest.raises(errors.ShapeError) as caught:
        WRONG[name]()
    assert "test_pooling.py" in caught.value.where and caught.value.fix


def test_complex_numbers_have_no_order():
    with pytest.raises(errors.DtypeError):
        nn.max_pool(bnp.ones((4, 1), "complex64"), (2,))
