"""Weak types through transforms: gradients, loops, branches, reports of types."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.lax import fori_loop, scan, while_loop
from tests.transforms.weak_types import TYPES, names, types_of

NAMES = names(bf, bnp)


@pytest.mark.parametrize("group", TYPES)
def test_types_of_results(group):
    for text, types in TYPES[group].items():
        assert types_of(bf.tree.leaves(eval(text, NAMES))) == types, text


@pytest.mark.parametrize(
    "group", ["grad", "derivatives", "scan", "while_loop", "fori_loop", "cond", "custom"]
)
def test_types_of_results_while_tracing(group):
    for text, types in TYPES[group].items():
        assert types_of(bf.tree.leaves(bf.eval_shape(lambda text=text: eval(text, NAMES)))) == types, text


X = bnp.asarray(np.array([1.0, 2.0], np.float32)).astype("bfloat16")


@pytest.mark.parametrize("loop", ["scan", "while_loop", "fori_loop"])
@pytest.mark.parametrize("wrap", [lambda f: f, bf.jit], ids=["eager", "jit"])
def test_a_scale_in_a_carry_leaves_the_dtype_of_what_it_scales(loop, wrap):
    """As the same Python loop does."""
    step = lambda scale, x: (scale * 0.5, x * scale)

    def run(x):
        if loop == "scan":
            return scan(lambda c, _: (step(*c), None), (1.0, x), None, length=3)[0]
        if loop == "while_loop":
            return while_loop(lambda c: c[0] > 0.2, lambda c: step(*c), (1.0, x))
        return fori_loop(0, 3, lambda i, c: step(*c), (1.0, x))

    scale, y = wrap(run)(X)
    assert y.dtype == "bfloat16" and scale.weak_type and float(scale) == 0.125
    assert y.tolist() == [0.125, 0.25]


def test_a_weak_carry_that_stays_weak_is_traced_once():
    seen = []
    f = bf.jit(lambda c: scan(lambda c, x: (seen.append(c.aval) or c + 1, None), c, None, length=2)[0])
    assert float(f(f(f(1.0)))) == 7.0, "the result is weak, too"
    assert [str(a) for a in seen] == ["~f32[]"]


def test_a_promoted_carry_is_traced_again_as_strong():
    seen = []
    step = lambda c, x: (seen.append(str(c.aval)) or c + x, None)
    assert scan(step, 1, X)[0].dtype == "bfloat16"
    assert seen == ["~i32[]", "bf16[]"]
    with pytest.raises(errors.CarryError, match="f64"):
        scan(lambda c, x: (c.astype("float64"), None), bnp.float32(1), None, length=2)


def test_gradients_update_python_numbers_without_a_retrace():
    traces = []

    @bf.jit
    def step(p):
        traces.append(1)
        return p - 0.5 * bf.grad(lambda p: p * p)(p)

    p = 2.0
    for _ in range(3):
        p = step(p)
    assert float(p) == 0.0 and len(traces) == 1


def test_reports_say_which_types_are_weak():
    weak = bf.ShapeDtypeStruct((), "float32", weak_type=True)
    assert "weak_type=True" in repr(weak) and "weak" not in repr(bf.ShapeDtypeStruct((), "float32"))
    f = lambda x, y: (x * 2, x * y)
    lowered = bf.jit(f).lower(1.0, np.float32(2))
    _, shapes = bf.make_jaxpr(f, return_shape=True)(1.0, np.float32(2))
    for found in (
        bf.eval_shape(f, weak, np.float32(2)),
        shapes,
        lowered.out_info,
        lowered.compile().out_info,
    ):
        assert found == (weak, bf.ShapeDtypeStruct((), "float32"))


def test_weak_integers_have_tangents_without_a_dtype():
    float0 = bf.dtypes.float0
    assert bf.jvp(lambda x: 2, (1.0,), (1.0,))[1].dtype == float0
    assert bf.linearize(lambda x: (x, 2), 1.0)[1](1.0)[1].dtype == float0
    assert bf.vjp(lambda n, x: n * x, 2, 1.0)[1](1.0)[0].dtype == float0
    assert bf.grad(lambda n, x: n * x, (0, 1), allow_int=True)(2, 1.0)[0].dtype == float0
    assert (
        bf.jacfwd(lambda x: (2, x))(1.0)[0].dtype
        == bf.jacrev(lambda n: n * 1.0, allow_int=True)(2).dtype
        == float0
    )
