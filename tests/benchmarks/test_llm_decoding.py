"""The benchmark of decoding by examples/llm: a tiny size, a plan for a GPU."""

import dataclasses

import pytest

import blufunc as bf
from benchmarks.suites import llm_decoding
from benchmarks.suites.llm_decoding import LLAMA_1B, SIZES
from blufunc import nn, random
from examples.llm import model, weights

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8]] * 2


@pytest.mark.slow
def test_both_continuations_are_one_program(tmp_path):
    sizes = dataclasses.replace(SIZES["cpu"], short=2, long=6)
    weights.save(tmp_path / "m", model.init(random.key(0), sizes.config), sizes.config)
    run, logits, nbytes = llm_decoding.ours(tmp_path / "m", sizes)
    assert run(PROMPTS, 6)[0][:2] == run(PROMPTS, 2)[0] and logits(PROMPTS).shape == (2, 256)
    assert nbytes == 4 * (256 * 64 + 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64))
    assert llm_decoding.bytes_per_token(sizes, 2, nbytes) == nbytes + 2 * 2 * 2 * 2 * 16 * 4 * (8 + 4)


def test_the_time_of_a_token_leaves_out_the_prompt(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(llm_decoding.time, "perf_counter", lambda: now[0])

    def run(prompts, n):
        now[0] += 5 + 0.25 * n

    assert llm_decoding.seconds_per_token(run, PROMPTS, SIZES["cpu"], 3) == 0.25


@pytest.mark.parametrize("batch, launches", [(1, 9), (8, 10)])
def test_launches_of_a_layer_on_a_gpu(batch, launches):
    """A norm, QKV, rotation, update, attention, output; a norm, SwiGLU, down.

    Rows of different lengths update keys and values by two scatters. A launch more is 1 to 4 us of a token's 0.7 ms.
    """

    def planned(layers):
        config = dataclasses.replace(LLAMA_1B, layers=layers)
        like = lambda *shape: bf.ShapeDtypeStruct(shape, "int32")
        params = weights.types(config, "bfloat16")
        read = lambda params, tokens, lengths: model.prefill(params, tokens, lengths, config, 512)[1]
        cache = bf.eval_shape(read, params, like(batch, 64), like(batch))

        def step(params, cache, token):
            logits, cache = model.extend(params, cache, token[:, None], config)
            return nn.sample(None, logits[:, 0], temperature=0), cache

        step = bf.jit(step, donate_argnums=1)
        return bf.explain(step, params, cache, like(batch), device="cuda:sm_90").cost.launches

    assert planned(3) - planned(2) == launches
