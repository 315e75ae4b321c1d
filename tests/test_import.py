"""Lean imports: deferred modules, and access to deferred names."""

import importlib
import pkgutil
import subprocess
import sys
import textwrap
import types

import pytest

import blufunc as bf
from blufunc import _lazy

MODULES = 110
"""Upper bound of imported modules; there were 456 without deferred imports."""

LATER = (
    "scipy",
    "cupy",
    "opt_einsum",
    "threadpoolctl",
    "blufunc.io",
    "blufunc.optim",
    "blufunc.parallel",
    "blufunc.random.keys",
    "blufunc.testing",
    "blufunc.kernels.backends.cpu.program",
    "blufunc.kernels.backends.cuda",
    "blufunc.kernels.pipeline",
)


def loaded_by(program: str) -> set[str]:
    """The modules that a program loads in a fresh process."""
    script = textwrap.dedent(program) + "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.second
@pytest.mark.parametrize(
    "program",
    [
        "import blufunc",
        "import blufunc.numpy as jnp; jnp.ones(3) + 1",
        "from blufunc import grad, jit, lax, nn, vmap",
    ],
    ids=["import", "array", "transforms"],
)
def test_an_import_loads_what_every_program_needs(program):
    modules = loaded_by(program)
    assert not modules & set(LATER)
    assert sum(m.split(".")[0] == "blufunc" for m in modules) <= MODULES


@pytest.mark.slow
def test_a_jitted_program_on_the_cpu_loads_no_cuda_module():
    modules = loaded_by("""
        import blufunc as bf
        bf.config.host_compiler = "always"
        bf.config.plan_cache = False
        bf.jit(bf.grad(lambda x: bf.nn.softmax(x).sum()))(bf.numpy.ones((8, 8)))
    """)
    assert "blufunc.kernels.pipeline" in modules
    assert not {
        m for m in modules if m.startswith(("blufunc.kernels.backends.cuda", "blufunc.parallel", "cupy"))
    }


def packages():
    """All packages of blufunc whose names are deferred."""
    found = [
        importlib.import_module(m.name) for m in pkgutil.walk_packages(bf.__path__, "blufunc.") if m.ispkg
    ]
    return [m for m in [bf, *found] if isinstance(m, _lazy._Package)]


@pytest.mark.parametrize("package", packages(), ids=lambda m: m.__name__)
def test_deferred_names_are_found(package):
    for name in package._deferred:
        assert getattr(package, name) is getattr(package, name)
        assert name in dir(package)
    for name in package.__all__:
        assert not isinstance(getattr(package, name), _lazy._Recorded), name


@pytest.mark.slow
@pytest.mark.parametrize("module", ["blufunc.explain", "blufunc.parallel.recipes.dropless_experts"])
def test_a_function_keeps_its_place_beside_a_module_of_its_name(module):
    package, _, name = module.rpartition(".")
    script = f"import {module}, sys; assert callable(getattr(sys.modules[{package!r}], {name!r}))"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_all_names_at_once():
    namespace: dict = {}
    exec("from blufunc.numpy import *\nfrom blufunc import *", namespace)
    assert namespace["einsum"] is bf.numpy.einsum and namespace["grad"] is bf.grad


def test_recipes_are_found_in_parallel():
    assert set(bf.parallel.recipes.__all__) <= set(dir(bf.parallel))
    assert bf.parallel.pipeline is bf.parallel.recipes.pipeline
    assert isinstance(bf.parallel.pipeline, types.FunctionType)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match=r"'blufunc\.nn' has no attribute 'sofmax'"):
        bf.nn.sofmax
    with pytest.raises(ImportError, match="sofmax"):
        exec("from blufunc.nn import sofmax")


def test_a_deferred_module_is_imported_with_its_first_attribute():
    modules = loaded_by("""
        from blufunc import _lazy
        with _lazy.modules(globals()):
            import colorsys
        import sys
        assert "colorsys" not in sys.modules
        assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)
    """)
    assert "colorsys" in modules


def test_the_autocast_table_does_not_depend_on_what_was_imported():
    code = "import blufunc as bf; print(bf.autocast_table())"
    fresh = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    bf.lax.conv_general_dilated, bf.lax.reduce_window, bf.scipy.special.zeta
    assert fresh.stdout.strip() == bf.autocast_table().strip()
