"""Which axis to group along, answered by the model itself: its own K, V and Q through kivi.probe.

Four pairs of axes (keys per channel or token, values per channel or token), each with and without sink
window and recent window; errors where the tensor is stored and where it is consumed.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import kivi
import numpy as np

from engine.caches import NumpyCache

AXES = [("channel", "token"), ("channel", "channel"), ("token", "token"), ("token", "channel")]
BITS, GROUP, SINK, RECENT = 2, 32, 32, 96
WINDOWS = [(0, 0), (0, RECENT), (SINK, 0), (SINK, RECENT)]  # (sink, recent)
CHUNK = 256
CLOSED = 0.2  # a gap counts as closed when at most this share of it is left


@dataclass
class Activations:
    """One layer's rotated queries (of the last positions), keys and values, each [tokens, heads, head_dim]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass
class Row:
    """Errors of one way to store keys and values, relative but for the KL, means over the layers."""

    k_axis: str
    v_axis: str
    sink: int
    recent: int
    key_error: float
    score_error: float
    attention_kl: float
    value_error: float
    output_error: float
    output_error_key: float    # only K quantised
    output_error_value: float  # only V quantised
    sparsity: float            # share of the exact weights below 1 % of their row's maximum


MEASURED = [field.name for field in fields(Row)][4:]


def capture(model, tokens, queries):
    """Activations of every layer after `tokens`, in full precision, with the last `queries` queries."""
    cache, last = NumpyCache(model.shape, 1, len(tokens)), [[] for _ in range(model.shape.layers)]
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start:start + CHUNK]
        attend = cache.attention([len(part)])

        def listen(layer, q, k, v):
            last[layer].append(q)
            return attend(layer, q, k, v)
        model.forward(part, np.arange(start, start + len(part)), listen)
    return [Activations(np.concatenate(q)[-queries:], *map(np.ascontiguousarray, cache.keys_and_values(layer, 0)))
            for layer, q in enumerate(last)]


def measure(activations, advance=lambda: None):
    """A Row for each pair of axes and each pair of windows."""
    def errors(task):
        (k_axis, v_axis), (sink, recent), layer = task
        total, _ = kivi.probe(layer.q, layer.k, layer.v, kivi.Spec(BITS, k_axis, GROUP),
                              kivi.Spec(BITS, v_axis, GROUP), sink=sink, recent=recent, flush=GROUP)
        return [getattr(total, name) for name in MEASURED]

    cases = [(axes, windows) for axes in AXES for windows in WINDOWS]
    found = []
    with ThreadPoolExecutor() as pool:  # the library computes without Python's lock
        for measured in pool.map(errors, [(*case, layer) for case in cases for layer in activations]):
            found.append(measured)
            advance()
    means = np.reshape(found, (len(cases), len(activations), len(MEASURED))).mean(1)
    return [Row(*axes, *windows, *map(float, mean)) for (axes, windows), mean in zip(cases, means)]


@dataclass
class Ordering:
    """One claim about the axes and windows, and whether this model shows it."""

    claim: str
    holds: bool
    evidence: str


def orderings(rows, activations):
    """The claims behind the design, checked on the table."""
    table = {(row.k_axis, row.v_axis, row.sink, row.recent): row for row in rows}

    def at(k_axis, v_axis, sink, recent):
        return table[k_axis, v_axis, sink, recent]

    def everywhere(name):
        """Whether per-channel keys have the smaller error under all windows, and the figures without and with."""
        pairs = [(getattr(at("channel", "token", *w), name), getattr(at("token", "token", *w), name)) for w in WINDOWS]
        return all(a < b for a, b in pairs), pairs[0], pairs[-1]

    found = []
    for name, what, show in (("score_error", "score error", percent), ("attention_kl", "attention KL", plain)):
        holds, (a, b), (c, d) = everywhere(name)
        found.append(Ordering(
            f"Keys per channel beat keys per token on {what}.", holds,
            f"{show(a)} against {show(b)} without windows, {show(c)} against {show(d)} with both."
            + ("" if holds else f" {why_keys(activations)}")))

    def gap(sink):
        token, channel = at("channel", "token", sink, RECENT), at("channel", "channel", sink, RECENT)
        return channel.output_error_value - token.output_error_value, token, channel

    open_gap, token, channel = gap(0)
    holds = open_gap > 0 and token.value_error > channel.value_error
    found.append(Ordering(
        "Without sinks, values per token beat values per channel on output error, although not on stored error.", holds,
        f"Output error from V alone {percent(token.output_error_value)} per token, "
        f"{percent(channel.output_error_value)} per channel; stored error {percent(token.value_error)} and "
        f"{percent(channel.value_error)}." + ("" if holds else f" {why_values(activations)}")))
    left, token, channel = gap(SINK)
    holds = open_gap > 0 and left < CLOSED * open_gap
    found.append(Ordering(
        "The sink window closes that gap.", holds,
        f"With {SINK} sinks the output error from V alone is {percent(token.output_error_value)} per token, "
        f"{percent(channel.output_error_value)} per channel: the gap goes from {100 * open_gap:.1f} to "
        f"{100 * left:.1f} points, {100 * max(0, left) / abs(open_gap):.0f} % of it is left." + ("" if holds else f" {why_values(activations)}")))

    none, recent, sinks, both = (at("channel", "token", *w).output_error for w in WINDOWS)
    holds = recent < none and sinks < none and both < min(recent, sinks)
    found.append(Ordering(
        "Recent window and sinks lower the output error.", holds,
        f"{percent(none)} with neither, {percent(recent)} with the recent window, {percent(sinks)} with the sinks, "
        f"{percent(both)} with both." + ("" if holds else f" {why_windows(activations)}")))
    return found


def why_keys(activations):
    ratio = np.mean([channel_peak(layer.k) for layer in activations])
    return (f"The largest key channel is only {ratio:.1f} times the mean one: without outlier channels a group over "
            "tokens has no advantage.")


def why_values(activations):
    mass, size = np.mean([sink_mass(layer) for layer in activations]), np.mean([sink_size(a.v) for a in activations])
    return (f"The first {SINK} tokens carry {percent(mass)} of the attention and token 0 has a value of {size:.2f} times "
            "the usual norm: the axis of the values matters as far as attention rests on small values that share a "
            "group with large ones.")


def why_windows(activations):
    mass = np.mean([sink_mass(layer) for layer in activations])
    return (f"The first {SINK} tokens carry {percent(mass)} of the attention: windows help as far as attention rests on "
            "the tokens that they keep.")


def channel_peak(k):
    size = np.abs(k).mean(0)
    return float((size.max(-1) / size.mean(-1)).mean())


def sink_size(v):
    norms = np.linalg.norm(v, axis=-1)
    return float((norms[0] / norms[SINK:].mean(0)).mean())


def sink_mass(layer):
    """Share of the last query's exact attention on the first SINK tokens."""
    heads = np.repeat(layer.k, layer.q.shape[1] // layer.k.shape[1], axis=1)
    scores = np.einsum("hd,thd->ht", layer.q[-1], heads) / np.sqrt(layer.q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return float((weights[:, :SINK].sum(-1) / weights.sum(-1)).mean())


def percent(x):
    return f"{100 * x:.1f} %"


def plain(x):
    return f"{x:.3f}"
