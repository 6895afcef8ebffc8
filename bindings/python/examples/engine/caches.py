"""Where keys and values live: in plain numpy arrays, in a kivi cache, or in several caches side by side.

attention(counts) gives the callback that Llama.forward asks for: the new tokens of the call belong to
sequences 0, 1, 2, ... in this order, counts[s] tokens each; a sequence with count 0 takes no part.
"""

import time

import numpy as np


class NumpyCache:
    """The exact reference: keys and values rounded to fp16 as a full-precision cache keeps them, fp32 arithmetic."""

    def __init__(self, shape, sequences, capacity):
        size = (shape.layers, sequences, shape.kv_heads, capacity, shape.head_dim)
        self._k, self._v = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._lengths = np.zeros((shape.layers, sequences), np.int64)

    def attention(self, counts):
        def attend(layer, q, k, v):
            out = np.empty_like(q)
            for sequence, new in spans(counts):
                out[new] = self._attend(layer, sequence, q[new], k[new], v[new])
            return out
        return attend

    def keys_and_values(self, layer, sequence):
        """k, v [tokens, kv_heads, head_dim] as stored."""
        length = self._lengths[layer, sequence]
        return tuple(rows[layer, sequence, :, :length].swapaxes(0, 1) for rows in (self._k, self._v))

    def _attend(self, layer, sequence, q, k, v):
        count, q_heads, dim = q.shape
        kv_heads = k.shape[1]
        past = self._lengths[layer, sequence]
        end = past + count
        keys, values = self._k[layer, sequence, :, :end], self._v[layer, sequence, :, :end]
        for rows, new in ((keys, k), (values, v)):
            rows[:, past:] = new.astype(np.float16).swapaxes(0, 1)
        self._lengths[layer, sequence] = end
        # One product a KV head: its query heads and all new tokens are rows of one matrix.
        grouped = q.reshape(count, kv_heads, -1, dim).swapaxes(0, 1).reshape(kv_heads, -1, dim)
        scores = (grouped @ keys.swapaxes(1, 2)).reshape(kv_heads, count, -1, end) / np.float32(np.sqrt(dim))
        later = np.arange(end) > np.arange(past, end)[:, None]
        scores += np.where(later, np.float32(-np.inf), np.float32(0))[None, :, None, :]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = (weights.reshape(kv_heads, -1, end) @ values).reshape(kv_heads, count, -1, dim)
        return out.swapaxes(0, 1).reshape(count, q_heads, dim)


class KiviCache:
    """A kivi.Cache as the engine's cache, with a clock on its attention."""

    def __init__(self, cache):
        self.cache = cache
        self.append_seconds = self.attend_seconds = 0.0

    def attention(self, counts):
        """One new token a sequence: append it, then attend. More: they attend to themselves exactly
        (fresh keys and values) and to the past as it is packed, then they are appended."""
        counts = np.asarray(counts, np.int32)
        prompt = counts.max() > 1

        def attend(layer, q, k, v):
            fresh = {"k": k, "v": v} if prompt else {}
            out = np.empty_like(q)
            begin = time.perf_counter()
            if not prompt:
                self.cache.append(layer, k, v, counts=counts)
            between = time.perf_counter()
            self.cache.attend(layer, q, out=out, counts=counts, **fresh)
            end = time.perf_counter()
            self.append_seconds += between - begin
            self.attend_seconds += end - between
            if prompt:
                self.cache.append(layer, k, v, counts=counts)
            return out
        return attend

    def storage(self, counts):
        """A callback that only stores the new tokens."""
        counts = np.asarray(counts, np.int32)

        def store(layer, k, v):
            self.cache.append(layer, k, v, counts=counts)
        return store


class SideBySide:
    """Several caches that get the same number of new tokens in a call: first all tokens of the first cache,
    then all of the second, and so on."""

    def __init__(self, caches):
        self._caches = caches

    def attention(self, counts):
        callbacks, rows = [cache.attention(counts) for cache in self._caches], sum(counts)

        def attend(layer, q, k, v):
            out = np.empty_like(q)
            for i in range(len(callbacks)):
                # Turns with the layer: whoever comes first after the matrix products is slowed by them.
                i = (i + layer) % len(callbacks)
                part = slice(i * rows, (i + 1) * rows)
                out[part] = callbacks[i](layer, q[part], k[part], v[part])
            return out
        return attend


def spans(counts):
    """(sequence, slice of its new tokens) of each sequence that takes part."""
    ends = np.cumsum(counts)
    return [(s, slice(end - count, end)) for s, (count, end) in enumerate(zip(counts, ends)) if count]
