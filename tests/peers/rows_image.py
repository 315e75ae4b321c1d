"""Rows against JAX: ``image``, ``scipy.signal``, ``scipy.fft`` and interpolation."""

from tests.peers.peer_row import A, Row

X = A((5, 7))


def fun(name, f, *args, **more):
    """A row with a function of its own."""
    return Row(name, args, f, **more)


METHODS = "nearest linear cubic cubic-pytorch lanczos3 lanczos5 area".split()
IMAGE = [
    *(
        fun(
            f"image.resize {method} {shape} {antialias=}",
            lambda m, x, method=method, shape=shape, antialias=antialias: m.image.resize(
                x, shape, method, antialias
            ),
            X,
            order=1,
        )
        for method in METHODS
        for shape, antialias in (((3, 9), True), ((3, 9), False), ((11, 3), True))
    ),
    *(
        fun(
            f"image.scale_and_translate {method}",
            lambda m, x, s, t, method=method: m.image.scale_and_translate(x, (6, 4), (0, 1), s, t, method),
            X,
            A((2,), 0.6, 1.3),
            A((2,), -0.7, 0.7),
            order=1,
            tol=20,
        )
        for method in METHODS[1:]
    ),
]
ROWS = [*IMAGE]
