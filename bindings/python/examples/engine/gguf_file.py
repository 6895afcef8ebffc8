"""Reads a GGUF model file: the model's shape, its weights in fp32, its metadata."""

import os
from dataclasses import dataclass

import gguf
import numpy as np
from gguf.quants import dequantize

FAMILIES = ("llama", "qwen2")


class ModelError(Exception):
    """The model file cannot be used; the message is one sentence that says why."""


@dataclass(frozen=True)
class Shape:
    """What the forward pass must know about a model."""

    family: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    width: int
    context: int
    norm_epsilon: float
    rope_base: float
    rope_scale: float  # positions are divided by it (linear scaling); 1: none


class ModelFile:
    """An open GGUF file of a known family."""

    def __init__(self, path):
        self.path = str(path)
        self._reader = _open(self.path)
        self.shape = self._read_shape()

    def get(self, key, default=None):
        """A metadata value: a number, a string, or a list of either."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key):
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path}: the metadata has no '{key}'.")
        return value

    def weights(self):
        """Every tensor by name, as fp32 with rows = outputs."""
        tensors = self._reader.tensors
        needed = 4 * sum(int(t.n_elements) for t in tensors)
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free:
            raise ModelError(f"{self.path}: the weights need {needed / 1e9:.1f} GB of memory as fp32, "
                             f"{free / 1e9:.1f} GB are free.")
        try:
            return {t.name: np.asarray(dequantize(t.data, t.tensor_type), dtype=np.float32) for t in tensors}
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: the weights have an encoding that cannot be read ({error}).") from error

    def _read_shape(self):
        family = self.need("general.architecture")
        if family not in FAMILIES:
            raise ModelError(f"{self.path}: the model family '{family}' is not known; known are "
                             f"{' and '.join(FAMILIES)}.")
        if self.get(f"{family}.expert_count", 0):
            raise ModelError(f"{self.path}: mixture-of-experts models of the family '{family}' are not known.")

        def need(key):
            return self.need(f"{family}.{key}")

        q_heads, width = int(need("attention.head_count")), int(need("embedding_length"))
        head_dim = int(self.get(f"{family}.attention.key_length", width // q_heads))
        rotated = int(self.get(f"{family}.rope.dimension_count", head_dim))
        if rotated != head_dim:
            raise ModelError(f"{self.path}: rotates {rotated} of {head_dim} channels; only whole heads are known.")
        scaling = self.get(f"{family}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelError(f"{self.path}: the rope scaling '{scaling}' is not known; known are none and linear, "
                             "and frequency factors kept as a tensor.")
        return Shape(
            family=family,
            layers=int(need("block_count")),
            q_heads=q_heads,
            kv_heads=int(self.get(f"{family}.attention.head_count_kv", q_heads)),
            head_dim=head_dim,
            width=width,
            context=int(need("context_length")),
            norm_epsilon=float(need("attention.layer_norm_rms_epsilon")),
            rope_base=float(self.get(f"{family}.rope.freq_base", 10000.0)),
            rope_scale=float(self.get(f"{family}.rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0,
        )


def _open(path):
    if not os.path.isfile(path):
        raise ModelError(f"{path}: there is no such file.")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path}: this is not a GGUF file.")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        # The reader indexes into the mapped file and trips wherever the file ends.
        raise ModelError(f"{path}: the file is cut short or damaged ({error}).") from error
