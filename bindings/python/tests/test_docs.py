"""What the documentation shows runs as it stands."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import kivi
from kivi import _arrays, _cache, _config

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("module", [kivi, _arrays, _cache, _config], ids=lambda module: module.__name__)
def test_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0 or module is _arrays


def test_quickstart_runs():
    result = subprocess.run([sys.executable, EXAMPLES / "quickstart.py"], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    assert "bytes" in result.stdout and len(result.stdout.splitlines()) <= 4
