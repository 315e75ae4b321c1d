"""Arrays of other libraries as arguments: devices, dtypes, refusals."""

import gc

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, lax, nn
from blufunc.core.ir import dtypes
from tests.core.arrays.lent import Lent

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
I = np.asarray([2, 0])

FUNCTIONS = {
    "sin": (bnp.sin, X),
    "add": (bnp.add, X, X[0]),
    "operator": (lambda x: bnp.ones(4) + x, X),
    "reflected": (lambda x: bnp.ones((3, 4)) @ x.__class__(x.values.T.copy()), X),
    "where": (bnp.where, X > 0, X, X * 2),
    "einsum": (lambda x, y: bnp.einsum("ij,kj->ik", x, y), X, X),
    "matmul": (bnp.matmul, X, X.T),
    "sum": (lambda x: bnp.sum(x, axis=0), X),
    "sort": (bnp.sort, X),
    "concatenate": (lambda x, y: bnp.concatenate([x, y]), X, X),
    "stack": (lambda x: bnp.stack([x, x]), X),
    "list": (lambda x: bnp.asarray([x, x]), X),
    "index": (lambda i: bnp.arange(4.0)[i], I),
    "mask": (lambda m: bnp.arange(4.0)[m], X[0] > 0),
    "update": (lambda i, v: bnp.zeros(4).at[i].set(v), I, X[0, :2]),
    "take": (bnp.take, X, I),
    "reshape": (lambda x: bnp.reshape(x, (4, 3)), X),
    "shape": (lambda x: bnp.asarray(bnp.shape(x)), X),
    "zeros_like": (bnp.zeros_like, X),
    "ones_like": (bnp.ones_like, I),
    "full_like": (lambda x: bnp.full_like(x, 3), X),
    "full": (lambda x: bnp.full((2, 4), x), X[0]),
    "linalg": (bnp.linalg.norm, X),
    "fft": (bnp.fft.fft, X),
    "interp": (bnp.interp, X[0], X[1], X[2]),
    "histogram": (lambda x: bnp.histogram(x, bins=4)[0], X),
    "split": (lambda x: bnp.split(x, 2, axis=1)[1], X),
    "lax": (lax.tanh, X),
    "softmax": (nn.softmax, X),
    "permutation": (lambda x: bf.random.permutation(bf.random.key(0), x), X),
    "jit": (bf.jit(lambda x: x * 2), X),
    "grad": (bf.grad(lambda x: (x * x).sum()), X),
    "vmap": (bf.vmap(bnp.sum), X),
    "scan": (lambda x: lax.scan(lambda c, v: (c + v, c), bnp.zeros(4), x)[1], X),
    "cond": (lambda p: lax.cond(p, lambda: bnp.ones(2), lambda: bnp.zeros(2)), np.asarray(True)),
    "result_type": (lambda x: bnp.ones(2, bnp.result_type(x)), X),
    "device_put": (lambda x: bf.device_put(x, bf.devices("cpu")[0]), X),
    "closure": (lambda x: bf.jit(lambda y: y + x)(bnp.ones(4)), X),
    "eval_shape": (lambda x: bnp.zeros(bf.eval_shape(bnp.sin, x).shape), X),
}


@pytest.mark.second
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_tensors(name):
    f, *args = FUNCTIONS[name]
    tensors = [Lent(a) for a in args]
    with_arrays = f(*[Lent(a) if name == "reflected" else bnp.asarray(a) for a in args])
    result = f(*tensors)
    assert result.dtype == with_arrays.dtype
    np.testing.assert_array_equal(result, with_arrays)
    del result, with_arrays
    if name not in ("jit", "grad", "vmap"):  # programs may keep constants
        gc.collect()


@pytest.mark.parametrize(
    "given, dtype, result",
    [("float64", None, "float32"), ("int64", None, "int32"), ("complex128", None, "complex64"),
     ("float64", "float64", "float64"), ("bfloat16", None, "bfloat16"), ("float32", "int8", "int8"),
     ("float8_e5m2", None, "float8_e5m2")],
)  # fmt: skip
def test_widths(given, dtype, result):
    tensor = Lent(np.ones((2, 2)).astype(dtypes.as_dtype(given)))
    assert bnp.asarray(tensor, dtype=dtype).dtype == result
    assert bnp.from_dlpack(tensor).dtype == given


def test_values_on_the_cpu_are_copied_unless_told_otherwise():
    tensor = Lent(X.copy())
    copied, shared, same = bnp.asarray(tensor), bnp.from_dlpack(tensor), bnp.asarray(tensor, copy=False)
    mine = bnp.from_dlpack(tensor, copy=True)
    tensor.values[0, 0] = 7
    assert [float(x[0, 0]) for x in (copied, shared, same, mine)] == [-1, 7, 7, -1]
    with pytest.raises(errors.ArgumentError, match="copy=False"):
        bnp.asarray(Lent(np.ones(3)), copy=False)  # float64 becomes float32
    with pytest.raises(errors.InteropError, match="row-major"):
        bnp.asarray(Lent(X.T), copy=False)


@pytest.mark.parametrize("strided", [X.T, X[:, ::2], X[::-1], np.broadcast_to(X[0], (3, 4))], ids=str)
def test_strided_memory_is_copied(strided):
    tensor = Lent(strided)
    x = bnp.from_dlpack(tensor)
    np.testing.assert_array_equal(x, strided)
    assert tensor.alive == 0


def test_integers_that_do_not_fit():
    tensor = Lent(np.asarray([2**40]))
    with pytest.raises(errors.ValueRangeError, match=r"1099511627776(.|\n)*dtype='int64'"):
        bnp.asarray(tensor)
    assert bnp.asarray(tensor, dtype="int64").tolist() == bnp.from_dlpack(tensor).tolist() == [2**40]


class Tensor(Lent):
    """A tensor with the attributes of PyTorch's."""

    def __init__(self, **attributes):
        super().__init__(np.ones(3, np.float32))
        vars(self).update(attributes)


REFUSED = [
    ({"requires_grad": True}, r"requires a gradient(.|\n)*x.detach\(\)"),
    ({"is_conj": lambda: True}, r"conjugate(.|\n)*x.resolve_conj\(\)"),
    ({"is_neg": lambda: True}, r"negated(.|\n)*x.resolve_neg\(\)"),
    ({"is_sparse": True}, r"sparse(.|\n)*x.to_dense\(\)"),
    ({"is_quantized": True}, r"quantized(.|\n)*x.dequantize\(\)"),
]


@pytest.mark.parametrize(
    "attributes, message", REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_states_that_would_be_lost(attributes, message):
    for take in (bnp.from_dlpack, bnp.asarray, bnp.sin, bf.jit(lambda x: x)):
        with pytest.raises(BufferError, match=message):
            take(Tensor(**attributes))
    Tensor(requires_grad=False, is_conj=lambda: False, is_neg=lambda: False)
    assert bnp.sin(Tensor(requires_grad=False, is_conj=lambda: False)).shape == (3,)


def test_errors_name_the_argument():
    with pytest.raises(
        errors.InteropError, match=r"the argument w\['a'\], a lent.Tensor|the argument w\['a'\], a "
    ):
        bf.jit(lambda w: w["a"])({"a": Tensor(requires_grad=True)})


def test_a_library_that_refuses():
    class Refuses(Lent):
        def __dlpack__(self, **options):
            raise RuntimeError("it is busy")

    with pytest.raises(errors.InteropError, match="it is busy"):
        bnp.asarray(Refuses(X))


# -- PyTorch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "bool", "complex64"]
)
def test_pytorch_shares_memory_both_ways(name):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    x = bnp.from_dlpack(tensor)
    back = torch.from_dlpack(x)
    assert x.dtype == name and back.dtype == tensor.dtype and back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_pytorch_tensors_in_functions():
    torch = pytest.importorskip("torch")
    x = torch.ones(3)
    assert bnp.sin(x).shape == (3,) and (bnp.ones(3) + x).tolist() == [2, 2, 2]
    parameter = torch.nn.Parameter(x)
    for given in (parameter, x.to(torch.complex64).conj(), x.to(torch.complex64).conj().imag, x.to_sparse()):
        with pytest.raises(errors.InteropError, match=r"detach|resolve_conj|resolve_neg|to_dense"):
            bnp.sin(given)
    assert bnp.sin(parameter.detach()).shape == (3,)
    with pytest.raises(errors.InteropError, match="meta"):
        bnp.asarray(torch.ones(3, device="meta"))
