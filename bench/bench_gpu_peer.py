"""fp16 attention of cuDNN through PyTorch at the shapes of bench_gpu, timed alike: medians of replays of a graph of
calls over caches that rotate out of the L2. One JSON object a line."""
import json
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = [(1, 32, 8, 1024), (1, 32, 8, 32768), (1, 32, 8, 131072), (8, 32, 8, 32768), (32, 32, 8, 8192), (64, 32, 8, 4096),
          (1, 32, 32, 32768), (8, 32, 32, 4096)]
DIM, CALLS, REPLAYS, ROTATION = 128, 20, 15, 256 << 20


def measure(batch, q_heads, kv_heads, tokens):
    bytes_of = 4 * batch * kv_heads * tokens * DIM
    sets = min(CALLS, max(2, ROTATION // bytes_of + 1))
    caches = [tuple(torch.randn(batch, kv_heads, tokens, DIM, device="cuda", dtype=torch.float16) for _ in "kv")
              for _ in range(sets)]
    q = torch.randn(batch, q_heads, 1, DIM, device="cuda", dtype=torch.float16)

    def call(i):
        return torch.nn.functional.scaled_dot_product_attention(q, *caches[i % sets], enable_gqa=q_heads != kv_heads)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for i in range(3):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(CALLS):
                call(i)
    times = []
    for i in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(1e3 * begin.elapsed_time(end) / CALLS)
    us = statistics.median(times)
    print(json.dumps({"bench": "gpu_peer", "peer": "cuDNN fp16", "batch": batch, "q_heads": q_heads,
                      "kv_heads": kv_heads, "tokens": tokens, "us": round(us, 2),
                      "gbps": round(bytes_of / us / 1e3)}), flush=True)


for shape in SHAPES:
    measure(*shape)
    torch.cuda.empty_cache()
