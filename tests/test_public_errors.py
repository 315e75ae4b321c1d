"""Bad arguments of public functions: blufunc errors, never internal ones.

Every public function is called with junk in each of its positional slots, the others often being valid. The
result must be a ``BlufuncError``, or the ``TypeError`` of a call that does not fit the signature.
"""

import inspect
import traceback
import types
import warnings

import pytest

import blufunc as bf
import blufunc.numpy as bnp
import blufunc.scipy.linalg
import blufunc.scipy.special
from blufunc import ad_checkpoint, debug, errors, lax, nn, random, testing
from blufunc.core.primitives.primitive import Primitive

KEY = random.key(0)
ONE, MATRIX, POSITIONS = bnp.ones(()), bnp.ones((2, 3)), bnp.arange(3)

BAD = [None, "a", -1, 99, 1.5, 1j, (), (0, 0), [1], {}, object(), KEY, ONE, MATRIX, POSITIONS]
GOOD = [MATRIX, 1]  # values of the required slots that are not under test

EFFECTS = types.SimpleNamespace(
    pure_callback=bf.pure_callback,
    io_callback=bf.io_callback,
    named_scope=bf.named_scope,
    named_call=bf.named_call,
)
FACES = {"numpy": bnp, "lax": lax, "nn": nn, "random": random}
FACES |= {"cache": nn.cache, "lora": nn.lora, "reparametrize": nn.reparametrize}
FACES |= {"linalg": bnp.linalg, "fft": bnp.fft, "lax_linalg": lax.linalg, "scipy_linalg": bf.scipy.linalg}
DERIVATIVES = types.SimpleNamespace(
    autocast=bf.autocast,
    autocast_table=bf.autocast_table,
    hessian=bf.hessian,
    jacfwd=bf.jacfwd,
    jacrev=bf.jacrev,
)
FACES |= {"scipy_special": bf.scipy.special}
FACES |= {"derivatives": DERIVATIVES}
FACES |= {"custom_batching": bf.custom_batching, "custom_derivatives": bf.custom_derivatives}
FACES |= {"optim": bf.optim, "tree_utils": bf.optim.tree_utils, "stats": bf.scipy.stats}
DISTRIBUTIONS = [
    name for name in bf.scipy.stats.__all__ if isinstance(getattr(bf.scipy.stats, name), types.ModuleType)
]
FACES |= {f"stats_{name}": getattr(bf.scipy.stats, name) for name in DISTRIBUTIONS}
FACES |= {"tree": bf.tree, "tree_util": bf.tree_util, "ops": bf.ops}
FACES |= {"devices": types.SimpleNamespace(typeof=bf.typeof, **{n: getattr(bf, n) for n in (
    "default_backend", "device_count", "devices", "local_device_count", "local_devices", "process_count",
    "process_index")})}  # fmt: skip
FACES |= {"meshes": types.SimpleNamespace(**{n: getattr(bf, n) for n in (
    "device_put", "make_array_from_callback", "make_array_from_process_local_data",
    "make_array_from_single_device_arrays", "make_mesh", "sharding_svg", "visualize_sharding")})}  # fmt: skip
FACES |= {"multihost": bf.multihost}
FACES |= {"partition_specs": types.SimpleNamespace(
    P=lambda *entries: bf.P(*entries), owed=lambda x, y: bf.P(unreduced=x, reduced=y),
    NamedSharding=lambda mesh, spec: bf.NamedSharding(mesh, spec), Mesh=lambda devices, names: bf.Mesh(devices, names),
    AbstractMesh=lambda sizes, names: bf.AbstractMesh(sizes, names))}  # fmt: skip
FACES |= {"ad_checkpoint": ad_checkpoint, "debug": debug, "effects": EFFECTS, "testing": testing}


def is_function(x):
    """True if x is a function, plain or transformed."""
    return callable(x) and not isinstance(x, (type, types.GenericAlias, Primitive)) and not inspect.isclass(x)


# Called with junk they would write files, change how NumPy prints, or wait for input.
WITH_EFFECTS = {
    "debug.breakpoint",
    "numpy.save",
    "numpy.savez",
    "numpy.printoptions",
    "numpy.set_printoptions",
}

FUNCTIONS = [
    f"{face}.{name}"
    for face, module in FACES.items()
    for name in getattr(module, "__all__", dir(module))
    if not name.startswith("_")
    and is_function(getattr(module, name))
    and f"{face}.{name}" not in WITH_EFFECTS
]


def cases(function, draws):
    """Arguments and options, one of them invalid."""
    parameters = inspect.signature(function).parameters.values()
    slots = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in slots)
    count = len(slots) + any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for good in GOOD:
        for slot in range(min(count, 5)):
            args = [KEY if draws and not i else good for i in range(max(slot, required))]
            args[required:] = [p.default for p in slots[required : len(args)]]
            for bad in BAD:
                yield [*args[:slot], bad, *args[slot + 1 :]], {}
        args = [KEY if draws and not i else good for i in range(required)]
        for p in parameters:
            if p.kind is p.KEYWORD_ONLY:
                for bad in BAD:
                    yield args, {p.name: bad}


@pytest.mark.sampled(150)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_junk_gets_an_error_of_blufunc(name):
    face, function = name.split(".")
    f = getattr(FACES[face], function)
    leaks = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args, options in cases(f, face == "random"):
            try:
                f(*args, **options)
            except errors.BlufuncError:
                pass
            except Exception as e:
                if isinstance(e, TypeError) and len(traceback.extract_tb(e.__traceback__)) == 1:
                    continue  # Python's own: the arguments do not fit the signature
                leaks.setdefault(f"{type(e).__name__}: {e}", (args, options))
    assert not leaks, leaks


WRONG = {
    "a slice of step 0": (lambda: MATRIX[::0], errors.ValueRangeError),
    "an update of step 0": (lambda: MATRIX.at[::0].set(1), errors.ValueRangeError),
    "a slice by a string": (lambda: MATRIX["a":], errors.ArgumentError),
    "eye": (lambda: bnp.eye(-1), errors.ValueRangeError),
    "identity": (lambda: bnp.identity(-1), errors.ValueRangeError),
    "tile": (lambda: bnp.tile(MATRIX, -1), errors.ValueRangeError),
    "zeros": (lambda: bnp.zeros((2, -1)), errors.ValueRangeError),
    "concatenate": (lambda: bnp.concatenate(ONE), errors.ArgumentError),
    "lexsort of None": (lambda: bnp.lexsort(None), errors.ArgumentError),
    "lexsort of nothing": (lambda: bnp.lexsort({}), errors.ArgumentError),
    "len": (lambda: len(ONE), errors.ArgumentError),
    "range": (lambda: range(ONE), errors.ArgumentError),
    "hash": (lambda: hash(ONE), errors.ArgumentError),
    "tensordot": (lambda: bnp.tensordot(ONE, MATRIX), errors.ValueRangeError),
    "vander": (lambda: bnp.vander(ONE), errors.ShapeError),
    "glu": (lambda: nn.glu(ONE), errors.ValueRangeError),
    "transpose": (lambda: bnp.transpose(MATRIX, -1), errors.ArgumentError),
    "rot90": (lambda: bnp.rot90(MATRIX, axes=(0,)), errors.ArgumentError),
    "nonzero": (lambda: bnp.nonzero(ONE), errors.ShapeError),
    "einsum": (lambda: bnp.einsum([1, 2]), errors.ArgumentError),
    "nan_to_num": (lambda: bnp.nan_to_num(MATRIX, nan=None), errors.ArgumentError),
    "full_like": (lambda: bnp.full_like(MATRIX, 1j), errors.DtypeError),
    "where": (lambda: bnp.where(MATRIX, 1), errors.ArgumentError),
    "softmax": (lambda: nn.softmax(MATRIX, axis="a"), errors.ArgumentError),
    "dot_general": (lambda: lax.dot_general(MATRIX, MATRIX, None), errors.ArgumentError),
    "pad": (lambda: lax.pad(MATRIX, 0.0, [(0, 0), (0, 0)]), errors.ArgumentError),
    "categorical": (lambda: random.categorical(KEY, MATRIX, axis=None), errors.ArgumentError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_say_what_to_do(name):
    call, error = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert caught.value.what
    assert caught.value.where and caught.value.fix


def test_where_with_a_mask_alone_gives_positions():
    mask = bnp.asarray([[True, False], [False, True]])
    assert [p.tolist() for p in bnp.where(mask)] == [[0, 1], [0, 1]]


def test_the_names_of_random_are_its_own():
    assert {"sort", "max", "sub"}.isdisjoint(dir(random))
    assert all(callable(getattr(random, name)) for name in random.__all__)


@pytest.mark.parametrize(
    "call, dtype",
    [(lambda: lax.bitwise_xor(MATRIX, MATRIX), "int32"), (lambda: lax.exp(POSITIONS), "float32")],
    ids=["integers", "floats"],
)
def test_the_dtype_that_is_proposed_is_accepted(call, dtype):
    with pytest.raises(errors.DtypeError) as caught:
        call()
    assert f"astype('{dtype}')" in caught.value.fix
