"""Generation: batches of different lengths, programs, sampling, speculation, text."""

import dataclasses
import json

import numpy as np
import pytest

import blufunc as bf
from blufunc import random, tree
from blufunc.errors import DataError, UnsupportedError
from examples.llm import generate, model, placement, speculative, tokenizer, weights
from examples.llm.config import TINY
from tests.emulation import fake_cuda
from tests.examples.llm.test_llm_model import CONFIGS, SMALL, params_of

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11]]
LLAMA, MISTRAL = CONFIGS["llama"], CONFIGS["mistral"]


def greedy(params, config, prompt, n):
    """Tokens by whole forward passes."""
    tokens = list(prompt)
    for _ in range(n):
        window = np.zeros((1, config.context), np.int32)
        window[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(model.forward(params, window, config)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


def test_rows_of_different_lengths_are_continued_as_if_alone():
    params = params_of(MISTRAL)
    got = generate.generate(params, MISTRAL, PROMPTS, 6, stop=())
    assert got == [greedy(params, MISTRAL, prompt, 6) for prompt in PROMPTS]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page", [3, 8])
def test_pages_give_the_same_tokens(page):
    """Each row has the pages that its own length needs; layers with windows, too."""
    params = params_of(MISTRAL)
    got = generate.generate(params, MISTRAL, PROMPTS, 6, stop=(), page=page)
    assert got == generate.generate(params, MISTRAL, PROMPTS, 6, stop=())
    pages = generate.pages_of(np.array([3, 7]), 6, page, MISTRAL)
    owned = [row[row >= 0] for row in pages.tables]
    assert [len(row) for row in owned] == [-(-9 // page), -(-13 // page)]
    every = np.concatenate(owned)
    assert len(set(every)) == len(every) and every.max() < pages.pool and pages.pool & (pages.pool - 1) == 0
    with pytest.raises(DataError, match="pages of 0"):
        generate.generate(params, MISTRAL, PROMPTS, 6, page=0)


def test_prompts_are_written_to_their_pages_only():
    params = params_of(LLAMA)
    tokens, lengths = generate.padded(PROMPTS, 2, LLAMA)
    tables = np.array([[5, -1, -1, -1], [2, 0, -1, -1]], np.int32)
    _, cache = model.prefill(params, tokens, lengths, LLAMA, 16, 1, model.Pages(tables, 6, 4))
    _, whole = model.prefill(params, tokens, lengths, LLAMA, 16)
    for paged, plain in zip(cache.layers, whole.layers, strict=True):
        keys, plain = np.asarray(paged.keys), np.asarray(plain.keys)
        np.testing.assert_array_equal(keys[5, :3], plain[0, :3])
        np.testing.assert_array_equal(np.concatenate([keys[2], keys[0, :3]]), plain[1, :7])
        assert not keys[[1, 3, 4]].any() and not keys[5, 3:].any() and not keys[0, 3:].any()


def test_programs_serve_a_range_of_lengths(monkeypatch):
    traced = []
    for name in ("prefill", "extend"):
        plain = getattr(model, name)
        monkeypatch.setattr(model, name, lambda *a, plain=plain, name=name: traced.append(name) or plain(*a))
    config = dataclasses.replace(LLAMA, layers=1, vocab=40)
    params = params_of(config)
    for n in (3, 5, 8):
        generate.generate(params, config, [[1] * n], n, sampling=generate.Sampling(n / 10))
    assert traced == ["prefill", "extend"]
    generate.generate(params, config, [[1] * 9], 8)  # 17 positions, and greedily
    assert traced == ["prefill", "extend"] * 2
    assert [generate.rounded(n, 100) for n in (1, 16, 17, 33, 99)] == [16, 16, 32, 64, 100]


@pytest.mark.slow
def test_a_row_ends_with_a_stop_token():
    params = params_of(LLAMA)
    free = generate.generate(params, LLAMA, PROMPTS, 8, stop=())
    stop = free[0][2]
    steps = list(generate.stream(params, LLAMA, PROMPTS, 8, stop=[stop]))
    for row, tokens in enumerate(free):
        at = tokens.index(stop) + 1 if stop in tokens else 8
        assert [step[row] for step in steps] == (tokens[:at] + [None] * 8)[: len(steps)]
    ended = dataclasses.replace(LLAMA, eos=(stop,))
    assert len(generate.generate(params, ended, PROMPTS[:1], 8)[0]) == free[0].index(stop) + 1


@pytest.mark.slow
def test_sampling_by_row_and_penalty():
    params = params_of(LLAMA)
    free = generate.generate(params, LLAMA, PROMPTS, 6, stop=())
    mixed = generate.Sampling(temperature=[0.0, 5.0])
    drawn = generate.generate(params, LLAMA, PROMPTS, 6, sampling=mixed, stop=())
    assert drawn[0] == free[0] and drawn[1] != free[1]
    repeated = generate.generate(params, LLAMA, PROMPTS, 6, sampling=mixed, stop=())
    assert repeated == drawn  # by the key alone
    other = generate.generate(params, LLAMA, PROMPTS, 6, sampling=mixed, stop=(), key=random.key(1))
    assert other[1] != drawn[1]
    strict = generate.Sampling(repetition_penalty=1e6)
    for prompt, row in zip(PROMPTS, generate.generate(params, LLAMA, PROMPTS, 12, sampling=strict, stop=())):
        assert len(set(row)) == 12 and not set(row) & set(prompt)


@pytest.mark.slow
def test_a_mesh_gives_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(bf.config, "cpu_devices", 2)
    config = dataclasses.replace(LLAMA, vocab=42)
    params = params_of(config)
    weights.save(tmp_path / "m", params, config)
    shardings, grouped = placement.placed(config, bf.make_mesh((2,), ("model",)))
    placed, _ = weights.load(tmp_path / "m", shardings, config=grouped)
    expected = generate.generate(params, config, PROMPTS, 4, stop=())
    assert generate.generate(placed, grouped, PROMPTS, 4, stop=()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("device", ["emulated", pytest.param("real", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_gpu_gives_the_same_tokens(name, device, monkeypatch):
    config, params = CONFIGS[name], params_of(CONFIGS[name])
    expected = generate.generate(params, config, PROMPTS, 5, stop=())
    if device == "emulated":
        fake_cuda.install(monkeypatch)
    gpu = bf.devices("cuda")[0]
    with bf.default_device(gpu):
        assert generate.generate(bf.device_put(params, gpu), config, PROMPTS, 5, stop=()) == expected


@pytest.mark.parametrize(
    "prompts, n, message, fix",
    [
        ([[1], []], 3, "a prompt is empty", "at least one token"),
        (
            [[1] * 30],
            3,
            "a prompt of 30 tokens and 3 new ones do not fit the context of 32",
            "at most 2 tokens",
        ),
        ([[1] * 40], 3, "do not fit the context of 32", r"keep its last tokens: prompt\[-29:\]"),
        ([[1], [2, 41]], 3, "token 41 is outside the vocabulary of 41", "the tokenizer.json in the folder"),
    ],
)
def test_prompts_that_do_not_fit(prompts, n, message, fix):
    with pytest.raises(DataError, match=f"(?s){message}.*{fix}"):
        next(generate.stream({}, SMALL, prompts, n))


# -- speculation -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_speculation_gives_the_tokens_of_the_target(rng):
    """A draft that is often right; rejected tokens leave a ring as it was."""
    params = params_of(MISTRAL)
    draft = tree.map(lambda w: w + 0.03 * rng.standard_normal(w.shape).astype("float32"), params)
    rounds = list(speculative.stream((params, MISTRAL), (draft, MISTRAL), PROMPTS, 16, ahead=3, stop=()))
    got = [[token for step in rounds for token in step[row]] for row in range(2)]
    assert got == generate.generate(params, MISTRAL, PROMPTS, 16, stop=())
    assert len(rounds) < 14 and max(len(step[0]) for step in rounds) == 4  # several at once


@pytest.mark.slow
def test_speculation_draws_from_the_distribution_of_the_target():
    config = dataclasses.replace(SMALL, vocab=5, layers=1)
    target, draft = params_of(config, 1), params_of(config, 2)
    n = 3000
    found = [[] for _ in range(n)]
    how = {"ahead": 2, "sampling": generate.Sampling(0.7, top_p=0.9), "key": random.key(3)}
    for step in speculative.stream((target, config), (draft, config), [[1, 2]] * n, 3, **how):
        for row, new in zip(found, step):
            row += new
    found = np.array(found)
    logits, cache = model.prefill(target, np.array([[1, 2]] * 5), np.full(5, 2), config, 16)
    of = lambda logits: np.asarray(bf.nn.softmax(bf.nn.filtered_logits(logits, temperature=0.7, top_p=0.9)))
    first = of(logits)[0]
    second = of(model.extend(target, cache, np.arange(5)[:, None], config)[0][:, 0])
    pairs = np.zeros((5, 5))
    np.add.at(pairs, (found[:, 0], found[:, 1]), 1 / n)
    assert np.abs(pairs - first[:, None] * second).max() < 0.02


def test_speculation_refuses_models_that_differ():
    with pytest.raises(DataError, match="the draft has 5 tokens, and the target 41"):
        next(speculative.stream(({}, SMALL), ({}, dataclasses.replace(SMALL, vocab=5)), PROMPTS, 3))
    strict = generate.Sampling(repetition_penalty=2.0)
    with pytest.raises(UnsupportedError, match="no repetition penalty"):
        next(speculative.stream(({}, SMALL), ({}, SMALL), PROMPTS, 3, sampling=strict))


# -- text ------------------------------------------------------------------------------------------


def test_text_comes_in_whole_characters():
    text = tokenizer.Text(tokenizer.Bytes())
    assert [text.add(b) for b in "aä€".encode()] == ["a", "", "ä", "", "", "€"] and text.rest() == ""
    assert text.add("ä".encode()[0]) == "" and text.rest() == "\ufffd"


def test_tokenizers_that_do_not_fit(tmp_path):
    with pytest.raises(DataError, match=r"(?s)no tokenizer.*tokenizer\.json.*--bytes"):
        tokenizer.load(tmp_path, TINY)
    small = dataclasses.replace(TINY, vocab=100)
    with pytest.raises(DataError, match=r"(?s)ids up to 255, and the vocabulary 100.*of the same model"):
        tokenizer.fitting(tokenizer.Bytes(), small)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(
        DataError, match=r"(?s)tokenizer\.model is not a file of tiktoken.*SentencePiece.*tokenizer\.json"
    ):
        tokenizer.load(tmp_path, TINY)


def test_a_package_that_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(
        UnsupportedError, match=r"(?s)the package tokenizers, which is not installed.*blufunc\[llm\]"
    ):
        tokenizer.load(tmp_path, TINY)


@pytest.mark.peer("tokenizers", "llm")
def test_tokenizers_of_files(tmp_path):
    import tokenizers

    sample = "def f(x):\n    return 'aä€ and more' + x\n"
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator([sample] * 10, vocab_size=300, min_frequency=2, special_tokens=["<s>"])
    config = dataclasses.replace(TINY, vocab=300)
    (tmp_path / "old").mkdir()
    made.save_model(str(tmp_path / "old"))
    made.save(str(tmp_path / "tokenizer.json"))
    for folder in (tmp_path, tmp_path / "old"):
        found = tokenizer.load(folder, config)
        tokens = found.encode(sample)
        assert found.decode(tokens) == sample and len(tokens) < len(sample)
        text = tokenizer.Text(found)
        assert "".join([text.add(token) for token in tokens]) + text.rest() == sample
    with pytest.raises(
        DataError, match=rf"(?s)tokenizer has ids up to {found.size - 1}.*tokenizer of the same"
    ):
        tokenizer.load(tmp_path, dataclasses.replace(config, vocab=found.size - 1))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(DataError, match="is not a tokenizer"):
        tokenizer.load(tmp_path, config)


@pytest.mark.peer("tiktoken", "llm")
def test_the_tokenizer_of_llama3(tmp_path):
    import base64

    ranks = [bytes([b]) for b in range(256)] + [b"de", b"def", b" x"]
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(ranks)]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    found = tokenizer.load(tmp_path, dataclasses.replace(TINY, vocab=515))
    assert found.size == 259 + 256
    assert found.encode("def x<|eot_id|>") == [259, 257, 258, 259 + 9]
    assert found.decode([259, 257, 258, 268]) == "def x"
    assert len(found.encode("<|eot_id|>", special=False)) == 10
