"""Arrays in notebooks."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

import blufunc as bf
import blufunc.numpy as bnp


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 4)
    return bf.make_mesh((2, 2), ("x", "y"), devices=bf.devices("cpu"))


def shown(x):
    """The facts, the values, and the texts of the drawing; the HTML is well formed."""
    root = ElementTree.fromstring(x._repr_html_())
    facts = {row[0].text: row[1].text for row in root.iter("tr")}
    drawn = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    return facts, root.find("pre").text, drawn


ON_ONE_DEVICE = {
    "matrix": (lambda: bnp.ones((2, 3)), "(2, 3)", "float32", "24 B", "[[1. 1. 1.]\n [1. 1. 1.]]"),
    "number": (lambda: bnp.int8(7), "()", "int8", "1 B", "7"),
    "weak": (lambda: bnp.asarray(2.0), "()", "float32 (weak)", "4 B", "2.0"),
    "empty": (lambda: bnp.zeros((0, 4)), "(0, 4)", "float32", "0 B", "[]"),
    "narrow": (lambda: bnp.ones(2, "bfloat16"), "(2,)", "bfloat16", "4 B", "[1. 1.]"),
}


@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_on_one_device(name):
    make, shape, dtype, size, values = ON_ONE_DEVICE[name]
    facts, text, drawn = shown(make())
    assert facts == {"shape": shape, "dtype": dtype, "size": size, "device": "cpu:0"}
    assert text == values and not drawn


def test_many_values_are_abridged():
    _, text, _ = shown(bnp.arange(10_000))
    assert text == "[   0    1    2 ... 9997 9998 9999]"


def test_keys_and_donated_arrays():
    assert shown(bf.random.key(0))[1].startswith("Array(()) key")
    x = bnp.ones((64, 64))
    bf.jit(lambda v: v + 1, donate_argnums=0)(x)
    facts, text, _ = shown(x)
    assert facts["donated to"].startswith("<lambda> at") and text.endswith("donated)")


def test_shards_are_drawn(mesh):
    x = bf.device_put(bnp.zeros((4, 6)), bf.NamedSharding(mesh, bf.P("x", "y")))
    facts, text, drawn = shown(x)
    assert facts["sharding"] == "P('x', 'y') on x=2, y=2" and facts["of a device"] == "(2, 3)"
    assert text.count("0.") == 24 and {"0", "1", "2", "3"} <= set(drawn)


def test_what_is_whole_everywhere_is_not_drawn(mesh):
    facts, _, drawn = shown(bf.device_put(bnp.zeros(4), bf.NamedSharding(mesh, bf.P())))
    assert facts["sharding"].startswith("P(") and not drawn
