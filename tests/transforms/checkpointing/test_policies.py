"""Policies of ``checkpoint``, names and memories, and ``saved_residuals``."""

import contextlib
import io

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import ad_checkpoint, errors, lax
from blufunc import checkpoint_policies as policies
from blufunc.ad_checkpoint import checkpoint, checkpoint_name, print_saved_residuals, saved_residuals
from blufunc.core.ops.offload import offload_p
from blufunc.transforms.checkpointing.policies import Offload, name_p
from tests.transforms.common import arr, close, draw


def network(w, x):
    h = checkpoint_name(bnp.sin(w @ x), "h")
    g = checkpoint_name(bnp.exp(w @ h), "g")
    return (g * h * bnp.einsum("ij,ij->i", w, w)).sum()


TO_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}
H_STAYS = {"names_which_can_be_saved": ["h"], "names_which_can_be_offloaded": ["g"]}
# The policy, what it is printed as, and what it keeps: an operation or a name, + for what is moved.
POLICIES = [
    (policies.nothing_saveable, "nothing_saveable", ""),
    (policies.dots_saveable, "dots_saveable", "dot_general dot_general dot_general"),
    (policies.checkpoint_dots, "dots_saveable", "dot_general dot_general dot_general"),
    (
        policies.dots_with_no_batch_dims_saveable,
        "dots_with_no_batch_dims_saveable",
        "dot_general dot_general",
    ),
    (
        policies.checkpoint_dots_with_no_batch_dims,
        "dots_with_no_batch_dims_saveable",
        "dot_general dot_general",
    ),
    (
        policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        "offload_dot_with_no_batch_dims('device', 'pinned_host')",
        "dot_general+ dot_general+",
    ),
    (policies.save_only_these_names("h", "other"), "save_only_these_names('h', 'other')", "'h'"),
    (policies.save_only_these_names(), "save_only_these_names()", ""),
    (policies.save_any_names_but_these("h"), "save_any_names_but_these('h')", "'g'"),
    (
        policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("g")),
        "save_from_both_policies(dots_saveable, save_only_these_names('g'))",
        "dot_general 'g' dot_general dot_general",
    ),
    (
        policies.save_and_offload_only_these_names(**H_STAYS, **TO_HOST),
        "save_and_offload_only_these_names(['h'], ['g'], 'device', 'pinned_host')",
        "'h' 'g'+",
    ),
]
POLICY = pytest.mark.parametrize("policy, text, kept", POLICIES, ids=[text for _, text, _ in POLICIES])


def words(why):
    """The output of ``saved_residuals``, abbreviated as in the table."""
    origin, _, moved = why.partition(", moved from device to pinned_host")
    return origin.split()[{"named": 1, "output": 2}[origin.split()[0]]] + "+" * why.endswith("pinned_host")


@POLICY
def test_what_is_kept(policy, text, kept):
    f = checkpoint(network, policy=policy)
    arguments, stored = [], []
    for aval, why in saved_residuals(f, draw(3, 3), draw(3)):
        (arguments if why.startswith("from the argument") else stored).append(why)
        assert aval.dtype == np.float64
    assert [why.split()[-1] for why in arguments] == ["w", "x"]
    assert sorted(map(words, stored)) == sorted(kept.split())
    assert all("test_policies.py" in why and "(network)" in why for why in stored)


@POLICY
@pytest.mark.parametrize("order", [1, 2])
def test_derivatives(policy, text, kept, order):
    f = checkpoint(network, policy=policy)
    derive = lambda f: bf.grad(f, (0, 1))
    if order == 2:
        derive = lambda f: bf.grad(lambda w, x: sum((g * g).sum() for g in bf.grad(f, (0, 1))(w, x)), (0, 1))
    w, x = draw(3, 3), draw(3)
    close(derive(f)(w, x), derive(network)(w, x), 1e-11)
    close(bf.jit(derive(f))(w, x), derive(network)(w, x), 1e-11)
    mapped = bf.vmap(derive(f), (None, 0))(w, draw(2, 3))
    close(mapped, bf.vmap(derive(network), (None, 0))(w, draw(2, 3)), 1e-11)


@POLICY
def test_policies_print_and_hash_by_what_they_keep(policy, text, kept):
    (call,) = bf.make_jaxpr(checkpoint(network, policy=policy))(draw(3, 3), draw(3)).eqns
    assert call.params["policy"] is policy
    assert f"policy={text}\n" in str(bf.make_jaxpr(checkpoint(network, policy=policy))(draw(3, 3), draw(3)))
    assert isinstance(hash(policy), int)


def test_equal_policies_share_a_trace():
    make = [
        lambda: policies.save_only_these_names("a", "b"),
        lambda: policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        lambda: policies.save_and_offload_only_these_names(**H_STAYS, **TO_HOST),
        lambda: policies.save_from_both_policies(
            policies.dots_saveable, policies.save_any_names_but_these("a")
        ),
    ]
    for one in make:
        assert one() == one() and hash(one()) == hash(one())
    distinct = {one() for one in make} | {
        policies.save_only_these_names("a"),
        policies.save_any_names_but_these("a", "b"),
    }
    assert len(distinct) == len(make) + 2
    assert policies.save_only_these_names("a", "b") == policies.save_only_these_names("b", "a")
    with pytest.raises(AttributeError):
        make[0]().names = frozenset()


def test_of_two_policies_the_first_says_where():
    keep, move = (
        policies.save_only_these_names("h"),
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["h", "g"], **TO_HOST
        ),
    )
    ask = lambda p, name: p(name_p, arr(1.0).aval, name=name)
    assert ask(policies.save_from_both_policies(keep, move), "h") is True
    assert ask(policies.save_from_both_policies(move, keep), "h") == Offload("device", "pinned_host")
    assert ask(policies.save_from_both_policies(keep, move), "g") == Offload("device", "pinned_host")
    assert ask(policies.save_from_both_policies(keep, move), "other") is False


def test_policies_are_asked_inside_of_jit():
    f = checkpoint(bf.jit(lambda w, x: bf.jit(network)(w, x)), policy=policies.save_only_these_names("h"))
    whys = [why for _, why in saved_residuals(f, draw(3, 3), draw(3))]
    assert whys[2].startswith("named 'h' from") and len(whys) == 3


def test_policies_are_not_asked_inside_of_loops():
    loop = lambda w, x: lax.scan(lambda c, a: (checkpoint_name(bnp.sin(w @ c), "h") * a, None), x, x)[0].sum()
    f = checkpoint(loop, policy=policies.save_only_these_names("h"))
    assert [why for _, why in saved_residuals(f, draw(3, 3), draw(3))] == [
        "from the argument w",
        "from the argument x",
    ]


def test_policies_of_a_body_are_asked_in_every_step():
    body = lambda w: lambda c, a: (checkpoint_name(bnp.sin(w @ c), "h") * a, None)
    loop = lambda wrap: lambda w, x: lax.scan(wrap(body(w)), x, x)[0].sum()
    saved = loop(lambda f: checkpoint(f, policy=policies.save_only_these_names("h")))
    scan = next(
        e for e in bf.make_jaxpr(bf.grad(saved, (0, 1)))(draw(3, 3), draw(3)).eqns if e.prim.name == "scan"
    )
    assert len(scan.outvars) == 1 + 2, "the carry; of all steps, the carries and the named values"
    want = bf.grad(loop(lambda f: f), (0, 1))(draw(3, 3), draw(3))
    close(bf.grad(saved, (0, 1))(draw(3, 3), draw(3)), want)


def test_offloaded_values_are_moved_there_and_back():
    policy = policies.save_and_offload_only_these_names(**H_STAYS, **TO_HOST)
    lowered = bf.jit(bf.grad(checkpoint(network, policy=policy))).lower(draw(3, 3), draw(3)).jaxpr
    (away,) = [e for e in lowered.eqns if e.prim is offload_p]
    (call,) = [e for e in lowered.eqns if e.prim.name == "checkpoint"]
    assert away.params == {"src": "device", "dst": "pinned_host"}
    assert away.outvars[0] in call.invars and away.invars[0] not in call.invars
    body = call.params["jaxpr"]
    (back,) = [e for e in body.eqns if e.prim is offload_p]
    assert back.params == {"src": "pinned_host", "dst": "device"} and back.invars[0] in body.invars
    assert "offload[dst=pinned_host src=device]" in str(lowered)


# -- checkpoint_name ---------------------------------------------------------------------------------


def test_a_name_changes_nothing_else():
    tree = {"a": draw(2), "b": (arr(3, np.int32), None, bf.random.key(0))}
    named = checkpoint_name(tree, "n")
    assert bf.tree.structure(named) == bf.tree.structure(tree)
    close(named["a"], tree["a"])
    jaxpr = bf.make_jaxpr(lambda t: checkpoint_name(t, "n"))(tree)
    assert [(e.prim, e.params) for e in jaxpr.eqns] == [(name_p, {"name": "n"})] * 3
    f = lambda x: (checkpoint_name(bnp.sin(x), "n") ** 2).sum()
    close(bf.grad(bf.grad(f))(arr(0.5)), bf.grad(bf.grad(lambda x: (bnp.sin(x) ** 2).sum()))(arr(0.5)))
    text = str(bf.make_jaxpr(lambda x: bf.jvp(f, (x,), (x,)))(arr(0.5)))
    assert text.count("name[name=n]") == 1, "tangents have no names"


def test_the_face_is_that_of_jax():
    assert ad_checkpoint.remat is checkpoint is bf.checkpoint is bf.remat
    assert ad_checkpoint.checkpoint_policies is bf.checkpoint_policies
    assert bf.checkpoint_name is checkpoint_name
    assert all(callable(getattr(policies, name)) for name in policies.__all__)


# -- saved_residuals ---------------------------------------------------------------------------------


def test_saved_residuals_without_checkpoint():
    table = draw(3, seed=7)
    f = lambda p, x, n: (bnp.sin(p["w"] @ x) * table * n.astype("float64")).sum()
    found = [(str(a), why) for a, why in saved_residuals(f, {"w": draw(3, 3)}, draw(3), arr(2, np.int32))]
    assert ("f64[3]", "from the argument x") in found and ("f64[3,3]", "from the argument p['w']") in found
    assert any(why.startswith("output of cos from test_policies.py:") for _, why in found)
    assert ("f64[3]", "from a constant") in found
    assert saved_residuals(lambda x: x + 1.0, arr(1.0)) == []
    assert saved_residuals(lambda x: x * 3.0, bf.ShapeDtypeStruct((2,), "float32")) == []


def test_print_saved_residuals():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(checkpoint(lambda x: bnp.sin(bnp.sin(x)).sum()), draw(2))
    assert out.getvalue() == "f64[2] from the argument x\n"


@pytest.mark.peer
@pytest.mark.parametrize("name, names", [
    ("nothing_saveable", None), ("everything_saveable", None), ("dots_saveable", None),
    ("dots_with_no_batch_dims_saveable", None), ("save_only_these_names", ["h"]),
    ("save_only_these_names", ["h", "g"]), ("save_any_names_but_these", ["h"]),
    ("save_anything_except_these_names", ["h"]),
])  # fmt: skip
def test_residuals_as_jax(name, names):
    import jax
    import jax.numpy as jnp
    from jax._src.ad_checkpoint import saved_residuals as saved_by_jax
    from jax.ad_checkpoint import checkpoint_name as named_by_jax

    def f(w, x):
        h = named_by_jax(jnp.sin(w @ x), "h")
        g = named_by_jax(jnp.exp(w @ h), "g")
        return (g * h * jnp.einsum("ij,ij->i", w, w)).sum()

    made = [
        getattr(p, name)(*names) if names else getattr(p, name) for p in (policies, jax.checkpoint_policies)
    ]
    w, x = np.ones((3, 3), np.float32), np.ones(3, np.float32)
    mine = saved_residuals(checkpoint(network, policy=made[0]), w, x)
    theirs = saved_by_jax(jax.checkpoint(f, policy=made[1]), w, x)
    assert sorted(a.shape for a, _ in mine) == sorted(a.shape for a, _ in theirs)


# -- errors ------------------------------------------------------------------------------------------


class Unhashable:
    __hash__ = None

    def __call__(self, prim, *avals, **params):
        return True


ONLY = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": []}
WRONG = {
    "a name that is none": (
        lambda: checkpoint_name(1.0, 3),
        errors.ArgumentError,
        "takes a string for the name",
    ),
    "a value that is none": (lambda: checkpoint_name({"a": "text"}, "n"), errors.ArgumentError, "leaf 0"),
    "names that are none": (lambda: policies.save_only_these_names(1), errors.ArgumentError, "takes names"),
    "a string of names": (
        lambda: policies.save_and_offload_only_these_names(
            **{**ONLY, "names_which_can_be_saved": "h"}, **TO_HOST
        ),
        errors.ArgumentError,
        "takes names, not 'h'",
    ),
    "a name in both": (
        lambda: policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["h"], names_which_can_be_offloaded=["h"], **TO_HOST
        ),
        errors.ValueRangeError,
        "both lists hold 'h'",
    ),
    "a memory that is none": (
        lambda: policies.offload_dot_with_no_batch_dims("device", None),
        errors.ArgumentError,
        "names of two memories",
    ),
    "policies that are none": (
        lambda: policies.save_from_both_policies(3, policies.dots_saveable),
        errors.ArgumentError,
        "takes a function",
    ),
    "a policy that is none": (
        lambda: checkpoint(bnp.sin, policy="dots"),
        errors.ArgumentError,
        "the policy is 'dots'",
    ),
    "a policy without a hash": (
        lambda: checkpoint(bnp.sin, policy=Unhashable()),
        errors.ArgumentError,
        "which is not a hashable function",
    ),
    "a policy that does not know": (
        lambda: bf.grad(checkpoint(bnp.sin, policy=lambda *a, **k: "yes"))(1.0),
        errors.ArgumentError,
        "returned 'yes' for sin",
    ),
    "residuals of nothing": (lambda: saved_residuals(3), errors.ArgumentError, "takes a function"),
    "residuals at nothing": (
        lambda: saved_residuals(bnp.sin, "a"),
        errors.ArgumentError,
        "the argument x is a str",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text) as info:
        call()
    assert "test_policies.py" in info.value.where and info.value.fix
