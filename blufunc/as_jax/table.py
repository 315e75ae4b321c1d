"""The table of served modules: for each module of JAX, its sources in blufunc.

Under the face ``as_jax``. The first source that has a name gives it; ``stubs.py`` has the rest.
"""

from __future__ import annotations

_OWN = "blufunc.as_jax."

# Modules of blufunc have JAX's names where none is given.
_FACES = """
ad_checkpoint custom_batching custom_derivatives debug distributed errors export flatten_util image lax lax.linalg nn
nn.initializers numpy numpy.fft numpy.linalg ops random scipy scipy.cluster scipy.cluster.vq scipy.fft scipy.integrate
scipy.interpolate scipy.linalg scipy.ndimage scipy.optimize scipy.signal scipy.sparse scipy.sparse.linalg scipy.spatial
scipy.spatial.transform scipy.special scipy.stats sharding tree tree_util typing
example_libraries example_libraries.optimizers example_libraries.stax profiler dlpack
"""

_DISTRIBUTIONS = """
bernoulli beta betabinom binom cauchy chi2 dirichlet expon gamma gennorm geom gumbel_l gumbel_r laplace logistic
multinomial multivariate_normal nbinom norm pareto poisson t truncnorm uniform vonmises wrapcauchy
"""

TABLE: dict[str, tuple[str, ...]] = {f"jax.{name}": (f"blufunc.{name}",) for name in _FACES.split()}
TABLE |= {f"jax.scipy.stats.{name}": (f"blufunc.scipy.stats.{name}",) for name in _DISTRIBUTIONS.split()}
TABLE |= {
    "jax": (_OWN + "toplevel", _OWN + "extras.version", _OWN + "extras.flags", "blufunc"),
    "jax.ad_checkpoint": (_OWN + "extras.policies", "blufunc.ad_checkpoint"),
    "jax.api_util": (_OWN + "linear_util",),
    "jax.core": (_OWN + "traces", _OWN + "jaxprs", "blufunc.core", "blufunc.extend.core"),
    "jax.dtypes": (_OWN + "types", "blufunc.dtypes"),
    "jax.experimental": (_OWN + "experimental", "blufunc.experimental"),
    "jax.experimental.array_serialization": (),
    "jax.experimental.array_serialization.serialization": (),
    "jax.experimental.array_serialization.tensorstore_impl": (),
    "jax.experimental.checkify": ("blufunc.experimental.checkify", "blufunc.checkify"),
    "jax.experimental.colocated_python": (),
    "jax.experimental.colocated_python.func": (),
    "jax.experimental.colocated_python.serialization": (),
    "jax.experimental.compilation_cache": (),
    "jax.experimental.compilation_cache.compilation_cache": (_OWN + "extras.disk_cache",),
    "jax.experimental.hijax": (_OWN + "hijax", _OWN + "jaxprs"),
    "jax.experimental.jet": ("blufunc.experimental.jet", "blufunc.jet"),
    "jax.experimental.layout": (_OWN + "extras.layouts",),
    "jax.experimental.mesh_utils": (_OWN + "meshes",),
    "jax.experimental.multihost_utils": (_OWN + "extras.hosts", "blufunc.multihost"),
    "jax.experimental.ode": ("blufunc.experimental.ode", "blufunc.ode"),
    "jax.experimental.pjit": (_OWN + "experimental",),
    "jax.experimental.random": ("blufunc.experimental.random",),
    "jax.experimental.rnn": ("blufunc.experimental.rnn",),
    "jax.experimental.serialize_executable": (_OWN + "extras.executables",),
    "jax.experimental.shard_alike": (_OWN + "extras.alike",),
    "jax.experimental.shard_map": (_OWN + "shard_maps",),
    "jax.experimental.sparse": ("blufunc.experimental.sparse", _OWN + "extras.sparse_primitives"),
    "jax.experimental.sparse.linalg": ("blufunc.scipy.sparse.linalg",),
    "jax.experimental.topologies": (),
    "jax.experimental.xla_metadata": (_OWN + "extras.hints",),
    "jax.extend": (),
    "jax.extend.core": (
        _OWN + "traces",
        _OWN + "jaxprs",
        _OWN + "primitives",
        "blufunc.extend.core",
        "blufunc.core",
    ),
    "jax.extend.backend": (_OWN + "extras.backends",),
    "jax.extend.core.primitives": (
        _OWN + "primitive_names",
        "blufunc.extend.core.primitives",
        _OWN + "extras.composed",
        _OWN + "extras.prng",
        _OWN + "extras.window_primitives",
    ),
    "jax.extend.ifrt_programs": (),
    "jax.extend.linear_util": (_OWN + "linear_util",),
    "jax.extend.random": (_OWN + "extras.prng",),
    "jax.extend.source_info_util": (_OWN + "extras.source_info", _OWN + "tracebacks"),
    "jax.interpreters": (),
    "jax.interpreters.ad": (_OWN + "primitives", _OWN + "differentiation"),
    "jax.interpreters.batching": (_OWN + "primitives", _OWN + "differentiation"),
    "jax.interpreters.mlir": (_OWN + "primitives", _OWN + "lowering"),
    "jax.interpreters.partial_eval": (_OWN + "partial_eval",),
    "jax.interpreters.xla": (_OWN + "jaxprs",),
    "jax.lib": (_OWN + "extras.version",),
    "jax.monitoring": (_OWN + "monitoring",),
    "jax.custom_derivatives": ("blufunc.custom_derivatives", "blufunc.extend.core.primitives"),
    "jax.lax": (
        "blufunc.lax",
        "blufunc.parallel.recipes.ragged_exchange",
        _OWN + "extras.composed",
        _OWN + "extras.window_primitives",
    ),
    "jax.lax.linalg": ("blufunc.lax.linalg", _OWN + "extras.linalg_primitives"),
    "jax.numpy": (_OWN + "array_names", "blufunc.numpy"),
    "jax.profiler": ("blufunc.profiler", _OWN + "extras.memory_profile"),
    "jax.random": ("blufunc.random", _OWN + "extras.random_names"),
    "jax.debug": ("blufunc.debug", _OWN + "extras.inspection"),
    "jax.ref": ("blufunc.ref",),
    "jax.sharding": ("blufunc.sharding", _OWN + "meshes"),
    "jax.tree_util": ("blufunc.tree_util", _OWN + "types"),
    "jax.stages": ("blufunc.stages", "blufunc.transforms.staging.stages"),
    "jax.test_util": ("blufunc.test_util", "blufunc.testing"),
    "jax.version": (_OWN + "extras.version",),
    # Private modules of JAX that libraries import all the same.
    "jax._src": (),
    "jax._src.ad_util": (_OWN + "differentiation", "blufunc.lax"),
    "jax._src.api_util": (_OWN + "linear_util",),
    "jax._src.callback": (),
    "jax._src.checkify": ("blufunc.experimental.checkify", "blufunc.checkify"),
    "jax._src.compiler": (),
    "jax._src.core": (_OWN + "traces", _OWN + "jaxprs", "blufunc.core", "blufunc.extend.core"),
    "jax._src.dispatch": (_OWN + "experimental",),
    "jax._src.distributed": (_OWN + "experimental",),
    "jax._src.dtypes": (_OWN + "types", "blufunc.dtypes"),
    "jax._src.interpreters": (),
    "jax._src.interpreters.ad": (_OWN + "primitives", _OWN + "differentiation"),
    "jax._src.interpreters.pxla": (),
    "jax._src.state": (),
    "jax._src.state.types": (),
    "jax._src.traceback_util": (_OWN + "tracebacks",),
    "jax._src.tree_util": (_OWN + "types", "blufunc.tree_util"),
    "jax._src.xla_bridge": (_OWN + "experimental",),
}

_NOT_OF_JAX = {
    "jax": """
        AbstractMesh DeviceSpec Jaxpr LinkSpec Mesh PartitionSpec Primitive Tracer Transform autocast autocast_table
        check_jaxpr checkpoint_name collectives constrain cuda_kernel elementwise explain io_callback override plan
        shard sharding_svg visualize_sharding with_sharding_constraint
    """,
    "jax.lax": """
        cholesky_update_p get_p hessenberg_p householder_product_p ormqr_p random_gamma_p schur_p swap_p
        symmetric_product_p tridiagonal_p
        add_any_p bitcast_p complex_abs_p convert_p debug_callback_p hypot_p io_callback_p logaddexp_p psum_scatter_p
        pure_callback_p pvary ragged_contract_p ragged_dot_p random_gamma_grad_p select_p trunc
        trunc_p window_argmax_p window_argmin_p zeros_like
    """,
    "jax.nn": """
        BatchNormResult BlockScaleConfig SpectralNormResult avg_pool batch_norm convex_kl_divergence
        cosine_distance cosine_similarity
        ctc_loss dropout embedding_lookup generalized_kl_divergence group_norm hinge_loss huber_loss instance_norm
        kl_divergence kl_divergence_with_log_targets l2_loss layer_norm linear_cross_entropy log_cosh max_pool min_pool
        multiclass_hinge_loss multiclass_perceptron_loss ntxent perceptron_loss poly_loss_cross_entropy pool rms_norm
        safe_softmax_cross_entropy sigmoid_binary_cross_entropy sigmoid_focal_loss smooth_labels softmax_cross_entropy
        softmax_cross_entropy_with_integer_labels sparsemax_loss spectral_norm squared_error triplet_margin_loss
        weight_norm
    """,
    "jax.interpreters.ad": "CustomVJPException",
    "jax.interpreters.batching": "CustomVJPException",
    "jax.lib": "__version_info__",
    "jax.numpy": "fix",
    "jax.ref": "ds View",
    "jax.extend.random": "key_dtype",
    "jax.lax.linalg": "lu_solve_p",
    "jax.tree": """
        DictKey FlattenedIndexKey GetAttrKey SequenceKey TreeDef broadcast_prefix flatten_up_to keystr leaf_paths
        register_dataclass register_leaf register_node register_pytree_node register_static
    """,
}

HIDDEN = {module: tuple(names.split()) for module, names in _NOT_OF_JAX.items()}
"""Names that the sources have and JAX 0.10.2 lacks, by module."""
