"""libkivi: attention keys and values in 2 to 4 bits, and attention straight from them.

>>> import numpy, kivi
>>> cache = kivi.Cache("k3v2", layers=1, q_heads=4, kv_heads=2, head_dim=64, max_tokens=512)
>>> k = v = numpy.ones((1, 10, 2, 64), numpy.float16)   # [sequences, tokens, kv_heads, head_dim]
>>> q = numpy.ones((1, 1, 4, 64), numpy.float16)        # [sequences, queries, q_heads, head_dim]
>>> cache.append(0, k, v)
>>> cache.attend(0, q).shape
(1, 1, 4, 64)
>>> cache.step(0, q, k[:, :1], v[:, :1]).shape         # of a new token: attend with it and append it, in one call
(1, 1, 4, 64)
>>> cache.length(layer=0, sequence=0).length
11
>>> cache.close()

Arrays are numpy arrays (float32, float16, bfloat16 of ml_dtypes) or anything with __dlpack__, read and
written in place. With device="cuda" the cache lives on a GPU: arrays of the host are then copied there and
back, for which the call waits, and arrays of the GPU are used where they are, in the order of the call's
stream. Every error that the library reports is a kivi.Error.
"""

from ._cache import Cache
from ._config import Config, Layer, Preset, Spec, presets
from ._native import (
    BufferTooSmallError,
    CapacityError,
    CorruptError,
    DeviceError,
    DeviceInfo,
    Error,
    InternalError,
    InvalidArgumentError,
    Length,
    Memory,
    MismatchError,
    NoDeviceError,
    OutOfMemoryError,
    ProbeResult,
    StateError,
    Statistics,
    Support,
    UnsupportedError,
    build_info,
    devices,
    estimate,
    merge,
    probe,
    query_support,
    status_name,
    version,
)

__version__ = version()

__all__ = [
    "BufferTooSmallError",
    "Cache",
    "CapacityError",
    "Config",
    "CorruptError",
    "DeviceError",
    "DeviceInfo",
    "Error",
    "InternalError",
    "InvalidArgumentError",
    "Layer",
    "Length",
    "Memory",
    "MismatchError",
    "NoDeviceError",
    "OutOfMemoryError",
    "Preset",
    "ProbeResult",
    "Spec",
    "StateError",
    "Statistics",
    "Support",
    "UnsupportedError",
    "build_info",
    "devices",
    "estimate",
    "merge",
    "presets",
    "probe",
    "query_support",
    "status_name",
    "version",
]
