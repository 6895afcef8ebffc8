"""What a Python call of attend costs over the C call: the same tiny attend, from both, in turns.

    python bindings/python/bench/bench_python.py

needs a C compiler (`cc`) for the C side. Prints microseconds a call, medians over many short runs.
"""

import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy

import kivi

HERE = Path(__file__).parent
RUNS, CALLS = 200, 200


def c_side(folder):
    """attend_loop.c built against the very library that the Python module uses."""
    library = next(Path(kivi.__file__).parent.glob("libkivi.so*"))
    built = Path(folder) / "attend_loop.so"
    include = HERE.parents[2] / "include"
    subprocess.run(["cc", "-std=gnu99", "-O2", "-shared", "-fPIC", f"-I{include}", HERE / "attend_loop.c", library,
                    f"-Wl,-rpath,{library.parent}", "-o", built], check=True)
    loop = ctypes.CDLL(str(built))
    loop.attend_loop_new.restype = ctypes.c_void_p
    loop.attend_loop_run.argtypes = [ctypes.c_void_p, ctypes.c_int]
    loop.attend_loop_run.restype = ctypes.c_double
    loop.attend_loop_free.argtypes = [ctypes.c_void_p]
    return loop


def measure(runs=RUNS, calls=CALLS):
    """Median microseconds of a call: {"c": ..., "python": ..., "python, all keywords": ...}."""
    cache = kivi.Cache("k3v2", layers=1, q_heads=1, kv_heads=1, head_dim=64, max_tokens=256, threads=1)
    q, out, k = numpy.ones((3, 1, 1, 1, 64), numpy.float32)
    sequences, counts = numpy.zeros(1, numpy.int32), numpy.ones(1, numpy.int32)
    cache.append(0, k, k)

    def plain():
        begin = time.perf_counter()
        for _ in range(calls):
            cache.attend(0, q, out)
        return (time.perf_counter() - begin) / calls

    def keywords():
        begin = time.perf_counter()
        for _ in range(calls):
            cache.attend(0, q, out, sequences=sequences, counts=counts, scale=0.125, window_left=-1)
        return (time.perf_counter() - begin) / calls

    with tempfile.TemporaryDirectory() as folder:
        c = c_side(folder)
        loop = c.attend_loop_new()
        assert loop, "the C side could not make its cache"
        times = {"c": [], "python": [], "python, all keywords": []}
        for _ in range(runs):
            times["c"].append(c.attend_loop_run(loop, calls))
            times["python"].append(plain())
            times["python, all keywords"].append(keywords())
        c.attend_loop_free(loop)
    cache.close()
    assert min(times["c"]) > 0, "the C side failed"
    return {name: 1e6 * statistics.median(seconds) for name, seconds in times.items()}


if __name__ == "__main__":
    result = measure()
    for name, microseconds in result.items():
        print(f"{name:24} {microseconds:7.2f} us   over C {microseconds - result['c']:5.2f} us")
