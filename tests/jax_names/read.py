"""Write ``names.txt``: the public names of the installed JAX, by module.

``python -m tests.jax_names.read``, in an environment that has JAX. The names of a module are those of its ``__all__``,
or those that its source defines or imports under their own names (``from x import y as y``). Of the modules in
``DEFINING`` they are the functions and classes that have a description.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
from pathlib import Path

HERE = Path(__file__).parent
NAMES = HERE / "names.txt"

MODULES = """
jax jax.ad_checkpoint jax.api_util jax.core jax.custom_batching jax.custom_derivatives jax.debug jax.distributed
jax.dlpack jax.dtypes jax.errors jax.export jax.ffi jax.flatten_util jax.image jax.monitoring jax.ops jax.profiler
jax.random jax.ref jax.sharding jax.stages jax.test_util jax.tree jax.tree_util jax.typing
jax.lax jax.lax.linalg jax.nn jax.nn.initializers jax.numpy jax.numpy.fft jax.numpy.linalg
jax.scipy jax.scipy.cluster jax.scipy.cluster.vq jax.scipy.fft jax.scipy.integrate jax.scipy.interpolate
jax.scipy.linalg jax.scipy.ndimage jax.scipy.optimize jax.scipy.signal jax.scipy.sparse jax.scipy.sparse.linalg
jax.scipy.spatial.transform jax.scipy.special jax.scipy.stats
jax.scipy.stats.bernoulli jax.scipy.stats.beta jax.scipy.stats.betabinom jax.scipy.stats.binom jax.scipy.stats.cauchy
jax.scipy.stats.chi2 jax.scipy.stats.dirichlet jax.scipy.stats.expon jax.scipy.stats.gamma jax.scipy.stats.gennorm
jax.scipy.stats.geom jax.scipy.stats.gumbel_l jax.scipy.stats.gumbel_r jax.scipy.stats.laplace
jax.scipy.stats.logistic jax.scipy.stats.multinomial jax.scipy.stats.multivariate_normal jax.scipy.stats.nbinom
jax.scipy.stats.norm jax.scipy.stats.pareto jax.scipy.stats.poisson jax.scipy.stats.t jax.scipy.stats.truncnorm
jax.scipy.stats.uniform jax.scipy.stats.vonmises jax.scipy.stats.wrapcauchy
jax.example_libraries.optimizers jax.example_libraries.stax
jax.extend.backend jax.extend.core jax.extend.core.primitives jax.extend.linear_util jax.extend.random
jax.extend.source_info_util
jax.experimental jax.experimental.checkify jax.experimental.compilation_cache.compilation_cache
jax.experimental.compute_on jax.experimental.custom_partitioning jax.experimental.hijax jax.experimental.jet
jax.experimental.layout jax.experimental.mesh_utils jax.experimental.multihost_utils jax.experimental.ode
jax.experimental.pjit jax.experimental.random jax.experimental.rnn jax.experimental.serialize_executable
jax.experimental.shard_alike jax.experimental.shard_map jax.experimental.sparse jax.experimental.xla_metadata
""".split()


DEFINING = """
jax.api_util jax.example_libraries.optimizers jax.example_libraries.stax jax.experimental.jet
jax.experimental.multihost_utils jax.experimental.ode jax.experimental.rnn
""".split()
"""Modules that define functions: those with a description are public."""


def exported(source: str) -> set[str]:
    """The names that a source defines, or imports under their own names."""
    found: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.If, ast.Try)):
                visit(node.body)
                visit(node.orelse)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update(a.asname for a in node.names if a.asname == a.name.split(".")[-1])
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(t.id for x in targets for t in ast.walk(x) if isinstance(t, ast.Name))

    visit(ast.parse(source).body)
    return found


def names_of(name: str) -> list[str]:
    """The public names of a module of JAX."""
    module = importlib.import_module(name)
    values = {
        n: getattr(module, n, None) for n in getattr(module, "__all__", None) or dir(module) if n[0] != "_"
    }
    if name in DEFINING:
        defined = (n for n, v in values.items() if getattr(v, "__module__", None) == name)
        return sorted(n for n in defined if inspect.getdoc(values[n]))
    listed = set(getattr(module, "__all__", ())) or exported(inspect.getsource(module)) or set(values)
    return sorted(n for n, v in values.items() if n in listed and not _elsewhere(v, name))


def _elsewhere(value: object, name: str) -> bool:
    """True for a module that is neither documented nor the parent of one."""
    if not isinstance(value, types.ModuleType):
        return False
    path = value.__name__
    return not path.startswith(name + ".") or not any(f"{m}.".startswith(path + ".") for m in MODULES)


def text() -> str:
    """The content of ``names.txt``."""
    return "".join(f"{m}: {' '.join(names_of(m))}\n" for m in sorted(MODULES))


if __name__ == "__main__":
    NAMES.write_text(text())
    print(sum(len(line.split()) - 1 for line in NAMES.read_text().splitlines()), "names", file=sys.stderr)
