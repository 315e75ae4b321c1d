"""Rows against JAX: Fourier transforms, convolutions, windows and pooling."""

from tests.peers.peer_row import A, Row


def fun(name, f, *args, **more):
    """A row with a function of its own."""
    return Row(name, args, f, **more)


X, Z = A((4, 6)), A((4, 6), dtype="complex")
FFT = [
    *(
        fun(f"np.fft.{n}", lambda m, x, n=n: getattr(m.np.fft, n)(x), Z)
        for n in "fft ifft fft2 ifft2 fftn ifftn fftshift ifftshift".split()
    ),
    *(
        fun(f"np.fft.{n}", lambda m, x, n=n: getattr(m.np.fft, n)(x), X)
        for n in "rfft rfft2 rfftn ihfft".split()
    ),
    *(
        fun(f"np.fft.{n}", lambda m, x, n=n: getattr(m.np.fft, n)(x), Z)
        for n in "irfft irfft2 irfftn hfft".split()
    ),
    *(
        fun(
            f"np.fft.fft {norm} of {k} over the first axis",
            lambda m, x, norm=norm, k=k: m.np.fft.fft(x, k, 0, norm),
            Z,
        )
        for norm, k in (("ortho", 3), ("forward", 7), ("backward", 5))
    ),
    fun(
        "np.fft.rfft of real numbers, back",
        lambda m, x: m.np.fft.irfft(m.np.sin(m.np.abs(m.np.fft.rfft(x, axis=0)) + 1), 4, axis=0),
        X,
    ),
    fun("np.fft.irfft of an odd length", lambda m, x: m.np.fft.irfft(x, 9), Z),
    fun("lax.fft", lambda m, x: m.lax.fft(x, "fft", (4, 6)), Z),
]
IMAGE, KERNEL = A((2, 4, 7, 6)), A((6, 4, 3, 2))


def conv(name, image, kernel, *args, **more):
    """A convolution."""
    return fun(
        f"lax.conv_general_dilated {name}",
        lambda m, x, w: m.lax.conv_general_dilated(x, w, *args, **more),
        image,
        kernel,
        tol=2,
    )


CONV = [
    conv("same", IMAGE, KERNEL, (1, 1), "SAME"),
    conv("strided", IMAGE, KERNEL, (2, 3), "VALID"),
    conv("padded unevenly", IMAGE, KERNEL, (2, 1), ((1, 2), (0, 3))),
    conv("with negative padding", IMAGE, KERNEL, (1, 1), ((-1, 2), (0, -1))),
    conv("dilated", IMAGE, KERNEL, (1, 1), ((2, 2), (1, 1)), rhs_dilation=(2, 3)),
    conv("transposed", IMAGE, KERNEL, (1, 1), ((2, 1), (1, 1)), lhs_dilation=(2, 3)),
    conv(
        "dilated in every way",
        IMAGE,
        KERNEL,
        (2, 1),
        ((2, 1), (3, 1)),
        lhs_dilation=(2, 1),
        rhs_dilation=(1, 3),
    ),
    conv("in groups", IMAGE, A((6, 2, 3, 2)), (1, 2), "SAME", feature_group_count=2),
    conv("of each channel", IMAGE, A((8, 1, 3, 2)), (1, 1), "SAME", feature_group_count=4),
    conv("in groups of the batch", IMAGE, KERNEL, (1, 1), "VALID", batch_group_count=2),
    conv(
        "NHWC", A((2, 6, 5, 3)), A((3, 2, 3, 4)), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    conv(
        "HWNC to CHWN",
        A((6, 5, 2, 3)),
        A((3, 3, 2, 4)),
        (2, 1),
        "SAME",
        dimension_numbers=("HWNC", "IHWO", "CHWN"),
    ),
    conv("of one dimension", A((2, 3, 8)), A((4, 3, 3)), (2,), "SAME"),
    conv("of three dimensions", A((1, 2, 4, 3, 5)), A((2, 2, 2, 2, 3)), (1, 1, 2), "SAME"),
    fun("lax.conv", lambda m, x, w: m.lax.conv(x, w, (1, 2), "SAME"), IMAGE, KERNEL),
    fun(
        "lax.conv_transpose",
        lambda m, x, w: m.lax.conv_transpose(x, w, (2, 2), "SAME"),
        A((1, 4, 4, 2)),
        A((3, 3, 2, 3)),
    ),
    fun(
        "lax.conv_transpose valid",
        lambda m, x, w: m.lax.conv_transpose(x, w, (2, 1), "VALID", transpose_kernel=True),
        A((1, 4, 4, 2)),
        A((3, 2, 3, 2)),
    ),
    fun(
        "lax.conv_general_dilated_patches",
        lambda m, x: m.lax.conv_general_dilated_patches(x, (2, 3), (1, 2), "SAME"),
        A((2, 2, 5, 6)),
    ),
    fun(
        "lax.conv_general_dilated_local",
        lambda m, x, w: m.lax.conv_general_dilated_local(x, w, (1,), "VALID", (3,)),
        A((2, 2, 5)),
        A((4, 6, 3)),
    ),
    fun(
        "a convolution under vmap of both",
        lambda m, x, w: m.vmap(lambda x, w: m.lax.conv(x[None], w, (1, 1), "SAME")[0])(x, w),
        A((3, 2, 4, 4)),
        A((3, 2, 2, 3, 3)),
    ),
]
D = A((2, 6, 5), distinct=True)
WINDOWS = [
    *(
        fun(
            f"lax.reduce_window {n} {padding}",
            lambda m, x, n=n, padding=padding: m.lax.reduce_window(
                x,
                x.dtype.type({"max": -float("inf"), "min": float("inf"), "add": 0}[n]),
                getattr(m.lax, n),
                (1, 3, 2),
                (1, 2, 1),
                padding,
            ),
            D,
        )
        for n in ("max", "min", "add")
        for padding in ("VALID", "SAME")
    ),
    fun(
        "lax.reduce_window add dilated",
        lambda m, x: m.lax.reduce_window(
            x,
            x.dtype.type(0),
            m.lax.add,
            (1, 2, 2),
            (1, 1, 2),
            ((0, 0), (2, 1), (1, 1)),
            (1, 2, 1),
            (1, 2, 2),
        ),
        D,
    ),
    fun(
        "lax.reduce_window max dilated",
        lambda m, x: m.lax.reduce_window(
            x,
            x.dtype.type(-float("inf")),
            m.lax.max,
            (1, 2, 2),
            (1, 1, 2),
            ((0, 0), (1, 1), (1, 1)),
            None,
            (1, 2, 2),
        ),
        D,
        order=0,
    ),
    fun("lax.reduce", lambda m, x: m.lax.reduce(x, x.dtype.type(0), m.lax.add, (1,)), D),
]
ROWS = [*FFT, *CONV, *WINDOWS]
