"""The ways to store a cache that the demo and the quality run compare, each as a kivi cache for a model."""

from dataclasses import dataclass, replace
from typing import Optional

import kivi
import numpy as np

from engine.caches import KiviCache, NumpyCache

CHUNK = 256


@dataclass(frozen=True)
class Candidate:
    """A preset with what is set beside it, or (with k and v) specs of its own under the preset's windows.

    rotate_keys: Hadamard on the keys. moments: query-aware rounding with moments from calibration text.
    """

    preset: str
    name: Optional[str] = None
    k: Optional[kivi.Spec] = None
    v: Optional[kivi.Spec] = None
    rotate_keys: bool = False
    moments: bool = False

    @property
    def label(self):
        return self.name or self.preset

    def config(self, shape, sequences, capacity, device="cpu"):
        base = {preset.name: preset for preset in kivi.presets()}[self.preset]
        k, v = self.k or base.k, self.v or base.v
        if self.rotate_keys:
            k = replace(k, transform="hadamard")
        if self.moments:
            k = replace(k, rounding="query_aware")
        return kivi.Config.preset(
            self.preset, layers=shape.layers, q_heads=shape.q_heads, kv_heads=shape.kv_heads,
            head_dim=shape.head_dim, k=k, v=v, max_tokens=capacity, max_sequences=sequences, device=device)


BASELINE = Candidate("f16")
QUERY_AWARE = Candidate("k3v2", name="k3v2, keys rotated, query-aware", rotate_keys=True, moments=True)


def open_caches(candidates, model, sequences, capacity, calibration, advance=lambda: None, device="cpu"):
    """A KiviCache for each candidate by label; moments are taken from the calibration tokens and committed."""
    caches = {}
    for candidate in candidates:
        config = candidate.config(model.shape, sequences, capacity, device)
        caches[candidate.label] = KiviCache(kivi.Cache(config))
    learning = [caches[candidate.label].cache for candidate in candidates if candidate.moments]
    if learning:
        accumulate_moments(learning, model, calibration, advance)
    return caches


def accumulate_moments(caches, model, tokens, advance=lambda: None):
    """Runs the tokens in full precision and gives their queries to the caches, then commits."""
    exact = NumpyCache(model.shape, 1, len(tokens))
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start:start + CHUNK]
        attend = exact.attention([len(part)])

        def listen(layer, q, k, v):
            for cache in caches:
                cache.moments_accumulate(layer, q)
            return attend(layer, q, k, v)
        model.forward(part, np.arange(start, start + len(part)), listen)
        advance()
    for cache in caches:
        for layer in range(model.shape.layers):
            cache.moments_commit(layer)


def bits_per_element(cache):
    """Of a packed token, scale and min included, mean over K and V."""
    return kivi.query_support(cache.config).bits_per_element
