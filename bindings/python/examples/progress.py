"""Shows how far a long run is: one updating line on a terminal, a plain line every tenth otherwise."""

import sys
import time


class Progress:
    def __init__(self, what, total):
        self._what, self._total, self._done, self._shown = what, total, 0, -1
        self._begin = time.monotonic()

    def advance(self, count=1):
        self._done += count
        terminal = sys.stderr.isatty()
        tick = 100 * self._done // self._total // (1 if terminal else 10)
        if tick == self._shown:
            return
        self._shown = tick
        spent = time.monotonic() - self._begin
        left = spent * (self._total - self._done) / self._done
        line = f"{self._what}: {100 * self._done // self._total:3d} %  {spent:4.0f} s, {left:4.0f} s left"
        end = "\r" if terminal and self._done < self._total else "\n"
        print(line, end=end, file=sys.stderr, flush=True)
