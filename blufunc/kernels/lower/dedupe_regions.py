"""Regions that are alike are lowered once: the layers of a model, the updates of parameters of one shape.

Kernels, stage 6, around ``region.py``. In: the regions of a fusion, one after another. Out: their launches, where
regions of one spelling share kernels. A **spelling** says all that lowering sees of a region, with numbers in the
place of variables: equations and their lines, types, roles, and the names of the user's arguments.
"""

from __future__ import annotations

from typing import Any

from blufunc.config import config
from blufunc.core.ir.jaxpr import Eqn, Literal, Var
from blufunc.core.ir.typed_key import exact
from blufunc.kernels.fusion.fuse import Fusion, Region
from blufunc.kernels.loopir.launch import Launch, Scratch
from blufunc.kernels.loopir.verify import check_kernel
from blufunc.kernels.lower.names import stem_of
from blufunc.kernels.lower.region import lower
from blufunc.kernels.target import Target


class Lowered:
    """Lowers the regions of one fusion for one target."""

    def __init__(self, fusion: Fusion, target: Target):
        self.fusion, self.target = fusion, target
        self.paths = dict(zip(fusion.jaxpr.invars, fusion.jaxpr.arg_names, strict=False))
        self.heads: dict[Eqn, int] = {}
        self.numbers: dict[Any, int] = {}  # of what operations are, all but their operands
        self.known: dict[tuple, tuple[list[Launch], dict[Var, int]]] = {}

    def launches(self, region: Region) -> list[Launch]:
        """The kernels of a region."""
        key, variables = self.spelled(region)
        found = self.known.get(key)
        if found is None:
            made = lower(region, self.fusion, self.target)
            if config.check:
                for launch in made:
                    check_kernel(launch.kernel)
            self.known[key] = made, {v: n for n, v in enumerate(variables)}
            return made
        launches, numbers = found
        scratch = {
            x: Scratch(x.dtype, x.size)
            for launch in launches
            for x in launch.operands.values()
            if isinstance(x, Scratch)
        }
        return [
            Launch(
                launch.kernel,
                {
                    b: scratch[x] if isinstance(x, Scratch) else variables[numbers[x]]
                    for b, x in launch.operands.items()
                },
                launch.starts,
            )
            for launch in launches
        ]

    def spelled(self, region: Region) -> tuple[tuple, list[Var]]:
        """The spelling of a region, and the variables that its numbers stand for."""
        numbers: dict[Var, int] = {}
        parts: list[Any] = []
        virtual = self.fusion.virtual

        def operand(atom: Any) -> Any:
            number = numbers.get(atom)
            if number is not None:
                return number
            if atom.__class__ is Literal:
                return atom.aval, atom.value.tobytes()
            eqn = virtual.get(atom)
            if eqn is None:
                parts.append((atom.aval, stem_of(self.paths.get(atom))))
            else:
                parts.append((self.head(eqn), *map(operand, eqn.invars)))
            numbers[atom] = len(numbers)
            return numbers[atom]

        for eqn in region.eqns:
            out = eqn.outvars[0]
            parts.append((self.head(eqn), region.roles[out], *map(operand, eqn.invars)))
            numbers[out] = len(numbers)
        ends = tuple(map(operand, region.outputs)), tuple(map(operand, region.numbers))
        roles = tuple([numbers[v] for v in region.roles])
        return (region.frame, roles, ends, *parts), list(numbers)

    def head(self, eqn: Eqn) -> int:
        """A number for an operation: its primitive, parameters, result and line."""
        number = self.heads.get(eqn)
        if number is None:
            params = tuple([(k, exact(v)) for k, v in eqn.params.items()])
            line = eqn.source and (id(eqn.source[0]), *eqn.source[1:])  # code is compared by its bytes alone
            key = eqn.prim, params, eqn.outvars[0].aval, line
            number = self.heads[eqn] = self.numbers.setdefault(key, len(self.numbers))
        return number
