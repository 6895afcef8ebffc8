"""Decode attention in numpy, fp32: the peer that a Python user would write.

    bench_numpy.py FILE [--quick]

Reads the JSON Lines that the C++ benchmarks wrote to FILE, measures numpy for the shapes of their attend cases on the
same threads and caches as cold, adds the ratio "numpy" to them, and writes FILE again with its own cases at the end.
"""
import json
import math
import statistics
import sys
import time

import numpy as np

HEADS, RATIO, DIM = 8, 4, 128


def attend(q, k, v):
    """q [heads, ratio, dim], k and v [heads, tokens, dim]."""
    scores = q @ k.transpose(0, 2, 1) * (DIM ** -0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ v


def measure(tokens, seconds, cache_bytes):
    """Median time of one call in microseconds; sets of keys and values rotate over more than four times the cache."""
    random = np.random.default_rng(0)
    bytes_of_set = 2 * HEADS * tokens * DIM * 4
    sets = max(2, math.ceil(4.2 * cache_bytes / bytes_of_set) + 1)
    k = [random.standard_normal((HEADS, tokens, DIM), dtype=np.float32) for _ in range(sets)]
    v = [x.copy() for x in k]
    q = random.standard_normal((HEADS, RATIO, DIM), dtype=np.float32)
    times = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        i = len(times) % sets
        start = time.perf_counter()
        attend(q, k[i], v[i])
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6, bytes_of_set


def main():
    path, quick = sys.argv[1], "--quick" in sys.argv
    with open(path) as lines:
        cases = [json.loads(line) for line in lines]
    usual = [
        c for c in cases
        if c["suite"] == "attend" and c["case"]["head_dim"] == DIM and c["case"]["batch"] == 1
        and c["case"]["threads"] == 2 and c["case"]["q_heads"] == HEADS * RATIO
    ]
    print("\nnumpy", np.__version__)
    cache_bytes = cases[0]["llc_bytes"]
    for tokens in sorted({c["case"]["context"] for c in usual}):
        median, size = measure(tokens, 1 if quick else 3, cache_bytes)
        print(f"  {'numpy f32':24} T {tokens:<6} B 1  threads 2  {median:10.1f} us {size / median / 1e3:7.2f} GB/s")
        for c in usual:
            if c["case"]["context"] == tokens:
                c["ratios"]["numpy"] = round(median / c["median_us"], 4)
        cases.append({
            "suite": "attend",
            "case": {
                "backend": "numpy", "batch": 1, "q_heads": HEADS * RATIO, "kv_heads": HEADS, "head_dim": DIM,
                "context": tokens, "q_len": 1, "dtype": "f32", "preset": "numpy", "k_bits": 32, "v_bits": 32,
                "group": 0, "threads": 2, "isa": "numpy", "hadamard": False,
            },
            "median_us": round(median, 3), "bytes": size, "gbps": round(size / median / 1e3, 3),
            "llc_bytes": cache_bytes, "ratios": {},
        })
        for name in ("f16", "kivi2-sink", "k3v2"):
            for c in usual:
                if c["case"]["context"] == tokens and c["case"]["preset"] == name:
                    print(f"      {name}: {c['ratios']['numpy']:.1f}x faster")
                    break
    with open(path, "w") as lines:
        lines.writelines(json.dumps(c) + "\n" for c in cases)


if __name__ == "__main__":
    main()
