"""What the blob of each golden case must hold: inputs by formula, then core/FORMAT.md restated in numpy."""

import os
from dataclasses import dataclass, field

import numpy as np

from numerics import bf16_to_f32, f32_to_f16, fma, hadamard, narrow, widen

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = {"f16": np.float32(65504), "bf16": bf16_to_f32(0x7F7F), "f32": np.finfo(np.float32).max}


@dataclass
class Spec:
    bits: int
    axis: str = "-"
    group: int = 0  # 0: 16 bits; -1: whole head
    ratio: float = 0.0  # 0: min-max
    param: str = "-"
    transform: bool = False
    query_aware: bool = False


@dataclass
class Layer:
    kv_heads: int
    q_heads: int
    dims: dict  # "k", "v" -> D
    specs: dict


@dataclass
class Case:
    name: str
    dtype: str
    sink: int
    recent: int
    flush: int
    schedule: str
    tokens: int
    chunk: int
    layers: list = field(default_factory=list)
    puts: list = field(default_factory=list)
    flushed: bool = False
    stored: bool = True  # its blob is committed

    @property
    def unit(self):
        groups = [s.group for l in self.layers if l.kv_heads for s in l.specs.values() if s.axis == "channel"]
        return int(np.lcm.reduce(groups)) if groups else 1


def parse_spec(words):
    bits = int(words[0])
    if bits == 16:
        return Spec(16, transform=words[1] == "hadamard")
    axis, group, rule, ratio, param, transform, rounding = words[1:]
    group = -1 if group == "head" else int(group)
    ratio = float(ratio) if rule == "ratio" else 0.0
    return Spec(bits, axis, group, ratio, param, transform == "hadamard", rounding == "query-aware")


def read_cases():
    cases = []
    for line in open(os.path.join(HERE, "cases.txt")):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] in ("case", "unstored"):
            numbers = [int(words[i]) for i in (4, 6, 8)]
            cases.append(Case(words[1], words[2], *numbers, words[9], int(words[11]), int(words[13])))
            cases[-1].stored = words[0] == "case"
        elif words[0] == "layer":
            shape = [int(w) for w in words[1:5]]
            specs = " ".join(words[5:]).split("|")[1:]
            specs = dict(zip("kv", (parse_spec(s.split()) for s in specs)))
            cases[-1].layers.append(Layer(shape[0], shape[1], dict(zip("kv", shape[2:])), specs))
        elif words[0] == "put":
            cases[-1].puts.append((int(words[1]), words[2], *(int(w) for w in words[3:7]), float(words[7])))
        elif words[0] == "flush":
            cases[-1].flushed = True
    return cases


# ---- Inputs -------------------------------------------------------------------------------------------


def mix(*fields):
    """32 scattered bits of some small numbers."""
    with np.errstate(over="ignore"):
        h = np.uint32(0x811C9DC5)
        for number in fields:
            h = (h ^ np.asarray(number, np.uint32)) * np.uint32(0x9E3779B1)
            h = h ^ (h >> np.uint32(15))
        h = h * np.uint32(0x85EBCA6B)
        return h ^ (h >> np.uint32(13))


def inputs(case, layer, part, head):
    """fp32 [tokens, D]: bell-shaped noise, channels of different scales and offsets."""
    dim = case.layers[layer].dims[part]
    token, channel = np.arange(case.tokens)[:, None], np.arange(dim)[None, :]
    h = mix(layer, "kv".index(part), head, token, channel).astype(np.int64)
    noise = ((h & 255) + (h >> 8 & 255) + (h >> 16 & 255) + (h >> 24) - 510) / 64.0
    with np.errstate(over="ignore"):
        fine = (h.astype(np.uint32) * np.uint32(0xC2B2AE35)).astype(np.int64) >> 20
    value = (noise + (fine - 2048) * 2.0**-18) * 2.0 ** (channel % 4 - 1) + 10.0 * (channel % 5 == 2)
    x = value.astype(np.float32)
    for put_layer, put_part, put_head, first, last, put_channel, put in case.puts:
        if (put_layer, put_part, put_head) == (layer, part, head):
            x[first:last, slice(None) if put_channel < 0 else put_channel] = np.float32(put)
    return x


def moment(case, layer, head):
    """fp32 [D, D], exact: second moment of 96 vectors of small integers."""
    dim = case.layers[layer].dims["k"]
    row, channel = np.arange(96)[:, None], np.arange(dim)[None, :]
    vectors = (mix(layer, 2, head, row, channel).astype(np.int64) & 15) - 7
    vectors = vectors + ((mix(layer, 3, head, row).astype(np.int64) & 7) - 3) * (channel % 3)
    return (vectors.T @ vectors / 64.0).astype(np.float32)


# ---- Rows, borders, groups -----------------------------------------------------------------------------


def stored_rows(x, transform, dtype):
    """Bits [tokens, D] in the window dtype, and which rows saturated."""
    finite = np.isfinite(x)
    unit = np.ones((len(x), 1), np.float32)
    with np.errstate(all="ignore"):
        if transform:
            peak = np.where(finite, np.abs(x), 0).max(axis=1, keepdims=True, initial=0)
            unit = np.where(peak > np.float32(2.0**118), np.float32(1024), np.float32(1))
            x = hadamard(x / unit)
            finite = np.isfinite(x)
        scaled = x * unit
        beyond = finite & ~np.isfinite(widen(narrow(scaled, dtype), dtype))
        scaled = np.where(beyond, np.copysign(LIMIT[dtype], x), scaled).astype(np.float32)
    return narrow(scaled, dtype), beyond.any(axis=1)


def borders(case):
    """Key and value border, 0 where nothing is packed."""
    n, R = case.tokens, case.recent
    if case.schedule == "published":
        targets = [R * ((n - 1) // R), n - 1 - R]
    else:
        targets = [case.flush * ((n - R) // case.flush)] * 2
    if case.flushed:
        targets = [max(t, case.unit * (n // case.unit)) for t in targets]
    return dict(zip("kv", (t if t > case.sink else 0 for t in targets)))


def to_param(x, param):
    """fp32 numbers rounded to the parameter type: saturated, zero is +0, NaN stays."""
    if param == "f16":
        x = np.where(np.isnan(x), x, np.clip(x, -LIMIT["f16"], LIMIT["f16"]))
        x = widen(f32_to_f16(x), "f16")
    return np.where(x == 0, np.float32(0), x).astype(np.float32)


def group_params(x, spec):
    """Scale and min, fp32 [...], of groups x [..., elements]."""
    with np.errstate(all="ignore"):
        limit = np.float32(2.0**126)
        low, high = np.clip(x.min(axis=-1), -limit, limit), np.clip(x.max(axis=-1), -limit, limit)
        extent = high - low
        if spec.ratio:
            kept = extent * np.float32(spec.ratio)
            low = low + np.float32(0.5) * (extent - kept)
            extent = kept
        scale = to_param(extent / np.float32(2**spec.bits - 1), spec.param)
        low = to_param(low, spec.param)
    damaged = ~np.isfinite(x).all(axis=-1)
    nan = np.float32(np.nan)
    return np.where(damaged, nan, scale), np.where(damaged, nan, low)


def encode(y, scale, low, bits):
    with np.errstate(all="ignore"):
        steps = np.rint((y - low) / scale)  # ties to even
    steps = np.where((scale > 0) & ~np.isnan(steps), steps, 0)
    return np.clip(steps, 0, 2**bits - 1).astype(np.int32)


def encode_query_aware(y, scale, low, bits, order, weights):
    """Codes of y [tokens, D]; the recursion runs in coding order, tokens side by side."""
    y = y[:, order].copy()
    scale, low = scale[:, order], low[:, order]
    codes = np.zeros(y.shape, np.int32)
    for j in range(y.shape[1]):
        code = encode(y[:, j], scale[:, j], low[:, j], bits)
        decoded = fma(code.astype(np.float32), scale[:, j], low[:, j])
        with np.errstate(all="ignore"):
            error = y[:, j] - decoded
        later = fma(-error[:, None], weights[j, j + 1 :][None, :], y[:, j + 1 :])
        y[:, j + 1 :] = np.where(np.isnan(scale[:, j])[:, None], y[:, j + 1 :], later)
        codes[:, j] = code
    result = np.zeros_like(codes)
    result[:, order] = codes
    return result


def quantize(rows, spec, table=None):
    """Codes, scales and mins, each [tokens, D], of packed rows (fp32); whole groups."""
    tokens, dim = rows.shape
    scale, low = np.zeros((tokens, dim), np.float32), np.zeros((tokens, dim), np.float32)
    if spec.axis == "channel":
        for first in range(0, tokens, spec.group):
            block = slice(first, first + spec.group)
            scale[block], low[block] = group_params(rows[block].T, spec)
    else:
        group = dim if spec.group == -1 else spec.group
        for first in range(0, dim, group):
            block = slice(first, min(first + group, dim))
            for target, values in zip((scale, low), group_params(rows[:, block], spec)):
                target[:, block] = values[:, None]
    if table is None:
        return encode(rows, scale, low, spec.bits), scale, low
    return encode_query_aware(rows, scale, low, spec.bits, *table), scale, low
