"""blufunc: gradients, batches and compiled programs from pure Python functions over immutable arrays."""

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
from blufunc.core.primitive import Primitive as Primitive
from blufunc.core.trace import Tracer as Tracer
from blufunc.transforms.arguments import ShapeDtypeStruct as ShapeDtypeStruct
from blufunc.transforms.checkpoint import checkpoint as checkpoint
from blufunc.transforms.custom_jvp import custom_jvp as custom_jvp
from blufunc.transforms.custom_vjp import custom_vjp as custom_vjp
from blufunc.transforms.grad import grad as grad
from blufunc.transforms.grad import jvp as jvp
from blufunc.transforms.grad import linearize as linearize
from blufunc.transforms.grad import value_and_grad as value_and_grad
from blufunc.transforms.grad import vjp as vjp
from blufunc.transforms.jit import jit as jit
from blufunc.transforms.make_jaxpr import eval_shape as eval_shape
from blufunc.transforms.make_jaxpr import make_jaxpr as make_jaxpr
from blufunc.transforms.transfer import block_until_ready as block_until_ready
from blufunc.transforms.transfer import device_get as device_get
from blufunc.transforms.transfer import device_put as device_put
from blufunc.transforms.transfer import devices as devices
from blufunc.transforms.vmap import vmap as vmap

__version__ = "0.1.0.dev0"
