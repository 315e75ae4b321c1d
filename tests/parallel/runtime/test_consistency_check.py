"""The order of a program's collectives, and the user's lines of those that run."""

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.config import config
from blufunc.core.ir import source
from blufunc.parallel.collectives.primitives import psum_invariant_p
from blufunc.parallel.runtime import consistency_check
from blufunc.parallel.runtime import engine as engines


def psum(x, axis="x"):
    return psum_invariant_p.bind(x, axes=(axis,), sizes=(2,), src="V", dst="I")


def steps(f, *args):
    return [s.text for s in consistency_check.collectives(bf.make_jaxpr(f)(*args))]


def test_steps_say_operation_axes_types_and_bytes():
    (step,) = consistency_check.collectives(bf.make_jaxpr(lambda x: psum(x * 2) + 1)(bnp.ones((3, 4))))
    assert step.text == "psum_invariant over x of f32[3,4] (48 bytes), dst=I, src=V"
    assert step.line.startswith("test_consistency_check.py:")


def test_collectives_of_loops_stand_between_begin_and_end():
    def f(x):
        def body(c, _):
            return psum(c), None

        return psum(bf.lax.scan(body, x, None, length=5)[0], "y")

    inner = "psum_invariant over x of f32[2] (8 bytes), dst=I, src=V"
    assert steps(f, bnp.ones(2)) == [
        "scan, body 0 5 times: begin",
        inner,
        "scan, body 0: end",
        inner.replace("over x", "over y"),
    ]


def test_digests_differ_by_what_is_exchanged_and_not_by_what_is_computed():
    def of(f, n=3):
        return consistency_check.digest(bf.make_jaxpr(f)(bnp.ones(n)))

    assert of(lambda x: psum(x)) == of(lambda x: psum(bnp.sin(x)) * 2)
    others = [
        of(lambda x: psum(x), 4),
        of(lambda x: psum(x, "y")),
        of(lambda x: psum(psum(x))),
        of(lambda x: x),
    ]
    assert len({of(lambda x: psum(x)), *others}) == 5


class World:
    """A rank of two, whose peer has given what ``peer`` says."""

    rank = 0

    def __init__(self, peer):
        self.peer = [*consistency_check.parameters(peer), *consistency_check.collectives(peer)]

    def gather(self, name, value, members):
        theirs = (
            consistency_check._hash(self.peer).encode()
            if name == "a program"
            else consistency_check.json.dumps(self.peer).encode()
        )
        return [value, theirs]


def test_the_first_difference_is_named_with_both_lines():
    mine = bf.make_jaxpr(lambda x: psum(psum(x), "y"))(bnp.ones(3))
    theirs = bf.make_jaxpr(lambda x: psum(psum(x), "z"))(bnp.ones(3))
    consistency_check.check_agreement(mine, World(mine), [0, 1])
    with pytest.raises(errors.CollectiveError) as e:
        consistency_check.check_agreement(mine, World(theirs), [0, 1])
    text = str(e.value)
    assert "ranks 0 and 1 run different programs (<lambda>): their collective 2 is not the same." in text
    assert "rank 0: psum_invariant over y of f32[3] (12 bytes)" in text
    assert "rank 1: psum_invariant over z of f32[3] (12 bytes)" in text
    assert text.count(", at test_consistency_check.py:") == 2


def test_shards_of_other_shapes_are_named():
    mine, theirs = (bf.make_jaxpr(lambda tokens: psum(tokens.sum()))(bnp.ones((n, 2))) for n in (3, 4))
    assert [s.text for s in consistency_check.collectives(mine)] == [
        s.text for s in consistency_check.collectives(theirs)
    ]
    with pytest.raises(errors.CollectiveError, match="their parameter 1 is not the same") as e:
        consistency_check.check_agreement(mine, World(theirs), [0, 1])
    assert "rank 0: the parameter tokens: f32[3,2]" in str(e.value)
    assert "rank 1: the parameter tokens: f32[4,2]" in str(e.value)


@pytest.mark.parametrize("compiler", ["never", "always"])
def test_programs_tell_the_engine_the_users_line(compiler, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", compiler)
    lines = []

    def exchange(kind, x, axes, **options):
        lines.append(source.line_of(source.replay.line))
        return np.array(x)

    @bf.jit
    def f(x):
        x = psum(bnp.sin(x) * 2)
        return psum(bnp.cos(x) + 1)

    with engines.use(types.SimpleNamespace(collective=exchange)):
        f(bnp.ones(1000)).block_until_ready()
    # both in psum above, whose line is the innermost of the user's
    assert len(lines) == 2 and set(lines) == {psum.__code__.co_firstlineno + 1}


ORDERED = """
from blufunc.parallel.runtime import consistency_check as digest
from tests.parallel.partition.test_partition_gpt import AbstractMesh, P, TENSOR, partitioned
mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "model"))
specs = TENSOR | {"up": P("fsdp", "model"), "down": P("model", "fsdp"), "tokens": P("model", "fsdp")}
print(digest.digest(partitioned(mesh, specs, P(("data", "fsdp")))))
"""


@pytest.mark.slow
def test_processes_with_other_hashes_of_names_make_the_same_program():
    root = Path(__file__).parents[3]
    digests = {
        subprocess.run(
            [sys.executable, "-c", ORDERED],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and len(digests.pop()) == 65
