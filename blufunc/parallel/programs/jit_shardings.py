"""``jit`` with the shardings of arguments and results.

Parallel, stages 1 and 8, above ``transforms/staging/jit.py``, which makes a ``ShardedJit`` if shardings are given. In:
shardings. Out: constraints at both ends of the traced function, and arguments that are resharded before a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from blufunc import errors
from blufunc.core.arrays.array import ConcreteArray
from blufunc.core.arrays.backend import default_device, host_device
from blufunc.core.ir import source
from blufunc.core.ir.avals import DEVICE
from blufunc.core.ir.trace import EVAL, state
from blufunc.core.ops.offload import in_memory
from blufunc.core.pytree import tree
from blufunc.parallel.mesh.constrain import constrain
from blufunc.parallel.mesh.mesh import current_mesh
from blufunc.parallel.mesh.sharding import NamedSharding, SingleDeviceSharding
from blufunc.parallel.mesh.spec_trees import Shardings, check_ranks, is_spec, shardings_of
from blufunc.parallel.partition.resharding import layout_of
from blufunc.parallel.programs.placement import device_put
from blufunc.parallel.programs.reshard import reshard
from blufunc.transforms.arguments import FlatFunction, abstract, labels_of
from blufunc.transforms.staging.jit import Jitted


class ShardedJit(Jitted):
    """The result of ``jit`` with ``in_shardings`` or ``out_shardings``."""

    def __init__(self, fun: Callable, *options: Any, in_shardings: Any, out_shardings: Any):
        super().__init__(fun, *options)
        self.in_shardings, self.out_shardings = in_shardings, out_shardings
        self._plain = False  # the fast path does not place arguments
        self._given: dict[Any, Shardings] = {}

    def _of_arguments(self, call: Any) -> Shardings:
        """The sharding of each leaf of the arguments of a call."""
        key = call.in_tree, current_mesh()
        found = self._given.get(key)
        if found is None:
            found = self._given[key] = self._matched(call)
        return found

    def _matched(self, call: Any) -> Shardings:
        in_shardings = self.in_shardings
        if in_shardings is None:
            return [None] * len(call.leaves)
        if call.kwargs:
            raise errors.ArgumentError(
                f"{self.name} was called with {', '.join(call.kwargs)}=.",
                where=source.here(),
                why="in_shardings are for positional arguments.",
                fix="pass these by position, or make them static",
            )
        n = len(call.args)
        if isinstance(in_shardings, (tuple, list)) and not is_spec(
            in_shardings
        ):  # without the static arguments
            rest = iter(in_shardings)
            dynamic = n - sum(i in self.static_nums for i in range(n))
            if len(in_shardings) != dynamic:
                raise errors.TreeError(
                    f"in_shardings of {self.name} has {len(in_shardings)} entries, and the call {dynamic} arguments.",
                    where=source.here(),
                    fix="one for each argument that is not static, or one sharding for all",
                )
            in_shardings = tuple(None if i in self.static_nums else next(rest) for i in range(n))
        found = shardings_of(in_shardings, call.args, None, f"in_shardings of {self.name}")
        avals = [abstract(x) for x in call.leaves]
        check_ranks(found, avals, tree.structure(call.args), f"{self.name}: argument ")
        return found

    def _flat(self, call: Any) -> FlatFunction:
        return _Annotated(call.rebuild(self.fun), call.in_tree, self._of_arguments(call), self)

    def _placed(self, call: Any, values: list) -> list:
        if state.trace is not EVAL:
            return values
        pairs = zip(values, self._of_arguments(call), strict=True)
        return [v if s is None else self._onto(v, s, call, i) for i, (v, s) in enumerate(pairs)]

    def _onto(self, x: ConcreteArray, sharding: NamedSharding, call: Any, i: int) -> ConcreteArray:
        """Move argument leaf ``i`` to its sharding, unless the user placed it elsewhere."""
        if x.device.joint:
            own, n = x.buffer.sharding, x.aval.ndim
            # equal specs, up to mesh axes of size 1
            if x.aval.memory != sharding.memory_kind:
                return device_put(x, sharding)  # type: ignore[return-value]
            if own == sharding.with_memory_kind(DEVICE) or (
                own.mesh == sharding.mesh
                and layout_of(own.spec, n, own.mesh) == layout_of(sharding.spec, n, own.mesh)
            ):
                return x
        elif x.device in (default_device(), host_device()):
            return device_put(x, sharding)  # type: ignore[return-value]
        placement = f"{x.buffer.sharding.spec} on {x.device}" if x.device.joint else str(x.device)
        raise errors.ShardingError(
            f"the argument {labels_of(self.fun, call.in_tree)[i]} of {self.name} is placed as {placement}, and "
            f"in_shardings says {sharding.spec} on the mesh ({sharding.mesh}).",
            where=source.here(),
            why="jit moves uncommitted arrays only.",
            fix="bf.reshard(x, sharding) before the call, or None in in_shardings",
        )

    def _layouts(self, call: Any) -> Sequence[Any]:
        return [x if s is None else s for x, s in zip(call.leaves, self._of_arguments(call), strict=True)]


class _Annotated(FlatFunction):
    """A function of flat leaves with the shardings of these and of its results."""

    def __init__(self, fun: Callable, in_tree: tree.TreeDef, shardings: Shardings, owner: ShardedJit):
        super().__init__(fun, in_tree)
        self.shardings, self.owner = shardings, owner

    def __call__(self, *leaves: Any) -> list[Any]:
        # both: reshard moves the argument, constrain lays out its cotangent
        ins = [
            # what is in the memory of the host stays there: arguments are moved before the call
            x if s is None or x.aval.memory != DEVICE else constrain(reshard(x, s), s)
            for x, s in zip(leaves, self.shardings, strict=True)
        ]
        return super().__call__(*ins)

    def flatten_out(self, out: Any) -> list[Any]:
        flat = super().flatten_out(out)
        name = self.owner.name
        shardings = shardings_of(self.owner.out_shardings, out, None, f"out_shardings of {name}", alone=True)
        check_ranks(shardings, [x.aval for x in flat], self.out_tree, f"{name}: result ")
        return [x if s is None else _placed(x, s) for x, s in zip(flat, shardings, strict=True)]


def _placed(x: Any, sharding: NamedSharding | SingleDeviceSharding) -> Any:
    """A traced value with a sharding; a single device is that of the program."""
    if isinstance(sharding, NamedSharding):
        if x.aval.memory == sharding.memory_kind != DEVICE:
            return constrain(
                x, sharding
            )  # another layout there is an error; back and forth would cost two copies
        x = in_memory(x, DEVICE)
        x = constrain(reshard(x, sharding), sharding)
    return in_memory(x, sharding.memory_kind)
