"""Golden plans and sources of the model families: they change only on purpose.

Goldens are in ``tests/goldens/programs``, two kinds a family: the plans as text, to be read in a diff, and a digest of
each kernel of its C++ and CUDA, so that the diff says which kernels changed. ``make goldens`` rewrites them; to see how
a kernel changed, write both versions with ``python -m tests.kernels.golden_programs DIR`` and compare the folders.
"""

import hashlib
import re

import pytest

from benchmarks.suites.families import FAMILIES
from blufunc.config import config
from tests.kernels import golden_programs

_FUNCTION = re.compile(r'^extern "C" [^;{]*?\b(?!__)(\w+)\([^;{]*\{.*?^\}', re.MULTILINE | re.DOTALL)


def digests(source):
    """Lines and digest of each entry function of a source, then of the rest."""
    functions = [(m[1], m[0]) for m in _FUNCTION.finditer(source)]
    rows = [*functions, ("(declarations)", _FUNCTION.sub("", source))]
    return "\n".join(
        f"{len(text.splitlines()):5} {hashlib.sha256(text.encode()).hexdigest()[:16]} {name}"
        for name, text in rows
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_plans_and_sources(family, golden, monkeypatch):
    monkeypatch.setattr(config, "host_compiler", "always")
    monkeypatch.setattr(config, "cpu_devices", 8)
    texts = golden_programs.generated(family)
    sources = {file: texts.pop(file) for file in (f"{family}.cpp", f"{family}.cu")}
    golden(f"programs/{family}.sources", "\n".join(f"{f}\n{digests(s)}" for f, s in sources.items()))
    for file, plan in texts.items():
        golden(f"programs/{file}", plan)


def test_digests_tell_which_function_changed():
    source = '// a\nint one;\nextern "C" void f(\n  int n\n) {\n  if (n) {\n  }\n}\nextern "C" void g(int n) {\n}\n'
    changed = source.replace("if (n)", "if (!n)")
    before, after = (digests(s).splitlines() for s in (source, changed))
    assert [row.split()[2] for row in before] == ["f", "g", "(declarations)"]
    assert [row.split()[0] for row in before] == ["6", "2", "4"]
    assert [a == b for a, b in zip(before, after)] == [False, True, True]
    moved = digests(source.replace("int one", "int two")).splitlines()
    assert [a == b for a, b in zip(before, moved)] == [True, True, False]
