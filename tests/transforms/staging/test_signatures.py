"""Signatures and analyses of stages, under JAX's names."""

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors, stages

X = np.ones((4, 3), "float32")


@bf.jit
def plain(x, *, scale):
    return {"y": x * scale, "n": x.sum()}


def test_types():
    traced = plain.trace(X, scale=2.0)
    lowered = traced.lower()
    compiled = lowered.compile()
    for stage in (traced, lowered, compiled):
        (x,), named = stage.in_avals
        assert x is bf.typeof(bnp.asarray(X)) and named["scale"].weak_type
        assert stage.out_info == {
            "y": bf.ShapeDtypeStruct((4, 3), "float32"),
            "n": bf.ShapeDtypeStruct((), "float32"),
        }
        assert bf.tree.structure(stage.out_info) == stage.out_tree == bf.tree.structure(stage.out_avals)
        assert stage.in_tree == bf.tree.structure(((X,), {"scale": 2.0})) and stage.donate_argnums == ()
        ((info,), _) = stage.args_info
        assert info == stages.ArgInfo(x, False) and (info.shape, info.dtype) == ((4, 3), "float32")
    assert traced.fun_name == "plain" and plain.eval_shape(X, scale=1) == traced.out_info
    assert (
        compiled.as_text()
        == lowered.as_text()
        == str(lowered.compiler_ir())
        == str(compiled.compiler_ir("jaxpr"))
    )
    assert [type(s) for s in (plain, traced, lowered, compiled)] == [
        stages.Wrapped, stages.Traced, stages.Lowered, stages.Compiled,
    ]  # fmt: skip
    with pytest.raises(errors.UnsupportedError, match="stablehlo"):
        lowered.compiler_ir("stablehlo")


def test_analyses():
    f = bf.jit(lambda x, n: (x @ x.T, x + n), static_argnums=1, donate_argnums=0)
    lowered = f.lower(X, 3)
    assert lowered.donate_argnums == (0,) and lowered.args_info[0][0].donated
    cost = lowered.cost_analysis()
    assert cost["flops"] >= 2 * 4 * 4 * 3 / 2 and cost["bytes accessed"] >= (12 + 16 + 12) * 4
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert compiled.cost_analysis() == cost
    assert memory.argument_size_in_bytes == 48 and memory.output_size_in_bytes == (16 + 12) * 4
    assert 0 <= memory.alias_size_in_bytes <= 48
    assert memory.peak_memory_in_bytes == compiled.sight().memory.peak_bytes
