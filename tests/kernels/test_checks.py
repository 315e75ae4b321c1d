"""``config.check``: errors for wrong kernels and memory plans."""

from dataclasses import replace

import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import errors
from blufunc.config import config
from blufunc.kernels import pipeline
from blufunc.kernels.backends.cuda.program import Draft
from blufunc.kernels.lower import region as dedupe_regions


def draft():
    f = bf.jit(lambda x: bnp.exp(bnp.sort(bnp.tanh(x), -1)) * 2)
    return Draft(f.trace(bf.ShapeDtypeStruct((64, 48), "float32")).jaxpr, (False,), "sm_90").schedule


@pytest.fixture
def wrong_kernels(monkeypatch):
    """Lowering forgets the outermost loop of the grid."""
    lower = dedupe_regions.lower

    def without_rows(*args):
        return [
            replace(launch, kernel=replace(launch.kernel, grid=launch.kernel.grid[1:]))
            for launch in lower(*args)
        ]

    monkeypatch.setattr(dedupe_regions, "lower", without_rows)


@pytest.fixture
def wrong_plans(monkeypatch):
    """The planner runs the steps backwards."""
    plan = pipeline.plan

    def backwards(*args, **kwargs):
        made = plan(*args, **kwargs)
        return replace(made, order=made.order[::-1])

    monkeypatch.setattr(pipeline, "plan", backwards)


def test_a_wrong_kernel_is_found(wrong_kernels):
    with pytest.raises(errors.JaxprTypeError, match="lowering built a wrong kernel"):
        draft()


def test_a_wrong_plan_is_found(wrong_plans):
    with pytest.raises(errors.ValueRangeError, match="the plan would corrupt memory"):
        draft()


def test_without_the_flag_nothing_is_checked(wrong_plans, monkeypatch):
    monkeypatch.setattr(config, "check", False)
    assert len(draft().steps) == 3
