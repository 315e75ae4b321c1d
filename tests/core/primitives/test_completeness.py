"""Every primitive has a row, and each rule or ``unsupported`` with a reason."""

import importlib
import pkgutil
from pathlib import Path

import numpy as np
import pytest

import blufunc.core.ops
import blufunc.parallel
import blufunc.transforms
from blufunc.core.ir import dtypes
from blufunc.core.primitives import kinds, linear_ops
from blufunc.core.primitives.c_form import CForm
from blufunc.core.primitives.primitive import RULES, Primitive, unsupported
from blufunc.testing.primitives import rule_state
from tests.op_table.rows import OPS

# Primitives without a row, since operands are jaxprs or user rules, and the file that tests each.
TESTED_ELSEWHERE = {
    "jit": ("tests/transforms/staging/test_jit.py", "jit("),
    "cond": ("tests/transforms/control_flow/test_cond.py", "cond("),
    "platform_dependent": ("tests/transforms/control_flow/test_platform_dependent.py", "platform_dependent("),
    "no_function_for_platform": (
        "tests/transforms/control_flow/test_platform_dependent.py",
        "def test_no_function(",
    ),
    "cuda_kernel": ("tests/transforms/extension/test_cuda_kernel.py", "bf.cuda_kernel("),
    "while": ("tests/transforms/control_flow/test_while_loop.py", "while_loop("),
    "linear_solve": ("tests/transforms/custom_rules/test_linear_solve.py", "custom_linear_solve("),
    "attention": ("tests/nn/attention/test_dot_product.py", "dot_product_attention("),
    "attention_grad": ("tests/nn/attention/test_dot_product.py", "grad(f, (0, 1, 2))(q, k, v)"),
    "either": ("tests/nn/attention/test_recognised.py", "TRANSFORMED"),
    "recurrence": ("tests/transforms/control_flow/test_associative_scan.py", "associative_scan("),
    "affine_recurrence": ("tests/transforms/control_flow/test_associative_scan.py", "affine_recurrence"),
    "scan": ("tests/transforms/control_flow/test_scan.py", "scan("),
    "sharding_constraint": ("tests/parallel/partition/test_partition.py", "constrain("),
    "claim": ("tests/parallel/partition/test_explicit_types.py", "auto_axes("),
    "release": ("tests/parallel/partition/test_explicit_types.py", "auto_axes("),
    "reshard": ("tests/parallel/programs/test_shard.py", "reshard("),
    "checkpoint": ("tests/transforms/checkpointing/test_checkpoint.py", "checkpoint("),
    "custom_jvp_call": ("tests/transforms/custom_rules/test_custom_jvp.py", "@custom_jvp"),
    "custom_vjp_call": ("tests/transforms/custom_rules/test_custom_vjp.py", "@custom_vjp"),
    "pure_callback": ("tests/transforms/staging/test_callback.py", "pure_callback("),
    "io_callback": ("tests/transforms/staging/test_callback.py", "io_callback("),
    "check": ("tests/experimental/test_checkify.py", "checkify.check("),
    "debug_callback": ("tests/test_debug.py", "debug.callback("),
    "custom_vmap_call": ("tests/transforms/custom_rules/test_custom_vmap.py", "@custom_vmap"),
    "custom_vjp_linear": ("tests/transforms/custom_rules/test_custom_vjp.py", "custom_vjp_linear"),
    **{
        name: ("tests/transforms/batching/test_named_axes.py", f"lax.{name}(")
        for name in (
            "all_gather",
            "all_to_all",
            "axis_index",
            "pmax",
            "pmin",
            "ppermute",
            "psum",
            "psum_scatter",
        )
    },
    **{
        name: ("tests/parallel/collectives/test_primitives.py", f"ops.{name}_p")
        for name in (
            "keep_first",
            "mesh_all_gather",
            "mesh_all_to_all",
            "mesh_axis_index",
            "mesh_ppermute",
            "mesh_psum_scatter",
            "pcast",
            "pmax_invariant",
            "pmin_invariant",
            "psum_invariant",
            "shard_pad",
            "shard_slice",
        )
    },
    "mesh_sums": ("tests/parallel/collectives/test_allreduce_buckets.py", "mc.mesh_sums_p"),
    "cast_to": ("tests/parallel/collectives/test_axis_types.py", "lax.pcast("),
    "shard_map": ("tests/parallel/collectives/test_shard_map.py", "shard_map("),
}
ROOT = Path(__file__).parents[3]


def modules():
    """All modules that may define primitives."""
    yield linear_ops
    for package in (blufunc.core.ops, blufunc.transforms, blufunc.parallel):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            yield importlib.import_module(info.name)


def primitives():
    found = {}
    for module in modules():
        for value in vars(module).values():
            if isinstance(value, Primitive):
                found[id(value)] = value
    return sorted(found.values(), key=lambda p: p.name)


PRIMITIVES = primitives()


def state_of(prim, rule):
    """``'present'``, ``'unsupported'`` or ``'missing'``."""
    if rule in vars(prim):
        return "missing"  # an instance's own attribute would not be bound to it
    return rule_state(prim, rule)[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("prim", PRIMITIVES, ids=str)
def test_every_primitive_has_every_rule(prim, rule):
    assert state_of(prim, rule) != "missing", (
        f"{prim.name} has no {rule}: define it in {type(prim).__qualname__}, or set it to unsupported('reason')"
    )


@pytest.mark.parametrize("prim", PRIMITIVES, ids=str)
def test_values_and_types_are_never_unsupported(prim):
    """Only calls that are always inlined may lack evaluation or typing."""
    assert state_of(prim, "abstract") == "present"
    if prim.name not in TESTED_ELSEWHERE:
        assert state_of(prim, "impl") == "present"


def test_names_are_unique():
    names = [p.name for p in PRIMITIVES]
    assert sorted(set(names)) == names


@pytest.mark.parametrize("prim", PRIMITIVES, ids=str)
def test_every_primitive_has_a_row(prim):
    if prim.name in TESTED_ELSEWHERE:
        file, text = TESTED_ELSEWHERE[prim.name]
        assert text in (ROOT / file).read_text(encoding="utf-8")
        return
    assert any(op.prim is prim for op in OPS), f"add a row for {prim.name} to tests/op_table/rows.py"


@pytest.mark.parametrize("prim", PRIMITIVES, ids=str)
def test_differentiable_primitives_are_differentiated(prim):
    """A primitive with derivatives has a row that runs them to order 2 at least."""
    mine = [op for op in OPS if op.prim is prim and "float64" in op.dtypes and op.args]
    if not mine or (isinstance(prim, kinds.Elementwise) and prim.derivs is not None and not any(prim.derivs)):
        return
    results = [prim.abstract(*[a.aval("float64") for a in op.args], **op.params) for op in mine]
    flat = [x for out in results for x in (out if prim.multiple_results else [out])]
    if any(dtypes.is_inexact(x.dtype) for x in flat):
        if state_of(prim, "jvp") == "present":
            assert any(op.grad == 2 for op in mine), f"no row of {prim.name} has grad=2"


@pytest.mark.parametrize("prim", [p for p in PRIMITIVES if isinstance(p, kinds.Elementwise)], ids=str)
def test_every_elementwise_primitive_has_a_c_form_or_a_reason(prim):
    """Or a definition: kernels compute it, or it gives the reason for the host."""
    if isinstance(prim.lower, unsupported):
        assert len(prim.lower.reason) > 10
    else:
        assert prim.has_definition or (
            isinstance(prim.lower, CForm) and (prim.lower.templates or prim.lower.special)
        )
    assert prim.cost >= 0


@pytest.mark.parametrize("prim", PRIMITIVES, ids=str)
def test_the_class_of_autocast_is_one(prim):
    assert prim.autocast_class is None or prim.autocast_class in kinds.AUTOCAST


def rows_with_linear_operands():
    for op in OPS:
        if "float64" in op.dtypes and isinstance(op.prim, Primitive) and op.args and op.prim.kind != "random":
            avals = [a.aval("float64") for a in op.args]
            outs = op.prim.abstract(*avals, **op.params)
            outs = list(outs) if op.prim.multiple_results else [outs]
            for group in op.prim.linear_in(avals, outs, **op.params):
                if all(dtypes.is_floating(avals[i].dtype) for i in group) and dtypes.is_inexact(
                    outs[0].dtype
                ):
                    yield pytest.param(op, group, id=f"{op.id} in {sorted(group)}")


@pytest.mark.parametrize("op, group", list(rows_with_linear_operands()))
def test_linear_operands_are(op, group):
    """f(2 x - y) = 2 f(x) - f(y) jointly in a group of operands, others fixed."""
    rng = np.random.default_rng(len(op.id))
    args = [np.asarray(x) for x in op.sample("float64")]
    draws = [[rng.normal(size=x.shape) if i in group else x for i, x in enumerate(args)] for _ in range(2)]
    both = [2 * x - y if i in group else x for i, (x, y) in enumerate(zip(*draws, strict=True))]
    found = [op.prim.impl(*xs, **op.params) for xs in (*draws, both)]
    fx, fy, fb = (f if op.prim.multiple_results else [f] for f in found)
    for x, y, b in zip(fx, fy, fb, strict=True):
        tol = 1e-9 if b.dtype.itemsize >= 8 else 0.02
        np.testing.assert_allclose(b, 2 * x - y, tol, tol)


def test_there_are_primitives():
    assert len(PRIMITIVES) > 60
    assert {"add", "dot_general", "reduce_sum", "jit"} <= {p.name for p in PRIMITIVES}


def test_a_missing_rule_is_found():
    class Bare(Primitive):
        name = "bare"
        batch = unsupported("it is only an example here")

    assert [state_of(Bare(), r) for r in ("impl", "batch")] == ["missing", "unsupported"]
