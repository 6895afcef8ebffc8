"""The GIL is released, caches are independent, and misuse of one cache from two threads is an error."""

import sys
import threading
import time

import numpy
import pytest

import kivi
from reference import attention, error


@pytest.fixture(scope="module")
def long_attend():
    """A cache whose prompt attention takes a noticeable time, and the call."""
    cache = kivi.Cache("k3v2", layers=1, q_heads=8, kv_heads=2, head_dim=128, max_tokens=8256, threads=1)
    rng = numpy.random.default_rng(1)
    for _ in range(8):
        k, v = rng.standard_normal((2, 1024, 2, 128)).astype(numpy.float16)
        cache.append(0, k, v)
    q = rng.standard_normal((64, 8, 128)).astype(numpy.float32)
    yield cache, lambda: cache.attend(0, q)
    cache.close()


def test_other_python_code_runs_during_a_call(long_attend):
    """A thread that only counts: while attend runs on another, it must get on without the switch timer."""
    _, attend = long_attend
    begin = time.perf_counter()
    attend()
    alone = time.perf_counter() - begin
    repeats = max(1, int(0.3 / alone))
    state = {"running": True, "ticks": 0}

    def work():
        for _ in range(repeats):
            attend()
        state["running"] = False

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)  # nobody gives the GIL away but by releasing it
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while state["running"]:
            state["ticks"] += 1
            time.sleep(0.002)  # gives the GIL away itself
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    # With the GIL held during attend there would be about one tick a call.
    assert state["ticks"] > 2 * repeats and state["ticks"] > 20


def test_two_caches_in_two_threads(small):
    results = {}

    def work(name, seed):
        rng = numpy.random.default_rng(seed)
        worst = 0.0
        with kivi.Cache("k3v2", **small) as cache:
            for _ in range(20):
                k, v = rng.standard_normal((2, 45, 2, 64)).astype(numpy.float32)
                cache.append(0, k, v)
                q = rng.standard_normal((1, 4, 64)).astype(numpy.float32)
                worst = max(worst, error(cache.attend(0, q), attention(q, *cache.dequantize(0, 0))[0]))
        results[name] = worst

    threads = [threading.Thread(target=work, args=(name, name)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and max(results.values()) < 1e-3


def test_attends_of_one_cache_run_together(small, rng):
    with kivi.Cache("k3v2", **small) as cache:
        k, v = rng.standard_normal((2, 700, 2, 64)).astype(numpy.float32)
        cache.append(0, k, v)
        queries = rng.standard_normal((4, 33, 4, 64)).astype(numpy.float32)
        expected = [cache.attend(0, q) for q in queries]
        wrong = []

        def work(i):
            for _ in range(20):
                if not numpy.array_equal(cache.attend(0, queries[i]), expected[i]):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def during(call, attempt):
    """Tries `attempt` in the middle of `call` on another thread until it raises StateError; its message."""
    begin = time.perf_counter()
    call()
    duration = time.perf_counter() - begin
    for _ in range(50):
        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(duration / 3)
        try:
            attempt()
        except kivi.StateError as error:
            return str(error)
        finally:
            thread.join()
    return None


def test_append_during_attend_is_a_state_error_and_does_nothing(long_attend):
    cache, attend = long_attend
    before = cache.length(0, 0).length
    nothing = numpy.ones((1, 2, 128), numpy.float16)
    appended = []

    def append():
        cache.append(0, nothing, nothing)
        appended.append(1)

    assert during(attend, append)
    assert cache.length(0, 0).length == before + len(appended)


def test_close_during_attend_is_a_state_error_and_does_nothing(long_attend):
    cache, attend = long_attend
    message = during(attend, cache.close)
    assert message and "under way" in message
    assert not cache.closed
