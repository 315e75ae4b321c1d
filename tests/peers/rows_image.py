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
SIGNAL, KERNEL = A((6, 5)), A((3, 4))
SPECTRAL = {"nperseg": 8, "noverlap": 3, "nfft": 12, "fs": 4.0, "detrend": "linear"}
SIGNALS = [
    *(
        fun(
            f"scipy.signal.{name} {mode}",
            lambda m, x, y, name=name, mode=mode: getattr(m.scipy.signal, name)(x, y, mode=mode),
            SIGNAL,
            KERNEL,
        )
        for name, mode in (
            ("convolve", "full"),
            ("convolve", "same"),
            ("correlate", "valid"),
            ("correlate", "same"),
            ("fftconvolve", "same"),
            ("fftconvolve", "full"),
            ("convolve2d", "same"),
            ("correlate2d", "same"),
        )
    ),
    fun(
        "scipy.signal.correlate of complex numbers",
        lambda m, x, y: m.scipy.signal.correlate(x, y),
        A((6,), dtype="complex"),
        A((4,), dtype="complex"),
    ),
    fun("scipy.signal.detrend", lambda m, x: m.scipy.signal.detrend(x, bp=2), SIGNAL),
    fun("scipy.signal.stft", lambda m, x: m.scipy.signal.stft(x, **SPECTRAL), A((2, 20)), order=1),
    fun("scipy.signal.istft", lambda m, z: m.scipy.signal.istft(z)[1], A((5, 6), dtype="complex"), order=1),
    fun("scipy.signal.welch", lambda m, x: m.scipy.signal.welch(x, **SPECTRAL), A((2, 20)), order=1, tol=2),
    fun(
        "scipy.signal.csd",
        lambda m, x, y: m.scipy.signal.csd(x, y, **SPECTRAL),
        A((2, 20)),
        A((2, 20)),
        order=1,
        tol=2,
    ),
    *(
        fun(
            f"scipy.fft.{name} {norm}",
            lambda m, x, name=name, norm=norm: getattr(m.scipy.fft, name)(x, norm=norm),
            SIGNAL,
        )
        for name in ("dct", "idct", "dctn", "idctn")
        for norm in (None, "ortho")
    ),
]
INTERPOLATION = [
    *(
        fun(
            f"scipy.ndimage.map_coordinates {mode} {order}",
            lambda m, x, c, mode=mode, order=order: m.scipy.ndimage.map_coordinates(x, list(c), order, mode),
            SIGNAL,
            A((2, 9), -4.0, 8.0),
            order=1,
        )
        for mode in ("constant", "nearest", "wrap", "mirror", "reflect")
        for order in (0, 1)
    ),
    *(
        fun(
            f"scipy.interpolate.RegularGridInterpolator {method}",
            lambda m, x, p, v, method=method: m.scipy.interpolate.RegularGridInterpolator(
                (m.np.cumsum(x), m.np.arange(5.0, dtype=x.dtype)), v, method, fill_value=1.0
            )(p),
            A((6,), 0.5, 1.0),
            A((7, 2), 0.2, 4.5),
            SIGNAL,
            order=1,
            tol=4,
        )
        for method in ("linear", "nearest")
    ),
    fun("scipy.integrate.trapezoid", lambda m, y, x: m.scipy.integrate.trapezoid(y, x), A((5,)), A((5,))),
    fun("scipy.cluster.vq.vq", lambda m, x, c: m.scipy.cluster.vq.vq(x, c), A((6, 3)), A((2, 3)), order=0),
]


def rotation(m):
    return m.scipy.spatial.transform.Rotation


QUAT = A((3, 4), 0.1, 2)
ROTATIONS = [
    *(
        fun(
            f"scipy.spatial.transform.Rotation.as_{form}",
            lambda m, q, form=form: getattr(rotation(m).from_quat(q), f"as_{form}")(),
            QUAT,
            order=1,
            batch=False,
        )
        for form in ("matrix", "rotvec", "mrp", "quat")
    ),
    *(
        fun(
            f"scipy.spatial.transform.Rotation euler {seq}",
            lambda m, a, seq=seq: rotation(m).from_euler("zxz", a).as_euler(seq),
            A((2, 3), 0.2, 0.9),
            order=1,
            batch=False,
            tol=4,
        )
        for seq in ("xyz", "ZYX", "zyz")
    ),
    fun(
        "scipy.spatial.transform.Rotation.from_matrix",
        lambda m, q: rotation(m).from_matrix(rotation(m).from_quat(q).as_matrix()).as_quat(),
        A((4,), 0.1, 2),
        order=0,
    ),
    fun(
        "scipy.spatial.transform.Rotation.from_rotvec",
        lambda m, v, p: (lambda r: (r.apply(p), r.inv().magnitude(), (r * r).as_quat()))(
            rotation(m).from_rotvec(v)
        ),
        A((2, 3), 0.1, 1),
        A((2, 3)),
        order=1,
        batch=False,
    ),
    fun(
        "scipy.spatial.transform.Slerp",
        lambda m, t, v: m.scipy.spatial.transform.Slerp.init(
            m.np.arange(3.0, dtype=v.dtype), rotation(m).from_rotvec(v)
        )(t).as_matrix(),
        A((4,), 0.1, 1.9),
        A((3, 3), 0.1, 1),
        order=0,
        batch=False,
    ),
]
ROWS = [*IMAGE, *SIGNALS, *INTERPOLATION, *ROTATIONS]
