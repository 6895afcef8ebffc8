"""Tiny model files made on the spot, so that no test downloads anything."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.tokenizer import byte_characters  # noqa: E402

LAYERS, WIDTH, Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 48, 4, 2, 64, 40


def byte_pair_tables(writer):
    """Every byte, three merges, one control token."""
    merges = ["t h", "th e", "\u0120 the"]
    tokens = byte_characters() + ["th", "the", "\u0120the", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)
    return len(tokens)


def sentence_piece_tables(writer):
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello"]
    plain = len(tokens) - 259
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-10.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * plain)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    return len(tokens)


def write_model(path, family, tables=byte_pair_tables, seed=0, tied=True, **metadata):
    """A model file of random weights; returns the weights as they stand in the file."""
    writer = gguf.GGUFWriter(str(path), family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(Q_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{family}.{key.replace('__', '.')}", value)
    vocabulary = tables(writer)
    random = np.random.default_rng(seed)
    weights = {}

    def add(name, *size, scale=0.15, about=0.0):
        weights[name] = (about + scale * random.standard_normal(size)).astype(np.float32)
        writer.add_tensor(name, weights[name])

    add("token_embd.weight", vocabulary, WIDTH, scale=0.3)
    add("output_norm.weight", WIDTH, about=1.0)
    if not tied:
        add("output.weight", vocabulary, WIDTH)
    for layer in range(LAYERS):
        p = f"blk.{layer}."
        add(p + "attn_norm.weight", WIDTH, about=1.0)
        add(p + "ffn_norm.weight", WIDTH, about=1.0)
        for name, heads in (("q", Q_HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            add(f"{p}attn_{name}.weight", heads * HEAD_DIM, WIDTH, scale=0.3)
            if family == "qwen2":
                add(f"{p}attn_{name}.bias", heads * HEAD_DIM, scale=0.5)
        add(p + "attn_output.weight", WIDTH, Q_HEADS * HEAD_DIM)
        add(p + "ffn_gate.weight", HIDDEN, WIDTH)
        add(p + "ffn_up.weight", HIDDEN, WIDTH)
        add(p + "ffn_down.weight", WIDTH, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(params=["llama", "qwen2"])
def family(request):
    return request.param


@pytest.fixture
def model_path(tmp_path, family):
    path = tmp_path / f"{family}.gguf"
    write_model(path, family)
    return path
