"""Rotary embeddings: formulas, scalings as in transformers, derivatives, errors."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, nn
from blufunc.config import config
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.backends.cpu import toolchain
from blufunc.nn.language.rotation import rotated, rotation_p

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 3, 8)).astype(np.float32)


def turned(x, positions, interleaved=False, base=10000.0, factor=1.0):
    """Pairs as complex numbers, in float64."""
    n = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :n], x[..., n:])
    angle = positions[..., None, None] * base ** (-np.arange(n) / n)
    z = (a + 1j * b) * np.exp(1j * angle) * factor
    out = np.empty(x.shape)
    if interleaved:
        out[..., ::2], out[..., 1::2] = z.real, z.imag
    else:
        out[..., :n], out[..., n:] = z.real, z.imag
    return out


POSITIONS = {
    "of the sequence": np.arange(5),
    "of each entry": np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 900]]),
    "one": np.array(11),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
def test_as_complex_numbers(name, interleaved):
    positions = POSITIONS[name]
    for f in (nn.rope, bf.jit(nn.rope, static_argnames="interleaved")):
        got = f(X, positions, interleaved=interleaved)
        np.testing.assert_allclose(got, turned(X, positions, interleaved), rtol=1e-4, atol=1e-4)


def test_dtypes_and_base():
    positions = np.arange(5)
    got = nn.rope(bnp.asarray(X, dtype="float64"), positions, base=500.0)
    np.testing.assert_allclose(got, turned(X, positions, base=500.0), rtol=1e-12)
    low = nn.rope(bnp.asarray(X, dtype="bfloat16"), positions)
    rounded = turned(np.asarray(bnp.asarray(X, dtype="bfloat16").astype("float32")), positions)
    np.testing.assert_allclose(np.asarray(low.astype("float32")), rounded, rtol=2**-8)
    assert low.dtype == bnp.bfloat16


@pytest.mark.parametrize("scaling", [None, {"type": "default", "partial_rotary_factor": 0.5}])
def test_a_part_of_the_features(scaling):
    how = {"features": 4} if scaling is None else {"scaling": scaling}
    got = nn.rope(X, np.arange(5), **how)
    np.testing.assert_allclose(got[..., :4], turned(X[..., :4], np.arange(5)), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[..., 4:], X[..., 4:])


def test_scores_depend_on_distances():
    q, k = X[0, :1], X[1, :1]
    scores = [np.sum(nn.rope(q, bnp.asarray([p])) * nn.rope(k, bnp.asarray([p - 3]))) for p in (3, 50)]
    np.testing.assert_allclose(*scores, rtol=1e-5)


def test_the_derivative_turns_back():
    """In both modes, and under ``vmap``."""
    t = RNG.normal(size=X.shape).astype(np.float32)
    positions = POSITIONS["of each entry"]
    f = lambda x: nn.rope(x, positions)
    _, pull = bf.vjp(f, X)
    np.testing.assert_allclose(pull(bnp.asarray(t))[0], turned(t, -positions), rtol=1e-4, atol=1e-4)
    _, push = bf.jvp(f, (X,), (t,))
    np.testing.assert_allclose(push, turned(t, positions), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(bf.vmap(nn.rope)(X, positions), f(X), rtol=1e-6)


@pytest.mark.skipif(toolchain.find() is None, reason="no C++ compiler")
@pytest.mark.parametrize("interleaved", [False, True])
def test_one_kernel_in_each_direction(interleaved):
    """Besides those of the tables of cosines and sines."""
    x, positions = bnp.ones((4, 128, 8, 64), dtype="bfloat16"), bnp.arange(128)
    f = lambda x, p: nn.rope(x, p, interleaved=interleaved)
    back = lambda x, p, t: bf.vjp(lambda x: f(x, p), x)[1](t)[0]
    for g, args in ((f, (x, positions)), (back, (x, positions, x))):
        steps = [r for r in bf.jit(g).lower(*args).cost.steps if r.bytes >= x.nbytes]
        assert len(steps) == 1 and steps[0].bytes < 2.2 * x.nbytes


def rotations(f, *args):
    """The equations of rotations in the program of a function."""
    return [e for e in simplify(bf.make_jaxpr(f)(*args)).eqns if e.prim is rotation_p]


def test_transforms_keep_it_one_operation():
    x, t = (bnp.asarray(RNG.normal(size=X.shape), dtype="float32") for _ in range(2))
    positions = bnp.asarray(POSITIONS["of each entry"])
    f = lambda x: nn.rope(x, positions)
    programs = {
        "forward mode": (lambda x, t: bf.jvp(f, (x,), (t,)), 2),
        "reverse mode": (lambda x, t: bf.vjp(f, x)[1](t), 1),
        "vmap of reverse mode": (
            lambda x, t: bf.vmap(lambda x, t: bf.vjp(lambda x: nn.rope(x, 3), x)[1](t))(x, t),
            1,
        ),
        "reverse mode of vmap": (lambda x, t: bf.vjp(lambda x: bf.vmap(nn.rope)(x, positions), x)[1](t), 1),
        "mixed precision": (lambda x, t: bf.vjp(bf.autocast(lambda x: f(x @ bnp.eye(8)).sum()), x), 1),
    }
    for name, (g, n) in programs.items():
        assert len(rotations(g, x, t)) == n, name
    (eqn,) = rotations(programs["mixed precision"][0], x, t)
    assert [v.aval.dtype.name for v in eqn.invars] == ["bfloat16", "float32", "float32"]


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (2, 1), (1, 1)])
def test_batches_of_x_and_of_positions(dims):
    x, p = RNG.normal(size=(2, 2, 2, 4, 8)).astype(np.float32), np.array([[3, 4], [7, 90]])
    row = lambda a, d, i: a if d is None else np.take(a, i, d)
    f = lambda x, p: nn.rope(x, p)
    x, p = (a[0] if d is None else a for a, d in zip((x, p), dims, strict=True))
    got = bf.vmap(f, dims)(x, p)
    for i in range(2):
        np.testing.assert_allclose(got[i], f(row(x, dims[0], i), row(p, dims[1], i)), rtol=1e-5, atol=1e-6)


def test_angles_may_be_differentiated():
    """A rotation by a table of its own, to the second order."""
    t = bnp.asarray(RNG.normal(size=(2, 6)), dtype="float64")
    f = lambda a: (rotated(t, bnp.cos(a), bnp.sin(a), False) * t[::-1]).sum()
    a, h = bnp.asarray([0.3, 0.5, 1.0], dtype="float64"), 1e-5
    step = h * bnp.eye(3, dtype="float64")
    for g in (f, lambda a: bf.grad(f)(a).sum()):
        want = [(g(a + s) - g(a - s)) / (2 * h) for s in step]
        np.testing.assert_allclose(bf.grad(g)(a), want, rtol=1e-6)
        np.testing.assert_allclose(bf.jacfwd(g)(a), want, rtol=1e-6)


@pytest.mark.parametrize("spec", [bf.P("data", None, "heads"), bf.P(None, "data", "heads")])
def test_rotations_need_no_collective(spec, monkeypatch):
    monkeypatch.setattr(config, "cpu_devices", 4)
    mesh = bf.make_mesh((2, 2), ("data", "heads"))
    x = bnp.asarray(RNG.normal(size=(4, 6, 4, 8)), dtype="float32")
    f = lambda x: bf.grad(lambda x: (nn.rope(x, bnp.arange(6)) ** 3).sum())(x)
    sharded = bf.shard(f, mesh, (spec,), spec)
    assert len(bf.collectives(sharded, x)) == 0
    got = sharded(bf.device_put(x, bf.NamedSharding(mesh, spec)))
    np.testing.assert_allclose(np.asarray(got), np.asarray(f(x)), rtol=1e-4, atol=1e-5)


SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, sharp": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2,
        "truncate": False, "attention_factor": 0.7,
    },
    "yarn, as deepseek": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.1,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(16)], "factor": 4.0,
        "long_factor": [2.0 + i / 4 for i in range(16)], "original_max_position_embeddings": 64,
    },
}  # fmt: skip
MOST = 256


@pytest.mark.peer
@pytest.mark.parametrize("length", [48, 400])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_as_transformers(name, length):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaling = None if SCALINGS[name] is None else dict(SCALINGS[name])
    config = llama.LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=MOST,
        rope_scaling=None if scaling is None else dict(scaling), rope_theta=5000.0,
    )  # fmt: skip
    x = RNG.normal(size=(1, 3, 2, 32)).astype(np.float32)
    positions = np.array([0, 7, length - 1])
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.asarray(positions)[None])
    q = torch.asarray(x).transpose(1, 2)
    want, _ = llama.apply_rotary_pos_emb(q, q, cos, sin)
    traced = bf.jit(lambda x, p: nn.rope(x, p, base=5000.0, scaling=scaling, max_positions=MOST))
    for p in (positions, positions[None]):
        got = np.asarray(traced(x, p))
        np.testing.assert_allclose(got, want.transpose(1, 2).numpy(), rtol=1e-4, atol=1e-4)


FREQUENCIES = {  # of 4 pairs and base 10000; where a formula of one line exists
    "linear": ({"type": "linear", "factor": 4}, [0.25, 0.025, 0.0025, 0.00025], 1.0),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 100},
        [1, 0.1 * 4 ** (-1 / 3), 0.01 * 4 ** (-2 / 3), 0.001 / 4], 1.0,
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1000, "beta_fast": 32},
        [1, 0.1 * (2 / 3 + 1 / 6), 0.01 * (1 / 3 + 1 / 3), 0.001 / 2], 0.1 * np.log(2) + 1,
    ),
    "llama3": (
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 100,
        },
        [1, 0.1 / 8 * (1 - (w := (10 / 2 / np.pi - 1) / 3)) + 0.1 * w, 0.01 / 8, 0.001 / 8], 1.0,
    ),
    "longrope": (
        {
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": 100, "factor": 10.0,
        },
        [1, 0.05, 0.0025, 0.001 / 8], np.sqrt(1.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FREQUENCIES)
def test_frequencies(name):
    """At a length of 200, traced or not."""
    scaling, want, factor = FREQUENCIES[name]
    found = nn.rope_frequencies(8, scaling=scaling, length=200)
    np.testing.assert_allclose(found.frequencies, want, rtol=1e-5)
    assert found.factor == pytest.approx(factor)
    traced = bf.jit(lambda n: nn.rope_frequencies(8, scaling=scaling, length=n).frequencies)
    np.testing.assert_allclose(traced(200), want, rtol=1e-5)


def test_the_length_of_dynamic_scaling_is_that_of_the_positions():
    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 4}
    within = nn.rope(X, np.arange(5) - 1, scaling=scaling)
    np.testing.assert_allclose(within, nn.rope(X, np.arange(5) - 1), rtol=1e-5)
    longer = nn.rope(X, np.arange(5), scaling=scaling)
    np.testing.assert_allclose(longer, nn.rope(X, np.arange(5), scaling=scaling, length=5), rtol=1e-6)
    assert np.abs(longer - nn.rope(X, np.arange(5))).max() > 0.1


ERRORS = {
    "an unknown type": ({"scaling": {"rope_type": "xpos"}}, errors.ValueRangeError, "'xpos'"),
    "an unknown field": ({"scaling": {"type": "linear", "factor": 2, "beta": 1}}, errors.ArgumentError, "beta"),
    "a field that lacks": ({"scaling": {"type": "llama3", "factor": 2}}, errors.ArgumentError, "low_freq_factor"),
    "no original length": ({"scaling": {"type": "dynamic", "factor": 2}}, errors.ArgumentError, "max_positions="),
    "odd features": ({"features": 3}, errors.ShapeError, "3 of 8"),
    "more features": ({"features": 10}, errors.ShapeError, "10 of 8"),
    "lists of another length": (
        {"scaling": FREQUENCIES["longrope"][0] | {"short_factor": [1.0]}}, errors.ShapeError, "4 pairs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    how, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message) as caught:
        nn.rope(X, np.arange(5), **how)
    assert "test_rope.py" in caught.value.where


def test_errors_of_positions():
    with pytest.raises(errors.ShapeError, match="do not fit"):
        nn.rope(X, np.arange(4))
    with pytest.raises(errors.DtypeError, match="integers"):
        nn.rope(X, np.arange(5.0))
