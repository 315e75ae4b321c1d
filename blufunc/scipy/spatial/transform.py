"""``scipy.spatial.transform``: rotations as unit quaternions; interpolation.

A face above ``blufunc.numpy``. A quaternion is (x, y, z, w), the scalar last. Forms that divide by an angle use its
series where it is small, so that all are differentiable at the identity. Sources: J. Diebel, "Representing attitude:
Euler angles, unit quaternions, and rotation vectors" (2006); S. W. Shepperd, "Quaternion from rotation matrix" (1978);
E. Bernardes and S. Viollet, "Quaternion to Euler angles conversion" (2022); F. L. Markley et al., "Averaging
quaternions" (2007); K. Shoemake, "Animating rotation with quaternion curves" (1985).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import blufunc.numpy as bnp
from blufunc import errors, random
from blufunc.core.ir import dtypes, source
from blufunc.core.ir.axes import static_int
from blufunc.core.ir.trace import Array
from blufunc.numpy.promotion import inexact, promote_dtypes
from blufunc.tree_util import register_pytree_node_class

__all__ = ["Rotation", "Slerp"]

_SMALL = 1e-6  # of a squared angle: the first terms left out of the series are below 1e-18


def _vectors(x: Any, n: int, name: str, rank: int = 1) -> Array:
    x = inexact(bnp.asarray(x), name)
    if x.aval.shape[-rank:] != (n,) * rank or x.aval.ndim > rank + 1 or dtypes.is_complex(x.aval.dtype):
        want = ", ".join(["n"] * rank).replace("n", str(n))
        raise errors.ShapeError(
            f"{name} of {x.aval}: real numbers of shape ({want}{',' * (rank == 1)}) or (k, {want}).",
            where=source.here(),
        )
    return x


def _dot(a: Array, b: Array) -> Array:
    return bnp.sum(a * b, -1, keepdims=True)


def _safe_sqrt(x: Array, small: Array) -> Array:
    """The square root where x is not small, and 1 elsewhere."""
    return bnp.sqrt(bnp.where(small, 1, x))


def _product(p: Array, q: Array) -> Array:
    """Hamilton's product."""
    p, q = bnp.broadcast_arrays(p, q)
    u, v, a, b = p[..., :3], q[..., :3], p[..., 3:], q[..., 3:]
    return bnp.concatenate([a * v + b * u + bnp.cross(u, v), a * b - _dot(u, v)], -1)


def _from_rotvec(v: Array) -> Array:
    square = _dot(v, v)
    small = square < _SMALL
    angle = _safe_sqrt(square, small)
    scale = bnp.where(small, 0.5 - square / 48 + square**2 / 3840, bnp.sin(angle / 2) / angle)
    return bnp.concatenate(
        [scale * v, bnp.where(small, 1 - square / 8 + square**2 / 384, bnp.cos(angle / 2))], -1
    )


def _canonical(q: Array) -> Array:
    """The one of q and -q with w > 0, or the first of z, y, x that is not 0 positive."""
    sign = bnp.zeros_like(q[..., :1])
    for i in (3, 0, 1, 2):
        sign = bnp.where(bnp.equal(sign, 0), bnp.sign(q[..., i : i + 1]), sign)
    return bnp.where(sign < 0, -q, q)


@register_pytree_node_class
class Rotation:
    """A rotation, or a vector of rotations; a pytree of its quaternions.

    Attributes:
      quat: unit quaternions (4,) or (n, 4), the scalar last.
    """

    __slots__ = ("quat",)

    def __init__(self, quat: Any):
        self.quat = quat

    def tree_flatten(self):
        """Children and static data, as a pytree node."""
        return (self.quat,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        """The inverse of ``tree_flatten``."""
        return cls(*children)

    def __repr__(self) -> str:
        return f"Rotation(quat={self.quat!r})"

    # -- construction --

    @classmethod
    def from_quat(cls, quat: Any) -> Rotation:
        """Rotations from quaternions (..., 4) of any norm but 0."""
        quat = _vectors(quat, 4, "Rotation.from_quat")
        return cls(quat / bnp.sqrt(_dot(quat, quat)))

    @classmethod
    def from_matrix(cls, matrix: Any) -> Rotation:
        """Rotations from orthogonal matrices (..., 3, 3) of determinant 1."""
        m = _vectors(matrix, 3, "Rotation.from_matrix", 2)
        trace = m[..., 0, 0] + m[..., 1, 1] + m[..., 2, 2]
        # four times the products of each component with all four: the row of the largest is the most accurate
        rows = []
        for i in range(3):
            j, k = (i + 1) % 3, (i + 2) % 3
            row: list[Any] = [None] * 4
            row[i] = 1 - trace + 2 * m[..., i, i]
            row[j] = m[..., j, i] + m[..., i, j]
            row[k] = m[..., k, i] + m[..., i, k]
            row[3] = m[..., k, j] - m[..., j, k]
            rows.append(bnp.stack(row, -1))
        turn = [m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]]
        rows.append(bnp.stack([*turn, 1 + trace], -1))
        choice = bnp.argmax(bnp.stack([row[..., i] for i, row in enumerate(rows)], -1), -1)[..., None]
        q = rows[3]
        for i in range(3):
            q = bnp.where(choice == i, rows[i], q)
        return cls(q / bnp.sqrt(_dot(q, q)))

    @classmethod
    def from_rotvec(cls, rotvec: Any, degrees: bool = False) -> Rotation:
        """Rotations about vectors (..., 3), by their norms."""
        v = _vectors(rotvec, 3, "Rotation.from_rotvec")
        return cls(_from_rotvec(bnp.deg2rad(v) if degrees else v))

    @classmethod
    def from_mrp(cls, mrp: Any) -> Rotation:
        """Rotations from Rodrigues parameters (..., 3): axes times ``tan(angle / 4)``."""
        v = _vectors(mrp, 3, "Rotation.from_mrp")
        square = _dot(v, v)
        return cls(bnp.concatenate([2 * v, 1 - square], -1) / (1 + square))

    @classmethod
    def from_euler(cls, seq: str, angles: Any, degrees: bool = False) -> Rotation:
        """Rotations about one to three axes, one after the other.

        Args:
          seq: of ``"xyz"`` about fixed axes, of ``"XYZ"`` about those that turn along.
          angles: (k,) or (n, k) for k axes; for one axis also a number.
          degrees: whether they are in degrees.
        """
        axes, intrinsic = _sequence(seq, "Rotation.from_euler")
        angles = inexact(bnp.asarray(angles), "Rotation.from_euler")
        if len(axes) == 1 and not angles.ndim:
            angles = angles[None]
        if not angles.ndim or angles.shape[-1] != len(axes) or angles.ndim > 2:
            raise errors.ShapeError(
                f"Rotation.from_euler about {seq}, by angles {angles.aval}.",
                where=source.here(),
                fix=f"angles are ({len(axes)},) or (n, {len(axes)})",
            )
        half = (bnp.deg2rad(angles) if degrees else angles) / 2
        q: Any = None
        for i, axis in enumerate(axes):
            s, c = bnp.sin(half[..., i]), bnp.cos(half[..., i])
            one = bnp.stack([s if d == axis else bnp.zeros_like(s) for d in range(3)] + [c], -1)
            q = one if q is None else _product(q, one) if intrinsic else _product(one, q)
        return cls(q)

    @classmethod
    def identity(cls, num: int | None = None, dtype: Any = float) -> Rotation:
        """The rotation by nothing, or a vector of ``num`` of them."""
        dtype = "float32" if dtype is float else dtype
        one = bnp.asarray([0.0, 0.0, 0.0, 1.0], dtype=dtype)
        return cls(one if num is None else bnp.tile(one, (static_int(num, "Rotation.identity", "num"), 1)))

    @classmethod
    def random(cls, random_key: Any, num: int | None = None) -> Rotation:
        """A rotation of uniform distribution, or ``num`` of them."""
        shape = (4,) if num is None else (static_int(num, "Rotation.random", "num"), 4)
        return cls.from_quat(random.normal(random_key, shape))

    @classmethod
    def concatenate(cls, rotations: Sequence[Rotation]) -> Rotation:
        """One vector of all rotations."""
        return cls(bnp.concatenate([bnp.atleast_2d(r.quat) for r in rotations]))

    # -- other forms --

    def as_quat(self, canonical: bool = False, scalar_first: bool = False) -> Array:
        """Quaternions (..., 4); ``canonical`` picks the one of q and -q with w >= 0."""
        q = _canonical(self.quat) if canonical else self.quat
        return bnp.roll(q, 1, axis=-1) if scalar_first else q

    def as_matrix(self) -> Array:
        """Matrices (..., 3, 3)."""
        x, y, z, w = (self.quat[..., i] for i in range(4))
        rows = [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
        return bnp.stack([bnp.stack(row, -1) for row in rows], -2)

    def as_rotvec(self, degrees: bool = False) -> Array:
        """Rotation vectors (..., 3), of norms up to pi."""
        q = _canonical(self.quat)
        v, w = q[..., :3], q[..., 3:]
        square = _dot(v, v)
        small = square < _SMALL
        sine = _safe_sqrt(square, small)
        ratio = square / bnp.where(small, w, 1) ** 2
        series = 2 / bnp.where(small, w, 1) * (1 - ratio / 3 + ratio**2 / 5)
        v = v * bnp.where(small, series, 2 * bnp.arctan2(sine, w) / sine)
        return bnp.rad2deg(v) if degrees else v

    def as_mrp(self) -> Array:
        """Modified Rodrigues parameters (..., 3), of norms up to 1."""
        q = _canonical(self.quat)
        return q[..., :3] / (1 + q[..., 3:])

    def as_euler(self, seq: str, degrees: bool = False) -> Array:
        """Euler angles (..., 3) about three axes; see ``from_euler``.

        Where the second angle makes the first and the third one rotation, the third is 0.
        """
        axes, intrinsic = _sequence(seq, "Rotation.as_euler")
        if len(axes) != 3 or axes[0] == axes[1] or axes[1] == axes[2]:
            raise errors.ValueRangeError(
                f"Rotation.as_euler about {seq!r}.",
                where=source.here(),
                fix="three axes, of which neighbours differ: 'xyz', 'ZYZ'",
            )
        i, j, k = axes[::-1] if intrinsic else axes
        proper = i == k
        k = 3 - i - j if proper else k
        sign = (i - j) * (j - k) * (k - i) // 2
        q = self.quat
        w, a, b, c = q[..., 3], q[..., i], q[..., j], sign * q[..., k]
        if not proper:
            w, a, b, c = w - b, a + c, b + w, c - a
        second = 2 * bnp.arctan2(bnp.hypot(b, c), bnp.hypot(w, a))
        total, difference = bnp.arctan2(a, w), bnp.arctan2(c, b)
        near = 1e-7 if q.dtype == dtypes.float64 else 1e-5  # a few times the rounding of arctan2
        at_zero, at_pi = bnp.abs(second) < near, bnp.abs(second - math.pi) < near
        first, third = total - difference, total + difference
        if intrinsic:
            first, third = third, first
        locked = at_zero | at_pi
        alone = bnp.where(at_zero, 2 * total, 2 * difference * (1 if intrinsic else -1))
        first, third = bnp.where(locked, alone, first), bnp.where(locked, 0, third)
        if not proper:
            first, third = (first * sign, third) if intrinsic else (first, third * sign)
            second = second - math.pi / 2
        angles = bnp.stack([_wrapped(first), second, _wrapped(third)], -1)
        return bnp.rad2deg(angles) if degrees else angles

    # -- operations --

    @property
    def single(self) -> bool:
        """True for one rotation, False for a vector of them."""
        return self.quat.ndim == 1

    def __len__(self) -> int:
        if self.single:
            raise errors.ArgumentError("a single Rotation has no len.", where=source.here())
        return self.quat.shape[0]

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, indexer: Any) -> Rotation:
        if self.single:
            raise errors.ArgumentError("a single Rotation has no items.", where=source.here())
        return Rotation(self.quat[indexer])

    def __mul__(self, other: Rotation) -> Rotation:
        """The rotation by ``other``, then by this one."""
        if not isinstance(other, Rotation):
            return NotImplemented
        return Rotation(_product(*promote_dtypes("Rotation", self.quat, other.quat)))

    def apply(self, vectors: Any, inverse: bool = False) -> Array:
        """Vectors (..., 3), turned: one by each rotation, all by one, or each by its own."""
        v, q = promote_dtypes("Rotation.apply", vectors, self.quat, inexact=True)
        v = _vectors(v, 3, "Rotation.apply")
        u = -q[..., :3] if inverse else q[..., :3]
        u, v = bnp.broadcast_arrays(u, v)
        side = 2 * bnp.cross(u, v)
        return v + q[..., 3:] * side + bnp.cross(u, side)

    def inv(self) -> Rotation:
        """The inverse rotation."""
        return Rotation(bnp.concatenate([-self.quat[..., :3], self.quat[..., 3:]], -1))

    def magnitude(self) -> Array:
        """The angle of the rotation, 0 to pi."""
        v = self.quat[..., :3]
        square = bnp.sum(v * v, -1)
        nothing = bnp.equal(square, 0)
        sine = bnp.where(nothing, 0, _safe_sqrt(square, nothing))
        return 2 * bnp.arctan2(sine, bnp.abs(self.quat[..., 3]))

    def mean(self, weights: Any = None) -> Rotation:
        """The rotation of smallest weighted sum of squared chordal distances."""
        q = bnp.atleast_2d(self.quat)
        weighted = q if weights is None else q * inexact(weights, "Rotation.mean")[:, None]
        return Rotation(bnp.linalg.eigh(weighted.T @ q)[1][:, -1])


def _wrapped(angle: Array) -> Array:
    """An angle between -2 pi and 2 pi, between -pi and pi."""
    angle = bnp.where(angle < -math.pi, angle + 2 * math.pi, angle)
    return bnp.where(angle > math.pi, angle - 2 * math.pi, angle)


def _sequence(seq: Any, name: str) -> tuple[list[int], bool]:
    """The axes, and whether they turn along."""
    if (
        not isinstance(seq, str)
        or not 1 <= len(seq) <= 3
        or not (set(seq) <= set("xyz") or set(seq) <= set("XYZ"))
    ):
        raise errors.ValueRangeError(
            f"{name}: {seq!r:.60} is no sequence of axes.",
            where=source.here(),
            fix="one to three of 'xyz', about fixed axes, or of 'XYZ', about those that turn along",
        )
    return ["xyz".index(s) for s in seq.lower()], seq.isupper()


class Slerp(NamedTuple):
    """Interpolation at constant angular velocity between rotations; see ``init``."""

    times: Any
    timedelta: Any
    rotations: Rotation
    rotvecs: Any

    @classmethod
    def init(cls, times: Any, rotations: Rotation) -> Slerp:
        """The interpolation through rotations (n >= 2) at increasing times (n,)."""
        times = inexact(bnp.asarray(times), "Slerp")
        if not isinstance(rotations, Rotation) or rotations.single or len(rotations) < 2:
            raise errors.ArgumentError(
                "Slerp takes a vector of two or more rotations.",
                where=source.here(),
                fix="Rotation.concatenate",
            )
        if times.shape != (len(rotations),):
            raise errors.ShapeError(
                f"Slerp of {len(rotations)} rotations at times {times.aval}.", where=source.here()
            )
        first = rotations[:-1]
        return cls(times, bnp.diff(times), first, (first.inv() * rotations[1:]).as_rotvec())

    def __call__(self, times: Any) -> Rotation:
        """The rotations at times, a number or (k,); outside, the motion goes on."""
        t = inexact(bnp.asarray(times), "Slerp")
        i = bnp.clip(bnp.searchsorted(self.times, t, side="right") - 1, 0, len(self.rotations) - 1)
        alpha = (t - self.times[i]) / self.timedelta[i]
        return self.rotations[i] * Rotation.from_rotvec(self.rotvecs[i] * alpha[..., None])
