"""NumPy programs: a jaxpr as a straight-line Python function over arrays.

Kernels, stages 6 to 8 of the reference executor. In: a jaxpr. Out: a ``Program``. Each equation calls its primitive's
``impl``, so the source reads like the jaxpr. Two decisions are made at compile time: a value is deleted after its last
use, and a ufunc overwrites an operand that is dead.
"""

from __future__ import annotations

import keyword
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blufunc.core.arrays import recording
from blufunc.core.arrays.errstate import ignoring_fp_errors, ignoring_fp_errors_in_callbacks
from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import DropVar, Eqn, Jaxpr, Literal, Var
from blufunc.core.primitives.rule_errors import impl_of
from blufunc.core.programs.simplify import inline_definitions, inline_pointwise
from blufunc.kernels.backends.numpy import out_of_memory
from blufunc.kernels.timings import StepTime, medians


class Program:
    """A compiled jaxpr: call it with a list of argument buffers.

    Attributes:
      text: Python source that runs.
    """

    guard = staticmethod(ignoring_fp_errors)

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool]):
        self.jaxpr = inline_pointwise(jaxpr)
        self.name = jaxpr.name or "program"
        self.text, namespace = _Writer(self.jaxpr, donated).write()
        exec(compile(self.text, f"<blufunc {jaxpr.name or 'program'}>", "exec"), namespace)
        self.function: Callable[[list], tuple] = namespace["program"]

    def __call__(self, buffers: list) -> tuple:
        try:
            if (to := recording.active) is not None:
                return self._recorded(buffers, to)
            return ignoring_fp_errors(self.function, buffers)
        except MemoryError as error:
            raise out_of_memory.of_program(error, self.jaxpr) from None

    def _recorded(self, buffers: list, to: recording.Recording) -> tuple:
        start = recording.clock()
        try:
            return self.guard(self.function, buffers)
        finally:
            to.ran(self, start, (start, recording.clock()))

    @property
    def step_names(self) -> list[str]:
        """The names of the steps in recordings, which see one."""
        return [f"{self.name} as NumPy calls"]

    def source(self) -> str:
        """Python source that runs."""
        return self.text

    def timings(self, buffers: Sequence[np.ndarray], repeats: int = 5) -> list[StepTime]:
        """Median time of each equation's definition over ``repeats`` runs."""
        runs = [ignoring_fp_errors_in_callbacks(_timed, self.jaxpr, buffers) for _ in range(repeats + 1)][1:]
        return medians([e.prim.name for e in self.jaxpr.eqns], runs)


def _timed(jaxpr: Jaxpr, buffers: Sequence[np.ndarray]) -> list[float]:
    """Seconds of each equation, run one by one."""
    env: dict[Any, np.ndarray] = dict(zip(jaxpr.invars, buffers, strict=True))
    last_use = _last_uses(jaxpr)
    seconds = []
    for eqn, dying in zip(jaxpr.eqns, last_use, strict=True):
        prim = eqn.prim
        ins = [np.asarray(a.array) if a.__class__ is Literal else env[a] for a in eqn.invars]
        function = prim.reference(interpret, **eqn.params) if prim.reference is not None else None
        start = time.perf_counter()
        outs = function(ins) if function is not None else prim.impl(*ins, **eqn.params)
        seconds.append(time.perf_counter() - start)
        env.update(
            zip(eqn.outvars, outs if function is not None or prim.multiple_results else [outs], strict=True)
        )
        for v in dying:
            env.pop(v, None)
    return seconds


class CallingProgram(Program):
    """A program that calls user functions."""

    guard = staticmethod(ignoring_fp_errors_in_callbacks)

    def __call__(self, buffers: list) -> tuple:
        try:
            if (to := recording.active) is not None:
                return self._recorded(buffers, to)
            return ignoring_fp_errors_in_callbacks(self.function, buffers)
        except MemoryError as error:
            raise out_of_memory.of_program(error, self.jaxpr) from None


def interpret(jaxpr: Jaxpr) -> Callable[[list], tuple]:
    """Body of a call or loop as a function of buffers, without error-state handling."""

    def function() -> Callable[[list], tuple]:
        of_buffers = inline_definitions(jaxpr, keep=lambda prim: not prim.impl_on_arrays)
        return Program(of_buffers, (False,) * len(jaxpr.invars)).function

    return jaxpr.memoised("numpy body", function)


class _Writer:
    """Writer of the function, from the first equation to the last."""

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool]):
        self.jaxpr = jaxpr
        self.names: dict[Var, str] = {}
        self.namespace: dict[str, Any] = {}
        self.used: dict[str, int] = {}  # number of names with each stem
        self.storage = _Storage(jaxpr, donated)

    def write(self) -> tuple[str, dict[str, Any]]:
        """Source, and the namespace it refers to."""
        lines = ["def program(buffers):"]
        params = [self.name(v) for v in self.jaxpr.invars]
        if params:
            lines.append(f"    {', '.join(params)}{',' if len(params) == 1 else ''} = buffers")
            lines.append("    buffers.clear()")
        last_use = _last_uses(self.jaxpr)
        for i, eqn in enumerate(self.jaxpr.eqns):
            dying = last_use[i]
            self.storage.dead.update(dying)
            lines.append(f"    {self.call(eqn, dying)}  # {source.summary(eqn.source)}")
            gone = [self.name(v) for v in dying]
            if any(isinstance(v, DropVar) for v in eqn.outvars):
                gone.append("_")
            if gone:
                lines.append(f"    del {', '.join(gone)}")
        outs = self.outputs()
        lines.append(f"    return ({', '.join(outs)}{',' if len(outs) == 1 else ''})")
        return "\n".join(lines) + "\n", self.namespace

    def name(self, var: Var) -> str:
        """Python name of a variable."""
        found = self.names.get(var)
        if found is None:
            found = self.names[var] = "_" if isinstance(var, DropVar) else f"v{len(self.names)}"
        return found

    def define(self, stem: str, value: Any) -> str:
        """Name in the namespace for ``value``."""
        stem = re.sub(r"\W", "_", stem)
        if (
            not stem.isidentifier()
            or keyword.iskeyword(stem)
            or re.fullmatch(r"v\d+|buffers|program|_+", stem)
        ):
            stem = f"p_{stem}"  # keywords (and, or, not), and names that users give to primitives
        name = stem
        while self.namespace.setdefault(name, value) is not value:
            self.used[stem] = self.used.get(stem, 1) + 1
            name = f"{stem}_{self.used[stem]}"
        return name

    def operand(self, atom: Any) -> str:
        """Expression for an operand: a variable or a constant."""
        if atom.__class__ is Literal:
            value = np.asarray(atom.array)  # rank 0: faster in ufuncs than a NumPy scalar
            kind, text = (
                ("key", "") if value.dtype.names else (value.dtype.name, re.sub(r"\W", "_", str(value)))
            )
            return self.define(f"c_{kind}_{text}", value)
        return self.name(atom)

    def call(self, eqn: Eqn, dying: list[Var]) -> str:
        """Statement that computes one equation."""
        prim = eqn.prim
        outs = ", ".join(self.name(v) for v in eqn.outvars)
        ins = [self.operand(a) for a in eqn.invars]
        if prim.reference is not None:
            function = self.define(prim.name, prim.reference(interpret, **eqn.params))
            assigned = f"{outs}{',' if len(eqn.outvars) == 1 else ''} = " if outs else ""
            return f"{assigned}{function}([{', '.join(ins)}])"
        ufunc = prim.ufunc_for(eqn.outvars[0].aval.dtype) if outs else None
        if ufunc is not None:
            over = self.storage.overwritable(eqn, dying)
            if over is not None:
                ins.append(f"out={self.name(over)}")  # by keyword: np.maximum takes no third operand
            return f"{outs} = {self.define(prim.name, ufunc)}({', '.join(ins)})"
        function = impl_of(prim, eqn.params, [v.aval for v in eqn.outvars])
        if prim.kind == "collective":  # a collective that times out names the user's line
            function = source.at(eqn.source, function)
        assigned = (
            f"{outs}{',' if prim.multiple_results and len(eqn.outvars) == 1 else ''} = " if outs else ""
        )
        return f"{assigned}{self.define(prim.name + ('_' if eqn.params else ''), function)}({', '.join(ins)})"

    def outputs(self) -> list[str]:
        """Results, none of which may share storage with an array visible to the user."""
        texts, returned = [], set()
        for atom in self.jaxpr.outvars:
            text = self.operand(atom)
            shared = (
                atom.__class__ is Literal or self.storage.shared(atom) or self.storage.root(atom) in returned
            )
            if shared or not atom.aval.ndim:  # ufuncs return NumPy scalars instead of arrays of rank 0
                text = f"{self.define('copy_of', np.array)}({text})"
            else:
                returned.add(self.storage.root(atom))
            texts.append(text)
        return texts


class _Storage:
    """Alias analysis: variables that share storage, and operands to overwrite.

    Variables fall into groups that may share storage: an ``impl`` without ``prim.fresh`` may return a view of
    any operand.
    """

    def __init__(self, jaxpr: Jaxpr, donated: Sequence[bool]):
        self.parent: dict[Var, Var] = {}
        self.members: dict[Var, set[Var]] = {}
        self.fresh: set[Var] = {v for v, d in zip(jaxpr.invars, donated, strict=True) if d}
        self.fixed: set[Var] = {v for v in jaxpr.invars if v not in self.fresh}
        self.dead: set[Var] = set()
        for eqn in jaxpr.eqns:
            for out in eqn.outvars:
                if eqn.prim.fresh:
                    self.fresh.add(out)
                else:
                    for a in eqn.invars:
                        if a.__class__ is not Literal:
                            self._join(out, a)

    def root(self, v: Any) -> Var:
        """Representative of the group of ``v``."""
        while v in self.parent:
            up = self.parent[v]
            self.parent[v] = self.parent.get(up, up)  # path halving
            v = up
        return v

    def _group(self, v: Var) -> set[Var]:
        return self.members.setdefault(self.root(v), {v})

    def _join(self, a: Any, b: Any) -> None:
        ra, rb = self.root(a), self.root(b)
        if ra is rb:
            return
        if len(self._group(ra)) > len(self._group(rb)):
            ra, rb = rb, ra
        self._group(rb).update(self.members.pop(ra))
        self.parent[ra] = rb

    def shared(self, v: Any) -> bool:
        """True if ``v`` may share storage with a parameter that was not donated."""
        return not self._group(v).isdisjoint(self.fixed)

    def overwritable(self, eqn: Eqn, dying: list[Var]) -> Var | None:
        """Operand to overwrite: dead after the equation, of the same type, and not shared."""
        (out,) = eqn.outvars
        for v in dying:
            if v not in self.fresh or not v.aval.ndim or not v.aval.same_type(out.aval):
                continue
            if v in eqn.invars and self.dead.issuperset(self._group(v)):
                return v
        return None


def _last_uses(jaxpr: Jaxpr) -> list[list[Var]]:
    """For each equation, the variables whose last use it is."""
    seen = {v for v in jaxpr.outvars if v.__class__ is not Literal}
    uses: list[list[Var]] = []
    for eqn in reversed(jaxpr.eqns):
        dying: list[Var] = []
        for a in (*eqn.invars, *eqn.outvars):
            if isinstance(a, Var) and not isinstance(a, DropVar) and a not in seen:
                seen.add(a)
                dying.append(a)
        uses.append(dying)
    return uses[::-1]
