"""Rows against JAX: elementwise functions of ``numpy``, ``lax`` and ``nn``."""

import numpy as np

from tests.peers.peer_row import A, Row

UNARY = {
    "np.sin": (-3, 3), "np.cos": (-3, 3), "np.tan": (-1, 1), "np.arcsin": (-0.9, 0.9), "np.arccos": (-0.9, 0.9),
    "np.arctan": (-3, 3), "np.sinh": (-3, 3), "np.cosh": (-3, 3), "np.tanh": (-3, 3), "np.arcsinh": (-3, 3),
    "np.arccosh": (1.2, 4), "np.arctanh": (-0.9, 0.9), "np.exp": (-3, 3), "np.exp2": (-3, 3), "np.expm1": (-3, 3),
    "np.log": (0.1, 4), "np.log2": (0.1, 4), "np.log10": (0.1, 4), "np.log1p": (-0.8, 4), "np.sqrt": (0.1, 4),
    "np.cbrt": (0.1, 4), "np.square": (-3, 3), "np.reciprocal": (0.3, 3), "np.abs": (0.1, 3), "np.negative": (-3, 3),
    "np.sign": (0.1, 3), "np.floor": (-3, 3), "np.ceil": (-3, 3), "np.trunc": (-3, 3), "np.rint": (-3, 3),
    "np.sinc": (-2, 2), "np.deg2rad": (-90, 90), "np.rad2deg": (-3, 3), "np.i0": (-3, 3), "np.nan_to_num": (-3, 3),
    "lax.rsqrt": (0.2, 4), "lax.logistic": (-4, 4), "lax.erf": (-2, 2), "lax.erfc": (-2, 2),
    "lax.erf_inv": (-0.9, 0.9), "lax.lgamma": (0.3, 5), "lax.digamma": (0.3, 5), "lax.bessel_i0e": (-4, 4),
    "lax.bessel_i1e": (-4, 4),
    "nn.relu": (0.1, 3), "nn.relu6": (0.1, 5), "nn.sigmoid": (-4, 4), "nn.softplus": (-4, 4), "nn.silu": (-4, 4),
    "nn.soft_sign": (0.1, 3), "nn.gelu": (-4, 4), "nn.elu": (-3, 3), "nn.celu": (-3, 3), "nn.selu": (-3, 3),
    "nn.leaky_relu": (-3, 3), "nn.log_sigmoid": (-4, 4), "nn.mish": (-4, 4), "nn.hard_tanh": (-0.9, 0.9),
    "nn.hard_sigmoid": (-2, 2), "nn.hard_swish": (-2, 2), "nn.squareplus": (-3, 3), "nn.softmax": (-3, 3),
    "nn.log_softmax": (-3, 3), "nn.standardize": (-3, 3), "nn.glu": (-3, 3), "nn.logsumexp": (-3, 3),
}  # fmt: skip
LOOSE = {"lax.erf_inv": 4, "lax.lgamma": 4, "lax.digamma": 10, "np.arccos": 4, "nn.standardize": 20}
COMPLEX = "sin cos tan sinh cosh tanh exp log sqrt square reciprocal arctan arcsinh abs conj real imag angle".split()
BINARY = {
    "np.add": (-2, 2), "np.subtract": (-2, 2), "np.multiply": (-2, 2), "np.divide": (0.5, 2), "np.power": (0.3, 2),
    "np.arctan2": (0.3, 2), "np.hypot": (0.3, 2), "np.maximum": (-2, 2), "np.minimum": (-2, 2), "np.fmod": (0.4, 3),
    "np.remainder": (0.4, 3), "np.floor_divide": (0.4, 3), "np.logaddexp": (-3, 3), "np.logaddexp2": (-3, 3),
    "np.copysign": (0.3, 2), "np.heaviside": (0.3, 2), "np.fmax": (-2, 2), "np.fmin": (-2, 2),
    "np.float_power": (0.3, 2),
    "np.nextafter": (0.3, 2), "np.ldexp": None,
}  # fmt: skip
STEPS = {
    "np.sign",
    "np.floor",
    "np.ceil",
    "np.trunc",
    "np.rint",
    "np.floor_divide",
    "np.heaviside",
    "np.nextafter",
}
INTEGER = (
    "add subtract multiply bitwise_and bitwise_or bitwise_xor left_shift maximum minimum gcd lcm".split()
)
PREDICATES = (
    "equal not_equal less less_equal greater greater_equal logical_and logical_or logical_xor isclose".split()
)

ROWS = [
    *(
        Row(name, (A((2, 4), *ends),), order=0 if name in STEPS else 2, tol=LOOSE.get(name, 1))
        for name, ends in UNARY.items()
    ),
    *(
        Row(f"np.{name} of complex numbers", (A(dtype="complex", low=0.2, high=1.5),), tol=4)
        for name in COMPLEX
    ),
    *(
        Row(name, (A((2, 3), *ends), A((3,), *ends)), fun=None, batch=False, order=0 if name in STEPS else 2)
        for name, ends in BINARY.items()
        if ends
    ),
    *(
        Row(
            f"np.{name} of integers",
            (A(dtype="int32", low=0, high=9), A((3,), dtype="int32", low=0, high=9)),
            batch=False,
        )
        for name in INTEGER
    ),
    *(Row(f"np.{name}", (A(), A()), order=0) for name in PREDICATES),
    Row("np.where", (A(dtype="bool"), A(), A())),
    Row("np.clip", (A(),), options={"min": -0.5, "max": 0.7}),
    Row("np.ldexp", (A(), A(dtype="int32", low=-3, high=3)), order=1),
    Row("lax.clamp", (A(low=-1, high=-0.5), A(), A(low=0.5, high=1))),
    Row("lax.integer_pow", (A(),), fun=lambda m, x: m.lax.integer_pow(x, 5)),
    Row("lax.select_n", (A(dtype="int32", low=0, high=2), A(), A(), A())),
    *(
        Row(f"lax.{name}", (A(low=0.5, high=4), A(low=0.5, high=4)), order=1)
        for name in ("igamma", "igammac")
    ),
    Row("lax.polygamma", (A((3,), 1, 3, make=np.floor), A((3,), 0.5, 4)), order=0),
    Row("lax.betainc", (A((3,), 0.5, 3), A((3,), 0.5, 3), A((3,), 0.1, 0.9)), order=0, tol=10),
    Row("np.modf", (A(),), order=0),
    Row("np.frexp", (A(),), order=0),
    Row("np.angle", (A(dtype="complex"),), tol=4),
    Row(
        "nn.one_hot",
        (A((4,), 0, 5, dtype="int32"),),
        fun=lambda m, x: m.nn.one_hot(x, 6),
        dtypes=("float32",),
    ),
]
