"""blufunc: gradients, batches and compiled programs from pure Python functions over immutable arrays."""

import importlib as _importlib

from blufunc import ad_checkpoint as ad_checkpoint
from blufunc import custom_batching as custom_batching
from blufunc import custom_derivatives as custom_derivatives
from blufunc import debug as debug
from blufunc import extend as extend
from blufunc import kernels as kernels  # registers the backends
from blufunc import lax as lax
from blufunc import nn as nn
from blufunc import numpy as numpy
from blufunc import optim as optim
from blufunc import random as random
from blufunc import tree as tree
from blufunc.config import config as config
from blufunc.core import dtypes as dtypes
from blufunc.core.array import Array as Array
from blufunc.core.check import check_jaxpr as check_jaxpr
from blufunc.core.jaxpr import Jaxpr as Jaxpr
from blufunc.core.override import override as override
from blufunc.core.primitive import Primitive as Primitive
from blufunc.core.trace import Tracer as Tracer
from blufunc.transforms import checkpoint_policies as checkpoint_policies
from blufunc.transforms.arguments import ShapeDtypeStruct as ShapeDtypeStruct
from blufunc.transforms.autocast import autocast as autocast
from blufunc.transforms.autocast_policy import autocast_table as autocast_table
from blufunc.transforms.callback import effects_barrier as effects_barrier
from blufunc.transforms.callback import io_callback as io_callback
from blufunc.transforms.callback import pure_callback as pure_callback
from blufunc.transforms.checkpoint import checkpoint as checkpoint
from blufunc.transforms.checkpoint import remat as remat
from blufunc.transforms.checkpoint_policies import checkpoint_name as checkpoint_name
from blufunc.transforms.closure_convert import closure_convert as closure_convert
from blufunc.transforms.compile_time import ensure_compile_time_eval as ensure_compile_time_eval
from blufunc.transforms.custom_gradient import custom_gradient as custom_gradient
from blufunc.transforms.custom_jvp import custom_jvp as custom_jvp
from blufunc.transforms.custom_vjp import custom_vjp as custom_vjp
from blufunc.transforms.grad import grad as grad
from blufunc.transforms.grad import jvp as jvp
from blufunc.transforms.grad import linearize as linearize
from blufunc.transforms.grad import value_and_grad as value_and_grad
from blufunc.transforms.grad import vjp as vjp
from blufunc.transforms.jacobian import hessian as hessian
from blufunc.transforms.jacobian import jacfwd as jacfwd
from blufunc.transforms.jacobian import jacobian as jacobian
from blufunc.transforms.jacobian import jacrev as jacrev
from blufunc.transforms.jit import disable_jit as disable_jit
from blufunc.transforms.jit import jit as jit
from blufunc.transforms.linear_transpose import linear_transpose as linear_transpose
from blufunc.transforms.make_jaxpr import eval_shape as eval_shape
from blufunc.transforms.make_jaxpr import make_jaxpr as make_jaxpr
from blufunc.transforms.named_scope import named_call as named_call
from blufunc.transforms.named_scope import named_scope as named_scope
from blufunc.transforms.transfer import block_until_ready as block_until_ready
from blufunc.transforms.transfer import device_get as device_get
from blufunc.transforms.transfer import device_put as device_put
from blufunc.transforms.transfer import devices as devices
from blufunc.transforms.transform import Transform as Transform
from blufunc.transforms.vmap import vmap as vmap

__version__ = "0.1.0.dev0"

_WHEN_ASKED_FOR = ("flatten_util", "scipy", "testing")  # modules that most programs do without


def __getattr__(name: str):
    if name in _WHEN_ASKED_FOR:
        return _importlib.import_module(f"blufunc.{name}")
    raise AttributeError(f"module 'blufunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_ASKED_FOR})
