"""The public names of JAX that exist, and the reasons for the others.

In: ``names.txt``, which ``read.py`` writes, and ``reasons.toml``. Out: the count by module, and a section of
``docs/jax.md``. A name exists if ``hasattr`` finds it and it is no stub.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

from tests.jax_names.read import HERE, NAMES

PAGE = HERE.parents[1] / "docs" / "jax.md"
BEGIN, END = "<!-- names of JAX -->\n", "<!-- end of names of JAX -->\n"

PROGRAM = """
import importlib, json, sys
from blufunc import as_jax
as_jax.install()
from blufunc.as_jax import stubs
found = {}
for module, names in json.load(sys.stdin).items():
    try:
        served = importlib.import_module(module)
    except ModuleNotFoundError:
        served = None
    stubbed = stubs.names(module)
    found[module] = [n for n in names if n not in stubbed and hasattr(served, n)]
print(json.dumps(found))
"""


def theirs() -> dict[str, list[str]]:
    """The public names of JAX by module."""
    lines = [line.split() for line in NAMES.read_text().splitlines()]
    return {first.rstrip(":"): names for first, *names in lines}


def counted() -> dict[str, tuple[list[str], list[str]]]:
    """For each module of JAX: the names that exist, and those that are missing."""
    wanted = theirs()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(wanted), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    here = json.loads(done.stdout)
    return {m: (here[m], [n for n in names if n not in here[m]]) for m, names in wanted.items()}


def reasons() -> dict[str, str]:
    """The reason of each missing name, by ``module.name``."""
    rows = tomllib.loads((HERE / "reasons.toml").read_text())["missing"]
    listed = [(f"{row['module']}.{name}", row["why"]) for row in rows for name in row["names"].split()]
    assert len(dict(listed)) == len(listed), "a name has two reasons"
    return dict(listed)


def share(found: dict[str, tuple[list[str], list[str]]]) -> tuple[int, int]:
    """The number of names that exist, and of all."""
    return sum(len(h) for h, _ in found.values()), sum(len(h) + len(m) for h, m in found.values())


def table(found: dict[str, tuple[list[str], list[str]]]) -> str:
    """The count by module, as text."""
    rows = [
        f"{m:52} {len(h):4} of {len(h) + len(x):4}  {' '.join(x)}".rstrip() for m, (h, x) in found.items()
    ]
    here, names = share(found)
    return "\n".join([*rows, f"{'all':52} {here:4} of {names:4}  {100 * here / names:.1f}%"])


def section(found: dict[str, tuple[list[str], list[str]]]) -> str:
    """The section of ``docs/jax.md``."""
    here, names = share(found)
    lines = [
        f"Of the {names:,} public names of {len(found)} documented modules of JAX 0.10.2, {here:,} exist, which is "
        f"{100 * here / names:.1f}%; `python -m tests.jax_names` counts them by module. These are missing:",
        "",
        "| module | names | why |",
        "|---|---|---|",
    ]
    for row in tomllib.loads((HERE / "reasons.toml").read_text())["missing"]:
        listed = ", ".join(f"`{n}`" for n in row["names"].split())
        lines.append(f"| `{row['module']}` | {listed} | {row['why']} |")
    return "\n".join(lines) + "\n"


def write(found: dict[str, tuple[list[str], list[str]]]) -> None:
    """Replace the section of ``docs/jax.md``."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + section(found) + END + rest.split(END)[1])
