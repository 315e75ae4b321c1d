"""The LSTM with packed weights compared with its definition in NumPy."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.experimental import rnn


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(x, h, c, w, u, b, d, length, backward):
    outs = np.zeros((len(x), len(h)))
    for t in reversed(range(length)) if backward else range(length):
        i, f, g, o = np.split(w @ x[t] + b + u @ h + d, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outs[t] = h
    return outs, h, c


def test_lstm():
    sizes, lengths = (3, 4, 2, True), [5, 3]
    weights = rnn.init_lstm_weight(bf.random.key(0), *sizes)
    assert weights.shape == (rnn.get_num_params_in_lstm(*sizes),) and abs(weights).max() <= 0.5
    x, h, c = (
        np.asarray(bf.random.normal(bf.random.key(n), s))
        for n, s in ((1, (2, 5, 3)), (2, (4, 2, 4)), (3, (4, 2, 4)))
    )
    y, h_n, c_n = rnn.lstm(x, h, c, weights, bnp.array(lengths), *sizes[:3], 0.0, True)
    parts = [{k: np.asarray(v) for k, v in part.items()} for part in rnn.unpack_lstm_weights(weights, *sizes)]
    for n in range(2):
        rows = x[n]
        for layer in range(2):
            outs = []
            for k in (2 * layer, 2 * layer + 1):
                out, last_h, last_c = by_hand(
                    rows, h[k, n], c[k, n], *[p[k] for p in parts], lengths[n], k % 2
                )
                np.testing.assert_allclose(h_n[k, n], last_h, atol=1e-5)
                np.testing.assert_allclose(c_n[k, n], last_c, atol=1e-5)
                outs.append(out)
            rows = np.concatenate(outs, -1)
        np.testing.assert_allclose(y[n], rows, atol=1e-5)
    twice = rnn.swap_lstm_gates(rnn.swap_lstm_gates(weights, *sizes), *sizes)
    np.testing.assert_array_equal(twice, weights)
    with pytest.raises(errors.ShapeError, match="weights in one vector"):
        rnn.unpack_lstm_weights(weights[1:], *sizes)
    with pytest.raises(errors.UnsupportedError, match="dropout"):
        rnn.lstm(x, h, c, weights, bnp.array(lengths), *sizes[:3], 0.5, True)
