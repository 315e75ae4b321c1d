"""Rows against JAX: gather, scatter, bits, more of ``numpy``, custom rules."""

import numpy as np

from tests.peers.peer_row import A, Row

AT_ZERO = "the derivative of `abs` at 0 is 0, the symmetric one; JAX gives that from the right"


X, D = A((3, 4)), A((3, 4), distinct=True)
BYTES = A((7,), 0, 255, dtype="uint8")


def fun(name, f, *args, **more):
    """A row with a function of its own."""
    return Row(name, args or (X,), f, **more)


def scatter(op, m, x, i, y):
    """Rows of an operand updated at indices, through the general primitive."""
    numbers = m.lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return getattr(m.lax, op)(x, i[:, None], y, numbers, unique_indices=op == "scatter_mul")


def gather(m, x, i):
    """Windows of rows at indices that may lie outside."""
    numbers = m.lax.GatherDimensionNumbers((1,), (0,), (0,))
    return m.lax.gather(x, i[:, None], numbers, (1, 2), mode="clip")


def ragged(m, x, y, sizes, contract=((0,), (0,)), ragged=(0,), groups=()):
    """A matmul of groups of any axes."""
    numbers = m.lax.RaggedDotDimensionNumbers((contract, ((), ())), ragged, groups)
    return m.lax.ragged_dot_general(x, y, sizes, numbers)


def doubled(m):
    """A function with a batching rule of its own."""

    @m.custom_batching.custom_vmap
    def f(x, y):
        return m.np.sin(x) * y

    @f.def_vmap
    def rule(size, batched, x, y):
        return m.np.sin(x) * y, True

    return f


def closed(m, x):
    """A rule for a function that closes over what is differentiated."""

    @m.custom_vjp
    def apply(y, *consts):
        return converted(y, *consts)

    converted, consts = m.closure_convert(lambda y: m.np.sin(y) * x, x)
    apply.defvjp(
        lambda y, *cs: (apply(y, *cs), (y, cs)),
        lambda res, ct: (ct, *[ct * m.np.cos(res[0]) for _ in res[1]]),
    )
    return m.grad(lambda x: m.np.sum(apply(x, *consts)))(x)


def policy(name):
    """A function under a policy of what to keep."""

    def run(m, x, w):
        f = m.checkpoint(lambda x: m.np.sin(m.np.sin(x @ w) @ w), policy=getattr(m.checkpoint_policies, name))
        return m.grad(lambda x: f(x).sum())(x)

    return run


W = A((4, 4), -0.7, 0.7)
LAX = [
    fun("lax.gather", gather, D, A((5,), 0, 4, dtype="int32")),
    *(
        fun(
            f"lax.{op}",
            lambda m, x, i, y, op=op: scatter(op, m, x, i, y),
            X,
            A((2,), dtype="int32", make=lambda i: np.array([2, 0])),
            A((2, 4)),
        )
        for op in "scatter scatter_add scatter_mul scatter_min scatter_max".split()
    ),
    fun(
        "lax.dynamic_index_in_dim",
        lambda m, x, i: m.lax.dynamic_index_in_dim(x, i, 1),
        X,
        A((), 0, 3, dtype="int32"),
    ),
    fun(
        "lax.dynamic_update_index_in_dim",
        lambda m, x, y, i: m.lax.dynamic_update_index_in_dim(x, y, i, 0),
        X,
        A((4,)),
        A((), 0, 2, dtype="int32"),
    ),
    fun("lax.slice_in_dim", lambda m, x: m.lax.slice_in_dim(x, 0, 4, 2, axis=1)),
    fun("lax.squeeze", lambda m, x: m.lax.squeeze(x, (1,)), A((3, 1, 4))),
    fun(
        "lax.sort of two keys",
        lambda m, k, x: m.lax.sort((k, x), num_keys=2, dimension=0),
        A((8,), 0, 2, dtype="int32"),
        A((8,), distinct=True),
    ),
    fun("lax.sort_key_val", lambda m, k, x: m.lax.sort_key_val(k, x), D, X),
    fun("lax.argmax", lambda m, x: m.lax.argmax(x, 1, np.int32), D, order=0),
    fun("lax.reduce_precision", lambda m, x: m.lax.reduce_precision(x, 5, 10), order=1),
    fun("lax.batch_matmul", lambda m, x, y: m.lax.batch_matmul(x, y), A((2, 3, 4)), A((2, 4, 2))),
    fun("lax.population_count", lambda m, x: m.lax.population_count(x), BYTES),
    *(
        fun(
            f"lax.{n}",
            lambda m, x, y, n=n: getattr(m.lax, n)(x, y),
            A((6,), -99, 99, dtype="int32"),
            A((6,), 1, 9, dtype="int32"),
        )
        for n in "shift_left shift_right_arithmetic shift_right_logical div rem bitwise_xor".split()
    ),
    fun("lax.bitcast_convert_type to bytes", lambda m, x: m.lax.bitcast_convert_type(x, np.uint8), order=0),
    fun(
        "lax.bitcast_convert_type from bytes",
        lambda m, x: m.lax.bitcast_convert_type(x, np.float32),
        A((3, 4), 0, 99, dtype="uint8"),
        order=0,
    ),
    *(
        fun(f"to {t}", lambda m, x, t=t: x.astype(t), A((9,), -99, 99), order=0)
        for t in "int8 int16 int32 bool float16 bfloat16 complex64".split()
    ),
    *(
        fun(
            f"{t} with float32",
            lambda m, x, y: x * y,
            A((4,), -9, 9, dtype=t),
            A((4,), dtype="float32"),
            order=0,
        )
        for t in "int8 uint16 int32 bool float16".split()
    ),
    *(
        fun(f"np.sum of {t}", lambda m, x: m.np.sum(x), A((9,), 0, 9, dtype=t), dtypes=("float32",))
        for t in "bool int8 uint8 int32 float16".split()
    ),
    *(
        fun(f"np.mean of {t}", lambda m, x: m.np.mean(x), A((9,), 0, 9, dtype=t), dtypes=("float32",))
        for t in "bool int8 int32".split()
    ),
]
NUMPY = [
    *(
        fun(
            f"np.{n} of {t}",
            lambda m, x, y, n=n: getattr(m.np, n)(x, y),
            A((6,), -9, 9, dtype=t),
            A((6,), 1, 5, dtype=t),
            order=0,
        )
        for n in ("floor_divide", "remainder", "fmod", "divmod")
        for t in ("int32", "float32")
    ),
    *(
        fun(
            f"np.{n} at ties",
            lambda m, x, y, n=n: getattr(m.np, n)(x, y),
            A((4,), make=np.ones_like),
            A((4,), make=np.ones_like),
            order=1,
        )
        for n in ("maximum", "minimum")
    ),
    *(
        fun(
            f"np.{n} of ties",
            lambda m, x, n=n: getattr(m.np, n)(x, axis=1),
            A((3, 4), make=np.ones_like),
            order=1,
        )
        for n in ("max", "min", "prod")
    ),
    *(
        fun(
            f"{n} at zero",
            lambda m, x, n=n: (getattr(m.nn, n) if hasattr(m.nn, n) else getattr(m.np, n))(x),
            A((3,), make=np.zeros_like),
            order=1,
            differs=(AT_ZERO, ("jvp", "vjp", "vmap of vjp")) if n == "abs" else None,
        )
        for n in "relu relu6 leaky_relu elu celu selu silu abs sinc sign".split()
    ),
    fun(
        "np.abs of complex zeros",
        lambda m, x: m.np.abs(x),
        A((3,), dtype="complex", make=np.zeros_like),
        order=1,
    ),
    fun(
        "np.abs of large complex numbers",
        lambda m, x: m.np.abs(x),
        A((3,), 1e29, 1e30, dtype="complex"),
        order=1,
    ),
    fun(
        "lax.clamp at its ends",
        lambda m, x: m.lax.clamp(m.np.ones_like(x), x, 2 + x),
        A((3,), make=np.ones_like),
        order=1,
    ),
    fun("np.clip at its ends", lambda m, x: m.np.clip(x, 1.0, 2.0), A((3,), make=np.ones_like), order=1),
    fun("np.sort of ties", lambda m, x: m.np.sort(x), A((5,), make=np.ones_like), order=1),
    fun("np.var of integers", lambda m, x: m.np.var(x), A((5,), 0, 9, dtype="int32"), dtypes=("float32",)),
    fun("np.sqrt of negative numbers", lambda m, x: m.np.sqrt(x), A((3,), -2, -1), order=0),
    fun("np.log of zero", lambda m, x: m.np.log(x), A((3,), make=np.zeros_like), order=1),
    fun(
        "np.power of complex numbers",
        lambda m, x, y: m.np.power(x, y),
        A((4,), 0.3, 1, dtype="complex"),
        A((4,), 0.3, 1, dtype="complex"),
        tol=2,
    ),
    fun("np.power of integers", lambda m, x: m.np.power(x, 3), A((4,), -9, 9, dtype="int32")),
    fun("np.power of zero", lambda m, x: x**2, A((3,), make=np.zeros_like)),
    *(
        fun(f"np.{n} of batches", lambda m, x, y, n=n: getattr(m.np, n)(x, y), A((2, 3, 3)), A((2, 3)))
        for n in ("matvec",)
    ),
    fun("np.vecmat", lambda m, x, y: m.np.vecmat(x, y), A((2, 3)), A((2, 3, 4))),
    fun("np.permute_dims", lambda m, x: m.np.permute_dims(x, (1, 0))),
    fun("np.matrix_transpose", lambda m, x: m.np.matrix_transpose(x), A((2, 3, 4))),
    fun("np.unstack", lambda m, x: m.np.unstack(x, axis=1)),
    fun("np.cumulative_prod", lambda m, x: m.np.cumulative_prod(x, axis=0, include_initial=True)),
    fun("np.diagflat", lambda m, x: m.np.diagflat(x, k=1), A((3,))),
    fun("np.fill_diagonal", lambda m, x, v: m.np.fill_diagonal(x, v, inplace=False), A((3, 3)), A((3,))),
    fun("np.take with clip", lambda m, x: m.np.take(x, np.array([0, 3, -1]), mode="clip")),
    fun(
        "np.setdiff1d with size",
        lambda m, x, y: m.np.setdiff1d(x, y, size=3, fill_value=-1),
        A((5,), 0, 9, dtype="int32"),
        A((3,), 0, 9, dtype="int32"),
        batch=False,
    ),
    fun(
        "np.polyfit", lambda m, x, y: m.np.polyfit(x, y, 2), A((8,), distinct=True), A((8,)), order=1, tol=10
    ),
    fun("np.polyder", lambda m, c: m.np.polyder(c), A((4,))),
    fun("np.polyint", lambda m, c: m.np.polyint(c), A((4,))),
    fun(
        "np.vectorize",
        lambda m, x, y: m.np.vectorize(lambda a, b: a @ b, signature="(n),(n)->()")(x, y),
        A((2, 3)),
        A((3,)),
    ),
    fun("np.bitwise_count", lambda m, x: m.np.bitwise_count(x), BYTES),
    fun("np.packbits", lambda m, x: m.np.packbits(x), A((11,), 0, 1, dtype="uint8")),
    fun("np.unpackbits", lambda m, x: m.np.unpackbits(x), BYTES),
    fun("np.linspace", lambda m, a, b: m.np.linspace(a, b, 7), A((3,)), A((3,))),
    fun("np.geomspace", lambda m, a, b: m.np.geomspace(a, b, 5), A((), 0.5, 1), A((), 2, 9), tol=2),
]
NN = [
    fun(
        "nn.dot_product_attention",
        lambda m, q, k, v: m.nn.dot_product_attention(q, k, v, is_causal=True),
        A((2, 5, 4, 3)),
        A((2, 5, 2, 3)),
        A((2, 5, 2, 3)),
        tol=2,
        dtypes=("float32",),
    ),
    fun(
        "nn.dot_product_attention in float64",
        lambda m, q, k, v: m.nn.dot_product_attention(q, k, v),
        A((2, 5, 4, 3)),
        A((2, 5, 2, 3)),
        A((2, 5, 2, 3)),
        order=0,
        dtypes=("float64",),
        differs=("JAX's attention takes the softmax in float32", ("value", "vmap")),
    ),
    fun(
        "nn.softmax where",
        lambda m, x, w: m.nn.softmax(x, where=w),
        X,
        A((3, 4), dtype="bool", make=lambda w: w | (np.arange(4) == 1)),
    ),
    fun("nn.gelu exact", lambda m, x: m.nn.gelu(x, approximate=False)),
    fun("nn.sparse_plus", lambda m, x: m.nn.sparse_plus(x)),
    fun("nn.log1mexp", lambda m, x: m.nn.log1mexp(x), A((4,), 0.2, 3), order=1),
]
SIZES = A((3,), 0, 4, dtype="int32")
OF_JAX = {"order": 1, "batch": False, "tol": 2}  # JAX maps their first axes only, and sums have no derivative
GROUPS = [
    fun("lax.ragged_dot", lambda m, *args: m.lax.ragged_dot(*args), A((9, 4)), A((3, 4, 5)), SIZES, **OF_JAX),
    fun("lax.ragged_dot_general of sums", ragged, A((9, 4)), A((9, 5)), SIZES, **{**OF_JAX, "order": 0}),
    fun(
        "lax.ragged_dot_general, columns first",
        lambda m, *args: ragged(m, *args, contract=((0,), (2,)), ragged=(1,), groups=(1,)),
        A((4, 9)),
        A((5, 3, 4)),
        SIZES,
        **OF_JAX,
    ),
]
RULES = [
    fun("custom_vmap", lambda m, x, y: m.vmap(doubled(m))(x, y), A((4,)), A((4,)), order=0),
    fun(
        "custom_vmap of one operand",
        lambda m, x, y: m.vmap(doubled(m), (0, None))(x, y),
        A((4,)),
        A(()),
        order=0,
        batch=False,
    ),
    fun("closure_convert", closed, A((4,)), order=0),
    *(
        fun(f"checkpoint policy {n}", policy(n), X, W, order=1, tol=2)
        for n in "everything_saveable nothing_saveable dots_saveable dots_with_no_batch_dims_saveable".split()
    ),
    fun("named_scope", lambda m, x: m.named_call(m.np.sin, name="here")(x)),
    fun(
        "pure_callback",
        lambda m, x: m.pure_callback(
            lambda a: np.asarray(a) * 2, m.eval_shape(lambda: x), x, vmap_method="expand_dims"
        ),
        order=0,
    ),
    fun(
        "custom_gradient",
        lambda m, x: m.grad(lambda x: m.np.sum(m.custom_gradient(lambda x: (x**2, lambda g: 5 * g * x))(x)))(
            x
        ),
        order=0,
    ),
    fun(
        "ravel_pytree",
        lambda m, x, y: (lambda v, back: back(v * 2))(*m.flatten_util.ravel_pytree({"b": x, "a": [y]})),
        X,
        A((2,)),
    ),
]
ROWS = [*LAX, *NUMPY, *NN, *GROUPS, *RULES]
