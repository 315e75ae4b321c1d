"""Count the public callables that type checkers know.

``python -m tests.typing.census`` prints the count.
A callable is poor if mypy does not see it, if a parameter or the result has no annotation, or if the result is
``Any``. ``ALLOWED`` has those that stay so, with the reason.
"""

from __future__ import annotations

import collections
import importlib
import re
import sys
import types as pytypes
from dataclasses import dataclass
from pathlib import Path

from mypy import build, nodes, types
from mypy.errors import CompileError
from mypy.fscache import FileSystemCache
from mypy.main import process_options

ROOT = Path(__file__).parents[2]

MODULES = [
    "blufunc",
    *(
        f"blufunc.{name}"
        for name in (
            "ad_checkpoint contexts custom_batching custom_derivatives debug distributed dlpack dtypes "
            "example_libraries.optimizers example_libraries.stax experimental.jet experimental.ode extend "
            "flatten_util image io lax lax.linalg multihost nn nn.initializers numpy numpy.fft numpy.linalg ops "
            "optim parallel random scipy.cluster.vq scipy.fft scipy.integrate scipy.interpolate scipy.linalg "
            "scipy.ndimage scipy.optimize scipy.signal scipy.sparse.linalg scipy.spatial.transform scipy.special "
            "scipy.stats sharding stages testing tree tree_util typing"
        ).split()
    ),
]

_CALLER = "the shapes, the file or the function that the caller gives say what it is"
_LEAVES = "the leaves are of another type than those of the argument"
_TREE = "the structure that the caller gives says what it is"
_SYMBOLIC = "an array or a symbolic zero: rules pass it on"
_LAYER = "a pair of functions of pytrees"
_REGION = "the function, or a decorator of one; either may take another keyword, out_sharding"

# Callables whose result is Any, by reason.
ALLOWED = {
    **dict.fromkeys(
        (
            "blufunc.io_callback",
            "blufunc.lax.platform_dependent",
            "blufunc.pure_callback",
            "blufunc.io.facts",
            "blufunc.io.load",
            "blufunc.numpy.load",
        ),
        _CALLER,
    ),
    **dict.fromkeys(
        (
            "blufunc.device_get",
            "blufunc.eval_shape",
            "blufunc.example_libraries.stax.eval_shape",
            "blufunc.multihost.process_allgather",
        ),
        _LEAVES,
    ),
    **dict.fromkeys(
        (
            "blufunc.custom_derivatives.custom_vjp_primal_tree_values",
            "blufunc.example_libraries.optimizers.unpack_optimizer_state",
            "blufunc.tree.broadcast",
            "blufunc.tree.static",
            "blufunc.tree.transpose",
            "blufunc.tree.unflatten",
            "blufunc.tree_util.build_tree",
            "blufunc.tree_util.register_dataclass",
            "blufunc.tree_util.tree_broadcast",
            "blufunc.tree_util.tree_transpose",
            "blufunc.tree_util.tree_unflatten",
        ),
        _TREE,
    ),
    **dict.fromkeys(
        (
            "blufunc.custom_derivatives.instantiate",
            "blufunc.custom_derivatives.zero_from_primal",
            "blufunc.extend.add_tangents",
            "blufunc.extend.batched_front",
            "blufunc.extend.instantiate",
        ),
        _SYMBOLIC,
    ),
    **dict.fromkeys(
        (
            "blufunc.example_libraries.stax.AvgPool",
            "blufunc.example_libraries.stax.MaxPool",
            "blufunc.example_libraries.stax.SumPool",
        ),
        _LAYER,
    ),
    **dict.fromkeys(("blufunc.sharding.auto_axes", "blufunc.sharding.explicit_axes"), _REGION),
}


@dataclass
class Checked:
    """The result of one run.

    Attributes:
      errors: path, line, code and text of each.
      files: the modules as mypy sees them.
    """

    errors: list[tuple[Path, int, str, str]]
    files: dict[str, nodes.MypyFile]

    def counts(self) -> dict[str, str]:
        """For each public callable what it lacks, or an empty string."""
        found = {}
        for module in MODULES:
            names = importlib.import_module(module)
            for name in getattr(names, "__all__", None) or dir(names):
                value = getattr(names, name, None)
                if name[0] == "_" or not callable(value) or isinstance(value, pytypes.ModuleType):
                    continue
                if str(getattr(value, "__module__", "")).startswith("blufunc"):
                    found[f"{module}.{name}"] = _lacks(self.files[module].names.get(name))
        return found

    def poor(self) -> dict[str, str]:
        """The callables that lack something."""
        return {name: why for name, why in self.counts().items() if why}


def _lacks(symbol: nodes.SymbolTableNode | None) -> str:
    if symbol is None:
        return "is not seen"
    node = symbol.node
    if isinstance(node, nodes.FuncDef | nodes.OverloadedFuncDef | nodes.Var):
        return _of_type(node.type)
    if isinstance(node, nodes.Decorator):
        return _of_type(node.var.type)
    return ""  # classes, aliases


def _of_type(type_: types.Type | None) -> str:
    found = None if type_ is None else types.get_proper_type(type_)
    if isinstance(found, types.Overloaded):
        return next((why for item in found.items if (why := _of_type(item))), "")
    if isinstance(found, types.CallableType):
        for argument in found.arg_types:
            argument = types.get_proper_type(argument)
            if isinstance(argument, types.AnyType) and argument.type_of_any == types.TypeOfAny.unannotated:
                return "has parameters without an annotation"
        return "returns Any" if isinstance(types.get_proper_type(found.ret_type), types.AnyType) else ""
    return "is Any" if found is None or isinstance(found, types.AnyType) else ""


def check(files: list[Path]) -> Checked:
    """One run of mypy over files and the public modules, as of an installed blufunc."""
    config = str(Path(__file__).with_name("mypy.ini"))
    _, options = process_options(
        ["--config-file", config, "--python-executable", sys.executable, "-m", "blufunc"]
    )
    options.cache_dir = str(ROOT / ".mypy_cache" / "typing")
    options.mypy_path = [str(ROOT)]
    sources = [build.BuildSource(str(path), _module_of(path)) for path in files]
    sources += [build.BuildSource(None, None, "".join(f"import {name}\n" for name in MODULES))]
    try:
        result = build.build(sources, options, fscache=FileSystemCache())
    except CompileError as error:
        raise AssertionError("mypy did not run:\n" + "\n".join(error.messages)) from None
    errors = []
    for text in result.errors:
        if match := re.fullmatch(r"(.*?\.py):(\d+): error: (.*?)(?:  \[([a-z-]+)\])?", text):
            errors.append((Path(match[1]).resolve(), int(match[2]), match[4] or "", match[3]))
    return Checked(errors, result.files)


def _module_of(path: Path) -> str:
    root = ROOT if ROOT in path.parents else path.parents[1]
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def main() -> None:
    """Print the counts and what is poor."""
    counts = check([]).counts()
    by_reason = collections.Counter(counts.values())
    print(f"{by_reason['']} of {len(counts)} public callables have typed signatures and results")
    for name, why in sorted(counts.items()):
        if why:
            print(f"{name} {why}" + (f": {ALLOWED[name]}" if name in ALLOWED else ""))


if __name__ == "__main__":
    main()
