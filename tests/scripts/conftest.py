"""A copy of the checkout, and a PATH that lacks what a test says, so that no test changes this machine."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = frozenset({"c++", "cc", "g++", "gcc", "clang++", "clang"})
NEVER = {"apt-get", "sudo", "nvidia-smi", "nvcc"}  # what could change the machine, or makes machines differ


@pytest.fixture
def checkout(tmp_path):
    """What the scripts need of the repository; nothing has been set up or built in it."""
    copy = tmp_path / "checkout"
    for name in ("CMakeLists.txt", "README.md", "script", "cmake", "core", "include", "bench", "bindings/python",
                 "bindings/rust/scripts"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "build", "dist"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def tools(tmp_path_factory):
    """tools(without={...}): a folder of links to every command of this machine but these."""

    @functools.lru_cache(maxsize=None)
    def make(without=frozenset()):
        folder = tmp_path_factory.mktemp("tools")
        (folder / "python3").symlink_to(getattr(sys, "_base_executable", sys.executable))
        for place in map(Path, os.environ["PATH"].split(os.pathsep)):
            if not place.is_dir() or place.name == "ccache" or (place.parent / "pyvenv.cfg").exists():
                continue
            for command in place.iterdir():
                if command.name not in NEVER and not os.path.lexists(folder / command.name):
                    (folder / command.name).symlink_to(command)
        for name in without:
            (folder / name).unlink(missing_ok=True)
        return folder

    return make


@pytest.fixture
def run(checkout, tmp_path):
    """run(tools, words...): a command in the checkout, with that PATH, an empty home and no package index."""
    home = tmp_path / "home"
    home.mkdir()

    def call(tools, *words, **variables):
        environment = {
            "PATH": str(tools), "HOME": str(home), "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
            "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "0",
            "PIP_NO_CACHE_DIR": "1", **variables,
        }
        return subprocess.run(list(map(str, words)), cwd=checkout, env=environment, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL)

    return call


def contents(folder):
    """Every file below it with its size and the time of its last change."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def one_sentence(ended, status, *words):
    """The command ended so, and said it in one line that holds these words."""
    assert ended.returncode == status, ended
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n"), ended
    for word in words:
        assert word in ended.stderr, ended
