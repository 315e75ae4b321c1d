"""Fingerprints of programs: differences they must show, and must not."""

import dataclasses
import os
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

import blufunc as bf
import blufunc.numpy as bnp
from blufunc import extend, lax, nn
from blufunc.core.arrays import backend
from blufunc.core.arrays.array import from_numpy
from blufunc.core.ir.avals import ShapedArray
from blufunc.core.ir.jaxpr import Eqn, Jaxpr, Literal, Var
from blufunc.core.programs.simplify import simplify
from blufunc.kernels.cache import fingerprint
from blufunc.kernels.cache.fingerprint import Fingerprint, NoFingerprint

F32 = np.float32


def struct(*shape, dtype=F32):
    return bf.ShapeDtypeStruct(shape, dtype)


def spelled(f, *args, **options):
    return Fingerprint(simplify(bf.jit(f, **options).trace(*args).jaxpr))


def program(x, y=None):
    with bf.named_scope("outer"):
        z = bnp.sin(x) * 2.0 + x.sum(0)
    return lax.scan(lambda c, r: (c + r, c * r), z[0], z)[1]


# What is the same in all but one thing: the name of the change, the program, and its arguments.
X = struct(8, 16)
CHANGES = {
    "the shape": (program, struct(8, 17)),
    "the dtype": (program, struct(8, 16, dtype=np.float16)),
    "a parameter more": (program, X, struct(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_types_tell_programs_apart(change):
    f, *args = CHANGES[change]
    assert spelled(program, X).digest != spelled(f, *args).digest


def edited(change):
    """The jaxpr of ``program`` with one change to the equation of a primitive."""
    jaxpr = simplify(bf.jit(program).trace(X).jaxpr)
    name, change = EDITS[change]
    (eqn,) = [e for e in jaxpr.eqns if e.prim.name == name]
    return jaxpr.replace(eqns=[change(e) if e is eqn else e for e in jaxpr.eqns])


def with_params(**params):
    return lambda e: Eqn(e.prim, e.invars, e.outvars, e.params | params, e.source)


def with_line(line):
    return lambda e: Eqn(e.prim, e.invars, e.outvars, e.params, line(e.source))


def another_body(e):
    body = e.params["jaxpr"]
    renamed = body.replace(name="another")
    return with_params(jaxpr=renamed)(e)


EDITS = {
    "nothing": ("sin", lambda e: e),
    "the primitive": ("sin", lambda e: Eqn(lax.cos_p, e.invars, e.outvars, e.params, e.source)),
    "a parameter": ("scan", with_params(reverse=True)),
    "a number's class": ("scan", with_params(length=8.0)),
    "a number's sign": ("scan", with_params(length=-0.0)),
    "another sign": ("scan", with_params(length=0.0)),
    "a body": ("scan", another_body),
    "an operand": ("mul", lambda e: e.with_vars([e.invars[0], e.invars[0]], e.outvars)),
    "the order of operands": ("mul", lambda e: e.with_vars(e.invars[::-1], e.outvars)),
    "the instruction": ("sin", with_line(lambda s: (s[0], 0, *s[2:]))),
    "the scope": ("sin", with_line(lambda s: (*s[:2], ("inner",)))),
    "the file": ("sin", with_line(lambda s: (s[0].replace(co_filename="other.py"), *s[1:]))),
    "where a function begins": (
        "sin",
        with_line(lambda s: (s[0].replace(co_firstlineno=1 + s[0].co_firstlineno), *s[1:])),
    ),
    "the bytecode": ("sin", with_line(lambda s: (s[0].replace(co_code=s[0].co_code[:-2] + b"\0\0"), *s[1:]))),
    "no line": ("sin", with_line(lambda s: None)),
}


def test_folders_of_files_do_not_count(monkeypatch):
    """A notebook's cells lie in one of each process."""
    digests = set()
    for folder in ("", "/tmp/ipykernel_1/", "/tmp/ipykernel_2/"):
        place = with_line(lambda s, folder=folder: (s[0].replace(co_filename=f"{folder}cell.py"), *s[1:]))
        monkeypatch.setitem(EDITS, "the folder", ("sin", place))
        digests.add(Fingerprint(edited("the folder")).digest)
    assert len(digests) == 1


def scalars(parameter=False, result=False, literal=False):
    """``sin(x) * 2`` of a scalar, with these of its types weak."""
    two = Literal(from_numpy(np.array(2, F32), backend.host_device(), literal))
    x, y, z = (Var(ShapedArray((), np.dtype(F32), weak)) for weak in (parameter, result, False))
    eqns = [Eqn(lax.sin_p, [x], [y], {}, None), Eqn(lax.mul_p, [y, two], [z], {}, None)]
    return Fingerprint(Jaxpr([x], eqns, [z]))


def test_weak_types_count():
    weak = [{}, {"parameter": True}, {"result": True}, {"literal": True}]
    assert len({scalars(**which).digest for which in weak}) == len(weak)
    assert scalars().digest == scalars().digest


def test_all_that_an_equation_has_tells_programs_apart():
    digests = {change: Fingerprint(edited(change)).digest for change in EDITS}
    assert digests["nothing"] == spelled(program, X).digest
    assert len(set(digests.values())) == len(EDITS), digests


def test_values_of_literals_count_and_those_of_constants_do_not():
    times = lambda by: spelled(lambda x: x * by, X).digest
    assert len({times(2.0), times(3.0), times(0.0), times(-0.0)}) == 4
    arrays = [bnp.asarray(np.full((8, 16), v, F32)) for v in (1, 2)]
    first, second = (times(a) for a in arrays)
    assert first == second != times(bnp.asarray(np.ones((8, 16), np.float16)))


def test_names_of_arguments_count():
    """They are in the labels of plans, and in kernels."""
    both = lambda tree: [x + 1 for x in tree.values()]
    assert spelled(both, {"a": X}).digest != spelled(both, {"b": X}).digest


def test_two_traces_are_one_text():
    """Sharing, and other programs traced in between, do not matter."""
    first = spelled(program, X)
    for _ in range(40):  # by then the interpreter has specialised what runs
        spelled(lambda x: bnp.cos(x) + program(x)[0], X)
    second = spelled(program, X)
    assert first.digest == second.digest
    assert [c.co_name for c in second.codes] == [c.co_name for c in first.codes]


SCRIPT = """
    import blufunc as bf, numpy as np
    from blufunc.core.programs.simplify import simplify
    from blufunc.kernels.cache.fingerprint import Fingerprint

    def f(p, x):
        y = bf.nn.gelu(x @ p["w"]) @ p["v"] + {str(i): i for i in range(3)}["2"]
        return bf.nn.dot_product_attention(*[y.reshape(1, 16, 2, 8)] * 3, is_causal=True).sum()

    p = {"w": bf.ShapeDtypeStruct((16, 32), "float32"), "v": bf.ShapeDtypeStruct((32, 16), "float32")}
    traced = bf.jit(bf.value_and_grad(bf.autocast(f))).trace(p, bf.ShapeDtypeStruct((16, 16), "float32"))
    print(Fingerprint(simplify(traced.jaxpr)).digest)
"""


@pytest.mark.slow
def test_processes_agree(tmp_path):
    """With different hashes of strings, and so different orders of sets."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    found = [
        subprocess.run(
            [sys.executable, script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] and len(found[0]) == 65


# -- what has no text ------------------------------------------------------------------------------


class Twice(extend.Primitive):
    name = "twice_of_a_user"

    def impl(self, x):
        return 2 * x

    def abstract(self, x):
        return x


twice_p = Twice()


def custom(x):
    return bnp.sin(x)


custom_jvp = bf.custom_jvp(custom)
custom_jvp.defjvp(lambda primals, tangents: (custom_jvp(*primals), tangents[0]))

UNSPELLED = {
    "a user's primitive": (lambda x: twice_p.bind(x), "twice_of_a_user at test_fingerprint.py:"),
    "a callback": (
        lambda x: bf.pure_callback(np.sin, X, x),
        "pure_callback at test_fingerprint.py:",
    ),
    "one in a loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, c: twice_p.bind(c), x),
        "twice_of_a_user at test_fingerprint.py:",
    ),
    "a user's kernel": (
        bf.cuda_kernel("out[i] = x[i];", reference=lambda x: x, name="copied"),
        "cuda_kernel at test_fingerprint.py:",
    ),
}


@pytest.mark.parametrize("what", UNSPELLED)
def test_what_has_no_text_is_named(what):
    f, where = UNSPELLED[what]
    with pytest.raises(NoFingerprint, match="has") as e:
        spelled(lambda x: f(x) + 1, X)
    assert str(e.value).startswith(where) and str(e.value).count(" has ") == 1


@pytest.mark.parametrize("value", [object(), lambda x: x, np.sin, dataclasses.make_dataclass("D", ["x"])(1)])
def test_values_without_text(value):
    jaxpr = simplify(bf.jit(program).trace(X).jaxpr)
    eqns = [with_params(more=value)(e) for e in jaxpr.eqns]
    with pytest.raises(NoFingerprint):
        Fingerprint(jaxpr.replace(eqns=eqns))


def test_rules_of_functions_are_no_part_of_programs():
    """A function with a rule is its body: so where it stands in a loop, too."""
    loop = lambda f: lambda x: lax.fori_loop(0, 3, lambda i, c: f(c), x)
    assert spelled(loop(custom_jvp), X).digest
    assert spelled(loop(nn.relu), X).digest


def test_primitives_are_those_that_modules_have_now(monkeypatch):
    """A user's class in a blufunc module is rejected, and so is a replaced primitive."""
    monkeypatch.setattr(lax, "twice_p", twice_p, raising=False)
    ours = type(lax.sin_p)("sine_of_a_user", np.sin, "inexact")
    monkeypatch.setattr(lax, "sine_of_a_user_p", ours, raising=False)
    assert fingerprint.name_of(ours) == "blufunc.lax:sine_of_a_user_p"
    monkeypatch.setattr(lax, "sine_of_a_user_p", lax.cos_p)
    for prim in (twice_p, ours):
        with pytest.raises(NoFingerprint, match="not blufunc's own"):
            fingerprint.name_of(prim)


@pytest.mark.parametrize("package", ["numpyro", "numpy_of_a_user.numpy", "blufunc_extras", "builtins2"])
def test_packages_that_are_called_alike(package, monkeypatch):
    module = types.ModuleType(package)
    module.Settings = type("Settings", (), {"__module__": package})
    monkeypatch.setitem(sys.modules, package, module)
    with pytest.raises(NoFingerprint, match=f"Settings of {package}"):
        fingerprint._global_name(module.Settings)
    assert fingerprint._global_name(np.float32) == "numpy:float32"


def test_our_primitives_have_names():
    for prim in (lax.sin_p, lax.scan_p, lax.dot_general_p):
        module, _, name = fingerprint.name_of(prim).partition(":")
        assert getattr(sys.modules[module], name) is prim
