"""Losses and schedules where optax has them."""

import pytest

from blufunc import nn, optim


def test_losses_are_those_of_nn():
    assert len(optim.losses.__all__) >= 25
    for name in optim.losses.__all__:
        assert getattr(optim.losses, name) is getattr(nn, name)
        assert getattr(optim, name, getattr(nn, name)) is getattr(nn, name)


@pytest.mark.peer
def test_every_loss_of_nn_is_where_optax_has_it():
    optax = pytest.importorskip("optax")
    public = lambda module: {n for n in dir(module) if n[0] != "_"}
    there = public(optax.losses)
    assert {n for n in there if hasattr(nn, n)} == set(optim.losses.__all__)
    for name in there:
        if hasattr(nn, name) and hasattr(optax, name):
            assert getattr(optim, name) is getattr(nn, name)


@pytest.mark.peer
def test_schedules_have_the_names_of_optax():
    optax = pytest.importorskip("optax")
    theirs = {n for n in dir(optax) if n.endswith(("_schedule", "_schedules", "_decay"))} - {
        "scale_by_schedule"
    }
    assert theirs <= set(optim.__all__)
    assert all(getattr(optim.schedules, n) is getattr(optim, n) for n in theirs)
