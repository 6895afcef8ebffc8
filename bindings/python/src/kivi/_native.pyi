"""Types of the compiled module. tests/test_stubs.py compares them with it."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Optional, Protocol, Union

class SupportsDLPack(Protocol):
    def __dlpack__(self, **arguments: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

# numpy arrays (float32, float16, bfloat16 of ml_dtypes) and anything with __dlpack__.
Array = Union[SupportsDLPack, Any]
# A sequence of ints, or a one-dimensional int32 or int64 array.
Integers = Union[Sequence[int], Array]
Blob = Union[bytes, bytearray, memoryview, Any]
Path = Literal["none", "reference", "general", "fast"]

class Error(Exception):
    status: ClassVar[Optional[int]]

class InvalidArgumentError(Error, ValueError):
    status: ClassVar[int]

class UnsupportedError(Error, NotImplementedError):
    status: ClassVar[int]

class OutOfMemoryError(Error, MemoryError):
    status: ClassVar[int]

class CapacityError(Error, RuntimeError):
    status: ClassVar[int]

class NoDeviceError(Error, RuntimeError):
    status: ClassVar[int]

class DeviceError(Error, RuntimeError):
    status: ClassVar[int]

class StateError(Error, RuntimeError):
    status: ClassVar[int]

class CorruptError(Error, ValueError):
    status: ClassVar[int]

class MismatchError(Error, ValueError):
    status: ClassVar[int]

class BufferTooSmallError(Error, BufferError):
    status: ClassVar[int]

class InternalError(Error, RuntimeError):
    status: ClassVar[int]

class Length:
    @property
    def length(self) -> int: ...
    @property
    def sink(self) -> int: ...
    @property
    def key_border(self) -> int: ...
    @property
    def value_border(self) -> int: ...

class Statistics:
    @property
    def tokens(self) -> int: ...
    @property
    def packed_tokens(self) -> int: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def blocks_free(self) -> int: ...
    @property
    def saturated_rows(self) -> int: ...
    @property
    def key_rounding(self) -> Literal["nearest", "query_aware"]: ...
    @property
    def moments(self) -> Literal["none", "accumulated", "committed"]: ...
    @property
    def moment_queries(self) -> int: ...
    @property
    def device_error(self) -> bool: ...
    @property
    def live_bytes(self) -> int: ...

class Memory:
    @property
    def total_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def window_bytes(self) -> int: ...
    @property
    def table_bytes(self) -> int: ...
    @property
    def moment_bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def layout_id(self) -> int: ...

class DeviceInfo:
    @property
    def device(self) -> Literal["cpu", "cuda"]: ...
    @property
    def device_id(self) -> int: ...
    @property
    def available(self) -> bool: ...
    @property
    def threads(self) -> int: ...
    @property
    def capability(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...

class Support:
    @property
    def supported(self) -> bool: ...
    @property
    def attend_path(self) -> Path: ...
    @property
    def pack_path(self) -> Path: ...
    @property
    def bits_per_element(self) -> float: ...
    @property
    def reason(self) -> str: ...

class ProbeResult:
    @property
    def key_error(self) -> float: ...
    @property
    def value_error(self) -> float: ...
    @property
    def score_error(self) -> float: ...
    @property
    def attention_kl(self) -> float: ...
    @property
    def output_error(self) -> float: ...
    @property
    def output_error_key(self) -> float: ...
    @property
    def output_error_value(self) -> float: ...
    @property
    def sparsity(self) -> float: ...

class Cache:
    def __init__(self, config: Any) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def append(
        self,
        layer: int,
        k: Array,
        v: Array,
        *,
        sequences: Optional[Integers] = None,
        counts: Optional[Integers] = None,
        offsets: Optional[Integers] = None,
        stream: Optional[int] = None,
    ) -> None: ...
    def flush_residual(
        self, layer: int = -1, *, sequences: Optional[Integers] = None, stream: Optional[int] = None
    ) -> None: ...
    def attend(
        self,
        layer: int,
        q: Array,
        out: Optional[Array] = None,
        *,
        sequences: Optional[Integers] = None,
        counts: Optional[Integers] = None,
        offsets: Optional[Integers] = None,
        scale: float = 0.0,
        soft_cap: float = 0.0,
        window_left: int = -1,
        k: Optional[Array] = None,
        v: Optional[Array] = None,
        learned_sinks: Optional[Array] = None,
        lse: Optional[Array] = None,
        invariant: bool = False,
        workspace: Optional[Array] = None,
        stream: Optional[int] = None,
    ) -> Any: ...
    def step(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        out: Optional[Array] = None,
        *,
        sequences: Optional[Integers] = None,
        counts: Optional[Integers] = None,
        offsets: Optional[Integers] = None,
        scale: float = 0.0,
        soft_cap: float = 0.0,
        window_left: int = -1,
        learned_sinks: Optional[Array] = None,
        lse: Optional[Array] = None,
        invariant: bool = False,
        workspace: Optional[Array] = None,
        stream: Optional[int] = None,
    ) -> Any: ...
    def attend_workspace(self, layer: int, rows: int, max_count: int) -> int: ...
    def reset(self, *, stream: Optional[int] = None) -> None: ...
    def sequence_reset(self, sequence: int, *, stream: Optional[int] = None) -> None: ...
    def reserve(self, tokens: int, *, stream: Optional[int] = None) -> None: ...
    def sequence_reserve(self, sequence: int, tokens: int, *, stream: Optional[int] = None) -> None: ...
    def synchronize(self, *, stream: Optional[int] = None) -> None: ...
    def length(self, layer: int, sequence: int) -> Length: ...
    def statistics(self, layer: int = -1) -> Statistics: ...
    def memory(self) -> Memory: ...
    def dequantize(
        self,
        layer: int,
        sequence: int,
        begin: int = 0,
        end: Optional[int] = None,
        *,
        k: Optional[Array] = None,
        v: Optional[Array] = None,
        stored_basis: bool = False,
        stream: Optional[int] = None,
    ) -> tuple[Any, Any]: ...
    def export_sequence(self, sequence: int, *, stream: Optional[int] = None) -> bytes: ...
    def import_sequence(self, sequence: int, blob: Blob, *, stream: Optional[int] = None) -> None: ...
    def moments_accumulate(
        self,
        layer: int,
        q: Array,
        *,
        counts: Optional[Integers] = None,
        offsets: Optional[Integers] = None,
        stream: Optional[int] = None,
    ) -> None: ...
    def moments_set(
        self, layer: int, m: Array, *, stored_basis: bool = False, stream: Optional[int] = None
    ) -> None: ...
    def moments_commit(self, layer: int, *, stream: Optional[int] = None) -> None: ...
    def moments_export(self, layer: int) -> bytes: ...
    def moments_import(self, layer: int, blob: Blob, *, stream: Optional[int] = None) -> None: ...

def version() -> str: ...
def build_info() -> str: ...
def status_name(status: int) -> str: ...
def preset(name: str) -> dict[str, Any]: ...
def presets() -> list[dict[str, Any]]: ...
def devices() -> list[DeviceInfo]: ...
def estimate(config: Any) -> Memory: ...
def query_support(config: Any, layer: int = 0) -> Support: ...
def merge(
    outs: Sequence[Array],
    lses: Sequence[Array],
    out: Optional[Array] = None,
    *,
    lse: Optional[Array] = None,
    learned_sinks: Optional[Array] = None,
    stream: Optional[int] = None,
) -> Any: ...
def probe(
    q: Array,
    k: Array,
    v: Array,
    k_spec: Any = None,
    v_spec: Any = None,
    *,
    sink: Optional[int] = None,
    recent: Optional[int] = None,
    flush: Optional[int] = None,
    schedule: Optional[Literal["rolling", "published"]] = None,
    window_dtype: Optional[Literal["float32", "float16", "bfloat16"]] = None,
    scale: float = 0.0,
    soft_cap: float = 0.0,
    window_left: int = -1,
    moments: Optional[Array] = None,
) -> tuple[ProbeResult, list[ProbeResult]]: ...
