"""``visualize``: pictures of programs, memory, shardings and pipelines."""

import re
import xml.etree.ElementTree as ET

import pytest

import blufunc as bf
import blufunc.numpy as jnp
from blufunc import ShapeDtypeStruct, errors, visualize
from blufunc.kernels.inspect import drawing
from blufunc.kernels.schedule import accesses

W, X = ShapeDtypeStruct((64, 64), "float32"), ShapeDtypeStruct((256, 64), "float32")
SVG = "{http://www.w3.org/2000/svg}"


def step(w, x):
    loss, g = bf.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return loss, w - 0.1 * g


def nodes(picture):
    root = ET.fromstring(picture.svg)
    assert float(root.get("width")) == picture.width
    return [g for g in root.iter(f"{SVG}g") if g.get("class") == "node"]


def texts(node):
    return [t.text for t in node.iter(f"{SVG}text")]


@pytest.mark.parametrize("device", [None, "cuda:sm_90"])
def test_a_box_for_each_step_with_the_users_lines(device):
    picture = visualize.program(step, W, X, device=device)
    costs = bf.explain(step, W, X, device=device).cost.steps
    found = nodes(picture)
    assert [texts(n)[0].split()[1] for n in found] == [c.name[:36] for c in costs]
    assert all("test_visualize.py" in n.find(f"{SVG}title").text for n in found)
    shown = " ".join(t for n in found for t in texts(n))
    assert "← x, w" in shown or "← w, x" in shown
    assert {"0", "1"} <= set(re.findall(r"result (\d)", shown))


@pytest.mark.parametrize(
    "f, args",
    [
        (step, (W, X)),
        (lambda x: jnp.sum(x, 0), (ShapeDtypeStruct((65536, 64), "float32"),)),  # in two kernels
        (lambda w, x: jnp.linalg.qr(x @ w), (W, X)),
    ],
    ids=["step", "partial sums", "library"],
)
def test_edges_are_the_values_between_steps(f, args):
    root = ET.fromstring(visualize.program(f, *args, device="cuda:sm_90").svg)
    drawn = set()
    for path in root.iter(f"{SVG}path"):
        x, y, *_, down = map(float, re.findall(r"-?[\d.]+", path.get("d")))
        drawn.add((round((y - 62 - 44) / 96), round((down - 44) / 96)))
    made = bf.jit(f).trace(*args).lower(platform="cuda:sm_90").sight().schedule
    writer, wanted = {}, set()
    for n, s in enumerate(made.steps):
        touched = [(made.root(v), written) for v, written in accesses(s)]
        wanted |= {(writer[v], n) for v, _ in touched if v in writer and writer[v] != n}
        writer.update({v: n for v, written in touched if written})
    assert drawn == wanted and wanted


def test_results_of_one_value_are_all_named():
    (node,) = nodes(visualize.program(lambda x: (jnp.sin(x), jnp.sin(x)), X))
    assert "→ result 0, 1" in " ".join(texts(node))


def test_a_residual_has_a_column_of_its_own():
    def chain(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    forward = ET.fromstring(visualize.program(chain, W, X, device="cuda:sm_90").svg)
    backward = ET.fromstring(visualize.program(bf.grad(chain), W, X, device="cuda:sm_90").svg)
    columns = [
        len(
            {
                r.get("x")
                for g in root.iter(f"{SVG}g")
                if g.get("class") == "node"
                for r in g.iter(f"{SVG}rect")
            }
        )
        for root in (forward, backward)
    ]
    assert columns[0] == 1 < columns[1]


def test_bodies_of_loops():
    f = lambda x: bf.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=5)[0]
    picture = visualize.program(f, W, device="cuda:sm_90")
    assert "the body of scan" in picture.svg and "5 times" in picture.svg


def test_nothing_is_computed():
    assert "nothing is computed" in visualize.program(lambda x: x, X).svg


def test_memory_to_scale():
    picture = visualize.memory(step, W, X, device="cuda:sm_90")
    plan = bf.explain(step, W, X, device="cuda:sm_90").memory.plan
    found = nodes(picture)
    named = [n.find(f"{SVG}title").text for n in found]
    assert any(" x\n" in t for t in named) and any("dot_general" in t for t in named)
    heights = [float(n.find(f"{SVG}rect").get("height")) for n in found]
    (i,) = [i for i, t in enumerate(named) if t.startswith("f32[256,64] x")]
    assert heights[i] == pytest.approx(420 * X.size * 4 / plan.peak_bytes, rel=1e-3)


@pytest.mark.parametrize(
    "args, cells, bubble",
    [
        ((1, 1), 2, "0.0%"),
        ((4, 8), 64, "27.3%"),
        ((4, 8, "interleaved", 2), 128, "15.8%"),
        ((4, 8, "zb-h1"), 96, "11.1%"),
        ((3, 2, "gpipe"), 12, "50.0%"),
    ],
)
def test_pipeline(args, cells, bubble):
    picture = visualize.pipeline(*args)
    assert f"bubble {bubble}" in picture.title
    assert len([n for n in nodes(picture) if texts(n)]) == cells


def test_a_pipeline_is_drawn_to_scale():
    costs = bf.parallel.PipelineCosts(forward=1.0, input=2.0, weight=1.0)
    found = {}
    for n in nodes(visualize.pipeline(2, 8, "zb-h1", costs=costs)):
        what = n.find(f"{SVG}title").text.partition(": ")[2].partition(" of microbatch")[0]
        found.setdefault(what, set()).add(round(float(n.find(f"{SVG}rect").get("width")) + 1, 2))
    width = min(found["forward"])
    assert width * 2 == pytest.approx(max(found["backward, of the input"]))


def test_files(tmp_path):
    picture = visualize.program(step, W, X)
    picture.save(tmp_path / "p.svg")
    picture.save(tmp_path / "p.html")
    assert (tmp_path / "p.svg").read_text() == picture.svg == picture._repr_svg_()
    page = (tmp_path / "p.html").read_text()
    assert picture.svg in page and "<title>step</title>" in page
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)", page)  # one file, of this host
    with pytest.raises(errors.ArgumentError, match=r"as \.svg or \.html, not as 'p\.png'"):
        picture.save(tmp_path / "p.png")


def test_text_is_escaped():
    made = drawing.Drawing("a < {svg}", 10, 10, drawing.label(0, 0, "<&>"))
    assert ET.fromstring(made.svg)[0].text == "<&>" and "<title>a &lt; {svg}</title>" in made.html


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: visualize.program(3), "visualize.program"),
        (lambda: visualize.memory("f"), "visualize.memory"),
        (lambda: visualize.program(step, W, X, device="gpu"), "takes a device, not 'gpu'"),
        (lambda: visualize.pipeline(0, 4), "ranks is a positive number, not 0"),
        (lambda: visualize.pipeline(2, 1.5), "microbatches is a positive number"),
        (lambda: visualize.pipeline(2, 4, "zb"), "schedule is one of 1f1b, interleaved"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(errors.ArgumentError, match=message):
        call()
