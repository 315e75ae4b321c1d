"""Cross-rank consistency check of a local program before its first run.

Parallel, at the end of stage 3. In: the local jaxprs of all ranks. Out: nothing, or an error: ranks with different
programs would deadlock or mix up data. The error names the first parameter or collective that differs, and the user's
lines on both ranks. Line numbers themselves may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from blufunc.core.ir import source
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, subjaxprs
from blufunc.parallel.runtime import engine


class Step(NamedTuple):
    """A parameter, a collective, or the begin or end of a body that holds collectives."""

    text: str
    line: str


def collectives(jaxpr: Jaxpr) -> list[Step]:
    """The collectives of a local jaxpr in equation order, nested ones included."""
    return list(_steps(jaxpr))


def parameters(jaxpr: Jaxpr) -> list[Step]:
    """The parameter types of a local jaxpr, which determine message sizes."""
    names = jaxpr.arg_names or ("",) * len(jaxpr.invars)
    return [
        Step(f"the parameter {name or i}: {v.aval}", "")
        for i, (name, v) in enumerate(zip(names, jaxpr.invars, strict=True))
    ]


def digest(jaxpr: Jaxpr) -> str:
    """A hash without lines: ranks with equal digests cannot deadlock."""
    return _hash([*parameters(jaxpr), *collectives(jaxpr)])


def check_agreement(jaxpr: Jaxpr, world: engine.Peers, members: Sequence[int]) -> None:
    """Compare the programs of all ranks of ``members``, which call it.

    Raises:
      CollectiveError: programs differ, which is raised on all ranks; or a rank does not arrive.
    """
    n_parameters = parameters(jaxpr)
    steps = [*n_parameters, *collectives(jaxpr)]
    mine = _hash(steps)
    hashes = [h.decode() for h in world.gather("a program", mine.encode(), members)]
    if len(set(hashes)) == 1:
        return
    lists = world.gather("the steps of a program", json.dumps(steps).encode(), members)
    here = members.index(world.rank)
    # Compare with the first rank that differs from rank 0, so that ranks with the same program report the same pair.
    other = next(i for i, h in enumerate(hashes) if h != hashes[0]) if hashes[0] == mine else 0
    theirs = [Step(*s) for s in json.loads(lists[other])]
    _raise_difference(jaxpr.name, len(n_parameters), members[here], steps, members[other], theirs)


def _raise_difference(
    name: str, n_parameters: int, rank: int, mine: Sequence[Step], other: int, theirs: Sequence[Step]
) -> None:
    """Raise the error; ``n_parameters`` steps precede the collectives."""
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a.text != b.text),
        min(len(mine), len(theirs)),
    )
    a, b = (steps[at] if at < len(steps) else Step("no further collective", "") for steps in (mine, theirs))
    what = f"parameter {at + 1}" if at < n_parameters else f"collective {at + 1 - n_parameters}"
    raise engine.disagreement(
        f"ranks {rank} and {other} run different programs{f' ({name})' * bool(name)}: their {what} is not the same.",
        [(r, s.text + (f", at {s.line}" if s.line else "")) for r, s in ((rank, a), (other, b))],
    )


def _steps(jaxpr: Jaxpr) -> Iterator[Step]:
    for eqn in jaxpr.eqns:
        line = source.summary(eqn.source)
        if eqn.prim.kind == "collective":
            yield Step(_described(eqn), line)
        for i, inner in enumerate(subjaxprs(eqn.params)):
            steps = list(_steps(inner))
            if steps:
                times = f" {eqn.params['length']} times" if "length" in eqn.params else ""
                yield Step(f"{eqn.prim.name}, body {i}{times}: begin", line)
                yield from steps
                yield Step(f"{eqn.prim.name}, body {i}: end", line)


def _described(eqn: Eqn) -> str:
    nbytes = sum(v.aval.nbytes for v in eqn.invars)
    operands = ", ".join(str(v.aval) for v in eqn.invars)
    options = "".join(
        f", {k}={v}" for k, v in sorted(eqn.params.items()) if k not in ("axes", "sizes", "lines")
    )
    axes = ", ".join(map(str, eqn.params.get("axes", ())))
    return f"{eqn.prim.name} over {axes} of {operands} ({nbytes:,} bytes){options}"


def _hash(steps: Sequence[Any]) -> str:
    return hashlib.sha256("\n".join(s.text for s in steps).encode()).hexdigest()
