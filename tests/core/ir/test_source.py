"""Lines of the user's program, for messages and comments of generated sources."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import errors
from blufunc.config import config
from blufunc.core.ir import source
from blufunc.nn.low_precision import Float8, Format


@pytest.mark.parametrize(
    "name, shown",
    [
        ("a.py", "a.py"),
        ("caf\udce9.py", "caf\\udce9.py"),
        ("a\nint x;.py", "a\\nint x;.py"),
        ("é.py", "é.py"),
    ],
)
def test_summaries_are_one_line_of_utf8(name, shown):
    code = compile("def f(x): return g(x)", f"/home/{name}", "exec").co_consts[0]
    assert source.summary((code, 0)) == f"{shown}:1 (f)"
    assert source.describe((code, 0)).startswith(f"/home/{shown}:1 (f)")


def test_errors_of_dataclasses_point_at_the_call():
    """Methods that blufunc generates are no user code; code run from a string is."""
    for call in (lambda: Float8(scaling="column"), lambda: Format(9, 3)):
        with pytest.raises(errors.ValueRangeError) as caught:
            call()
        assert "test_source.py" in caught.value.where
    with pytest.raises(errors.ValueRangeError) as caught:
        exec("make(9, 3)", {"make": Format, "__name__": "__main__"})
    assert caught.value.where.startswith("<string>:1")


@pytest.mark.parametrize("name", ["caf\udce9.py", "a\nint x;.py"])
def test_functions_in_files_with_strange_names_compile_and_fail_as_others(name, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    names = {"jnp": jnp}
    exec(
        compile("def f(x): return jnp.tanh(x) * 2 + 1\ndef g(x): return jnp.reshape(x, 7)", name, "exec"),
        names,
    )
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_allclose(bf.jit(names["f"])(x), np.tanh(x) * 2 + 1, rtol=1e-6)
    with pytest.raises(errors.ShapeError) as caught:
        names["g"](jnp.ones(3))
    str(caught.value).encode()
