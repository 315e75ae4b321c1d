"""``rng_bit_generator``: keys of all forms, and bits of each width."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import errors, lax

KEYS = {
    "four words": np.arange(4, dtype=np.uint32),
    "two words": np.arange(2, dtype=np.uint32),
    "wide": np.arange(2, dtype=np.uint64) + 2**40,
}


@pytest.mark.parametrize("kind", KEYS)
def test_stream(kind):
    """A chain of keys gives bits that do not repeat, the same when compiled."""
    key = bf.numpy.asarray(KEYS[kind], dtype=KEYS[kind].dtype)
    words, drawn = [key], []
    for _ in range(3):
        new, bits = lax.rng_bit_generator(words[-1], (50, 4))
        assert new.dtype == key.dtype and new.shape == key.shape and bits.dtype == "uint32"
        words, drawn = [*words, new], [*drawn, np.asarray(bits)]
    assert len(np.unique(np.concatenate(drawn))) == 600
    compiled = bf.jit(lambda k: lax.rng_bit_generator(k, (50, 4)))(key)
    np.testing.assert_array_equal(compiled[0], words[1])
    np.testing.assert_array_equal(compiled[1], drawn[0])
    other = np.asarray(key) ^ np.asarray([0] * (key.size - 1) + [1], key.dtype)  # each word counts
    assert not np.array_equal(
        lax.rng_bit_generator(bf.numpy.asarray(other, dtype=key.dtype), (50, 4))[1], drawn[0]
    )


def test_widths():
    for dtype in ("uint8", "uint16", "uint32", "uint64"):
        bits = np.asarray(lax.rng_bit_generator(KEYS["four words"], (4000,), dtype)[1])
        top = float(np.iinfo(dtype).max)
        assert bits.dtype == dtype and abs(bits.mean() / top - 0.5) < 0.02 and bits.max() > 0.99 * top


def test_bad_arguments():
    key = KEYS["four words"]
    for attempt, error in [
        (lambda: lax.rng_bit_generator(key[:3], (2,)), errors.ArgumentError),
        (lambda: lax.rng_bit_generator(key.astype("int32"), (2,)), errors.ArgumentError),
        (lambda: lax.rng_bit_generator(key, (2,), "float32"), errors.DtypeError),
        (lambda: lax.rng_bit_generator(key, (2,), algorithm=lax.RandomAlgorithm.RNG_PHILOX), errors.UnsupportedError),
    ]:  # fmt: skip
        with pytest.raises(error, match="rng_bit_generator"):
            attempt()
