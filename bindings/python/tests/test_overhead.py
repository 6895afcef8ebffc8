"""A Python call of attend with numpy arrays costs at most 5 us over the C call."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

LIMIT_US = 5.0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the C side")
def test_attend_costs_little_over_c():
    from bench_python import measure

    for _ in range(3):  # a busy machine may spoil one measurement, not three
        result = measure(runs=50)
        over = {name: result[name] - result["c"] for name in ("python", "python, all keywords")}
        if max(over.values()) <= LIMIT_US:
            return
    pytest.fail(f"over the C call: {over} us, at most {LIMIT_US}")
