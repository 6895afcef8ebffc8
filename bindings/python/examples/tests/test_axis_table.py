"""The claims about axes and windows are judged from the table, either way."""

import numpy as np
import pytest
from conftest import write_model

pytest.importorskip("kivi")

import axis_table  # noqa: E402
from axis_table import AXES, RECENT, SINK, WINDOWS, Activations, Row  # noqa: E402
from engine.gguf_file import ModelFile  # noqa: E402
from engine.llama import Llama  # noqa: E402


def table(key_advantage, value_gap, gap_with_sinks, window_gain):
    """Rows in which per-token keys cost `key_advantage` times as much, and so on."""
    rows = []
    for k_axis, v_axis in AXES:
        for sink, recent in WINDOWS:
            key = 0.2 * (1 if k_axis == "channel" else key_advantage)
            gap = gap_with_sinks if sink else value_gap
            value = 0.1 + (gap if v_axis == "channel" else 0)
            output = 0.5 - window_gain * (bool(sink) + bool(recent))
            rows.append(Row(k_axis, v_axis, sink, recent, key, key, key, 0.4 if v_axis == "token" else 0.3,
                            output, key, value, 0.9))
    return rows


@pytest.fixture
def activations():
    random = np.random.default_rng(2)
    return [Activations(*(random.normal(size=(n, heads, 64)).astype(np.float32) for n, heads in ((4, 4), (80, 2), (80, 2))))]


def test_all_show(activations):
    assert [o.holds for o in axis_table.orderings(table(2, 0.3, 0.01, 0.1), activations)] == [True] * 5


@pytest.mark.parametrize("change, missing", [
    (dict(key_advantage=0.9), [0, 1]), (dict(value_gap=-0.1), [2, 3]), (dict(gap_with_sinks=0.2), [3]),
    (dict(window_gain=-0.1), [4]),
])
def test_each_can_be_missing_and_says_why(activations, change, missing):
    claims = dict(key_advantage=2, value_gap=0.3, gap_with_sinks=0.01, window_gain=0.1)
    found = axis_table.orderings(table(**{**claims, **change}), activations)
    assert [i for i, o in enumerate(found) if not o.holds] == missing
    for i, ordering in enumerate(found):
        reasoned = any(words in ordering.evidence for words in ("outlier", "rests on"))
        assert reasoned == (i in missing)


def test_errors_of_a_model(tmp_path):
    write_model(tmp_path / "m.gguf", "llama")
    tokens = np.random.default_rng(4).integers(0, 256, 300).tolist()
    activations = axis_table.capture(Llama(ModelFile(tmp_path / "m.gguf")), tokens, 16)
    assert [a.q.shape for a in activations] == [(16, 4, 64)] * 2 and activations[0].k.shape == (300, 2, 64)
    rows = axis_table.measure(activations)
    assert [(r.k_axis, r.v_axis) for r in rows[::4]] == AXES
    by_windows = {(r.sink, r.recent): r for r in rows if (r.k_axis, r.v_axis) == AXES[0]}
    assert by_windows[SINK, RECENT].output_error < by_windows[0, 0].output_error
    assert all(0 < r.key_error < 1 and 0 < r.output_error < 2 and 0 <= r.sparsity <= 1 for r in rows)
