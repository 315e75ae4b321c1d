"""Weak types of results in JAX: those of a table, or ``DIFFERS`` says why not.

The table is that of ``tests/transforms``.
"""

import warnings

import pytest

from tests.transforms.weak_types import TYPES, names, types_of

pytestmark = pytest.mark.peer

DIFFERS = {
    "the gradient of a weakly typed value is weak, whatever the rule returns": (
        "jax.grad(lambda x: (x*x).real, holomorphic=False)(2.0+1j)", "jax.grad(lambda x: x ** 2.5)(2.0)",
        "jax.grad(lambda x, y: x ** y, argnums=(0, 1))(2.0, 3.0)", "jax.jvp(CJS, (2.0,), (1.0,))", "jax.grad(CVS)(2.0)",
        "jax.grad(lambda a: lax.scan(lambda c, x: (c*x, None), a, f1+1)[0])(2.0)",
    ),
    "the counter of a loop has the dtype of its bounds": (
        "lax.fori_loop(np.int8(0), np.int8(3), lambda i, c: c+i, 0)",
        "lax.fori_loop(0, np.int8(3), lambda i, c: c+i, 0)",
    ),
    "a Python number in a branch takes the dtype of the other branch": (
        "lax.cond(True, lambda: 1, lambda: 2.0)", "lax.cond(True, lambda: 1, lambda: f0)",
        "lax.cond(True, lambda: 1, lambda: np.int8(1))", "lax.cond(False, lambda x: x, lambda x: 1, f0)",
        "lax.switch(1, [lambda: 1, lambda: b1[0], lambda: 3.0])",
    ),
    "lowered programs say which results are weak": (
        "jax.jit(lambda x: (x*2, x*f0)).lower(1.0).out_info", "jax.jit(lambda x: 1.0).lower(1.0).out_info",
        "jax.jit(lambda x: (x*2, x*f0)).lower(1.0).compile().out_info",
        "jax.jit(lambda x: x*2).lower(jax.ShapeDtypeStruct((), np.float32, weak_type=True)).out_info",
    ),
}  # fmt: skip


def test_types_of_results():
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'blufunc[peers]'")
    known = names(jax, jax.numpy)
    differ = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for table in TYPES.values():
            for text, types in table.items():
                try:
                    found = types_of(jax.tree.leaves(eval(text, known)))
                except TypeError:
                    found = "TypeError"
                if found != types:
                    differ.add(text)
    assert differ == {text for texts in DIFFERS.values() for text in texts}
