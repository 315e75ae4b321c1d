"""Sampling of tokens: frequencies, traced settings, and transformers' filters."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, nn, random

V = 12
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, V)).astype(np.float32) * 2
PREVIOUS = np.array([[0, 5, 5, -1], [1, 2, 3, 4], [-1, -1, -1, -1]])

SETTINGS = {
    "nothing": {},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 4},
    "top_k of all": {"top_k": 99},
    "top_p": {"top_p": 0.6},
    "top_p of nothing": {"top_p": 0.0},
    "top_p of all": {"top_p": 1.0},
    "min_p": {"min_p": 0.2},
    "all of them": {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "min_p": 0.1},
    "top_p and min_p": {"temperature": 2.5, "top_p": 0.8, "min_p": 0.3},
    "penalty": {"repetition_penalty": 1.5, "previous": PREVIOUS},
    "penalty and top_k": {"repetition_penalty": 3.0, "previous": PREVIOUS, "top_k": 3},
}


def expected(
    logits, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=None, previous=None
):
    """Row by row, in float64."""
    rows = []
    for n, x in enumerate(logits.astype(np.float64)):
        if previous is not None:
            for t in {*previous[n][previous[n] >= 0]}:
                x[t] = x[t] / repetition_penalty if x[t] > 0 else x[t] * repetition_penalty
        x = x / temperature
        order = np.argsort(-x, kind="stable")
        if top_k is not None:
            x[order[top_k:]] = -np.inf
        if top_p is not None:
            p = np.exp(x - x.max())
            p /= p.sum()
            ahead = np.cumsum(p[order]) - p[order]
            x[order[1:][ahead[1:] >= top_p]] = -np.inf
        if min_p is not None:
            x[np.exp(x - x.max()) < min_p] = -np.inf
        rows.append(x)
    return np.array(rows)


@pytest.mark.parametrize("name", SETTINGS)
def test_filtered_logits(name):
    want = expected(LOGITS, **SETTINGS[name])
    for f in (nn.filtered_logits, bf.jit(nn.filtered_logits, static_argnames="top_k")):
        np.testing.assert_allclose(f(LOGITS, **SETTINGS[name]), want, rtol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_have_the_frequencies_of_their_logits(name):
    keys = random.split(random.key(0), 4000)
    tokens = bf.vmap(lambda key: nn.sample(key, LOGITS, **SETTINGS[name]))(keys)
    assert tokens.dtype == np.int32 and tokens.shape == (4000, 3)
    shares = np.stack([np.bincount(np.asarray(tokens)[:, n], minlength=V) for n in range(3)]) / 4000
    x = expected(LOGITS, **SETTINGS[name])
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    assert not shares[p == 0].any()
    np.testing.assert_allclose(shares, p, atol=5 * 0.5 / 4000**0.5)


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_greedy_is_a_traced_temperature_of_0(how):
    """One program, of which each row has a setting of its own."""
    best = LOGITS.argmax(-1)
    traces = []

    @bf.jit
    def f(key, temperature):
        traces.append(1)
        return nn.sample(key, LOGITS, temperature=temperature, **how)

    for n in range(5):
        assert (np.asarray(f(random.key(n), 0.0)) == best).all()
        hot = np.asarray(f(random.key(n), np.array([0.0, 1e-4, 50.0], np.float32)))
        assert (hot[:2] == best[:2]).all()
    assert len(traces) <= 3  # a number, and an array
    assert (np.asarray(nn.sample(None, LOGITS, temperature=0)) == best).all()
    only = np.asarray(nn.filtered_logits(LOGITS, temperature=bnp.zeros(3), **how))
    assert (np.isfinite(only) == (np.arange(V) == best[:, None])).all()


def test_rows_have_settings_of_their_own():
    own = {
        "top_p": np.array([0.3, 0.6, 0.9]),
        "min_p": np.array([0.0, 0.1, 0.3]),
        "temperature": np.array([1, 2, 3.0]),
    }
    got = np.asarray(nn.filtered_logits(LOGITS, **own))
    for n in range(3):
        want = expected(LOGITS[n : n + 1], **{k: v[n] for k, v in own.items()})
        np.testing.assert_allclose(got[n], want[0], rtol=1e-5)
    mapped = bf.vmap(lambda x, p: nn.filtered_logits(x, top_p=p))(LOGITS, own["top_p"])
    np.testing.assert_allclose(mapped, nn.filtered_logits(LOGITS, top_p=own["top_p"]), rtol=1e-6)


def test_a_mask_of_previous_tokens():
    mask = np.zeros((3, V), bool)
    for n, row in enumerate(PREVIOUS):
        mask[n, row[row >= 0]] = True
    both = [nn.filtered_logits(LOGITS, repetition_penalty=2.0, previous=p) for p in (mask, PREVIOUS)]
    np.testing.assert_array_equal(*both)


def test_half_precision_and_one_row():
    x = bnp.asarray(LOGITS[0], dtype="bfloat16")
    assert nn.filtered_logits(x, top_p=0.5).dtype == np.float32
    assert nn.sample(random.key(0), x, top_k=1) == int(np.argmax(np.asarray(x, "float32")))


@pytest.mark.peer
@pytest.mark.parametrize("name", SETTINGS)
def test_filters_as_transformers(name):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    given, x = dict(SETTINGS[name]), torch.asarray(LOGITS.copy())
    makers = {
        "repetition_penalty": process.RepetitionPenaltyLogitsProcessor,
        "temperature": process.TemperatureLogitsWarper,
        "top_k": process.TopKLogitsWarper,
        "top_p": process.TopPLogitsWarper,
        "min_p": process.MinPLogitsWarper,
    }
    tokens = torch.asarray(np.where(PREVIOUS[:2] < 0, 0, PREVIOUS[:2]))  # which has no padding
    given.pop("previous", None)
    for key, make in makers.items():
        if key in given:
            x = make(given[key])(tokens, x[:2])
    penalized = {"previous": tokens.numpy()} if "repetition_penalty" in given else {}
    got = nn.filtered_logits(LOGITS[: len(x)], **given, **penalized)
    np.testing.assert_allclose(got, x.numpy(), rtol=1e-5)


ERRORS = {
    "no key": (lambda: nn.sample(None, LOGITS), errors.ArgumentError, "temperature=0"),
    "integers": (lambda: nn.sample(random.key(0), [1, 2]), errors.DtypeError, "floating"),
    "no tokens": (lambda: nn.filtered_logits(bnp.ones((3, 0))), errors.ShapeError, "no tokens"),
    "negative": (lambda: nn.filtered_logits(LOGITS, temperature=-1.0), errors.ValueRangeError, "temperature"),
    "percent": (lambda: nn.filtered_logits(LOGITS, top_p=90), errors.ValueRangeError, "0 <= top_p <= 1"),
    "top_k": (lambda: nn.filtered_logits(LOGITS, top_k=0), errors.ValueRangeError, "no token"),
    "rows": (lambda: nn.filtered_logits(LOGITS, min_p=bnp.ones(4)), errors.ShapeError, "each row"),
    "previous": (lambda: nn.filtered_logits(LOGITS, repetition_penalty=2.0), errors.ArgumentError, "previous="),
    "floats": (
        lambda: nn.filtered_logits(LOGITS, repetition_penalty=2.0, previous=LOGITS), errors.DtypeError, "integers"
    ),
    "one row": (
        lambda: nn.filtered_logits(LOGITS, repetition_penalty=2.0, previous=[1]), errors.ShapeError, "leading"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    f, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message) as caught:
        f()
    assert "test_sampling.py" in caught.value.where
