"""The forward pass against a plain restatement in double precision, written from the papers' formulas."""

import numpy as np
import pytest
from conftest import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS, WIDTH, write_model

from engine.caches import NumpyCache
from engine.gguf_file import ModelFile
from engine.llama import Llama

TOKENS = [5, 77, 130, 9, 200, 31, 31, 256]


def restated_logits(weights, family, tokens):
    """Logits of the last token. RoPE turns the pair (2i, 2i + 1) of a Llama file, (i, i + half) of a Qwen2 one."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def turn(head, position):
        turned, half = head.copy(), HEAD_DIM // 2
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if family == "llama" else (i, i + half)
            z = (head[a] + 1j * head[b]) * np.exp(1j * position * 5000.0 ** (-2 * i / HEAD_DIM))
            turned[a], turned[b] = z.real, z.imag
        return turned

    x = w["token_embd.weight"][tokens]
    for layer in range(LAYERS):
        p = f"blk.{layer}."
        h = norm(x, w[p + "attn_norm.weight"])
        q, k, v = (h @ w[f"{p}attn_{n}.weight"].T + w.get(f"{p}attn_{n}.bias", 0) for n in "qkv")
        q, k, v = (y.reshape(len(tokens), -1, HEAD_DIM) for y in (q, k, v))
        mixed = np.zeros((len(tokens), Q_HEADS * HEAD_DIM))
        for t in range(len(tokens)):
            for head in range(Q_HEADS):
                shared = head // (Q_HEADS // KV_HEADS)
                keys = np.stack([turn(k[j, shared], j) for j in range(t + 1)])
                scores = keys @ turn(q[t, head], t) / np.sqrt(HEAD_DIM)
                weight = np.exp(scores - scores.max())
                mixed[t, head * HEAD_DIM:(head + 1) * HEAD_DIM] = weight / weight.sum() @ v[:t + 1, shared]
        x = x + mixed @ w[p + "attn_output.weight"].T
        h = norm(x, w[p + "ffn_norm.weight"])
        gate, up = h @ w[p + "ffn_gate.weight"].T, h @ w[p + "ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "ffn_down.weight"].T
    head = w.get("output.weight", w["token_embd.weight"])
    return head @ norm(x[-1], w["output_norm.weight"])


def engine_logits(model, tokens, chunks):
    cache = NumpyCache(model.shape, 1, len(tokens))
    start = 0
    for count in chunks:
        part = tokens[start:start + count]
        hidden = model.forward(part, np.arange(start, start + count), cache.attention([count]))
        start += count
    return model.logits(hidden)[-1]


def close(a, b):
    """Equal but for the order of fp32 sums, and fp16 keys and values that they round the other way."""
    return np.abs(a - b).max() < 2e-3 * np.abs(b).max()


@pytest.mark.parametrize("tied", [True, False])
def test_matches_restatement(tmp_path, family, tied):
    path = tmp_path / "model.gguf"
    weights = write_model(path, family, tied=tied)
    got = engine_logits(Llama(ModelFile(path)), TOKENS, [len(TOKENS)])
    expected = restated_logits(weights, family, TOKENS)
    # The cache rounds keys and values to fp16; everything else is fp32 against double.
    assert np.abs(got - expected).max() < 5e-3 * np.abs(expected).max()


def test_any_split_of_the_tokens_gives_the_same_logits(model_path):
    model = Llama(ModelFile(model_path))
    whole = engine_logits(model, TOKENS, [8])
    for chunks in ([1] * 8, [3, 5], [7, 1]):
        assert close(engine_logits(model, TOKENS, chunks), whole)


def test_same_call_same_bits(model_path):
    first, second = (engine_logits(Llama(ModelFile(model_path)), TOKENS, [1] * 8) for _ in range(2))
    assert (first == second).all()


def test_sequences_of_one_batch_do_not_touch_each_other(model_path):
    model = Llama(ModelFile(model_path))
    cache = NumpyCache(model.shape, 3, 8)
    counts = [3, 0, 5]
    hidden = model.forward(TOKENS, [0, 1, 2, 0, 1, 2, 3, 4], cache.attention(counts))
    assert close(model.logits(hidden)[-1], engine_logits(model, TOKENS[3:], [5]))
    assert close(model.logits(hidden)[2], engine_logits(model, TOKENS[:3], [3]))


def test_shape(model_path, family):
    shape = ModelFile(model_path).shape
    assert (shape.family, shape.layers, shape.width) == (family, LAYERS, WIDTH)
    assert (shape.q_heads, shape.kv_heads, shape.head_dim) == (Q_HEADS, KV_HEADS, HEAD_DIM)


def test_linear_rope_scaling_divides_the_positions(tmp_path):
    write_model(tmp_path / "plain.gguf", "llama")
    write_model(tmp_path / "scaled.gguf", "llama", rope__scaling__type="linear", rope__scaling__factor=4.0)
    plain, scaled = (Llama(ModelFile(tmp_path / name)) for name in ("plain.gguf", "scaled.gguf"))
    assert np.allclose(4 * scaled.frequencies, plain.frequencies)
