"""``scipy.spatial.transform`` against SciPy, and derivatives at the identity."""

import itertools

import numpy as np
import pytest
from scipy.spatial.transform import Rotation as TheirRotation
from scipy.spatial.transform import Slerp as TheirSlerp

import blufunc as bf
from blufunc import errors
from blufunc.core.arrays.array import from_numpy
from blufunc.scipy.spatial.transform import Rotation, Slerp
from blufunc.transforms.autodiff.jacobian import jacfwd, jacrev
from blufunc.transforms.batching.vmap import vmap
from blufunc.transforms.staging.jit import jit

RNG = np.random.default_rng(0)
QUATS = RNG.normal(size=(40, 4))
QUATS[:4] = [[0, 0, 0, 2], [1, 0, 0, 0], [0, 1, 1, 0], [1e-5, 0, 0, -1]]
V = RNG.normal(size=(40, 3))


def same(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=1e-9)


OURS, THEIRS = Rotation.from_quat(from_numpy(QUATS)), TheirRotation.from_quat(QUATS)


def turns(r):
    return np.asarray(r.as_matrix())


@pytest.mark.parametrize("form", ["matrix", "rotvec", "mrp"])
def test_forms(form):
    got = getattr(OURS, f"as_{form}")()
    want = getattr(THEIRS, f"as_{form}")()
    back = jit(getattr(Rotation, f"from_{form}"))(got)
    same(turns(back), THEIRS.as_matrix())
    half = np.isclose(THEIRS.magnitude(), np.pi)  # of a turn by pi, either axis is right
    same(np.asarray(got)[~half], want[~half])
    single = getattr(OURS[5], f"as_{form}")()
    same(single, want[5])


def test_quaternions():
    same(OURS.as_quat(canonical=True), THEIRS.as_quat(canonical=True))
    same(OURS.as_quat(scalar_first=True), THEIRS.as_quat(scalar_first=True))
    same(OURS.magnitude(), THEIRS.magnitude())
    same(OURS.as_rotvec(degrees=True)[4:], THEIRS.as_rotvec(degrees=True)[4:])
    want = TheirRotation.from_rotvec(V * 50, degrees=True)
    same(Rotation.from_rotvec(from_numpy(V * 50), degrees=True).as_matrix(), want.as_matrix())


SEQUENCES = ["".join(s) for s in itertools.product("xyz", repeat=3) if s[0] != s[1] and s[1] != s[2]]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seq", [*SEQUENCES, *map(str.upper, SEQUENCES)])
def test_euler_angles(seq):
    angles = RNG.uniform(-3, 3, (12, 3))
    same(
        Rotation.from_euler(seq, from_numpy(angles)).as_matrix(),
        TheirRotation.from_euler(seq, angles).as_matrix(),
    )
    got = Rotation.from_quat(from_numpy(QUATS[4:])).as_euler(seq, degrees=True)
    same(got, TheirRotation.from_quat(QUATS[4:]).as_euler(seq, degrees=True))
    # gimbal lock: the third angle is 0, and the rotation the same
    second = np.array([0, np.pi] if seq[0] == seq[2] else [np.pi / 2, -np.pi / 2])
    locked = Rotation.from_euler(seq, from_numpy(np.stack([[0.3, 0.4], second, [0.5, -0.2]], -1)))
    found = locked.as_euler(seq)
    same(np.asarray(found)[:, 2], 0)
    np.testing.assert_allclose(turns(Rotation.from_euler(seq, found)), turns(locked), atol=1e-6)


def test_few_axes():
    for seq, angles in (("x", 0.3), ("Z", np.ones(1)), ("xz", np.array([0.3, 0.4])), ("Y", np.ones((2, 1)))):
        want = TheirRotation.from_euler(seq, angles)
        got = Rotation.from_euler(seq, from_numpy(np.asarray(angles, float)))
        same(np.squeeze(got.as_matrix()), np.squeeze(want.as_matrix()))


def test_products_and_inverses():
    same(turns(OURS * OURS[7].inv()), (THEIRS * THEIRS[7].inv()).as_matrix())
    same(OURS.apply(from_numpy(V)), THEIRS.apply(V))
    same(OURS.apply(from_numpy(V), inverse=True), THEIRS.apply(V, inverse=True))
    same(OURS[5].apply(from_numpy(V)), THEIRS[5].apply(V))
    same(OURS.apply(from_numpy(V[0])), THEIRS.apply(V[0]))


def test_means_identities_and_samples():
    same(turns(OURS.mean()), THEIRS.mean().as_matrix())
    w = RNG.uniform(size=40)
    same(turns(OURS.mean(from_numpy(w))), THEIRS.mean(w).as_matrix())
    assert Rotation.identity(3, "float64").quat.tolist() == [[0, 0, 0, 1]] * 3
    assert Rotation.identity().single and len(OURS) == 40 and bool(OURS)
    sample = Rotation.random(bf.random.key(0), 2000)
    np.testing.assert_allclose(np.asarray(sample.as_matrix()).mean(0), 0, atol=0.06)
    assert Rotation.random(bf.random.key(0)).single
    assert len(Rotation.concatenate([OURS[0], OURS])) == 41


def test_slerp():
    times = np.array([0.0, 1, 3, 4])
    at = np.array([0, 0.3, 1, 2.9, 4])
    want = TheirSlerp(times, THEIRS[5:9])(at).as_matrix()
    f = Slerp.init(from_numpy(times), OURS[5:9])
    same(turns(jit(lambda f, t: f(t))(f, from_numpy(at))), want)
    same(turns(f(from_numpy(at[1]))), want[1])


def test_derivatives_at_the_identity():
    zero = from_numpy(np.zeros(3))
    there_and_back = lambda v: Rotation.from_rotvec(v).as_rotvec()
    for jac in (jacfwd, jacrev):
        same(jac(there_and_back)(zero), np.eye(3))
        matrices = jac(lambda v: Rotation.from_rotvec(v).as_matrix())(zero)
        same(np.asarray(matrices)[:, :, 2], [[0, -1, 0], [1, 0, 0], [0, 0, 0]])
        assert np.isfinite(np.asarray(jac(lambda v: Rotation.from_rotvec(v).magnitude())(zero))).all()
    moved = vmap(lambda q, v: Rotation(q).apply(v))(OURS.quat, from_numpy(V))
    same(moved, THEIRS.apply(V))


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rotation.from_quat(np.ones(3)),
        lambda: Rotation.from_matrix(np.ones((2, 3))),
        lambda: Rotation.from_euler("xyzz", np.ones(4)),
        lambda: Rotation.from_euler("xYz", np.ones(3)),
        lambda: Rotation.from_euler("xy", np.ones(3)),
        lambda: Rotation.from_euler("x", np.ones(2)),
        lambda: OURS.as_euler("xx"),
        lambda: OURS.as_euler("xxy"),
        lambda: len(OURS[0]),
        lambda: OURS[0][0],
        lambda: Slerp.init(np.arange(2.0), OURS[0]),
        lambda: Slerp.init(np.arange(2.0), OURS),
    ],
)
def test_errors(call):
    with pytest.raises(errors.BlufuncError, match="at:"):
        call()
