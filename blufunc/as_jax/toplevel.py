"""Names of the module ``jax`` that blufunc spells otherwise.

Under the face ``as_jax``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from blufunc import errors
from blufunc.as_jax.configuration import config, enable_x64
from blufunc.contexts import checking_leaks
from blufunc.core.arrays.memories import Space
from blufunc.core.ir import source
from blufunc.core.pytree import tree
from blufunc.parallel.collectives.shard_map import shard_map
from blufunc.parallel.mesh.mesh import current_mesh
from blufunc.parallel.mesh.spec import P
from blufunc.parallel.programs.array_shards import Shard
from blufunc.transforms.autodiff.grad import vjp
from blufunc.transforms.checkpointing import policies
from blufunc.transforms.staging import transfer
from blufunc.transforms.staging.jit import jit

__all__ = [
    "Shard",
    "check_tracer_leaks",
    "checkpoint_policies",
    "config",
    "copy_to_host_async",
    "device_count",
    "devices",
    "enable_custom_prng",
    "enable_x64",
    "fwd_and_bwd",
    "host_count",
    "host_id",
    "host_ids",
    "local_device_count",
    "local_devices",
    "memory",
    "process_indices",
    "smap",
]

check_tracer_leaks = checking_leaks


class MissingBackendError(errors.BlufuncError, RuntimeError):
    """A platform without devices: libraries look for one by catching ``RuntimeError``."""


def _of_platform(function: Callable) -> Callable:
    @functools.wraps(function)
    def found(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except errors.BlufuncError as e:
            if isinstance(e, MissingBackendError):
                raise
            what = f"Unknown backend: {e.what}"  # the words by which programs tell it from other errors
            raise MissingBackendError(what, where=e.where, why=e.why, fix=e.fix) from None

    return found


devices = _of_platform(transfer.devices)
local_devices = _of_platform(transfer.local_devices)
device_count = _of_platform(transfer.device_count)
local_device_count = _of_platform(transfer.local_device_count)


@contextlib.contextmanager
def enable_custom_prng(on: bool = True) -> Iterator[None]:
    """A block in which ``PRNGKey`` makes typed keys: it always does."""
    yield


memory = SimpleNamespace(Space=Space)
checkpoint_policies = SimpleNamespace(**{name: getattr(policies, name) for name in policies.__all__})
host_id, host_count = transfer.process_index, transfer.process_count


def process_indices(backend: str | None = None) -> list[int]:
    """The ranks of all processes of a job."""
    return list(range(transfer.process_count(backend)))


host_ids = process_indices


def copy_to_host_async(x: Any) -> Any:
    """Begin copies of a pytree's arrays to the host, and return it."""
    for leaf in tree.leaves(x):
        if hasattr(leaf, "copy_to_host_async"):
            leaf.copy_to_host_async()
    return x


def fwd_and_bwd(
    fun: Callable, argnums: int | Sequence[int], has_aux: bool = False, jitted: bool = True
) -> tuple[Callable, Callable]:
    """The passes of ``vjp`` as two functions, which serve many calls.

    Args:
      argnums: the arguments to differentiate in.
      has_aux: whether ``fun`` returns ``(out, aux)``.
      jitted: compile both.
    Returns:
      ``fwd(*args) -> (out, residuals)``, with ``aux`` as a third result, and ``bwd(residuals, ct)``, which gives a
      cotangent for each of ``argnums``.
    """
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def fwd(*args: Any, **kwargs: Any) -> Any:
        places = [i % len(args) for i in chosen]

        def of_chosen(*given: Any) -> Any:
            whole = list(args)
            for i, x in zip(places, given, strict=True):
                whole[i] = x
            return fun(*whole, **kwargs)

        pulled: Any = vjp  # its overloads want a literal flag
        return pulled(of_chosen, *[args[i] for i in places], has_aux=has_aux)

    def bwd(residuals: Callable, ct: Any) -> Any:
        cts = residuals(ct)
        return cts[0] if isinstance(argnums, int) else cts

    return (jit(fwd), jit(bwd)) if jitted else (fwd, bwd)


def smap(f: Callable | None = None, /, *, in_axes: Any = 0, out_axes: Any, axis_name: str) -> Any:
    """Map a function over shards along one axis of the current mesh.

    Args:
      in_axes: for each argument the dimension that the axis divides, or None; one for all, or a tuple.
      out_axes: likewise, for the results.
    """
    if f is None:
        return functools.partial(smap, in_axes=in_axes, out_axes=out_axes, axis_name=axis_name)
    mesh = current_mesh()
    if mesh is None:
        raise errors.ShardingError(
            "smap outside of a mesh.", where=source.here(), fix="with jax.set_mesh(mesh): ..."
        )
    is_axis = lambda x: x is None or isinstance(x, int)
    spec = lambda axis: P() if axis is None else P(*[None] * axis, axis_name)
    in_specs, out_specs = (tree.map(spec, axes, is_leaf=is_axis) for axes in (in_axes, out_axes))
    several: Any = {"axis_names": {axis_name}} if len(mesh.axis_names) > 1 else {}

    @functools.wraps(f)
    def mapped(*args: Any) -> Any:
        specs = in_specs if isinstance(in_axes, tuple) else (in_specs,) * len(args)
        return shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, **several)(*args)

    return mapped
