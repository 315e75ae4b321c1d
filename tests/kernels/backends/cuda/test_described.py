"""Programs for a GPU that is described, not present."""

import re

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import errors, nn
from blufunc.kernels.backends.cuda.described import described
from blufunc.kernels.backends.cuda.driver import nvrtc
from tests.emulation import fake_cuda
from tests.emulation.cuda_machines import needs_nvrtc

X = bf.ShapeDtypeStruct((512, 512), np.float32)


def softmax(x):
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


@needs_nvrtc
@pytest.mark.parametrize("number", ["80", "90"])
def test_sources_compile(number):
    lowered = bf.jit(softmax).trace(X).lower(platform=f"cuda:sm_{number}")
    assert [s.kind for s in lowered.cost.steps] == ["kernel"]
    assert nvrtc.build(lowered.source(), f"sm_{number}").cubin


def attention(x):
    q = x.reshape(1, 512, 8, 64).astype("bfloat16")
    return nn.dot_product_attention(q, q, q, is_causal=True)


doubled = bf.cuda_kernel("if (i < out_size) out[i] = 2 * x[i];", reference=lambda x: x * 2, name="doubled")


LIBRARY = {
    "attention": (attention, r"attention_\w+"),
    "sort": (lambda x: jnp.sort(x[:, :100], -1), r"\w*sort\w*"),
    "scatter": (lambda x: jnp.zeros(7).at[x[0].astype("int32")].add(1.0), r"\w*scatter\w*"),
    "linear algebra": (lambda x: jnp.linalg.cholesky(x[:8, :64].reshape(8, 8, 8)), r"\w+"),
    "a user's kernel": (doubled, "doubled"),
}


@needs_nvrtc
@pytest.mark.parametrize("name", LIBRARY)
def test_sources_of_library_kernels(name):
    """They follow the generated ones, each under its name, and compile alone."""
    f, kernel = LIBRARY[name]
    text = bf.jit(f).trace(X).lower(platform="cuda:sm_90").source()
    _, *rest = re.split(r"^// ---- (\w+) ----$", text, flags=re.MULTILINE)
    parts = dict(zip(rest[::2], rest[1::2], strict=True))
    assert any(re.fullmatch(kernel, n) for n in parts)
    for n, source in parts.items():
        assert "__global__" in source and nvrtc.build(source, "sm_90a", n).cubin


def test_explained_against_the_device_model():
    shown = bf.explain(lambda x: softmax(x) @ x, X, device="cuda:sm_90")
    assert "H200" in str(shown) and shown.fusion is not None
    assert bf.jit(softmax).lower(X).sight().device.platform == "cpu"


def test_arrays_may_stay_where_they_are():
    x = jnp.ones((64, 64))
    assert "__global__" in bf.jit(softmax).trace(x).lower(platform="cuda").source()


def test_it_is_no_gpu(monkeypatch):
    fake_cuda.install(monkeypatch)
    assert described("cuda:sm_90") != bf.devices("cuda")[0]
    assert described("cuda:sm_90") is described("cuda:sm_90") != described("cuda:sm_80")
    assert str(described("cuda:sm_90")) == "cuda:sm_90a"


def test_nothing_runs():
    lowered = bf.jit(softmax).trace(X).lower(platform="cuda:sm_90a")
    with pytest.raises(errors.UnsupportedError, match="a description, without a GPU"):
        lowered.compile()
    with pytest.raises(errors.UnsupportedError, match="a description, without a GPU"):
        bf.explain(softmax, jnp.ones((4, 4)), device="cuda:sm_90", run=True)


def test_names_of_one_architecture():
    assert described("cuda") is described("cuda:sm_90") is described("cuda:sm_90a")
    assert not hasattr(described("cuda").backend, "_anything")


@pytest.mark.parametrize("name", [[], "cuda:sm_80a", "cuda:sm_70", "cuda:0", "tpu", "sm_90", 9])
def test_unknown_architectures(name):
    with pytest.raises(errors.ValueRangeError, match="there is no architecture"):
        described(name)
