"""Independent reader of libkivi's blobs, written from core/FORMAT.md. Needs numpy and nothing of the library.

    python reader.py FILE...      what a sequence blob or a moments blob holds
"""

import struct
import sys
import zlib
from dataclasses import dataclass, field

import numpy as np

from numerics import fma, hadamard, widen

SEQUENCE_MAGIC = b"KIVISEQ\0"
MOMENTS_MAGIC = b"KIVIMOM\0"
DTYPES = {1: "f32", 2: "f16", 3: "bf16"}
PAGE = 128


class Corrupt(Exception):
    pass


@dataclass
class Spec:
    bits: int
    axis: int
    group: int
    range: int
    ratio: float
    param_dtype: int
    transform: int
    rounding: int

    RECORD = struct.Struct("<iiiifiii")


@dataclass
class Head:
    """One tensor of one KV head. Bits of window rows; codes, scales and mins of the packed tokens."""

    sink: np.ndarray  # [rows, D] bits of the window dtype
    tail: np.ndarray
    packed: np.ndarray  # 16 bits: [tokens, D] bits of the window dtype; else codes [tokens, D]
    scale: np.ndarray  # [tokens, D] bits of the parameter type of each element's group
    min: np.ndarray
    rows: np.ndarray  # fp32 [n, D], stored basis


@dataclass
class Layer:
    kv_heads: int
    q_heads: int
    key_dim: int
    value_dim: int
    k: Spec
    v: Spec
    key_border: int
    value_border: int
    tables: int
    tables_crc: int
    heads: dict = field(default_factory=dict)  # "k", "v" -> list of Head

    def dequantized(self, part):
        """fp32 [n, kv_heads, D] as the caller's tokens: a Hadamard undone."""
        rows = np.stack([head.rows for head in self.heads[part]], axis=1)
        return hadamard(rows) if getattr(self, part).transform else rows


@dataclass
class Sequence:
    layout_id: int
    window_dtype: str
    sink: int
    recent: int
    flush: int
    unit: int
    schedule: int
    length: int
    layers: list


class Cursor:
    def __init__(self, data, at=0):
        self.data, self.at = data, at

    def take(self, size):
        if self.at + size > len(self.data):
            raise Corrupt("ends early")
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, layout):
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def array(self, dtype, *shape):
        count = int(np.prod(shape))
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype).reshape(shape)


def open_blob(data, magic):
    """Cursor behind the size field, after all checks of the whole blob."""
    if len(data) < 52 or data[:8] != magic:
        raise Corrupt("not such a blob")
    cursor = Cursor(data, 8)
    version, mark, size = cursor.unpack("IIQ")
    if mark != 0x01020304:
        raise Corrupt("byte order")
    if size != len(data):
        raise Corrupt(f"{len(data)} bytes where {size} are announced")
    if zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
        raise Corrupt("checksum")
    if version != 1:
        raise Corrupt(f"version {version}")
    return cursor


def unpack_codes(stream, bits, count):
    """Codes of little-endian bit streams [groups, bytes]."""
    flat = np.unpackbits(stream, axis=1, bitorder="little")[:, : bits * count]
    return (flat.reshape(len(stream), count, bits).astype(np.int32) << np.arange(bits)).sum(axis=2)


def read_groups(cursor, spec, dim, tokens):
    """Codes and parameter bits, each [tokens, dim], of consecutive tokens of one page."""
    bits_type = "<u2" if spec.param_dtype == 2 else "<u4"
    codes = np.zeros((tokens, dim), np.int32)
    scale, minimum = np.zeros((tokens, dim), bits_type), np.zeros((tokens, dim), bits_type)
    if spec.axis == 1:
        blocks = tokens // spec.group
        if tokens % spec.group:
            raise Corrupt("part of a group")
        stream = cursor.array(np.uint8, blocks * dim, spec.bits * spec.group // 8)
        grouped = unpack_codes(stream, spec.bits, spec.group).reshape(blocks, dim, spec.group)
        codes[:] = grouped.transpose(0, 2, 1).reshape(tokens, dim)
        for target in (scale, minimum):
            target[:] = np.repeat(cursor.array(bits_type, blocks, dim), spec.group, axis=0)
        return codes, scale, minimum
    group = dim if spec.group == -1 else spec.group
    edges = list(range(0, dim, group)) + [dim]
    sizes = [b - a for a, b in zip(edges, edges[1:])]
    stream = cursor.array(np.uint8, tokens, sum((spec.bits * size + 7) // 8 for size in sizes))
    at = 0
    for first, size in zip(edges, sizes):
        end = at + (spec.bits * size + 7) // 8
        codes[:, first : first + size] = unpack_codes(stream[:, at:end], spec.bits, size)
        at = end
    for target in (scale, minimum):
        target[:] = np.repeat(cursor.array(bits_type, tokens, len(sizes)), sizes, axis=1)
    return codes, scale, minimum


def read_head(cursor, sequence, spec, dim, border):
    window_bits = "<u4" if sequence.window_dtype == "f32" else "<u2"
    n, first = sequence.length, sequence.sink
    sink = cursor.array(window_bits, min(n, first), dim)
    pages = []
    for begin in range(first, border, PAGE):
        tokens = min(PAGE, border - begin)
        if spec.bits == 16:
            rows = cursor.array(window_bits, tokens, dim)
            pages.append((rows, rows[:, :0], rows[:, :0]))
        else:
            pages.append(read_groups(cursor, spec, dim, tokens))
    tail = cursor.array(window_bits, max(n - max(border, first), 0), dim)
    window = lambda bits: widen(bits, sequence.window_dtype)
    if not pages:
        none = np.zeros((0, dim), np.int32)
        return Head(sink, tail, none, none, none, np.concatenate([window(sink), window(tail)]))
    packed, scale, minimum = (np.concatenate(part) for part in zip(*pages))
    if spec.bits == 16:
        decoded = window(packed)
    else:
        param = DTYPES[spec.param_dtype]
        decoded = fma(packed.astype(np.float32), widen(scale, param), widen(minimum, param))
    return Head(sink, tail, packed, scale, minimum, np.concatenate([window(sink), decoded, window(tail)]))


def read_sequence(data):
    cursor = open_blob(data, SEQUENCE_MAGIC)
    layout_id, dtype, layer_count = cursor.unpack("Qii")
    sink, recent, flush, unit = cursor.unpack("4q")
    schedule, zero, length, zero2 = cursor.unpack("iIqQ")
    if zero or zero2:
        raise Corrupt("reserved field")
    sequence = Sequence(layout_id, DTYPES[dtype], sink, recent, flush, unit, schedule, length, [])
    places = []
    for _ in range(layer_count):
        shape = cursor.unpack("4i")
        specs = [Spec(*Spec.RECORD.unpack(cursor.take(32))) for _ in range(2)]
        *state, offset, size, zero = cursor.unpack("qqIIQQQ")
        if zero:
            raise Corrupt("reserved field")
        sequence.layers.append(Layer(*shape, *specs, *state))
        places.append((offset, size))
    for layer, (offset, size) in zip(sequence.layers, places):
        if layer.kv_heads == 0:
            continue
        if cursor.at != offset:
            raise Corrupt("payload offset")
        for part, spec, dim, border in (
            ("k", layer.k, layer.key_dim, layer.key_border),
            ("v", layer.v, layer.value_dim, layer.value_border),
        ):
            heads = range(layer.kv_heads)
            layer.heads[part] = [read_head(cursor, sequence, spec, dim, border) for _ in heads]
        if cursor.at != offset + size:
            raise Corrupt("payload size")
    if cursor.at != len(data) - 4:
        raise Corrupt("bytes left over")
    return sequence


@dataclass
class Moments:
    dim: int
    basis: int
    queries: int
    heads: list  # (matrix [D, D], order [D], weights [D, D] strict upper, in coding order)
    tables_crc: int


def read_moments(data):
    cursor = open_blob(data, MOMENTS_MAGIC)
    head_count, dim, basis, zero, queries = cursor.unpack("iiiIq")
    if zero:
        raise Corrupt("reserved field")
    heads, crc = [], 0
    for _ in range(head_count):
        matrix = cursor.array("<f4", dim, dim)
        begin = cursor.at
        order = cursor.array("<u2", dim)
        weights = np.zeros((dim, dim), np.float32)
        weights[np.triu_indices(dim, 1)] = cursor.array("<f4", dim * (dim - 1) // 2)
        crc = zlib.crc32(data[begin : cursor.at], crc)
        heads.append((matrix, order, weights))
    if cursor.at != len(data) - 4:
        raise Corrupt("bytes left over")
    return Moments(dim, basis, queries, heads, crc)


def main(paths):
    for path in paths:
        with open(path, "rb") as file:
            data = file.read()
        if data[:8] == MOMENTS_MAGIC:
            moments = read_moments(data)
            print(f"{path}: moments of {len(moments.heads)} heads, D {moments.dim}, basis {moments.basis}")
            continue
        sequence = read_sequence(data)
        print(f"{path}: {sequence.length} tokens, windows {sequence.sink}/{sequence.recent}/{sequence.flush},"
              f" {sequence.window_dtype}")
        for index, layer in enumerate(sequence.layers):
            for part in layer.heads:
                rows = layer.dequantized(part)
                border = layer.key_border if part == "k" else layer.value_border
                print(f"  layer {index} {part}: {layer.kv_heads} heads, D {rows.shape[2]},"
                      f" {getattr(layer, part).bits} bits, border {border},"
                      f" rms {np.sqrt(np.nanmean(rows.astype(np.float64) ** 2)):.4g}")


if __name__ == "__main__":
    main(sys.argv[1:])
