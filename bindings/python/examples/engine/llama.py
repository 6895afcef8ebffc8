"""The forward pass of the Llama and Qwen2 families in fp32 numpy."""

import numpy as np

from .gguf_file import ModelError


class Llama:
    """A decoder-only transformer. It keeps no state: keys and values belong to the caller's attention.

    forward() works on any number of tokens at once, each with its own position, whatever sequence they
    come from; only the attention callback knows which tokens belong together. So one call serves a prompt,
    or one token of each of many sequences (the weights are then read once for all of them).
    """

    def __init__(self, file):
        self.shape = s = file.shape
        weights = file.weights()
        try:
            self.embedding = weights["token_embd.weight"]
            self.head = weights.get("output.weight", self.embedding)
            self.norm = weights["output_norm.weight"]
            self.layers = [Layer(s, weights, f"blk.{i}.") for i in range(s.layers)]
        except KeyError as error:
            raise ModelError(f"{file.path}: the tensor {error} is missing.") from error
        frequencies = s.rope_base ** (-np.arange(0, s.head_dim, 2, dtype=np.float64) / s.head_dim)
        factors = weights.get("rope_freqs.weight")  # Llama 3: one divisor a frequency
        self.frequencies = frequencies / (s.rope_scale if factors is None else factors * s.rope_scale)

    def forward(self, tokens, positions, attention):
        """Final hidden states [tokens, width], normed.

        attention(layer, q, k, v) is given the rotated q [tokens, q_heads, head_dim] and
        k, v [tokens, kv_heads, head_dim] of the new tokens and returns the outputs, shaped like q.
        """
        s = self.shape
        angles = np.asarray(positions, dtype=np.float64)[:, None] * self.frequencies
        cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
        x = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            q, k, v = layer.project(rms_norm(x, layer.attention_norm, s.norm_epsilon))
            mixed = attention(index, rotate(q, cos, sin), rotate(k, cos, sin), v)
            x = x + mixed.reshape(len(x), -1) @ layer.output.T
            x = x + layer.feed_forward(rms_norm(x, layer.feed_forward_norm, s.norm_epsilon))
        return rms_norm(x, self.norm, s.norm_epsilon)

    def logits(self, hidden):
        """Next-token logits [tokens, vocabulary]."""
        return hidden @ self.head.T


class Layer:
    """Weights of one block, projections that share an input stacked into one matrix."""

    def __init__(self, shape, weights, prefix):
        self.shape = s = shape

        def get(name):
            return weights[prefix + name]

        self.qkv = np.concatenate([
            half_split(get("attn_q.weight"), s, s.q_heads),
            half_split(get("attn_k.weight"), s, s.kv_heads),
            get("attn_v.weight"),
        ])
        self.qkv_bias = None
        if prefix + "attn_q.bias" in weights:
            self.qkv_bias = np.concatenate([
                half_split(get("attn_q.bias"), s, s.q_heads),
                half_split(get("attn_k.bias"), s, s.kv_heads),
                get("attn_v.bias"),
            ])
        self.output = get("attn_output.weight")
        self.gate_up = np.concatenate([get("ffn_gate.weight"), get("ffn_up.weight")])
        self.down = get("ffn_down.weight")
        self.attention_norm = get("attn_norm.weight")
        self.feed_forward_norm = get("ffn_norm.weight")

    def project(self, x):
        """q [tokens, q_heads, head_dim] and k, v [tokens, kv_heads, head_dim], views of one product."""
        s = self.shape
        qkv = x @ self.qkv.T
        if self.qkv_bias is not None:
            qkv += self.qkv_bias
        qkv = qkv.reshape(len(x), -1, s.head_dim)
        return np.split(qkv, [s.q_heads, s.q_heads + s.kv_heads], axis=1)

    def feed_forward(self, x):
        """SwiGLU."""
        gate, up = np.split(x @ self.gate_up.T, 2, axis=1)
        with np.errstate(over="ignore"):  # exp(-gate) may be infinite, the quotient is then 0
            return (gate / (1 + np.exp(-gate)) * up) @ self.down.T


def rms_norm(x, weight, epsilon):
    mean_square = np.einsum("te,te->t", x, x) / x.shape[1]
    return x * (1 / np.sqrt(mean_square + epsilon))[:, None] * weight


def rotate(x, cos, sin):
    """RoPE: channel i of the first half of a head turns with channel i of the second half."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    out = np.empty(x.shape, dtype=np.float32)
    out[..., :half] = low * cos - high * sin
    out[..., half:] = high * cos + low * sin
    return out


def half_split(rows, shape, heads):
    """Rows of a q or k projection in the order that rotate() wants.

    GGUF files of the family 'llama' interleave the two halves of a head (0, h, 1, h + 1, ...); those of
    'qwen2' do not.
    """
    if shape.family != "llama":
        return rows
    pairs = rows.reshape(heads, shape.head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
