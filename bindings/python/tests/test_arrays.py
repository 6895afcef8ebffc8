"""Which arrays are taken, how their memory is read and written, and what is refused."""

import array
import weakref

import ml_dtypes
import numpy
import pytest

import fake_dlpack
import kivi
from fake_dlpack import ForeignArray


@pytest.fixture
def kv(rng):
    return rng.standard_normal((2, 30, 2, 64)).astype(numpy.float32)


@pytest.fixture
def q(rng):
    return rng.standard_normal((1, 4, 64)).astype(numpy.float32)


def stored(small, k, v, **arguments):
    with kivi.Cache("f16", **{**small, "window_dtype": "float32"}) as cache:
        cache.append(0, k, v, **arguments)
        return cache.dequantize(0, 0)


# Strides ----------------------------------------------------------------------------------------------

def test_strides_are_followed(small, rng):
    heads_first = rng.standard_normal((2, 30, 64)).astype(numpy.float32)
    fused = rng.standard_normal((60, 4, 192)).astype(numpy.float32)
    k = heads_first.transpose(1, 0, 2)
    v = fused[::2, 1:3, 64:128]
    back_k, back_v = stored(small, k, v)
    numpy.testing.assert_array_equal(back_k, k)
    numpy.testing.assert_array_equal(back_v, v)


def test_broadcast_inputs_are_taken_and_broadcast_outputs_refused(small, cache, kv, q):
    row = numpy.broadcast_to(kv[0, :1], (30, 2, 64))
    numpy.testing.assert_array_equal(stored(small, row, row)[0], row)
    cache.append(0, *kv)
    out = numpy.lib.stride_tricks.as_strided(numpy.zeros(64, numpy.float32), (1, 4, 64), (256, 0, 4))
    with pytest.raises(kivi.InvalidArgumentError, match="out"):
        cache.attend(0, q, out)


def test_negative_and_inner_strides_are_refused(cache, kv):
    k, v = kv
    with pytest.raises(kivi.InvalidArgumentError, match="k"):
        cache.append(0, k[::-1], v)
    wide = numpy.zeros((30, 2, 128), numpy.float32)
    with pytest.raises(kivi.InvalidArgumentError, match="v"):
        cache.append(0, k, wide[:, :, ::2])
    assert cache.length(0, 0).length == 0


def test_strides_that_are_no_multiple_of_the_element(cache, kv):
    record = numpy.zeros((30, 2), numpy.dtype([("k", numpy.float32, 64), ("tag", numpy.uint8)]))
    with pytest.raises(kivi.InvalidArgumentError, match="k: stride"):
        cache.append(0, record["k"], kv[1])


def test_fault_S12_strides_beyond_32_bits_arrive_whole(cache, kv):
    """The stride of the single row is 2^33 elements and is never stepped over."""
    far = numpy.lib.stride_tricks.as_strided(kv[0], (1, 30, 2, 64), (2**35, *kv[0].strides))
    cache.append(0, far, kv[1][None])
    assert cache.length(0, 0).length == 30
    two_rows = fake_dlpack.ForeignArray(far)
    cache.append(0, two_rows, kv[1][None])
    assert cache.length(0, 0).length == 60


# dtypes -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [numpy.float64, numpy.uint16, numpy.int16, numpy.int32, numpy.bool_, ">f4", ">f2"])
def test_other_dtypes_are_refused(cache, kv, dtype):
    with pytest.raises(TypeError, match="^k: .* is not taken"):
        cache.append(0, kv[0].astype(dtype), kv[1])
    assert cache.length(0, 0).length == 0


def test_other_types_of_ml_dtypes_are_refused(cache, kv):
    with pytest.raises((TypeError, BufferError)):
        cache.append(0, kv[0].astype(ml_dtypes.float8_e4m3fn), kv[1])


def test_bits_of_bfloat16_in_uint16_are_refused(cache, kv):
    bits = kv[0].astype(ml_dtypes.bfloat16).view(numpy.uint16)
    with pytest.raises(TypeError, match="'H'"):
        cache.append(0, bits, kv[1])


def test_bfloat16_of_ml_dtypes_with_strides(small, kv):
    k = kv[0].astype(ml_dtypes.bfloat16)[::3]
    v = kv[1].astype(ml_dtypes.bfloat16)[::3]
    numpy.testing.assert_array_equal(stored(small, k, v)[1], v.astype(numpy.float32))


@pytest.mark.parametrize("thing", [None, 3, "text", object(), [[1.0]], {}])
def test_things_that_are_no_arrays(cache, kv, thing):
    with pytest.raises(TypeError):
        cache.append(0, thing, kv[1])


def test_buffers_of_the_standard_library(cache, kv):
    with pytest.raises(kivi.InvalidArgumentError, match="dimensions"):
        cache.append(0, array.array("f", [1.0] * 64), kv[1])
    with pytest.raises(kivi.InvalidArgumentError, match="5 dimensions"):
        cache.append(0, numpy.zeros((1, 1, 1, 2, 64), numpy.float32), kv[1])


# Shapes -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(30, 3, 64), (30, 2, 32), (29, 2, 64), (2, 30, 2, 64)])
def test_wrong_shapes_are_refused(cache, kv, shape):
    with pytest.raises(kivi.InvalidArgumentError):
        cache.append(0, kv[0], numpy.zeros(shape, numpy.float32))
    assert cache.length(0, 0).length == 0


def test_lengths_of_ids_counts_and_offsets_must_agree(cache, kv):
    k, v = kv
    with pytest.raises(kivi.InvalidArgumentError, match="sequences: 3 entries for a batch of 1 rows"):
        cache.append(0, k[None], v[None], sequences=[0, 1, -1])
    with pytest.raises(kivi.InvalidArgumentError, match="counts: 2 entries for a batch of 1 rows"):
        cache.append(0, k, v, sequences=[0], counts=[1, 2])
    with pytest.raises(kivi.InvalidArgumentError, match="offsets"):
        cache.append(0, k, v, counts=[1, 2], offsets=[0])
    with pytest.raises(kivi.InvalidArgumentError, match="counts: needed"):
        cache.append(0, k, v, sequences=[0, 1])


@pytest.mark.parametrize("ids", [[0.0], ["0"], numpy.zeros(1, numpy.float32), numpy.zeros(1, numpy.uint8), [None]])
def test_ids_must_be_integers(cache, kv, ids):
    with pytest.raises(TypeError, match="sequences"):
        cache.append(0, *kv, sequences=ids)


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], [2**70], numpy.array([2**40]), numpy.zeros((1, 1), int)])
def test_ids_must_fit(cache, kv, ids):
    with pytest.raises(kivi.InvalidArgumentError, match="sequences"):
        cache.append(0, *kv, sequences=ids)


def test_learned_sinks_are_one_float32_a_head(cache, kv, q):
    cache.append(0, *kv)
    zeros = numpy.zeros(8, numpy.float32)
    for wrong in (zeros[:3], zeros[None, :4], zeros[::2]):
        with pytest.raises(kivi.InvalidArgumentError, match="learned_sinks"):
            cache.attend(0, q, learned_sinks=wrong)
    with pytest.raises(TypeError, match="learned_sinks"):
        cache.attend(0, q, learned_sinks=numpy.zeros(4, numpy.float64))


# Outputs ----------------------------------------------------------------------------------------------

def test_read_only_outputs_are_refused(cache, kv, q):
    cache.append(0, *kv)
    for dtype in (numpy.float32, ml_dtypes.bfloat16):
        out = numpy.zeros((1, 4, 64), dtype)
        out.setflags(write=False)
        with pytest.raises(kivi.InvalidArgumentError, match="out: the array is read-only"):
            cache.attend(0, q, out)
        assert not out.any()
    for versioned_flag, reason in ((fake_dlpack.READ_ONLY, "read-only"), (fake_dlpack.IS_COPIED, "copy")):
        out = ForeignArray(numpy.zeros((1, 4, 64), numpy.float32), flags=versioned_flag)
        with pytest.raises(kivi.InvalidArgumentError, match=f"out: .*{reason}"):
            cache.attend(0, q, out)
        assert out.deleted == 1


def test_read_only_inputs_are_fine(small, kv):
    kv.setflags(write=False)
    numpy.testing.assert_array_equal(stored(small, *kv)[0], kv[0])


def test_strided_outputs_are_written_in_place(cache, kv, q):
    cache.append(0, *kv)
    whole = numpy.full((2, 4, 128), 9, numpy.float32)
    cache.attend(0, q, whole[:1, :, 64:])
    numpy.testing.assert_array_equal(whole[:1, :, 64:], cache.attend(0, q))
    assert (whole[:1, :, :64] == 9).all() and (whole[1] == 9).all()


# DLPack -----------------------------------------------------------------------------------------------

class OnlyDlpack:
    """numpy's own capsules, with numpy's other ways closed."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_capsules_of_numpy(small, kv, cache, q):
    k = kv[0][::2]
    numpy.testing.assert_array_equal(stored(small, OnlyDlpack(k), OnlyDlpack(k))[1], k)
    cache.append(0, *kv)
    out = numpy.zeros((1, 4, 64), numpy.float32)
    cache.attend(0, OnlyDlpack(q), OnlyDlpack(out))
    numpy.testing.assert_array_equal(out, cache.attend(0, q))


@pytest.mark.parametrize("versioned", [True, False])
def test_capsules_are_taken_over_and_given_back(small, kv, versioned):
    k, v = (ForeignArray(x[::2], versioned=versioned) for x in kv)
    numpy.testing.assert_array_equal(stored(small, k, v)[0], kv[0][::2])
    assert (k.deleted, v.deleted) == (1, 1)
    used = b"used_dltensor_versioned" if versioned else b"used_dltensor"
    assert fake_dlpack.capsule_name(k.capsule) == used
    if versioned:
        assert k.arguments == {"max_version": (1, 0), "copy": False}
    else:
        assert k.arguments == {}


def test_bfloat16_comes_through_dlpack(small, kv):
    k = kv[0].astype(ml_dtypes.bfloat16)
    foreign = ForeignArray(k.view(numpy.uint16), fake_dlpack.BFLOAT)
    numpy.testing.assert_array_equal(stored(small, foreign, foreign)[0], k.astype(numpy.float32))


def test_compact_tensors_without_strides_and_byte_offsets(small, kv):
    foreign = ForeignArray(kv[0][2:], compact=True, byte_offset=2 * kv[0].strides[0])
    numpy.testing.assert_array_equal(stored(small, foreign, foreign)[0], kv[0][2:])


def test_ids_through_dlpack(cache, kv):
    cache.append(0, *kv, sequences=ForeignArray(numpy.array([1], numpy.int64)))
    assert cache.length(0, 1).length == 30


def test_another_dlpack_version_is_refused_and_its_capsule_left_alone(cache, kv):
    foreign = ForeignArray(kv[0], major=2)
    with pytest.raises(BufferError, match="k: DLPack version 2"):
        cache.append(0, foreign, kv[1])
    assert foreign.deleted == 0 and fake_dlpack.capsule_name(foreign.capsule) == b"dltensor_versioned"


def test_another_device_is_refused(cache, kv):
    """The library judges the device; the binding passes it on, with the stream that CUDA producers need."""
    foreign = ForeignArray(kv[0], device=(fake_dlpack.CUDA, 1))
    with pytest.raises(kivi.Error, match="k"):
        cache.append(0, foreign, kv[1])
    assert foreign.deleted == 1 and foreign.arguments["stream"] == 1
    with pytest.raises(kivi.InvalidArgumentError, match="k: DLPack device type 8"):
        cache.append(0, ForeignArray(kv[0], device=(8, 0)), kv[1])
    assert cache.length(0, 0).length == 0


def test_other_dlpack_dtypes_are_refused(cache, kv):
    foreign = ForeignArray(kv[0].astype(numpy.float64))
    with pytest.raises(TypeError, match="k: DLPack type code 2 of 64 bits"):
        cache.append(0, foreign, kv[1])
    assert foreign.deleted == 1


def test_an_error_of_the_producer_passes_through(cache, kv):
    class Failing(ForeignArray):
        def __dlpack__(self, **arguments):
            raise RuntimeError("tensor needs grad")

    with pytest.raises(RuntimeError, match="tensor needs grad"):
        cache.append(0, Failing(kv[0]), kv[1])


def test_outputs_of_a_foreign_library(cache, kv, q):
    cache.append(0, *kv)
    expected = cache.attend(0, q)
    out = ForeignArray(numpy.zeros((1, 4, 64), numpy.float32))
    assert cache.attend(0, ForeignArray(q), out) is out
    numpy.testing.assert_array_equal(out.memory, expected)
    made = cache.attend(0, fake_dlpack.OutsideLibrary(q))
    assert isinstance(made, fake_dlpack.OutsideLibrary)
    numpy.testing.assert_array_equal(made.memory, expected)
    with pytest.raises(TypeError, match="out: needed"):
        cache.attend(0, ForeignArray(q))


def test_no_array_is_kept_after_a_call(cache, kv):
    class Watched(numpy.ndarray):
        pass

    k, v = (x.copy().view(Watched) for x in kv)
    watches = [weakref.ref(k), weakref.ref(v)]
    cache.append(0, k, v)
    with pytest.raises(kivi.Error):
        cache.append(5, k, v)
    del k, v
    assert [watch() for watch in watches] == [None, None]


def test_jax_arrays(small, kv, cache, q):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    cpu = jax.devices("cpu")[0]
    k = jax.device_put(kv[0].astype(ml_dtypes.bfloat16), cpu)
    numpy.testing.assert_array_equal(stored(small, k, k)[0], numpy.asarray(k, numpy.float32))
    cache.append(0, *kv)
    out = numpy.zeros((1, 4, 64), numpy.float32)
    numpy.testing.assert_array_equal(cache.attend(0, jax.device_put(q, cpu), out), cache.attend(0, q))
    with pytest.raises(kivi.InvalidArgumentError, match="out: the array is read-only"):
        cache.attend(0, q, jax.device_put(out, cpu))


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_tensors(torch, small, kv, cache, q, dtype):
    k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in kv)
    heads_first = k.transpose(0, 1).contiguous().transpose(0, 1)
    back_k, back_v = stored(small, heads_first, v, sequences=torch.tensor([0]))
    numpy.testing.assert_array_equal(back_k, k.float().numpy())
    numpy.testing.assert_array_equal(back_v, v.float().numpy())
    cache.append(0, k, v)
    queries = torch.from_numpy(q).to(k.dtype)
    out = cache.attend(0, queries)
    assert isinstance(out, torch.Tensor) and out.dtype == k.dtype
    given = torch.zeros(1, 4, 64)
    assert cache.attend(0, queries, given) is given
    assert torch.equal(out, given.to(k.dtype))


def test_torch_tensors_that_cannot_be_taken(torch, cache, kv):
    k = torch.from_numpy(kv[0])
    with pytest.raises(TypeError, match="v: .* is not taken"):
        cache.append(0, k, k.double())
    with pytest.raises(BufferError):
        cache.append(0, k, k.clone().requires_grad_())
    if torch.cuda.is_available():
        with pytest.raises(kivi.Error, match="^v"):
            cache.append(0, k, k.cuda())
    assert cache.length(0, 0).length == 0
