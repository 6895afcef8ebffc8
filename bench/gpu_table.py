"""The results of bench_gpu as a table, and a picture of its sweep.

    gpu_table.py FILE [--plot PICTURE]

A line a case: time, GB/s of its own bytes, their share of the copy bandwidth of the same run, and how many times faster
than cuDNN's fp16 attention of the same shape, where FILE has that.
"""
import argparse
import json


def heads(case):
    return f"{case['q_heads']}/{case['kv_heads']}"


def name(case):
    what = case["case"]
    spec = what["preset"] + (" query-aware" if what["query_aware"] else "")
    return f"{spec}, {case['suite']}" if case["table"] == "steps" else spec  # which has several calls


def table(cases):
    width = max(len(name(c)) for c in cases)
    yield f"{'':{width + 2}} {'batch':>5} {'heads':>7} {'context':>8} {'queries':>7} {'path':>8} {'us':>10} {'GB/s':>7} {'of copy':>8} {'cuDNN':>7}"
    last = None
    for c in cases:
        what, ratios = c["case"], c["ratios"]
        if c["table"] != last:
            yield f"{c['table'] or 'copies'}"
            last = c["table"]
        peer = f"{ratios['cudnn-f16']:.2f}x" if "cudnn-f16" in ratios else ""
        yield (f"  {name(c):{width}} {what['batch']:5} {heads(what):>7} {what['context']:8} {what['q_len']:7} {what['path']:>8} {c['median_us']:10.1f} "
               f"{c['gbps']:7.0f} {100 * ratios['copy']:7.1f}% {peer:>7}")


def plot(cases, picture):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweep = [c for c in cases if c["table"] == "sweep" and "cudnn-f16" in c["ratios"]]
    presets = sorted({c["case"]["preset"] for c in sweep})
    ratios = sorted({c["case"]["q_heads"] // c["case"]["kv_heads"] for c in sweep})
    figure, axes = pyplot.subplots(len(presets), len(ratios), figsize=(4 * len(ratios), 3.2 * len(presets)), sharex=True,
                                   sharey=True, squeeze=False)
    for row, preset in zip(axes, presets):
        for axis, ratio in zip(row, ratios):
            shown = [c for c in sweep if c["case"]["preset"] == preset
                     and c["case"]["q_heads"] // c["case"]["kv_heads"] == ratio]
            for batch in sorted({c["case"]["batch"] for c in shown}):
                line = sorted((c["case"]["context"], c["ratios"]["cudnn-f16"]) for c in shown
                              if c["case"]["batch"] == batch)
                axis.plot(*zip(*line), marker="o", markersize=3, label=f"batch {batch}")
            axis.axhline(1, color="grey", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_xticks([1024, 4096, 32768, 131072], ["1K", "4K", "32K", "128K"])
            axis.set_title(f"{preset}, {ratio} query head{'s' * (ratio > 1)} a KV head", fontsize=9)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("times faster than cuDNN fp16")
    for axis in axes[-1]:
        axis.set_xlabel("context")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--plot", metavar="PICTURE")
    arguments = parser.parse_args()
    with open(arguments.file) as lines:
        cases = [json.loads(line) for line in lines]
    print("\n".join(table(cases)))
    if arguments.plot:
        plot(cases, arguments.plot)


if __name__ == "__main__":
    main()
