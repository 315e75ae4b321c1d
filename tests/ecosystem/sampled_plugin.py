"""A pytest plugin that keeps evenly spaced tests: ``table.py`` loads it."""


def pytest_addoption(parser):
    parser.addoption("--keep", type=int, default=0, help="run this many tests, evenly spaced; 0: all")


def pytest_collection_modifyitems(config, items):
    keep = config.getoption("--keep")
    if 0 < keep < len(items):
        chosen = {i * len(items) // keep for i in range(keep)}
        config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i not in chosen])
        items[:] = [x for i, x in enumerate(items) if i in chosen]
