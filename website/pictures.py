"""Pictures of the pages: ``python -m website.pictures`` writes the files.

In: records in ``benchmarks/results``, and the pictures that blufunc draws. Out: SVG files in ``docs/assets``, which
also show where Markdown is read without the site. A test compares them with what this module makes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import blufunc as bf
from website import charts

ASSETS = Path(__file__).parent.parent / "docs" / "assets"


def _sharding(*spec: str | None) -> str:
    mesh = bf.make_mesh((4, 2), ("data", "model"))
    x = bf.device_put(bf.numpy.zeros((8, 8)), bf.NamedSharding(mesh, bf.P(*spec)))
    drawn = bf.sharding_svg(x)
    return drawn.replace("<svg ", '<svg style="background: white" ', 1).rstrip() + "\n"


def _loss(params: dict, x: bf.Array, y: bf.Array) -> bf.Array:
    h = bf.nn.gelu(x @ params["w1"] + params["b1"])
    return bf.numpy.mean((h @ params["w2"] - y) ** 2)


def _drawn(draw: Callable) -> str:
    """A drawing of the loss and its gradient, for a GPU that need not be present."""
    a = lambda *shape: bf.ShapeDtypeStruct(shape, "float32")
    params = {"w1": a(768, 3072), "b1": a(3072), "w2": a(3072, 64)}
    step = bf.jit(bf.value_and_grad(_loss))
    return draw(step, params, a(4096, 768), a(4096, 64), device="cuda:sm_90").svg.rstrip() + "\n"


def pictures() -> dict[str, str]:
    """All pictures by the name of their file. Eight CPU devices must be configured."""
    return {
        "program.svg": _drawn(bf.visualize.program),
        "memory.svg": _drawn(bf.visualize.memory),
        "pipeline.svg": bf.visualize.pipeline(4, 8).svg.rstrip() + "\n",
        "pipeline-interleaved.svg": bf.visualize.pipeline(4, 8, "interleaved", 2).svg.rstrip() + "\n",
        "pipeline-zb-h1.svg": bf.visualize.pipeline(4, 8, "zb-h1").svg.rstrip() + "\n",
        "gpt2.svg": charts.picture(),
        "sharding-both.svg": _sharding("data", "model"),
        "sharding-rows.svg": _sharding("data"),
    }


if __name__ == "__main__":
    bf.config.cpu_devices = 8
    for name, text in pictures().items():
        (ASSETS / name).write_text(text)
