"""A pytest plugin that keeps evenly spaced tests, and lists those that fail.

``table.py`` loads it.
"""

import pathlib
import sys

import pytest


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="run every n-th test; 1: all")
    parser.addoption("--offset", type=int, default=0, help="the first test to run")
    parser.addoption("--only", type=pathlib.Path, help="a file with the ids of the tests to run")
    parser.addoption(
        "--failed-to", type=pathlib.Path, help="a file to which the ids of failing tests are added"
    )


def pytest_collection_modifyitems(config, items):
    every, offset, only = (config.getoption(f"--{name}") for name in ("every", "offset", "only"))
    chosen = set(range(offset, len(items), every))
    if only:
        ids = set(only.read_text().splitlines())
        chosen = {i for i, x in enumerate(items) if x.nodeid in ids}
    config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i not in chosen])
    items[:] = [x for i, x in enumerate(items) if i in chosen]


def pytest_configure(config):
    if config.getoption("--failed-to"):
        config.pluginmanager.register(_Failures(config.getoption("--failed-to")))


class _Failures:
    def __init__(self, path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if report.failed:
            with self.path.open("a") as file:
                file.write(report.nodeid + "\n")


@pytest.fixture(autouse=True, scope="module")
def precision_of_module():
    """End the precision that a file sets for itself.

    Libraries run each of their files in a process of its own.
    """
    before = sys.modules["jax"].config.jax_enable_x64 if "jax" in sys.modules else False
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_x64", before)
