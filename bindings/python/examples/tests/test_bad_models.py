"""A model file that cannot be used ends in one sentence that names the file and the reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import byte_pair_tables, write_model

from engine.gguf_file import ModelError, ModelFile
from engine.llama import Llama
from engine.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).parents[1]


def load(path):
    file = ModelFile(path)
    return Llama(file), load_tokenizer(file)


def refused(path, *words):
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and message.endswith(".") and "\n" not in message
    for word in words:
        assert word in message


def test_missing(tmp_path):
    refused(tmp_path / "none.gguf", "no such file")


def test_not_gguf(tmp_path):
    (tmp_path / "text.gguf").write_text("hello")
    refused(tmp_path / "text.gguf", "not a GGUF file")


def test_empty(tmp_path):
    (tmp_path / "empty.gguf").touch()
    refused(tmp_path / "empty.gguf", "not a GGUF file")


def test_cut_short_anywhere(tmp_path):
    write_model(tmp_path / "whole.gguf", "llama")
    whole = (tmp_path / "whole.gguf").read_bytes()
    for length in [4, 7, 20, 100, 1000, 5000, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        refused(tmp_path / "cut.gguf", "cut short or damaged")


def test_unknown_family(tmp_path):
    write_model(tmp_path / "m.gguf", "gemma3")
    refused(tmp_path / "m.gguf", "'gemma3'", "llama and qwen2")


def test_unknown_tokenizer_and_pre_tokenizer(tmp_path):
    def other_model(writer):
        count = byte_pair_tables(writer)
        writer.kv_data[0]["tokenizer.ggml.model"].value = "t5"
        return count

    def other_words(writer):
        count = byte_pair_tables(writer)
        writer.kv_data[0]["tokenizer.ggml.pre"].value = "newest"
        return count

    write_model(tmp_path / "a.gguf", "llama", other_model)
    refused(tmp_path / "a.gguf", "'t5'")
    write_model(tmp_path / "b.gguf", "llama", other_words)
    refused(tmp_path / "b.gguf", "'newest'", "smollm")


def test_unknown_rope_scaling(tmp_path):
    write_model(tmp_path / "m.gguf", "llama", rope__scaling__type="yarn")
    refused(tmp_path / "m.gguf", "'yarn'", "linear")


@pytest.mark.parametrize("program", [["demo.py", "--out", "o"], ["quality.py", "--windows", "w.json", "--json", "j"]])
@pytest.mark.parametrize("fault, words", [
    ("missing", "No such file"),
    ("text", "not a GGUF file"),
    ("cut", "cut short or damaged"),
    ("family", "'gemma3' is not known; known are llama and qwen2"),
])
def test_programs_say_it_in_one_sentence(tmp_path, program, fault, words):
    pytest.importorskip("kivi")
    (tmp_path / "w.json").write_text(json.dumps({"windows": [list(range(258))], "calibration": [1]}))
    model = tmp_path / "model.gguf"
    if fault == "text":
        model.write_text("hello")
    elif fault != "missing":
        write_model(model, "gemma3" if fault == "family" else "llama")
    if fault == "cut":
        model.write_bytes(model.read_bytes()[:5000])
    before = set(tmp_path.iterdir())
    ended = subprocess.run([sys.executable, EXAMPLES / program[0], *program[1:], "--model", model],
                           capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2 and ended.stdout == "" and set(tmp_path.iterdir()) == before
    said = [line for line in ended.stderr.splitlines() if not line.startswith("reading ")]
    assert len(said) == 1 and words in said[0] and str(model) in said[0]
