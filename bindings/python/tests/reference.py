"""Attention in float64 numpy, written from its formula: what the library's results are compared with."""

import numpy


def attention(q, k, v, *, scale=None, soft_cap=0.0, window_left=-1, learned_sinks=None):
    """q [queries, q_heads, key_dim] are the last positions of k [tokens, kv_heads, key_dim].

    Returns out [queries, q_heads, value_dim] and lse [queries, q_heads], learned sinks not in the latter.
    """
    q, k, v = (numpy.asarray(x, numpy.float64) for x in (q, k, v))
    queries, q_heads, key_dim = q.shape
    tokens, kv_heads, _ = k.shape
    scale = 1 / numpy.sqrt(key_dim) if scale is None else scale
    out = numpy.zeros((queries, q_heads, v.shape[2]))
    lse = numpy.full((queries, q_heads), -numpy.inf)
    for i in range(queries):
        position = tokens - queries + i
        begin = 0 if window_left < 0 else max(0, position - window_left)
        seen = slice(begin, position + 1)
        if position < 0:
            continue
        for h in range(q_heads):
            g = h // (q_heads // kv_heads)
            score = scale * (k[seen, g] @ q[i, h])
            if soft_cap:
                score = soft_cap * numpy.tanh(score / soft_cap)
            lse[i, h] = numpy.logaddexp.reduce(score)
            total = lse[i, h] if learned_sinks is None else numpy.logaddexp(lse[i, h], learned_sinks[h])
            out[i, h] = numpy.exp(score - total) @ v[seen, g]
    return out, lse


def error(got, expected):
    """Relative error in the Frobenius norm."""
    got = numpy.asarray(got, numpy.float64)
    return numpy.linalg.norm(got - expected) / numpy.linalg.norm(expected)
