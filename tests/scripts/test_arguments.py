"""Bad arguments and files: one sentence and status 2, before anything is set up or built."""

import json
import re

import pytest
from conftest import ROOT, contents, one_sentence

SHELL = ["bootstrap", "test", "demo", "quality", "bench", "gpu-test"]
WINDOWS = ["--windows", "good.json", "--json", "out.jsonl"]

# Words after script/, and what the sentence names: the argument, its value, what is expected.
BAD = [
    ("bootstrap --tests", ["'--tests'", "--test", "--cuda"]),
    ("bootstrap --test extra", ["'extra'"]),
    ("test --fast", ["'--fast'", "--quick", "ctest"]),
    ("test build conformance", ["'conformance'", "ctest"]),
    ("demo --fast", ["'--fast'", "--quick", "--model", "--out", "--device"]),
    ("demo extra", ["'extra'", "--quick"]),
    ("demo --model", ["--model", "expected one argument"]),
    ("demo --model none.gguf", ["--model", "'none.gguf'", "No such file", "GGUF file is expected"]),
    ("demo --model=none.gguf", ["--model", "'none.gguf'"]),
    ("demo --model script", ["--model", "'script'", "directory"]),
    ("demo --model README.md", ["--model", "'README.md'", "not a GGUF file"]),
    ("demo --out README.md", ["--out", "'README.md'", "is a file"]),
    ("demo --out README.md/below", ["--out", "'README.md/below'", "is a file"]),
    ("demo --quick=yes", ["--quick", "'yes'"]),
    ("demo --device gpu", ["--device", "'gpu'", "cpu", "cuda"]),
    ("quality", ["--windows", "--json", "required"]),
    ("quality --json out.jsonl", ["--windows", "required"]),
    ("quality --windows none.json --json out.jsonl", ["--windows", "'none.json'", "No such file", "JSON file"]),
    ("quality --windows README.md --json out.jsonl", ["--windows", "'README.md'", "not JSON"]),
    ("quality --windows list.json --json out.jsonl", ["'list.json'", "'windows' and 'calibration'"]),
    ("quality --windows words.json --json out.jsonl", ["'words.json'", "lists of token ids"]),
    ("quality --windows empty.json --json out.jsonl", ["'empty.json'", "lists of token ids"]),
    ("quality --windows short.json --json out.jsonl", ["'short.json'", "at least 258", "shortest has 2"]),
    ("quality --windows good.json --json none/out.jsonl", ["--json", "'none/out.jsonl'", "no folder"]),
    ("quality --windows good.json --json script", ["--json", "'script'", "file is expected"]),
    ("quality --limit 0 --windows good.json --json out.jsonl", ["--limit", "'0'", "1 or more"]),
    ("quality --limit two --windows good.json --json out.jsonl", ["--limit", "'two'"]),
    ("quality --fast --windows good.json --json out.jsonl", ["'--fast'", "--limit"]),
    ("quality --model none.gguf --windows good.json --json out.jsonl", ["--model", "'none.gguf'"]),
    ("bench --fast", ["'--fast'", "--quick", "--json", "--only", "--device", "--plot"]),
    ("bench --device gpu", ["--device", "'gpu'", "cpu or cuda"]),
    ("bench --device", ["--device", "cpu or cuda"]),
    ("bench --device cpu --plot out.png", ["--plot", "out.png", "GPU"]),
    ("bench --plot none/out.png", ["--plot", "none/out.png", "no folder none"]),
    ("bench --only", ["--only", "part of a name"]),
    ("bench --json", ["--json", "file"]),
    ("bench --json none/out.jsonl", ["--json", "none/out.jsonl", "no folder none"]),
    ("bench --json script", ["--json", "script", "must be a file"]),
    ("gpu-test --fast", ["'--fast'", "--no-build", "--json"]),
    ("gpu-test --json", ["--json", "file"]),
    ("gpu-test --json none/out.jsonl", ["--json", "none/out.jsonl", "no folder none"]),
]


@pytest.fixture
def files(checkout):
    """The files that the command lines name."""
    contents = {
        "good": {"windows": [[1] * 258], "calibration": [1]},
        "list": [1, 2],
        "words": {"windows": [["one", "two"]], "calibration": [1]},
        "empty": {"windows": [], "calibration": [1]},
        "short": {"windows": [[1] * 300, [1, 2]], "calibration": [1]},
    }
    for name, content in contents.items():
        (checkout / f"{name}.json").write_text(json.dumps(content))


def test_arguments(checkout, files, tools, run):
    path, before = tools(), contents(checkout)
    for words, expected in BAD:
        script, *arguments = words.split()
        one_sentence(run(path, f"script/{script}", *arguments), 2, f"{script}: ", *expected)
    assert contents(checkout) == before


@pytest.mark.parametrize("script", SHELL)
def test_help(checkout, tools, run, script):
    before = contents(checkout)
    ended = run(tools(), f"script/{script}", "--help")
    assert ended.returncode == 0 and ended.stderr == "" and f"script/{script}" in ended.stdout
    options = set(re.findall(r"^ +(--[a-z-]+)\)", (ROOT / "script" / script).read_text(), re.M))
    assert all(option in ended.stdout for option in options)
    assert contents(checkout) == before


@pytest.mark.parametrize("words, expected", [
    ("results.py junit report.xml", ["'junit'", "ctest", "pytest", "summary"]),
    ("results.py", ["required", "kind", "report"]),
    ("snippets.py --check", ["--check"]),
    ("spills.py none.log", ["'none.log'", "No such file"]),
])
def test_python_scripts(checkout, tools, run, words, expected):
    """These are for maintainers: the usage stands before the sentence."""
    before = contents(checkout)
    script, *arguments = words.split()
    ended = run(tools(), "python3", f"script/{script}", *arguments)
    *usage, sentence = ended.stderr.splitlines()
    assert ended.returncode == 2 and usage[0].startswith("usage: ") and all(word in sentence for word in expected)
    assert contents(checkout) == before


@pytest.mark.parametrize("kernel, status", [("decode", 1), ("prefill", 1), ("pack", 1), ("step", 1), ("write", 0)])
def test_spills(checkout, tools, run, kernel, status):
    """Kernels of the fast order must not spill."""
    (checkout / "build.txt").write_text(f"""
ptxas info    : Compiling entry function '_Z{len(kernel) + 7}{kernel}_kernelv' for 'sm_90'
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 128 registers, 256 bytes smem
""")
    ended = run(tools(), "python3", "script/spills.py", "build.txt")
    assert ended.returncode == status and f"{kernel}_kernel: 128 registers, 8 bytes of spills" in ended.stdout
    assert ("not allowed" in ended.stdout) == (status == 1)


def test_rust_scripts(checkout, tools, run):
    path, before = tools(), contents(checkout)
    one_sentence(run(path, "bindings/rust/scripts/test", "--fast"), 2, "'--fast'")
    one_sentence(run(path, "bindings/rust/scripts/test"), 2, "KIVI_LIB_DIR", "folder of libkivi.so")
    one_sentence(run(path, "bindings/rust/scripts/bindings", "compare"), 2, "write | check")
    assert contents(checkout) == before
