"""blufunc: grad, vmap and jit for pure Python functions over immutable arrays.

Names are imported on first use (``_lazy.py``); ``tests/test_import.py`` bounds what an import loads.
"""

from blufunc import _began as _began  # first, so that its time precedes all other imports
from blufunc import _lazy
from blufunc.config import config as config
from blufunc.core.arrays import array as _array
from blufunc.core.arrays import backend as _backend
from blufunc.core.ir import avals as _avals
from blufunc.core.programs import alternatives as _alternatives
from blufunc.core.programs import stage as _stage
from blufunc.numpy import methods as _methods
from blufunc.transforms.staging import jit as _jit
from blufunc.transforms.staging import stages as _stages

__version__ = "0.1.0.dev0"

# Names that JAX programs use: the replacement, or the statement that there is none.
_NOT_HERE = {
    "Shard": "x.addressable_shards has the shards of an array",
    "copy_to_host_async": "device_get copies to the host",
    "enable_custom_prng": "keys are always typed",
    "ffi": "pure_callback calls Python functions, and Primitive makes primitives of one's own",
    "fwd_and_bwd": "use vjp: out, backward = vjp(f, *args)",
    "host_callback": "use pure_callback, io_callback and debug.callback",
    "host_count": "use process_count()",
    "host_id": "use process_index()",
    "interpreters": "Transform makes transforms of one's own, and extend has what rules are written with",
    "lib": "it is JAX's own",
    "linear_util": "it is JAX's own; transforms of one's own are made with Transform",
    "monitoring": "nothing is monitored; config.debug shows the stages of programs",
    "smap": "use shard_map",
    "tensor": "use numpy.array",
    "transfer_guard": "values move to the host when NumPy or Python asks for them",
    "tree_flatten": "use tree.flatten",
    "tree_leaves": "use tree.leaves",
    "tree_map": "use tree.map",
    "tree_structure": "use tree.structure",
    "tree_unflatten": "use tree.unflatten",
    "version": "use blufunc.__version__",
    "xla_computation": "jit(f).lower(...).as_text() shows a program",
}

with _lazy.names(__name__, hints=_NOT_HERE):
    from blufunc import ad_checkpoint as ad_checkpoint
    from blufunc import core as core
    from blufunc import custom_batching as custom_batching
    from blufunc import custom_derivatives as custom_derivatives
    from blufunc import debug as debug
    from blufunc import distributed as distributed
    from blufunc import dlpack as dlpack
    from blufunc import dtypes as dtypes
    from blufunc import example_libraries as example_libraries
    from blufunc import experimental as experimental
    from blufunc import export as export
    from blufunc import extend as extend
    from blufunc import flatten_util as flatten_util
    from blufunc import image as image
    from blufunc import io as io
    from blufunc import kernels as kernels
    from blufunc import lax as lax
    from blufunc import memory as memory
    from blufunc import multihost as multihost
    from blufunc import nn as nn
    from blufunc import numpy as numpy
    from blufunc import ops as ops
    from blufunc import optim as optim
    from blufunc import parallel as parallel
    from blufunc import profiler as profiler
    from blufunc import random as random
    from blufunc import ref as ref
    from blufunc import scipy as scipy
    from blufunc import sharding as sharding
    from blufunc import stages as stages
    from blufunc import testing as testing
    from blufunc import tree as tree
    from blufunc import tree_util as tree_util
    from blufunc import typing as typing
    from blufunc import visualize as visualize
    from blufunc.contexts import check_tracer_leaks as check_tracer_leaks
    from blufunc.contexts import checking_leaks as checking_leaks
    from blufunc.contexts import debug_infs as debug_infs
    from blufunc.contexts import debug_key_reuse as debug_key_reuse
    from blufunc.contexts import debug_nans as debug_nans
    from blufunc.contexts import default_device as default_device
    from blufunc.contexts import default_matmul_precision as default_matmul_precision
    from blufunc.contexts import default_prng_impl as default_prng_impl
    from blufunc.contexts import enable_checks as enable_checks
    from blufunc.contexts import enable_x64 as enable_x64
    from blufunc.contexts import explain_cache_misses as explain_cache_misses
    from blufunc.contexts import log_compiles as log_compiles
    from blufunc.contexts import numpy_dtype_promotion as numpy_dtype_promotion
    from blufunc.contexts import numpy_rank_promotion as numpy_rank_promotion
    from blufunc.contexts import set_mesh as set_mesh
    from blufunc.contexts import threefry_partitionable as threefry_partitionable
    from blufunc.core.arrays.backend import Device as Device
    from blufunc.core.ir.check import check_jaxpr as check_jaxpr
    from blufunc.core.ir.dtypes import float0 as float0
    from blufunc.core.ir.jaxpr import Jaxpr as Jaxpr
    from blufunc.core.ir.trace import Array as Array
    from blufunc.core.ir.trace import Tracer as Tracer
    from blufunc.core.primitives.override import override as override
    from blufunc.core.primitives.primitive import Primitive as Primitive
    from blufunc.core.programs.interpret import ensure_compile_time_eval as ensure_compile_time_eval
    from blufunc.core.programs.refs import Ref as Ref
    from blufunc.core.programs.refs import ds as ds
    from blufunc.doctor import print_environment_info as print_environment_info
    from blufunc.explain import explain as explain
    from blufunc.memory import live_arrays as live_arrays
    from blufunc.parallel.collectives.shard_map import shard_map as shard_map
    from blufunc.parallel.mesh.constrain import constrain as constrain
    from blufunc.parallel.mesh.links import LinkSpec as LinkSpec
    from blufunc.parallel.mesh.mesh import AbstractMesh as AbstractMesh
    from blufunc.parallel.mesh.mesh import Mesh as Mesh
    from blufunc.parallel.mesh.mesh import make_mesh as make_mesh
    from blufunc.parallel.mesh.sharding import NamedSharding as NamedSharding
    from blufunc.parallel.mesh.spec import P as P
    from blufunc.parallel.mesh.spec import PartitionSpec as PartitionSpec
    from blufunc.parallel.programs.placement import device_put as device_put
    from blufunc.parallel.programs.placement import make_array_from_callback as make_array_from_callback
    from blufunc.parallel.programs.placement import (
        make_array_from_process_local_data as make_array_from_process_local_data,
    )
    from blufunc.parallel.programs.placement import (
        make_array_from_single_device_arrays as make_array_from_single_device_arrays,
    )
    from blufunc.parallel.programs.placement import with_sharding_constraint as with_sharding_constraint
    from blufunc.parallel.programs.pmap import pmap as pmap
    from blufunc.parallel.programs.reshard import reshard as reshard
    from blufunc.parallel.programs.shard import shard as shard
    from blufunc.parallel.reports.collectives import collectives as collectives
    from blufunc.parallel.reports.hardware import DeviceSpec as DeviceSpec
    from blufunc.parallel.reports.plan import plan as plan
    from blufunc.parallel.reports.visualize import sharding_svg as sharding_svg
    from blufunc.parallel.reports.visualize import visualize_sharding as visualize_sharding
    from blufunc.ref import empty_ref as empty_ref
    from blufunc.ref import free_ref as free_ref
    from blufunc.ref import freeze as freeze
    from blufunc.ref import new_ref as new_ref
    from blufunc.transforms.arguments import ShapeDtypeStruct as ShapeDtypeStruct
    from blufunc.transforms.autodiff.grad import grad as grad
    from blufunc.transforms.autodiff.grad import jvp as jvp
    from blufunc.transforms.autodiff.grad import linearize as linearize
    from blufunc.transforms.autodiff.grad import value_and_grad as value_and_grad
    from blufunc.transforms.autodiff.grad import vjp as vjp
    from blufunc.transforms.autodiff.jacobian import hessian as hessian
    from blufunc.transforms.autodiff.jacobian import jacfwd as jacfwd
    from blufunc.transforms.autodiff.jacobian import jacobian as jacobian
    from blufunc.transforms.autodiff.jacobian import jacrev as jacrev
    from blufunc.transforms.autodiff.linear_transpose import linear_transpose as linear_transpose
    from blufunc.transforms.batching.vmap import vmap as vmap
    from blufunc.transforms.checkpointing import policies as checkpoint_policies  # noqa: F401
    from blufunc.transforms.checkpointing.checkpoint import checkpoint as checkpoint
    from blufunc.transforms.checkpointing.checkpoint import remat as remat
    from blufunc.transforms.checkpointing.policies import checkpoint_name as checkpoint_name
    from blufunc.transforms.custom_rules.closure_convert import closure_convert as closure_convert
    from blufunc.transforms.custom_rules.custom_gradient import custom_gradient as custom_gradient
    from blufunc.transforms.custom_rules.custom_jvp import custom_jvp as custom_jvp
    from blufunc.transforms.custom_rules.custom_vjp import custom_vjp as custom_vjp
    from blufunc.transforms.extension.cuda_kernel import cuda_kernel as cuda_kernel
    from blufunc.transforms.extension.elementwise import elementwise as elementwise
    from blufunc.transforms.extension.transform import Transform as Transform
    from blufunc.transforms.precision.autocast import autocast as autocast
    from blufunc.transforms.precision.policy import autocast_table as autocast_table
    from blufunc.transforms.staging.callback import effects_barrier as effects_barrier
    from blufunc.transforms.staging.callback import io_callback as io_callback
    from blufunc.transforms.staging.callback import pure_callback as pure_callback
    from blufunc.transforms.staging.eval_shape import eval_shape as eval_shape
    from blufunc.transforms.staging.jit import clear_caches as clear_caches
    from blufunc.transforms.staging.jit import disable_jit as disable_jit
    from blufunc.transforms.staging.jit import jit as jit
    from blufunc.transforms.staging.make_jaxpr import make_jaxpr as make_jaxpr
    from blufunc.transforms.staging.make_jaxpr import typeof as typeof
    from blufunc.transforms.staging.named_scope import named_call as named_call
    from blufunc.transforms.staging.named_scope import named_scope as named_scope
    from blufunc.transforms.staging.transfer import block_until_ready as block_until_ready
    from blufunc.transforms.staging.transfer import default_backend as default_backend
    from blufunc.transforms.staging.transfer import device_count as device_count
    from blufunc.transforms.staging.transfer import device_get as device_get
    from blufunc.transforms.staging.transfer import devices as devices
    from blufunc.transforms.staging.transfer import local_device_count as local_device_count
    from blufunc.transforms.staging.transfer import local_devices as local_devices
    from blufunc.transforms.staging.transfer import process_count as process_count
    from blufunc.transforms.staging.transfer import process_index as process_index

# Hooks of lower packages into upper ones, imported on demand.
with _lazy.modules(globals()):
    from blufunc.core.ops import foreign as _foreign
    from blufunc.kernels.backends.cpu import backend as _cpu
    from blufunc.kernels.backends.cuda import backend as _cuda
    from blufunc.kernels.backends.cuda.library.attention import kernels as _attention
    from blufunc.nn.attention import recognised as _attention_recognised
    from blufunc.parallel.partition import explicit_types as _explicit_types
    from blufunc.parallel.programs import array_shards as _array_shards
    from blufunc.parallel.programs import jit_shardings as _jit_shardings
    from blufunc.parallel.reports import array_html as _array_html
    from blufunc.parallel.reports import per_device as _per_device

_backend.register("cpu", lambda: _cpu.NumpyBackend())
_backend.register("cuda", lambda: _cuda.CudaBackend())
_array.shards = _array_shards
_avals.placed = lambda *args: _explicit_types.placed(*args)
_stage.explicit_types = _explicit_types
_array.notebooks = _array_html
_array.foreign = _foreign
_alternatives.recognisers.append(
    (frozenset(("dot_general", "exp")), lambda jaxpr: _attention_recognised.recognise(jaxpr))
)
_alternatives.refusals["attention"] = lambda sizes, dtype: _attention.refused_everywhere(sizes, dtype)
_jit.register_sharded(lambda *args, **options: _jit_shardings.ShardedJit(*args, **options))
_stages.mesh_reports = _per_device
_methods.install()
