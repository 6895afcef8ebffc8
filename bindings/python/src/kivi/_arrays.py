"""New arrays for the calls that were given no output."""

from __future__ import annotations

from typing import Any

import numpy


def zeros(shape: tuple[int, ...]) -> numpy.ndarray:
    """A float32 numpy array of zeros."""
    return numpy.zeros(shape, numpy.float32)


def zeros_like(like: Any, shape: tuple[int, ...]) -> Any:
    """An array of zeros of the same library, dtype and device as `like`."""
    if isinstance(like, numpy.ndarray):
        return numpy.zeros(shape, like.dtype)
    if hasattr(like, "new_zeros"):  # PyTorch
        return like.new_zeros(shape)
    if hasattr(like, "__array_namespace__"):  # array API standard
        return like.__array_namespace__().zeros(shape, dtype=like.dtype, device=like.device)
    raise TypeError(f"out: needed, '{type(like).__name__}' has no way to make an array like itself")
