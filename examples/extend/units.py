"""Units as a transform: plain numeric functions check the units of quantities.

    checked(kinetic)(Quantity(2.0, kg), Quantity(3.0, m / s))   # 9 kg m^2 s^-2

The function knows nothing of units. A box is an array and its unit, and the unit is a *static* field of the box: part
of the pytree's structure, checked while the function is traced and free at run time. ``jit`` compiles the bare
arithmetic; a loop that changes the unit of its carry is an error, as a changed shape would be.

Derivatives need no extra rules: ``checked(bf.grad(f))`` checks the operations of the gradient like any others, and the
gradient of an energy by a position is a force.

    python -m examples.extend.units
"""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import lax


class UnitError(TypeError):
    """Operation on incompatible units."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """Product of powers of base units, as (name, power) pairs sorted by name."""

    powers: tuple[tuple[str, Fraction], ...] = ()

    def __mul__(self, other: Unit) -> Unit:
        total = dict(self.powers)
        for name, power in other.powers:
            total[name] = total.get(name, 0) + power
        return Unit(tuple(sorted((n, p) for n, p in total.items() if p)))

    def __pow__(self, exponent) -> Unit:
        return Unit(tuple((n, p * Fraction(exponent)) for n, p in self.powers if exponent))

    def __truediv__(self, other: Unit) -> Unit:
        return self * other**-1

    def __str__(self) -> str:
        return " ".join(n if p == 1 else f"{n}^{p}" for n, p in self.powers) or "1"


one = Unit()
m, s, kg, au, yr = (Unit(((name, Fraction(1)),)) for name in ("m", "s", "kg", "au", "yr"))


@dataclasses.dataclass(frozen=True)
class Quantity:
    """An array in a unit; unit None is that of the constant 0, which fits any unit."""

    value: bf.Array
    unit: Unit | None = dataclasses.field(metadata={"static": True})

    def __str__(self) -> str:
        return f"{self.value} {self.unit or ''}".strip()


def plain(x):
    """Values without a unit are pure numbers, but 0 fits all; integers stay plain."""
    if not bnp.issubdtype(x.dtype, bnp.floating):
        return x
    is_constant = not isinstance(x, bf.Tracer)  # of the program, no argument
    is_zero = is_constant and not x.ndim and float(x) == 0
    return Quantity(x, None if is_zero else one)


checked = bf.Transform("units", box=Quantity, lift=plain)


def fail(message):
    """Make a UnitError with the line of the checked function; rules run far from it."""
    raise UnitError(f"{message}\n  at: {checked.where()}")


def common(prim, xs):
    """The common unit of some quantities."""
    units = [x.unit for x in xs if isinstance(x, Quantity) and x.unit is not None]
    for unit in units[1:]:
        if unit != units[0]:
            fail(f"{prim.name} of [{units[0]}] and [{unit}]")
    return units[0] if units else None


def values(xs):
    """The bare arrays."""
    return [x.value if isinstance(x, Quantity) else x for x in xs]


# -- four kinds of rules, by their requirements on units -------------------------------------------


def keeps(prim, *xs, **params):
    """Operands of one unit, which is also that of the result."""
    unit = common(prim, xs)
    return Quantity(prim.bind(*values(xs), **params), unit)


def compares(prim, *xs, **params):
    """Operands of one unit; the result is not a quantity."""
    common(prim, xs)
    return prim.bind(*values(xs), **params)


def multiplies(prim, x, y, **params):
    """Multiply the units. (0 times anything is 0.)"""
    unit = None if x.unit is None or y.unit is None else x.unit * y.unit
    return Quantity(prim.bind(x.value, y.value, **params), unit)


def pure(prim, *xs, **params):
    """Functions of pure numbers."""
    unit = common(prim, xs)
    if unit not in (None, one):
        fail(f"{prim.name} of [{unit}], where it takes a pure number")
    return Quantity(prim.bind(*values(xs), **params), one)


KINDS = {
    keeps: [
        lax.add_p, lax.sub_p, lax.add_any_p, lax.neg_p, lax.abs_p, lax.max_p, lax.min_p, lax.clamp_p, lax.select_p,
        lax.reduce_sum_p, lax.reduce_max_p, lax.reduce_min_p, lax.cumsum_p, lax.concatenate_p, lax.broadcast_in_dim_p,
        lax.reshape_p, lax.transpose_p, lax.slice_p, lax.pad_p, lax.rev_p, lax.gather_p, lax.scatter_add_p,
        lax.dynamic_slice_p, lax.dynamic_update_slice_p, lax.convert_p, lax.copy_p, lax.stop_gradient_p,
    ],
    compares: [lax.eq_p, lax.ne_p, lax.lt_p, lax.le_p, lax.gt_p, lax.ge_p, lax.is_finite_p, lax.sign_p, lax.argmax_p],
    multiplies: [lax.mul_p, lax.dot_general_p],
    pure: [
        lax.exp_p, lax.expm1_p, lax.log_p, lax.log1p_p, lax.sin_p, lax.cos_p, lax.tan_p, lax.tanh_p, lax.logistic_p,
        lax.pow_p, lax.erf_p,
    ],
}  # fmt: skip
for kind, prims in KINDS.items():
    for p in prims:
        checked.rule(p)(functools.partial(kind, p))


def power(exponent):
    """Rule of a fixed power: that power of the unit."""

    def rule(prim, x, **params):
        return Quantity(prim.bind(x.value, **params), x.unit and x.unit ** exponent(**params))

    return rule


for p, exponent in (
    (lax.square_p, lambda: 2),
    (lax.sqrt_p, lambda: Fraction(1, 2)),
    (lax.rsqrt_p, lambda: Fraction(-1, 2)),
    (lax.integer_pow_p, lambda y: y),
):
    checked.rule(p)(functools.partial(power(exponent), p))


@checked.rule(lax.div_p)
def div(x, y):
    return Quantity(x.value / y.value, x.unit and x.unit / (y.unit or one))


# -- a planet --------------------------------------------------------------------------------------


def kinetic(mass, velocity):
    return 0.5 * mass * bnp.sum(bnp.square(velocity))


def potential(position, mass, mu):
    """Energy of a mass in the field of a sun; ``mu`` is G times the sun's mass."""
    return -mu * mass / bnp.sqrt(bnp.sum(bnp.square(position)))


def orbit(position, velocity, mass, mu, dt, steps):
    """Some leapfrog steps, with the energy after each."""

    def step(state, _):
        x, v = state
        v = v - 0.5 * dt * bf.grad(potential)(x, mass, mu) / mass
        x = x + dt * v
        v = v - 0.5 * dt * bf.grad(potential)(x, mass, mu) / mass
        return (x, v), kinetic(mass, v) + potential(x, mass, mu)

    return lax.scan(step, (position, velocity), None, length=steps)


EARTH = {
    "position": Quantity(bnp.asarray([1.0, 0.0]), au),
    "velocity": Quantity(bnp.asarray([0.0, 2 * math.pi]), au / yr),
    "mass": Quantity(5.972e24, kg),
    "mu": Quantity(4 * math.pi**2, au**3 / yr**2),
    "dt": Quantity(1 / 365, yr),
}


def mistaken(x, t):
    speed = x / t
    return speed + t


def main():
    print("kinetic energy:", checked(kinetic)(Quantity(2.0, kg), Quantity(3.0, m / s)))
    force = checked(bf.grad(potential))(EARTH["position"], EARTH["mass"], EARTH["mu"])
    print("force, the gradient of an energy:", force)
    year = bf.jit(checked(functools.partial(orbit, steps=365)))
    (x, v), energy = year(**EARTH)
    drift = float((energy.value.max() - energy.value.min()) / -energy.value[0])
    print(f"after a year at {x}")
    print(f"  with velocity {v}")
    print(f"  and an energy in [{energy.unit}] that moved by a share of {drift:.1e}\n")
    try:
        bf.jit(checked(mistaken))(Quantity(3.0, m), Quantity(2.0, s))
    except UnitError as e:
        print("UnitError:", e)


if __name__ == "__main__":
    main()
