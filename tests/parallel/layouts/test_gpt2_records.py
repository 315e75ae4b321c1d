"""GPT-2's layouts as ``bf.parallel.search`` ranks them, and as measured."""

import itertools
import json
from pathlib import Path

import pytest

import blufunc as bf
from blufunc import AbstractMesh, DeviceSpec, LinkSpec, ShapeDtypeStruct, optim
from examples.gpt import model, sharded

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
RECORDS = ["gpu_multi_2.json", "gpu_multi_4.json"]

H200 = DeviceSpec(flops=600e12, bandwidth=4e12, elementwise_flops=30e12)
NVLINK = LinkSpec(300e9, 5e-6)

LABELS = {"data": "data parallel", "fsdp": "FSDP", "tensor": "tensor parallel"}

NOISE = 0.02
"""Relative differences of layouts that change sign between records."""


def measured(record: str) -> tuple[int, dict[str, float]]:
    """The devices of a record, and the best tokens/s of each layout."""
    rows = json.loads((RESULTS / record).read_text())["rows"]
    found: dict[str, float] = {}
    for r in rows:
        if r["library"].startswith("blufunc, ") and r["layout"] in LABELS and r.get("tokens_s"):
            found[r["layout"]] = max(found.get(r["layout"], 0.0), r["tokens_s"])
    return max(r["gpus"] for r in rows), found


def training(devices: int):
    """GPT-2 124M without annotations, and its arguments; heads have a dimension."""
    config = model.PRESETS["gpt2-124m"]
    loss = bf.autocast(lambda params, tokens: model.loss(params, tokens, config))
    optimizer = optim.adamw(1e-3)

    def step(params, state, tokens):
        value, grads = bf.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    heads_apart = sharded.Plan(AbstractMesh((2,), ("model",)))
    params = bf.eval_shape(lambda: sharded.packed(model.init(bf.random.key(0), config), heads_apart))
    state = bf.eval_shape(optimizer.init, params)
    tokens = ShapeDtypeStruct((32 * devices, config.context + 1), "int32")
    return bf.jit(step, donate_argnums=(0, 1)), (params, state, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS)
def test_layouts_rank_as_they_were_measured(record):
    devices, rates = measured(record)
    assert {"data", "fsdp"} <= set(rates)
    step, args = training(devices)
    mesh = AbstractMesh((devices,), ("data",))
    # the strategies of one axis: FSDP, ZeRO, data and tensor parallelism
    found = bf.parallel.search(step, *args, mesh=mesh, device=H200, links=NVLINK, plans=4)
    seconds = {name: min(r.seconds for r in found if r.label == label) for name, label in LABELS.items()}
    for a, b in itertools.combinations(rates, 2):
        faster, predicted = rates[a] / rates[b], seconds[b] / seconds[a]
        if abs(faster - 1) > NOISE:
            assert (faster > 1) == (predicted > 1), (a, b, faster, predicted)
        else:
            assert abs(predicted - 1) < NOISE, (a, b, faster, predicted)
