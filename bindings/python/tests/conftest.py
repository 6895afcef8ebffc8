"""Data and caches that the tests share."""

import numpy
import pytest

import kivi


@pytest.fixture
def rng():
    return numpy.random.default_rng(7)


@pytest.fixture
def small():
    """Arguments of a small model: 2 layers, 4 query heads over 2 KV heads of 64."""
    return dict(layers=2, q_heads=4, kv_heads=2, head_dim=64, max_tokens=1024, max_sequences=2, threads=2)


@pytest.fixture
def cache(small):
    with kivi.Cache("k3v2", **small) as cache:
        yield cache
