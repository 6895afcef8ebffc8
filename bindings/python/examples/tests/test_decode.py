"""Scores and answers through kivi caches."""

import numpy as np
import pytest

kivi = pytest.importorskip("kivi")

from candidates import BASELINE, QUERY_AWARE, Candidate, open_caches  # noqa: E402
from engine.caches import KiviCache, NumpyCache  # noqa: E402
from engine.decode import compare, generate, score_windows  # noqa: E402
from engine.gguf_file import ModelFile  # noqa: E402
from engine.llama import Llama  # noqa: E402

RANDOM = np.random.default_rng(3)
WINDOWS = [RANDOM.integers(0, 256, length).tolist() for length in (300, 290, 40)]
CALIBRATION = RANDOM.integers(0, 256, 200).tolist()


@pytest.fixture
def model(model_path):
    return Llama(ModelFile(model_path))


def test_f16_is_the_exact_cache(model):
    """The library's full-precision cache against the numpy one, prompt in one piece, then token by token."""
    tokens, prompt = WINDOWS[0][:60], 50
    logits = []
    for cache in (NumpyCache(model.shape, 1, 60), open_caches([BASELINE], model, 1, 60, [])["f16"]):
        model.forward(tokens[:prompt], np.arange(prompt), cache.attention([prompt]))
        for position in range(prompt, 60):
            hidden = model.forward(tokens[position:position + 1], [position], cache.attention([1]))
        logits.append(model.logits(hidden))
    assert np.abs(logits[0] - logits[1]).max() < 2e-3 * np.abs(logits[0]).max()


def test_fewer_bits_diverge_more(model):
    caches = open_caches([BASELINE, Candidate("kivi4"), Candidate("kivi2-sink")], model, 3, 300, [])
    scores = score_windows(model, caches, WINDOWS, 20)
    assert all(len(score.surprise) == 279 + 269 + 19 for score in scores.values())
    assert scores["f16"].kl == 0 and scores["f16"].top1 == 1
    assert 0 < scores["kivi4"].kl < scores["kivi2-sink"].kl
    assert abs(np.log(scores["kivi4"].perplexity / scores["f16"].perplexity)) < 0.1


def test_neighbours_do_not_matter(model):
    """A cache and a window give the same scores alone and side by side with others."""
    many = score_windows(model, open_caches([BASELINE, Candidate("kivi4")], model, 3, 300, []), WINDOWS, 20)
    alone = score_windows(model, open_caches([Candidate("kivi4")], model, 1, 300, []), WINDOWS[2:], 20)
    assert alone["kivi4"].kl == 0  # it is its own reference
    ends = score_windows(model, open_caches([Candidate("kivi4")], model, 1, 300, []), WINDOWS[:1], 20)
    together = many["kivi4"].surprise
    assert np.isclose(ends["kivi4"].surprise.mean(), np.mean(first_window(together)), rtol=1e-3)


def first_window(column):
    """Scores of WINDOWS[0] from a column of all windows: positions in order, the live windows at each."""
    picked, at = [], 0
    for position in range(20, 299):
        picked.append(column[at])
        at += sum(position + 1 < len(window) for window in WINDOWS)
    return picked


def test_moments_are_committed(model):
    caches = open_caches([BASELINE, QUERY_AWARE], model, 1, 300, CALIBRATION)
    statistics = caches[QUERY_AWARE.label].cache.statistics()
    assert (statistics.key_rounding, statistics.moments) == ("query_aware", "committed")
    scores = score_windows(model, caches, WINDOWS[:1], 20)
    assert 0 < scores[QUERY_AWARE.label].kl < 1


def test_compare_is_the_definition():
    logits = RANDOM.normal(size=(3, 4, 50)).astype(np.float32) * 4
    logits[2] = logits[0]
    exact = logits.astype(np.float64)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    targets = [3, 0, 49, 7]
    surprise, divergence, same = compare(logits.copy(), targets)
    assert np.allclose(surprise, -log_p[:, range(4), targets], atol=1e-5)
    assert np.allclose(divergence, (np.exp(log_p[0]) * (log_p[0] - log_p)).sum(-1), atol=1e-5)
    assert (same[1] == (log_p[1].argmax(-1) == log_p[0].argmax(-1))).all() and same[2].all()
    assert (divergence[2] == 0).all()


def test_answers(model):
    """Two exact caches answer alike; one of 2 bits is judged token by token on the reference's answer."""
    caches = open_caches([BASELINE, Candidate("f16", name="again"), Candidate("kivi2-sink")], model, 4, 330, [])
    prompts = [window[:length] for window, length in zip(WINDOWS, (250, 30))]
    answers = generate(model, caches, prompts, 40, stops=set())
    for reference, again in zip(answers["f16"], answers["again"]):
        assert reference == again and len(reference.tokens) == 40 and all(again.agreement)
    assert len(answers["kivi2-sink"][0].agreement) == 40
    stop = answers["f16"][0].tokens[5]
    shorter = generate(model, open_caches([BASELINE], model, 4, 330, []), prompts, 40, {stop})["f16"][0]
    assert stop not in shorter.tokens and len(shorter.tokens) == len(shorter.agreement) <= 5


def test_clocks_run(model):
    cache = open_caches([BASELINE], model, 1, 60, [])["f16"]
    assert isinstance(cache, KiviCache) and cache.attend_seconds == 0
    model.forward([1], [0], cache.attention([1]))
    assert cache.attend_seconds > 0 and cache.append_seconds > 0
