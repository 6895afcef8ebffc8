"""Keys and values of a model in 2 and 3 bits, and attention straight from them: quickstart.py [cpu|cuda]."""

import sys

import kivi
import numpy as np

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
rng = np.random.default_rng(0)
layers, q_heads, kv_heads, dim = 2, 8, 2, 128

shape = {"layers": layers, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": dim}
with kivi.Cache("k3v2", **shape, max_tokens=4096, device=device) as cache:
    prompt = rng.standard_normal((2, 2000, kv_heads, dim)).astype(np.float16)  # K and V, [tokens, heads, dim]
    for layer in range(layers):
        cache.append(layer, *prompt)

    for step in range(3):  # decode: one new token a step, attention over everything up to it
        for layer in range(layers):
            k, v = rng.standard_normal((2, 1, kv_heads, dim)).astype(np.float16)
            q = rng.standard_normal((1, q_heads, dim)).astype(np.float32)
            out = cache.step(layer, q, k, v)  # [1, q_heads, dim]

    tokens, held = cache.length(0, 0).length, cache.statistics().live_bytes
    print(f"{tokens} tokens: {held} bytes, {2 * 2 * layers * tokens * kv_heads * dim / held:.1f} times less than float16")
