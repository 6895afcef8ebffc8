"""demo.py and quality.py as they are run, on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import write_model

pytest.importorskip("kivi")
EXAMPLES = Path(__file__).parents[1]


def run(program, *arguments):
    return subprocess.run([sys.executable, EXAMPLES / program, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def windows(tmp_path):
    random = np.random.default_rng(5)
    content = {"windows": [random.integers(0, 256, n).tolist() for n in (300, 280)],
               "calibration": random.integers(0, 256, 300).tolist()}
    path = tmp_path / "windows.json"
    path.write_text(json.dumps(content))
    return path


def test_quality(tmp_path, model_path, windows):
    ended = run("quality.py", "--model", model_path, "--windows", windows, "--json", tmp_path / "out.jsonl")
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    fields = {"preset", "moments", "k_hadamard", "bits_per_element", "ppl_f16", "ppl", "kl", "top1"}
    assert len(rows) == 8 and all(set(row) == fields for row in rows)
    f16 = next(row for row in rows if row["preset"] == "f16")
    assert (f16["ppl"], f16["kl"], f16["top1"]) == (f16["ppl_f16"], 0, 1)
    assert [row["moments"] for row in rows].count(True) == 1
    bits = {row["preset"]: row["bits_per_element"] for row in rows}
    assert (bits["f16"], bits["k3v2"], bits["kivi4"], bits["kivi2-paper"]) == (16, 3, 5, 3)
    assert all(row["kl"] > 0 for row in rows if row is not f16)


def test_quality_refuses_windows_of_another_vocabulary(tmp_path, model_path):
    (tmp_path / "w.json").write_text(json.dumps({"windows": [[70000] * 258], "calibration": [1]}))
    ended = run("quality.py", "--model", model_path, "--windows", tmp_path / "w.json", "--json", tmp_path / "o")
    assert ended.returncode == 2 and not (tmp_path / "o").exists()
    assert ended.stderr == f"{tmp_path / 'w.json'}: holds the token id 70000, but the model's ids end at 260.\n"


def test_demo(tmp_path):
    write_model(tmp_path / "tiny.gguf", "llama")
    ended = run("demo.py", "--quick", "--model", tmp_path / "tiny.gguf", "--out", tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "out/demo.json").read_text())
    assert len(result["presets"]) == 7 and len(result["axes"]) == 16 and len(result["orderings"]) == 5
    assert result["presets"][0]["agreement"] == 1
    for name in ("quality", "memory", "attention", "axes"):
        assert (tmp_path / f"out/{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out/demo.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "http" not in page
    assert "kivi2-paper" in ended.stdout
