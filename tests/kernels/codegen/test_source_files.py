"""The loader of sources in files: parts, constants, and what goes in front."""

import pytest

from blufunc.kernels.codegen import source_files

FILE = """// For readers.
int not_a_part;

//# one 1st
int one() { return ONE; }  //# no part

//# two

int two() { return TWO; }
"""


@pytest.fixture
def path(monkeypatch):
    monkeypatch.setattr(source_files.pkgutil, "get_data", lambda package, path: {"a.h": FILE.encode()}[path])
    source_files.parts.cache_clear()
    yield "a.h"
    source_files.parts.cache_clear()


def test_parts(path):
    assert list(source_files.parts(path)) == ["one 1st", "two"]
    assert source_files.parts(path)["two"] == "int two() { return TWO; }\n"
    with pytest.raises(TypeError):
        source_files.parts(path)["two"] = ""  # they are shared


def test_whole_files_and_parts(path):
    parts = source_files.parts(path)
    assert source_files.source(path) == parts["one 1st"] + "\n" + parts["two"]
    assert source_files.source(path, "two") == parts["two"]
    with pytest.raises(KeyError, match="three"):
        source_files.source(path, "three")


def test_constants_are_in_front(path):
    made = source_files.source(path, "two", TWO=2, FLAG=True, ELEMENT='"bf16"')
    assert made.splitlines()[:3] == [
        "constexpr int TWO = 2;",
        "constexpr bool FLAG = true;",
        '#define ELEMENT "bf16"',
    ]
    assert made.endswith(source_files.parts(path)["two"])
