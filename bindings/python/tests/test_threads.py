"""The GIL is released, caches are independent, and misuse of one cache from two threads is an error."""

import sys
import threading
import time

import numpy

import kivi
from reference import attention, error


class LongAttend:
    """A cache, and an attend on it that takes at least 0.3 s: by the plain double-precision code."""

    def __init__(self):
        rng = numpy.random.default_rng(1)
        self.cache = kivi.Cache("k3v2", layers=1, q_heads=8, kv_heads=2, head_dim=128, max_tokens=2048, threads=1,
                                reference=True)
        k, v = rng.standard_normal((2, 1024, 2, 128)).astype(numpy.float16)
        self.cache.append(0, k, v)
        self.q = rng.standard_normal((8, 8, 128)).astype(numpy.float32)
        while self.timed() < 0.3:
            self.q = numpy.concatenate([self.q, self.q])

    def __call__(self):
        return self.cache.attend(0, self.q, numpy.empty_like(self.q))

    def timed(self):
        begin = time.perf_counter()
        self()
        return time.perf_counter() - begin

    def interrupted_by(self, attempt):
        """Calls `attempt` in the middle of a call on another thread; the message of its StateError, or None."""
        wait = self.timed() / 3
        thread = threading.Thread(target=self)
        thread.start()
        time.sleep(wait)
        try:
            attempt()
        except kivi.StateError as error:
            return str(error)
        finally:
            thread.join()
        return None


def test_other_python_code_runs_during_a_call():
    """A thread that only counts: while attend runs on another, it must get on without the switch timer."""
    attend = LongAttend()
    ticks = 0
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)  # nobody gives the GIL away but by releasing it
    try:
        thread = threading.Thread(target=attend)
        thread.start()
        while thread.is_alive():
            ticks += 1
            time.sleep(0.002)  # gives the GIL away itself
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    attend.cache.close()
    assert ticks > 20  # with the GIL held during attend there would be one or two


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


def test_append_during_attend_is_a_state_error_and_does_nothing():
    attend = LongAttend()
    token = numpy.ones((1, 2, 128), numpy.float16)
    before = attend.cache.export_sequence(0)
    assert attend.interrupted_by(lambda: attend.cache.append(0, token, token))
    assert attend.cache.export_sequence(0) == before
    attend.cache.append(0, token, token)
    attend.cache.close()


def test_close_during_attend_is_a_state_error_and_does_nothing():
    attend = LongAttend()
    message = attend.interrupted_by(attend.cache.close)
    assert message and "under way" in message
    assert not attend.cache.closed
    attend()
    attend.cache.close()
