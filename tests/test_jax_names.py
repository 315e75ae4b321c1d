"""Public names of JAX: each exists, or has a reason in ``docs/jax.md``."""

import pytest

from tests.jax_names import count


@pytest.fixture(scope="module")
def found():
    return count.counted()


@pytest.mark.slow
def test_missing_names_have_reasons(found):
    missing = {f"{module}.{name}" for module, (_, names) in found.items() for name in names}
    reasons = count.reasons()
    assert missing - set(reasons) == set(), "build it, or give the reason in tests/jax_names/reasons.toml"
    assert set(reasons) - missing == set(), "it exists: the reason has to go"


def test_nearly_all_exist(found):
    here, names = count.share(found)
    assert names > 2000 and here >= 0.97 * names


def test_the_page_has_the_figures(found):
    text = count.PAGE.read_text()
    assert count.section(found) in text, "python -m tests.jax_names --write"
