"""The decoding benchmark's program, at a tiny size."""

import numpy as np

import blufunc as bf
from benchmarks.suites.decoding import ATTENTION, TINY, Sizes, arguments, decoder


def test_forms_of_attention_decode_the_same_tokens():
    args = bf.tree.map(bf.numpy.asarray, arguments(TINY, np.dtype(bf.numpy.bfloat16)))
    first, second = (np.asarray(bf.jit(decoder(bf, TINY, form)[0])(*args)) for form in ATTENTION)
    assert first.shape == (TINY.batch, TINY.tokens)
    np.testing.assert_array_equal(first, second)


def test_bytes_of_a_token():
    sizes = Sizes()
    weights = 8 * (2048 * (3072 + 2048 + 3 * 5632) + 2 * 2048) + 2048 * 32001
    assert sizes.bytes_per_token() == 2 * (weights + 2 * 8 * 8 * 512 * (16 + 128.5))
