"""fp16 attention of cuDNN and FlashAttention through PyTorch: the peers of bench_gpu.

    bench_gpu_peer.py FILE

Reads the JSON Lines that bench_gpu wrote to FILE, measures the peer at the shapes of its attend cases alike (medians of
replays of a graph of calls over caches that rotate out of the L2), adds the ratios "cudnn-f16" and, where there are
several query tokens, "flash-f16" to them, and writes FILE again with its own cases at the end. FlashAttention is causal;
cuDNN, whose mask through PyTorch is not that of a chunk behind a past, sees the whole chunk with every query.
"""
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

CALLS, REPLAYS, FEW_REPLAYS, ENOUGH_US, ROTATION, MOST_SETS = 20, 15, 5, 4e5, 256 << 20, 400
FEW_TOKENS = 64  # more make a call so long that two are enough

PEERS = ("cudnn-f16", "flash-f16")


def measure(peer, batch, q_heads, kv_heads, tokens, dim, q_len):
    """Microseconds of a call, and the bytes that it reads."""
    if q_len > 1:
        tokens += q_len
    bytes_of = 4 * batch * kv_heads * tokens * dim
    sets = 2 if q_len > FEW_TOKENS else min(MOST_SETS, ROTATION // bytes_of + 1)
    calls = sets if q_len > FEW_TOKENS else max(CALLS, sets)
    caches = [tuple(torch.randn(batch, kv_heads, tokens, dim, device="cuda", dtype=torch.float16) for _ in "kv")
              for _ in range(sets)]
    q = torch.randn(batch, q_heads, q_len, dim, device="cuda", dtype=torch.float16)

    def call(i):
        if peer == "flash-f16":  # the operator itself: its mask is causal at the bottom right
            return torch.ops.aten._scaled_dot_product_flash_attention(q, *caches[i % sets], 0.0, True)
        return torch.nn.functional.scaled_dot_product_attention(q, *caches[i % sets], enable_gqa=q_heads != kv_heads)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for i in range(3):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i)
    times = []
    for i in range(REPLAYS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(1e3 * begin.elapsed_time(end))
        if len(times) >= FEW_REPLAYS and sum(times) > ENOUGH_US:
            break
    return statistics.median(times) / calls, bytes_of


def save(cases, path):
    with open(path, "w") as lines:
        for c in cases:
            lines.write(json.dumps(c) + "\n")


def main():
    path = sys.argv[1]
    with open(path) as lines:
        cases = [json.loads(line) for line in lines]
    copy = next(c["gbps"] for c in cases if c["suite"] == "copy")
    groups = {}
    for c in cases:
        what = c["case"]
        if c["suite"] == "attend":
            shape = tuple(what[key] for key in ("batch", "q_heads", "kv_heads", "context", "head_dim", "q_len"))
            groups.setdefault(shape, []).append(c)
    # The largest first: PyTorch gives memory of a size back to the driver, but not its holes.
    for shape in sorted(groups, key=lambda s: -s[0] * s[2] * s[3]):
        for peer in PEERS if shape[-1] > 1 else PEERS[:1]:
            try:
                us, size = measure(peer, *shape)
            except torch.cuda.OutOfMemoryError:
                continue  # no peer, no ratio
            finally:
                torch.cuda.empty_cache()
            for c in groups[shape]:
                c["ratios"][peer] = round(us / c["median_us"], 4)
            what = dict(groups[shape][0]["case"], preset=peer, k_bits=16, v_bits=16, group=0, hadamard=False,
                        query_aware=False, path="peer")
            gbps = size / us / 1e3
            cases.append({"suite": "attend", "table": "peer", "case": what, "median_us": round(us, 3), "bytes": size,
                          "gbps": round(gbps, 1), "ratios": {"copy": round(gbps / copy, 4)}})
        save(cases, path)  # after each shape: a run that is cut off keeps what it has


if __name__ == "__main__":
    main()
