"""Placement: which devices of a mesh hold which part of a model.

Follows ``weights.py``. In: a configuration and a mesh. Out: arguments of ``weights.load``, and shardings of all that a
step reads and writes. The axes are those of ``examples/gpt/sharded.py``: "model" shards heads, hidden units and the
vocabulary (Shoeybi et al., arXiv:1909.08053), "expert" experts, "stage" layers, "fsdp" one more dimension of each
matrix, which is gathered when it is used, and "zero1" and "zero2" that of optimizer state. ``layouts.py`` computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import P, tree
from blufunc.errors import DataError
from examples.gpt import devices, sharded
from examples.llm import weights
from examples.llm.config import Config

AXES = sharded.AXES
REST = "rest"
"""The dimension of a matrix that "fsdp" shards; of state, ``sharded.DIVIDED``."""

# By the name of an array or of the dict that holds it: the mesh axes of each dimension.
_SPECS = {
    "embed": ("model", REST),
    "positions": (None, REST),
    **dict.fromkeys(("head", "qkv", "gate", "up"), ("model", REST)),
    **dict.fromkeys(("out", "down"), (REST, "model")),
}
_OF_EXPERTS = {**dict.fromkeys(("gate", "up"), ("expert", None, REST)), "down": ("expert", REST, None)}


def specs(values: Any, plan: sharded.Plan, kind: str = "params") -> Any:
    """A tree of ``PartitionSpec`` for parameters, or the state of an optimizer.

    Norms, and biases of what is summed over devices, are replicated.

    Args:
      values: in the plan's form (``packed``).
      kind: "params"; "gathered": parameters inside a stage, whole along "fsdp"; any other: state, sharded along "zero1"
        and "zero2" too.
    """
    rest = plan.among(*sharded.DIVIDED.get(kind, sharded.DIVIDED["state"]))
    vocabulary = "stage" if plan.sharded_ends else "model"

    def spec(path: tuple[Any, ...], leaf: Any) -> bf.PartitionSpec:
        keys = [str(getattr(key, "key", "")) for key in path]
        above, last = ("", *keys)[-2], ("", *keys)[-1]
        of_layer = "layers" in keys
        along = (_OF_EXPERTS if "experts" in keys else _SPECS).get(above) or _SPECS.get(last, ())
        if last == "bias":
            along = along[:1] if along[:1] == ("model",) else ()
        if last in ("embed", "positions") or above == "head":
            along = (vocabulary if along[0] == "model" else None, *along[1:])
        if plan.has("stage") and of_layer and leaf.ndim:
            along = ("stage", *along)
        here = [rest if axis == REST else axis if axis and plan.has(axis) else None for axis in along]
        return P(*here[: leaf.ndim])

    return tree.map_with_path(spec, values)


def shardings(values: Any, plan: sharded.Plan, kind: str = "params") -> Any:
    """``specs`` with the mesh."""
    return tree.map(lambda spec: plan.sharding(*spec), specs(values, plan, kind))


def placed(config: Config, mesh: bf.Mesh) -> tuple[dict, Config]:
    """A tree of ``NamedSharding``, and the configuration with groups by device.

    Raises:
      DataError: the mesh has other axes, or one does not divide the model.
    """
    check(config, dict(mesh.shape))
    config = grouped(config, dict(mesh.shape))
    return Layout(sharded.Plan(mesh), config=config).places(), config


def grouped(config: Config, axes: Mapping[str, int]) -> Config:
    """The configuration whose heads are in a group for each device along "model"."""
    return dataclasses.replace(config, groups=axes.get("model", 1))


def check(config: Config, axes: Mapping[str, int], ends: str | None = None) -> None:
    """Raise DataError if the axes of a mesh do not divide a model.

    Args:
      ends: the axis that must divide the vocabulary; without one, it is padded along "model".
    """
    where = f"--mesh {sharded.spelled(axes)}"
    if others := sorted(axes.keys() - set(AXES)):
        raise DataError(
            f"{others[0]!r} is no axis that a model is divided along",
            where=where,
            fix=f"use some of {', '.join(AXES)}",
        )
    matrices = "hidden units" if not config.experts else "hidden units of an expert"
    for axis, what, size in (
        ("model", "key heads", config.key_heads),
        ("model", matrices, config.hidden),
        ("model", "tokens of a vocabulary", config.vocab),
        *((axis, "features", config.width) for axis in ("fsdp", "zero1", "zero2")),
        ("stage", "layers", config.layers),
        ("expert", "experts", config.experts),
    ):
        if axis in axes and size % axes[axis]:
            fitting = [n for n in range(1, axes[axis]) if not size % n]
            raise DataError(
                f"{size} {what} cannot be divided among {axes[axis]} devices",
                where=where,
                why=f"the axis {axis!r} divides them",
                fix=f"{axis}={fitting[-1]}, or another axis",
            )
    if axes.get("expert", 1) > 1 and not config.experts:
        raise DataError(
            f"a {config.architecture} model has no experts",
            where=where,
            why="the axis 'expert' divides them",
            fix="the axis 'data', or a mixture of experts: mixtral, or --experts of the random model",
        )
    if "stage" in axes and len({config.window(i) for i in range(config.layers)}) > 1:
        raise DataError(
            "layers with windows of several sizes cannot be stages",
            where=where,
            why="all devices of a pipeline run one program, so all layers are alike",
            fix="the axes fsdp and model",
        )


def in_groups(params: dict, config: Config) -> dict:
    """Reorder the queries, keys and values of one group to those of ``config``."""
    N, K, D, M = config.heads, config.key_heads, config.features, config.groups

    def one(path: tuple[Any, ...], x: Any) -> Any:
        if "qkv" not in [getattr(key, "key", "") for key in path] or M == 1:
            return x
        parts = [part.reshape(M, -1, *x.shape[1:]) for part in jnp.split(x, [N * D, (N + K) * D])]
        return jnp.concatenate(parts, 1).reshape(x.shape)

    return tree.map_with_path(one, params)


def packed(params: Any, plan: sharded.Plan) -> Any:
    """The form in which parameters are placed: layers of a pipeline stacked."""
    if not plan.has("stage"):
        return params
    return weights.stacked(params, order(len(params["layers"]), plan), jnp.stack)


def unpacked(params: Any, plan: sharded.Plan) -> Any:
    """The form of one device, which files have."""
    if not plan.has("stage"):
        return params
    layers = params["layers"]
    where = {layer: i for i, layer in enumerate(order(len(tree.leaves(layers)[0]), plan))}
    return params | {"layers": [tree.map(lambda x, i=where[n]: x[i], layers) for n in range(len(where))]}


def order(layers: int, plan: sharded.Plan) -> list[int] | None:
    """The layers in the order of their ranks and chunks; None without stages."""
    if not plan.has("stage"):
        return None
    # that of ``parallel.interleave_layers``, as numbers also while a function is traced
    parts = np.arange(layers).reshape(plan.chunks, plan.mesh.shape["stage"], -1)
    return parts.swapaxes(0, 1).reshape(-1).tolist()


@dataclasses.dataclass(frozen=True)
class Layout(devices.Layout):
    """Placement of a model that is trained, by its plan, and its configuration there."""

    config: Config = dataclasses.field(kw_only=True)

    @property
    def packed(self) -> list[str]:
        """Axes that change the form of parameters, with their sizes, and chunks."""
        plan = self.plan
        sizes = {} if plan.mesh is None else plan.mesh.shape
        found = [f"{axis}:{sizes[axis]}" for axis in sharded.PACKING if sizes.get(axis, 1) > 1]
        return [*found, f"chunks:{plan.chunks}"] if plan.chunks > 1 else found

    def places(self) -> Any:
        """The sharding of each parameter, in the form in which they are placed."""
        if self.plan.mesh is None:
            return None
        types = bf.eval_shape(lambda x: packed(x, self.plan), weights.types(self.config))
        return shardings(types, self.plan)

    def even(self, windows: np.ndarray) -> np.ndarray:
        """As many windows as shard evenly; some are repeated if there are too few."""
        n = 1 if self.plan.mesh is None else self.plan.mesh.size_of(self.plan.among(*sharded.ROWS) or ())
        return np.resize(windows, (max(1, len(windows) // n) * n, *windows.shape[1:]))

    def placed(self, params: Any) -> Any:
        """Place parameters given in the form of one device."""
        if self.plan.mesh is None:
            return params
        params = packed(params, self.plan)
        return bf.device_put(params, shardings(params, self.plan))

    def state(self, init: Callable[[Any], Any], trained: Any) -> Any:
        """The state of an optimizer, placed."""
        state = init(trained)
        return state if self.plan.mesh is None else bf.device_put(state, shardings(state, self.plan, "state"))

    def replicated(self, values: Any) -> Any:
        """Place values that each device has whole, such as adapters."""
        return values if self.plan.mesh is None else bf.device_put(values, self.plan.sharding())

    def whole(self, values: Any) -> Any:
        """Collect placed parameters in the form of one device, collectively."""
        if bf.process_count() > 1:
            values = bf.multihost.process_allgather(values)
        elif self.plan.has("stage"):
            values = tree.map(np.asarray, values)
        return unpacked(values, self.plan)
