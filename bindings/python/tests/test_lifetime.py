"""Closing, exiting and destroying at awkward moments."""

import gc
import subprocess
import sys
import textwrap

import numpy
import pytest

import kivi

MAKE = """
import numpy, sys, kivi
cache = kivi.Cache("k3v2", layers=1, q_heads=2, kv_heads=2, head_dim=64, max_tokens=512, threads=2)
k = numpy.ones((300, 2, 64), numpy.float16)
cache.append(0, k, k)
cache.attend(0, k)
"""


def run(program):
    return subprocess.run([sys.executable, "-X", "dev", "-c", textwrap.dedent(program)], capture_output=True, text=True,
                          timeout=120)


@pytest.mark.parametrize("ending", [
    "",                                                 # a global cache is alive at exit 
    "sys.exit(0)",
    "sys.keep = cache; kivi = None",                    # held by a module that is torn down late
    "del sys.modules['kivi'], sys.modules['kivi._native']",
    "import atexit; atexit.register(cache.close); cache.close()",
    "import threading; threading.Thread(target=cache.attend, args=(0, k)).start()",
    # A daemon thread is inside the library when the interpreter goes.
    "import threading, time; q = numpy.ones((4096, 2, 64), numpy.float32)\n"
    "threading.Thread(target=lambda: [cache.attend(0, q) for _ in range(10**6)], daemon=True).start()\n"
    "time.sleep(0.05)",
    "cache.loop = [cache]",                             # freed by the cycle collector at exit, if at all
])
def test_fault_109_nothing_is_printed_at_exit(ending):
    result = run(MAKE + ending)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_fault_109_an_exit_by_exception_adds_no_message(cache):
    result = run(MAKE + "raise ValueError('of the caller')")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1] == "ValueError: of the caller"
    assert result.stderr.count("Traceback") == 1 and "kivi" not in result.stderr.split("Traceback")[0]


def test_fault_110_an_object_that_is_resurrected_by_its_finaliser():
    """The finaliser brings the cache back to life, it works, and dies later once."""
    result = run("""
        import numpy, kivi
        saved = []
        class Phoenix(kivi.Cache):
            def __del__(self):
                saved.append(self)
        cache = Phoenix("k3v2", layers=1, q_heads=2, kv_heads=2, head_dim=64, max_tokens=512)
        del cache
        k = numpy.ones((3, 2, 64), numpy.float16)
        saved[0].append(0, k, k)
        assert saved[0].length(0, 0).length == 3
        saved[0].close()
        saved[0].close()
        saved.clear()
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_fault_110_close_twice_and_use_after_it(small):
    cache = kivi.Cache("k3v2", **small)
    assert not cache.closed
    cache.close()
    cache.close()
    assert cache.closed and repr(cache) == "<kivi.Cache, closed>"
    k = numpy.ones((1, 2, 64), numpy.float16)
    q = numpy.ones((1, 4, 64), numpy.float16)
    calls = [
        lambda: cache.append(0, k, k), lambda: cache.attend(0, q), lambda: cache.step(0, q, k, k),
        lambda: cache.flush_residual(), cache.reset,
        lambda: cache.sequence_reset(0), lambda: cache.reserve(1), lambda: cache.length(0, 0), cache.statistics,
        cache.memory, lambda: cache.dequantize(0, 0), lambda: cache.export_sequence(0),
        lambda: cache.import_sequence(0, b""), lambda: cache.moments_accumulate(0, q),
        lambda: cache.moments_set(0, k), lambda: cache.moments_commit(0), lambda: cache.moments_export(0),
        lambda: cache.moments_import(0, b""), lambda: cache.attend_workspace(0, 1, 1),
    ]
    for call in calls:
        with pytest.raises(kivi.StateError, match="closed"):
            call()


def test_context_manager_closes_also_after_an_error(small):
    with pytest.raises(KeyError):
        with kivi.Cache("k3v2", **small) as cache:
            raise KeyError
    assert cache.closed


def test_a_cache_that_was_never_made_is_harmless():
    with pytest.raises(TypeError):
        kivi.Cache("k3v2")
    bare = kivi.Cache.__new__(kivi.Cache)
    assert bare.closed
    with pytest.raises(kivi.StateError, match="closed"):
        bare.memory()
    bare.close()
    del bare
    gc.collect()


def test_create_and_close_do_not_leak(small):
    resource = pytest.importorskip("resource", reason="no resource module on this system")
    def cycle(times):
        for _ in range(times):
            with kivi.Cache("k3v2", **small) as cache:
                cache.append(0, numpy.ones((64, 2, 64), numpy.float16), numpy.ones((64, 2, 64), numpy.float16))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    settled = cycle(20)
    assert cycle(60) - settled < 8 * 1024  # KiB; one such cache takes about 1 MiB


def test_a_child_of_fork_uses_and_closes_a_cache_that_a_thread_of_the_parent_reads():
    result = run(MAKE + """
import os, signal, threading, time, warnings
warnings.simplefilter("ignore")  # that this process has threads
expected = cache.attend(0, k[:1])
q = numpy.ones((4096, 2, 64), numpy.float32)
done = False
def read():
    while not done:
        cache.attend(0, q)
thread = threading.Thread(target=read, daemon=True)
thread.start()
time.sleep(0.05)
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a hang ends as a failure
        same = numpy.array_equal(cache.attend(0, k[:1]), expected)
        cache.close()
        os._exit(0 if same and cache.closed else 1)
    assert os.waitpid(child, 0)[1] == 0
done = True
thread.join()
""")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
