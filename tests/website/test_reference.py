"""The API reference: facts of an entry, each from where it is stated."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import errors
from website import entries, links, meanings, names, reference, shapes


def documented(a, axis, *rest, mode="x"):
    """Do something.

    More about ``mode``.

    Args:
      a, b: an array,
        of any shape.
    Returns:
      a pair.
    Raises:
      ShapeError: never.
    """
    if axis:
        raise errors.ShapeError("documented: no.")
    if mode:
        raise errors.DtypeError(f"documented: a dtype {axis} is not one.")
    return helper(rest)


def helper(x):
    raise errors.AxisRangeError("helper: there is no axis.")


def test_facts_of_an_entry():
    e = entries._entry("documented", documented, "blufunc")
    assert [p.name for p in e.parameters] == ["a", "axis", "*rest", "mode"]
    assert e.parameters[0].meaning == "an array, of any shape."
    assert e.parameters[1].meaning == meanings.TABLES["shared"]["axis"]
    assert e.signature == "(a, axis, *rest, mode='x')"
    assert (e.returns, e.unknown) == ("a pair.", ["b"])
    assert e.raises == [
        ("ShapeError", "never."),
        ("DtypeError", "a dtype … is not one"),
        ("AxisRangeError", "there is no axis"),
    ]
    assert e.summary == "Do something.\n\nMore about ``mode``."


def test_a_function_without_facts_has_gaps():
    def bare(odd):
        pass

    space = names.Namespace("blufunc", "", {}, [])
    assert reference.gaps(space, "bare", bare) == ["text", "the meaning of odd", "the result"]


@pytest.mark.parametrize("name", ["blufunc.numpy.linalg", "blufunc.tree", "blufunc.scipy.stats.norm"])
def test_names_of_a_namespace_are_described(name):
    space = names.namespace(name)
    assert space.objects()
    assert [reference.gaps(space, n, o) for n, o in space.objects()] == [[]] * len(space.objects())


def test_all_public_packages_are_found():
    found = {space.name for space in names.namespaces()}
    assert {"blufunc", "blufunc.numpy.fft", "blufunc.scipy.stats.norm", "blufunc.errors"} <= found
    assert not found & {"blufunc.kernels", "blufunc.transforms"}


def test_functions_made_at_run_time_are_with_their_module():
    assert names.home_of("sin", bf.numpy.sin, "blufunc.numpy") == "blufunc.numpy.elementwise"


@pytest.mark.parametrize(
    "path, name, function, result",
    [
        ("blufunc.numpy.sum", "sum", bf.numpy.sum, ["f32[]", "f32[4]"]),
        ("blufunc.lax.dynamic_slice", "dynamic_slice", bf.lax.dynamic_slice, ["f32[2,3]"]),
        ("blufunc.nn.relu", "relu", bf.nn.relu, ["f32[3,4]"]),
    ],
)
def test_shapes_are_measured(path, name, function, result):
    calls = shapes.measured(path, name, function)
    assert [c.result for c in calls] == result
    assert calls[0].source.startswith(f"{name}(") and "b1" not in calls[0].source


@pytest.mark.parametrize(
    "value, text",
    [
        ((bf.numpy.ones(2), 1), "(f32[2], int)"),
        ([np.ones(3)], "[numpy float64[3]]"),
        ({"a": bf.numpy.arange(2)}, "{'a': i32[2]}"),
    ],
)
def test_types_of_results(value, text):
    assert shapes.typed(value) == text


def test_docstrings_become_markdown():
    text = reference._prose("Sum of ``x_1`` and x_2 * y, as in\n\n    f(x_1)\n\nSee <a>.")
    assert text == "Sum of `x_1` and x\\_2 \\* y, as in\n\n```py\nf(x_1)\n```\n\nSee \\<a>."


@pytest.mark.parametrize(
    "link, rewritten",
    [
        ("[a](../kernels.md#x)", "[a](../kernels.md#x)"),
        ("[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("[a](../../examples/gpt/train.py)", "[a](../examples/gpt/train.md)"),
        ("[a](../../examples/gpt)", "[a](../examples/gpt/README.md)"),
        ("[`a`](../../blufunc/errors.py)", "`a`"),
        ("[a](https://x.org/b)", "[a](https://x.org/b)"),
        ("[a](#b)", "[a](#b)"),
        ("![a](../assets/b.svg)", "![a](../assets/b.svg)"),
        ("![a](../../docs/assets/b/c.png)", "![a](../assets/b/c.png)"),
        ("![a](../../runs/c.png)", "![a](../../runs/c.png)"),
        ("```\n[a](../../LICENSE)\n```", "```\n[a](../../LICENSE)\n```"),
    ],
)
def test_links_lead_to_pages(link, rewritten):
    assert links.rewritten(link, "docs/howto/x.md", "howto/x.md") == rewritten


def test_code_in_lists_is_indented_for_the_site():
    text = "- an item:\n\n      code\n        more\n\n- the next\n\n```\n\n      fenced\n```\n"
    assert links.indented(text) == text.replace("      code\n        more", "        code\n          more")


def test_names_of_a_namespace_are_links():
    marked = reference._marked("see `scale_by_adam`, and `adam` of `x`", "blufunc.optim", {"adam"})
    page = reference._resolved(
        marked, "reference/a/b.md", {"blufunc.optim.scale_by_adam": "reference/c/d.md"}
    )
    assert page == "see [`scale_by_adam`](../c/d.md#blufunc.optim.scale_by_adam), and `adam` of `x`"
