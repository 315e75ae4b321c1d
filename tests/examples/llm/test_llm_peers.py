"""Logits and tokens of random checkpoints, compared with ``transformers``."""

import numpy as np
import pytest

import blufunc as bf
from blufunc import tree
from examples.llm import generate, model, weights

pytestmark = pytest.mark.peer("transformers", "peers-llm")

COMMON = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROPE = {"rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 8}
LLAMA3 = ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHECKPOINTS = {
    "gpt2": ("GPT2", {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "llama": ("Llama", COMMON | {"rope_scaling": LLAMA3}),
    "llama-biases": (
        "Llama",
        COMMON | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-linear": (
        "Llama",
        COMMON | {"rope_scaling": {"rope_theta": 1e3, "rope_type": "linear", "factor": 4.0}},
    ),
    "llama-yarn": ("Llama", COMMON | {"rope_scaling": ROPE | {"rope_type": "yarn"}}),
    "qwen2": ("Qwen2", COMMON | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2-tied": ("Qwen2", COMMON | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 16}),
    "mistral": ("Mistral", COMMON | {"sliding_window": 8}),
    "mixtral": ("Mixtral", COMMON | {"num_local_experts": 4, "num_experts_per_tok": 3}),
}


@pytest.fixture(params=CHECKPOINTS)
def peer(request, tmp_path):
    """A random model of ``transformers``, and the folder that it wrote."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    kind, settings = CHECKPOINTS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    config._attn_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.2)  # biases and norms too
    made.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return made, tmp_path / "theirs"


def logits_of(made, tokens):
    import torch

    with torch.no_grad():
        return made(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def test_logits_are_those_of_transformers(peer, tmp_path, rng):
    import transformers

    made, folder = peer
    params, config = weights.load(folder)
    tokens = rng.integers(0, config.vocab, (2, 40)).astype("int32")
    expected = logits_of(made, tokens)
    got = np.asarray(bf.jit(model.forward, static_argnums=2)(params, tokens, config))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=1e-5)

    weights.save(tmp_path / "ours", params, config, shard_bytes=20_000)
    repeated, same = weights.load(tmp_path / "ours")
    assert same == config
    tree.map(np.testing.assert_array_equal, repeated, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    np.testing.assert_array_equal(logits_of(theirs, tokens), expected)


def test_greedy_tokens_are_those_of_transformers(peer, rng):
    import torch

    made, folder = peer
    params, config = weights.load(folder)
    prompts = [rng.integers(3, config.vocab, n).tolist() for n in (5, 11)]
    got = generate.generate(params, config, prompts, 20, stop=())
    for prompt, tokens in zip(prompts, got, strict=True):
        whole = torch.tensor([prompt])
        expected = made.generate(whole, max_new_tokens=20, do_sample=False, eos_token_id=None)
        assert tokens == expected[0, len(prompt) :].tolist()
