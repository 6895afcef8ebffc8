"""What a cache is made from: Spec, Layer, Config and the presets. Plain values, never changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

from . import _native

Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Spec:
    """How one tensor (K or V) of a layer is stored.

    bits: 2, 3, 4 or 8; 16 keeps it in the window dtype, and then only `transform` may be set.
    axis: "channel": a group is one channel over `group` consecutive tokens; "token": one token over
        `group` consecutive channels.
    group: elements that share a scale and a min: 32, 64 or 128; "head" on the token axis is the whole head.
    range: "minmax", or "ratio": that range shrunk about its centre by `range_ratio`.
    param_dtype: of scale and min: "float16" or "float32"; None is "float16".
    transform: "hadamard" multiplies the head dim by an orthonormal Hadamard matrix before storing.
    rounding: "query_aware" (keys on the channel axis) chooses codes for a small error of q . k.

    >>> Spec(bits=3, axis="channel", group=64).bits
    3
    """

    bits: int
    axis: Optional[Literal["channel", "token"]] = None
    group: Union[int, Literal["head"]] = 0
    range: Literal["minmax", "ratio"] = "minmax"
    range_ratio: float = 0.0
    param_dtype: Optional[Literal["float16", "float32"]] = None
    transform: Literal["none", "hadamard"] = "none"
    rounding: Literal["nearest", "query_aware"] = "nearest"


@dataclass(frozen=True)
class Layer:
    """One attention layer: head counts, head dims in elements, and k and v, the specs of its tensors.

    q_heads is a multiple of kv_heads, key_dim and value_dim are multiples of 8. kv_heads 0 marks a layer
    that keeps nothing; the other fields may then be left out.

    >>> spec = Spec(bits=4, axis="token", group=32)
    >>> Layer(kv_heads=8, q_heads=32, key_dim=128, value_dim=128, k=spec, v=spec).q_heads
    32
    """

    kv_heads: int
    q_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    k: Optional[Spec] = None
    v: Optional[Spec] = None


@dataclass(frozen=True)
class Preset:
    """A pair of specs, k and v, with a name. `what` describes it in one line; the windows sink, recent and
    flush (tokens) and the schedule are those of Config."""

    name: str
    what: str
    k: Spec
    v: Spec
    sink: int
    recent: int
    flush: int
    schedule: str


def presets() -> list[Preset]:
    """Every preset of the library.

    >>> [preset.name for preset in presets()]
    ['k3v2', 'kivi2-sink', 'k4v2', 'kivi4', 'kivi2-paper', 'f16']
    """
    return [
        Preset(**{**fields, "k": Spec(**fields["k"]), "v": Spec(**fields["v"])})
        for fields in _native.presets()
    ]


@dataclass(frozen=True)
class Config:
    """Everything about a cache. Use Config.preset unless every field is to be chosen.

    layers: the Layer of each layer of the model.
    max_sequences: slots; sequence ids are 0 .. max_sequences - 1.
    max_tokens: longest sequence, in tokens.
    sink: first tokens kept in the window dtype. recent: newest tokens kept so at least.
    flush: tokens packed at a time. sink and flush are multiples of every channel-axis group.
    schedule: "rolling", or "published" for KIVI's own (arXiv 2402.02750).
    window_dtype: "float16", "bfloat16" or "float32", of the sink window, the tail and 16-bit tensors.
    pool_tokens: packed tokens that all sequences share; 0: enough for every sequence at max_tokens.
    threads: of the CPU, the caller's included; 0: one a core.
    device, device_id: where the cache lives, "cpu" or "cuda" with its ordinal.
    reference: plain double-precision code instead of the fast one, for tests.

    >>> config = Config.preset("k3v2", layers=2, q_heads=8, kv_heads=2, head_dim=64, max_tokens=1024)
    >>> len(config.layers), config.layers[0].k.bits, config.sink
    (2, 3, 64)
    """

    layers: tuple[Layer, ...]
    max_sequences: int
    max_tokens: int
    sink: int
    recent: int
    flush: int
    schedule: Literal["rolling", "published"] = "rolling"
    window_dtype: Dtype = "float16"
    pool_tokens: int = 0
    threads: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    device_id: int = 0
    reference: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))

    @classmethod
    def preset(
        cls,
        name: str = "k3v2",
        *,
        layers: Union[int, Sequence[Layer]],
        q_heads: int = 0,
        kv_heads: int = 0,
        head_dim: int = 0,
        value_dim: Optional[int] = None,
        k: Optional[Spec] = None,
        v: Optional[Spec] = None,
        max_tokens: int,
        max_sequences: int = 1,
        **fields: Any,
    ) -> Config:
        """A config from a preset.

        layers: how many equal layers of q_heads, kv_heads, head_dim (value_dim where V differs), or a
            ready sequence of Layer; then only the windows come from the preset.
        k, v: specs in place of the preset's.
        fields: any other field of Config, in place of the preset's or the default.
        """
        chosen = _native.preset(name)
        windows = {key: chosen[key] for key in ("sink", "recent", "flush", "schedule")}
        if isinstance(layers, int):
            layer = Layer(
                kv_heads=kv_heads,
                q_heads=q_heads,
                key_dim=head_dim,
                value_dim=head_dim if value_dim is None else value_dim,
                k=k or Spec(**chosen["k"]),
                v=v or Spec(**chosen["v"]),
            )
            layers = (layer,) * layers
        elif q_heads or kv_heads or head_dim or value_dim or k or v:
            raise TypeError("layers: a sequence of Layer brings its own heads, dims and specs")
        return cls(
            layers=tuple(layers), max_sequences=max_sequences, max_tokens=max_tokens, **{**windows, **fields}
        )
