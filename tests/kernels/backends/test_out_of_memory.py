"""Programs on the CPU that need more memory than there is."""

import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.kernels.backends.cpu import toolchain

HUGE = {
    "eager": lambda x: bnp.outer(x, x) * bnp.ones((1 << 12, 1, 1)),
    "jit": bf.jit(lambda x: bnp.outer(x, x)[:, :, None] * bnp.ones((1, 1, 1 << 12))),
    "scan": bf.jit(lambda x: bf.lax.scan(lambda c, _: (c, bnp.outer(c, c)), x, None, length=3)[1]),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", HUGE)
def test_the_error_has_the_line(name, compiled, monkeypatch):
    """A ``MemoryError`` of NumPy gets the user's line, the size and a fix."""
    if compiled and not toolchain.find():
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(bf.config, "host_compiler", "always" if compiled else "never")
    fun = HUGE[name] if name == "eager" else bf.jit(HUGE[name].fun)
    with pytest.raises(
        errors.OutOfMemoryError, match=r"out of memory on the CPU(.|\n)*test_out_of_memory.py:\d+"
    ) as e:
        fun(bnp.ones(1 << 20))
    assert (
        isinstance(e.value, MemoryError)
        and "Unable to allocate" in str(e.value)
        and "lax.map" in str(e.value)
    )
