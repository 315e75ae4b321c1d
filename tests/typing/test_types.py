"""One run of mypy: programs, pages, mistakes and the public names."""

import ast
import importlib
import inspect
import re
import types as pytypes
from pathlib import Path

import pytest

from blufunc.core.ir.array_methods import ArrayMethods
from blufunc.core.ir.trace import Array
from tests.typing import census

pytest.importorskip("mypy")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = ["README.md", "docs/performance.md", "docs/parallelism.md", "docs/attention.md", "docs/sharding.md"]
EXAMPLES = ["examples/gpt/*.py", "examples/ports/*.py"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """One run of mypy: errors of each file, by line, and the types of public names."""
    folder = tmp_path_factory.mktemp("pages") / "pages"
    folder.mkdir()
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.S)
        (folder / f"{Path(page).stem.lower()}.py").write_text("\n".join(blocks))
    files = [*folder.glob("*.py"), *HERE.glob("accepted/*.py"), *HERE.glob("rejected/*.py")]
    files += [path for pattern in EXAMPLES for path in sorted(ROOT.glob(pattern))]
    return census.check(files)


@pytest.mark.slow
def test_programs_are_accepted(checked):
    found = [
        f"{path.name}:{line}: {text}"
        for path, line, _, text in checked.errors
        if "rejected" not in path.parts
    ]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(HERE.glob("rejected/*.py")), ids=lambda path: path.stem)
def test_mistakes_are_found(checked, path):
    wanted = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if marker := re.search(r"# error: ([a-z-]+)$", line):
            wanted[number] = marker[1]
    found = {line: code for where, line, code, _ in checked.errors if where == path}
    assert found == wanted


@pytest.mark.slow
def test_public_functions_say_what_they_return(checked):
    """All callables are seen and annotated; results that are Any have a reason."""
    assert checked.poor() == dict.fromkeys(census.ALLOWED, "returns Any")


@pytest.mark.slow
def test_declared_methods_are_those_that_are_installed():
    """``ArrayMethods`` has the parameters of the functions that are installed."""
    source = ast.parse(inspect.getsource(ArrayMethods))
    (cls,) = source.body
    for node in cls.body:
        if not isinstance(node, ast.FunctionDef) or not hasattr(Array, node.name):
            continue  # of concrete arrays alone
        installed = getattr(Array, node.name)
        if not isinstance(installed, pytypes.FunctionType) or node.name.startswith("__"):
            continue
        declared = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]][1:]
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        has = [p.name for p in inspect.signature(installed).parameters.values() if p.kind not in kinds][1:]
        assert declared == has, node.name
    declared = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    declared |= {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}
    public = {name for name in dir(Array) if not name.startswith("_")}
    typed = {"aval", "dtype", "nbytes", "ndim", "shape", "size", "weak_type"}  # of the classes themselves
    assert public - declared - typed == set()


def test_modules_that_are_seen_are_those_that_exist():
    for name in census.MODULES:
        importlib.import_module(name)
