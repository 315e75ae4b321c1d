"""Public names of JAX: each exists here, or stands in a table with the reason."""

import importlib
import types

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'blufunc[peers]'")
if jax.__version_info__[:2] != (0, 10):
    pytest.skip("the names are those of JAX 0.10", allow_module_level=True)

pytestmark = pytest.mark.peer

MODULES = """
    numpy numpy.fft numpy.linalg lax random nn nn.initializers tree tree_util dtypes core errors
    extend.core extend.core.primitives flatten_util custom_batching custom_derivatives ad_checkpoint ops typing stages
    debug sharding dlpack distributed export image
    lax.linalg scipy.cluster.vq scipy.fft scipy.integrate scipy.interpolate
    scipy.linalg scipy.ndimage scipy.optimize scipy.signal scipy.sparse.linalg scipy.spatial.transform scipy.special
    scipy.stats
""".split()

REASONS = {
    "4 and 6 bits, and other 8-bit floats, are storage formats that no kernel here reads": """
        numpy.float4_e2m1fn numpy.float6_e2m3fn numpy.float6_e3m2fn numpy.float8_e3m4 numpy.float8_e4m3
        numpy.float8_e4m3b11fnuz numpy.float8_e4m3fnuz numpy.float8_e5m2fnuz numpy.float8_e8m0fnu numpy.int1
        numpy.int2 numpy.int4 numpy.uint1 numpy.uint2 numpy.uint4 nn.get_scaled_dot_general_config
        nn.scaled_dot_general nn.scaled_matmul lax.scaled_dot
    """,
    "the function is made of other primitives": """
        lax.approx_top_k_p lax.clz_p lax.mulhi_p lax.reduce_p lax.reduce_window_p lax.scatter_sub_p lax.select_n_p
        lax.select_and_gather_add_p lax.select_and_scatter_add_p lax.select_and_scatter_p lax.split_p lax.squeeze_p
        lax.stack_p lax.stage_p lax.tile_p lax.unstack_p lax.eq_to_p lax.le_to_p lax.lt_to_p lax.device_put_p
        random.random_gamma_p custom_derivatives.remat_opt_p lax.linalg.cholesky_update_p
        lax.linalg.householder_product_p lax.linalg.ormqr_p lax.linalg.symmetric_product_p
    """,
    "order of effects follows the program: there are no tokens": """
        lax.after_all lax.after_all_p lax.create_token lax.create_token_p lax.dce_sink lax.dce_sink_p
        extend.core.AbstractToken extend.core.Token debug.DebugEffect debug.OrderedDebugEffect
    """,
    "XLA's own generators and hints; threefry is the generator, and functions are as accurate as they can be": """
        lax.AccuracyMode lax.Tolerance lax.rng_bit_generator_p
        lax.rng_uniform lax.rng_uniform_p random.key_dtype lax.DotAlgorithm
    """,
    "collectives that are not implemented": """
        lax.pbroadcast lax.precv lax.psend lax.ragged_all_to_all lax.ragged_all_to_all_p
    """,
    "parts of JAX's own machinery": """
        extend.core.CallPrimitive extend.core.DebugInfo extend.core.TraceTag extend.core.call_impl
        extend.core.take_current_trace extend.core.unsafe_am_i_under_a_jit_DO_NOT_USE
        extend.core.unsafe_am_i_under_a_vmap_DO_NOT_USE custom_derivatives.custom_vjp_primal_tree_values
        tree_util.default_registry ad_checkpoint.Offloadable ad_checkpoint.Recompute ad_checkpoint.Saveable
    """,
    "sizes are integers: there are no symbolic dimensions": """
        errors.InconclusiveDimensionOperation extend.core.InconclusiveDimensionOperation export.SymbolicScope
    """,
    "errors derive from the builtin classes, and BlufuncError is the base of all": """
        errors.JAXIndexError errors.JAXTypeError errors.JaxRuntimeError
    """,
    "exported programs are jaxprs in a format of their own": """
        export.DisabledSafetyCheck export.maximum_supported_calling_convention_version
        export.minimum_supported_calling_convention_version
    """,
    "transposition is linear_transpose, or a custom_vjp": "custom_derivatives.linear_call",
    "shardings are inferred when a program is compiled; a mesh is current in a with block": """
        sharding.AbstractDevice sharding.ManualAxisType sharding.auto_axes sharding.explicit_axes
        sharding.get_abstract_mesh sharding.get_mesh sharding.make_single_device_sharding sharding.set_mesh
        sharding.use_abstract_mesh debug.inspect_array_sharding
    """,
}
"""The reasons, and the names that are missing for them."""


def of(root, module):
    """The module or attribute, or None."""
    try:
        return importlib.import_module(f"{root}.{module}")
    except ImportError:
        found = importlib.import_module(root)
        for part in module.split("."):
            found = getattr(found, part, None)
        return found


def names():
    """``module.name`` of each public name of JAX; True if it is here."""
    for module in MODULES:
        theirs, ours = of("jax", module), of("blufunc", module)
        for name in getattr(theirs, "__all__", None) or dir(theirs):
            value = getattr(theirs, name, None)
            if name[0] != "_" and not isinstance(value, types.ModuleType):
                yield f"{module}.{name}", ours is not None and hasattr(ours, name)


def test_names():
    found = dict(names())
    reasons = [name for text in REASONS.values() for name in text.split()]
    assert len(found) > 1100 and len(reasons) == len(set(reasons))
    missing = {name for name, here in found.items() if not here}
    # a primitive of JAX is here if an operation is made of one with the same operands
    primitives = {name for name in missing if name.startswith("extend.core.primitives.")}
    assert missing - primitives - set(reasons) == set(), "build it, or give the reason"
    assert set(reasons) - missing == set(), "it is here: the reason has to go"
    assert len(primitives) <= 30
    functions = {name: here for name, here in found.items() if not name.endswith("_p")}
    assert sum(functions.values()) / len(functions) >= 0.94
