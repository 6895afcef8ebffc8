"""Writes the README's tables of presets and support from what the library itself answers.

    support.py          rewrites README.md
    support.py --check  fails if README.md differs from the library's answers
Run with a Python that has the kivi package.
"""
import argparse
import pathlib
import sys

try:
    import kivi
except ImportError as error:
    sys.exit(f"support.py: {error}; run this with a Python that has the kivi package")

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256]


def spec(bits, axis, group, **more):
    return kivi.Spec(bits=bits, axis=axis, group=group, **more)


# Specs beside the presets: what it is, K, V.
OTHERS = [
    ("8 bits, groups of 32", spec(8, "channel", 32), spec(8, "token", 32)),
    ("values of a token in one group", spec(2, "channel", 128), spec(2, "token", "head")),
    ("Hadamard on keys and values", spec(3, "channel", 64, transform="hadamard"), spec(2, "token", 64, transform="hadamard")),
    ("query-aware rounding", spec(3, "channel", 64, rounding="query_aware"), spec(2, "token", 64)),
    ("keys by token", spec(4, "token", 32), spec(4, "token", 32)),
    ("values by channel", spec(4, "channel", 32), spec(4, "channel", 32)),
    ("fp32 scales and mins", spec(4, "channel", 32, param_dtype="float32"), spec(4, "token", 32, param_dtype="float32")),
]

# Configurations that create refuses: what was asked for, as keywords of Config.preset.
REFUSED = [
    ("head dim 100", dict(head_dim=100)),
    ("head dim 520", dict(head_dim=520)),
    ("6 query heads on 4 KV heads", dict(q_heads=6, kv_heads=4)),
    ("5-bit keys", dict(k=spec(5, "channel", 32))),
    ("groups of 48 tokens", dict(k=spec(2, "channel", 48))),
    ("a sink window of 40 with groups of 64", dict(sink=40)),
    ("query-aware rounding of values", dict(v=spec(2, "token", 32, rounding="query_aware"))),
]


def config(preset="k3v2", **changes):
    shape = dict(layers=1, q_heads=32, kv_heads=8, head_dim=128, max_sequences=1, max_tokens=4096)
    return kivi.Config.preset(preset, **{**shape, **changes})


def describe(s):
    if s.bits == 16:
        return "16"
    group = "head" if s.group == "head" else f"g{s.group}"
    return f"{s.bits}, {s.axis} {group}" + (", Hadamard" if s.transform == "hadamard" else "")


def presets():
    lines = ["| preset | keys: bits, axis, group | values | sink / recent / flush | bits per element |", "|---|---|---|---|---|"]
    for p in kivi.presets():
        windows = "published schedule, R 128" if p.schedule == "published" else f"{p.sink} / {p.recent} / {p.flush}"
        bits = kivi.query_support(config(p.name), layer=0).bits_per_element
        lines.append(f"| `{p.name}` | {describe(p.k)} | {describe(p.v)} | {windows} | {bits:.1f} |")
    return lines


def path(**changes):
    answer = kivi.query_support(config(**changes), layer=0)
    return answer.attend_path if answer.supported else "refused"


def support():
    device = next(d for d in kivi.devices() if d.device == "cpu")
    lines = [
        "Which code attends on the CPU, by head dim (`kivi_query_support`): *fast* multiplies the codes themselves, *general* "
        "unpacks first and is right for everything. Any ratio of query heads to KV heads, f32, f16 and bf16 in and out.",
        "",
        "| | " + " | ".join(str(d) for d in HEAD_DIMS) + " |",
        "|---|" + "---|" * len(HEAD_DIMS),
    ]
    assert device.available, device.reason
    rows = [(f"`{p.name}`", dict(preset=p.name)) for p in kivi.presets()]
    rows += [(name, dict(preset="kivi4", k=k, v=v, sink=128, flush=128)) for name, k, v in OTHERS]
    for name, changes in rows:
        lines.append(f"| {name} | " + " | ".join(path(head_dim=d, **changes) for d in HEAD_DIMS) + " |")
    lines += ["", "What create refuses, and its sentence:", "", "| asked for | answer |", "|---|---|"]
    for name, changes in REFUSED:
        answer = kivi.query_support(config(**changes), layer=0)
        assert not answer.supported, name
        lines.append(f"| {name} | {answer.reason} |")
    return lines


def fill(text, name, lines):
    head, rest = text.split(f"<!-- {name}: written by script/support.py -->\n")
    _, tail = rest.split("<!-- end -->\n", 1)
    return "".join([head, f"<!-- {name}: written by script/support.py -->\n", "\n".join(lines), "\n<!-- end -->\n", tail])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if README.md differs from the library's answers")
    check = parser.parse_args().check
    before = README.read_text(encoding="utf-8")
    after = fill(fill(before, "presets", presets()), "support", support())
    if check:
        if after != before:
            sys.exit("README.md differs from what the library supports: run script/support.py")
        print("README.md: tables as the library answers")
    else:
        README.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
