"""The page for JAX users: its programs run, and it lists what is not compared."""

import re
from pathlib import Path

from tests.peers.peer_table import ROWS
from tests.peers.test_peers import INTEGERS

PAGE = (Path(__file__).parents[2] / "docs/jax.md").read_text()


def test_programs_run():
    """The blocks of the page are one program."""
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/jax.md", "exec"), names)


def test_every_disagreement_is_named():
    for reason in {row.differs[0] for row in ROWS if row.differs} | {INTEGERS}:
        assert reason in PAGE


def test_the_count_is_true():
    (claimed,) = re.findall(r"more than (\d+)\s+functions\s+and\s+compositions", PAGE)
    assert len(ROWS) > int(claimed)
