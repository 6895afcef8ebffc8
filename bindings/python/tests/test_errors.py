"""One exception class a status, and that each real failure raises its own."""

import re
from pathlib import Path

import numpy
import pytest

import kivi

BUILTIN = {
    "INVALID_ARGUMENT": ("InvalidArgumentError", ValueError),
    "UNSUPPORTED": ("UnsupportedError", NotImplementedError),
    "OUT_OF_MEMORY": ("OutOfMemoryError", MemoryError),
    "CAPACITY": ("CapacityError", RuntimeError),
    "NO_DEVICE": ("NoDeviceError", RuntimeError),
    "DEVICE": ("DeviceError", RuntimeError),
    "STATE": ("StateError", RuntimeError),
    "CORRUPT": ("CorruptError", ValueError),
    "MISMATCH": ("MismatchError", ValueError),
    "BUFFER_TOO_SMALL": ("BufferTooSmallError", BufferError),
    "INTERNAL": ("InternalError", RuntimeError),
}
HEADER = Path(__file__).parents[3] / "include/kivi/kivi.h"


def test_every_status_of_the_header_has_a_class():
    found = dict(re.findall(r"KIVI_ERROR_(\w+) = (-\d+)", HEADER.read_text()))
    assert set(found) == set(BUILTIN)
    for name, number in found.items():
        class_name, builtin = BUILTIN[name]
        error = getattr(kivi, class_name)
        assert issubclass(error, kivi.Error) and issubclass(error, builtin)
        assert error.status == int(number)
        assert kivi.status_name(error.status) == f"KIVI_ERROR_{name}"
        assert error.__doc__


def tokens(count, dtype=numpy.float16):
    return numpy.ones((count, 2, 64), dtype)


def test_invalid_argument_names_argument_value_and_limit(cache):
    with pytest.raises(kivi.InvalidArgumentError, match="7") as caught:
        cache.append(0, tokens(1), tokens(1), sequences=[7])
    assert "sequence" in str(caught.value) and "2" in str(caught.value)
    with pytest.raises(kivi.InvalidArgumentError, match="layer.*9"):
        cache.append(9, tokens(1), tokens(1))
    with pytest.raises(kivi.InvalidArgumentError, match="layer.*9"):
        cache.attend(9, numpy.ones((1, 4, 64), numpy.float32))


def test_capacity_changes_nothing(cache):
    cache.append(0, tokens(1000), tokens(1000))
    with pytest.raises(kivi.CapacityError):
        cache.append(0, tokens(25), tokens(25))
    assert cache.length(0, 0).length == 1000


def test_a_refused_step_neither_attends_nor_appends(cache):
    cache.append(0, tokens(1000), tokens(1000))
    q = numpy.ones((25, 4, 64), numpy.float16)
    out = numpy.full_like(q, 7)
    with pytest.raises(kivi.CapacityError):
        cache.step(0, q, tokens(25), tokens(25), out)
    with pytest.raises(kivi.InvalidArgumentError, match="k is NULL"):
        cache.step(0, q[:1], None, tokens(1), out[:1])
    assert (out == 7).all() and cache.length(0, 0).length == 1000


def test_unsupported_is_refused_at_create(small):
    bad = kivi.Spec(bits=4, axis="token", group=32, rounding="query_aware")
    with pytest.raises(kivi.Error) as caught:
        kivi.Cache("k3v2", **small, v=bad)
    assert isinstance(caught.value, (kivi.UnsupportedError, kivi.InvalidArgumentError))
    config = kivi.Config.preset("k3v2", **small, v=bad)
    support = kivi.query_support(config)
    assert not support.supported and support.reason in str(caught.value)


def test_no_device(small):
    if any(device.device == "cuda" and device.available for device in kivi.devices()):
        pytest.skip("a GPU is here")
    with pytest.raises(kivi.Error) as caught:
        kivi.Cache("k3v2", **small, device="cuda")
    assert isinstance(caught.value, (kivi.NoDeviceError, kivi.UnsupportedError))


def test_out_of_memory():
    with pytest.raises((kivi.OutOfMemoryError, kivi.InvalidArgumentError)) as caught:
        kivi.Cache("f16", layers=64, q_heads=64, kv_heads=64, head_dim=512, max_tokens=2**40, max_sequences=4)
    assert isinstance(caught.value, (MemoryError, ValueError))


def test_corrupt_and_mismatched_blobs(cache, small):
    for layer in (0, 1):
        cache.append(layer, tokens(200), tokens(200))
    blob = bytearray(cache.export_sequence(0))
    with kivi.Cache("kivi4", **small) as other, pytest.raises(kivi.MismatchError):
        other.import_sequence(0, blob)
    blob[len(blob) // 2] ^= 1
    with pytest.raises(kivi.CorruptError):
        cache.import_sequence(0, blob)
    with pytest.raises(TypeError, match="blob"):
        cache.import_sequence(0, 5)
    assert cache.length(0, 0).length == 200


def test_state_errors(small):
    key = kivi.Spec(bits=3, axis="channel", group=64, rounding="query_aware")
    with kivi.Cache("k3v2", **small, k=key) as cache:
        with pytest.raises(kivi.StateError):
            cache.moments_commit(0)


@pytest.mark.parametrize("arguments", [
    dict(axis="row"), dict(range="wide"), dict(transform="fourier"), dict(rounding="up"), dict(param_dtype="int8"),
    dict(group=2**40),
])
def test_words_that_a_spec_does_not_know(small, arguments):
    spec = kivi.Spec(**{**dict(bits=4, axis="token", group=32), **arguments})
    with pytest.raises(kivi.InvalidArgumentError, match=next(iter(arguments))):
        kivi.Cache("k3v2", **small, v=spec)


def test_unknown_presets_and_keywords(small):
    with pytest.raises(kivi.InvalidArgumentError, match="k9v9"):
        kivi.Cache("k9v9", **small)
    with pytest.raises(TypeError, match="max_seqs"):
        kivi.Cache("k3v2", **small, max_seqs=3)
    with pytest.raises(TypeError, match="no further arguments"):
        kivi.Cache(kivi.Config.preset("k3v2", **small), threads=1)


def test_a_stream_is_refused_on_the_cpu(cache):
    with pytest.raises(kivi.InvalidArgumentError, match="stream"):
        cache.append(0, tokens(1), tokens(1), stream=1234)
