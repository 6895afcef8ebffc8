"""fp32 operations of core/FORMAT.md in numpy: a true fma, bf16, and the Hadamard."""

import numpy as np

CANONICAL_NAN = {"f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0}


def fma(a, b, c):
    """a * b + c in fp32 with one rounding.

    The product of two fp32 numbers is exact in fp64. The sum is rounded to odd there: with 53 bits against
    24, rounding the odd result to fp32 then equals rounding the exact sum.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
        c = np.asarray(c, np.float32).astype(np.float64)
        total = product + c
        rest = total - product
        error = (product - (total - rest)) + (c - rest)
        bits = np.atleast_1d(total).view(np.int64).copy()
        inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
        even = np.atleast_1d(inexact) & (bits & 1 == 0)
        outwards = np.atleast_1d((error > 0) == (total > 0))
        bits += np.where(even, np.where(outwards, 1, -1), 0)
        return bits.view(np.float64).reshape(np.shape(total)).astype(np.float32)


def bf16_to_f32(h):
    return (np.asarray(h, np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x):
    """Bits of x rounded to bf16, ties to even; NaN is the one NaN."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), CANONICAL_NAN["bf16"], rounded).astype(np.uint16)


def f32_to_f16(x):
    """Bits of x rounded to fp16, ties to even; NaN is the one NaN."""
    with np.errstate(over="ignore"):
        bits = np.asarray(x, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), CANONICAL_NAN["f16"], bits).astype(np.uint16)


def narrow(x, dtype):
    """Bits of fp32 numbers in a stored type."""
    if dtype == "f16":
        return f32_to_f16(x)
    if dtype == "bf16":
        return f32_to_bf16(x)
    bits = np.asarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), np.uint32(CANONICAL_NAN["f32"]), bits).astype(np.uint32)


def widen(bits, dtype):
    """fp32 numbers of the bits of a stored type."""
    if dtype == "f16":
        return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)
    if dtype == "bf16":
        return bf16_to_f32(bits)
    return np.asarray(bits, np.uint32).view(np.float32)


def hadamard(rows):
    """Transform of fp32 rows [..., D] over blocks of the largest power of two that divides D."""
    dim = rows.shape[-1]
    block = dim & -dim
    x = np.array(rows, np.float32).reshape(-1, block)
    with np.errstate(all="ignore"):
        h = 1
        while h < block:
            pairs = x.reshape(-1, block // (2 * h), 2, h)
            left, right = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
            pairs[:, :, 0], pairs[:, :, 1] = left + right, left - right
            h *= 2
        x *= np.float32(1 / np.sqrt(np.float64(block)))
    return x.reshape(rows.shape)
