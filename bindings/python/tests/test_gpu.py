"""Caches on a GPU: arrays of the host are copied there and back, those of PyTorch are used where they are."""

import numpy
import pytest

import kivi

pytestmark = pytest.mark.skipif(
    not any(device.device == "cuda" and device.available for device in kivi.devices()),
    reason="there is no GPU that this build has code for")

LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 8, 2, 64


def make(device, preset="k3v2", **fields):
    return kivi.Cache(preset, layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, max_tokens=1024,
                      max_sequences=3, device=device, **fields)


@pytest.fixture
def pair():
    with make("cpu") as cpu, make("cuda") as gpu:
        yield cpu, gpu


def close(a, b):
    return numpy.linalg.norm(numpy.float64(a) - b) <= 4e-3 * numpy.linalg.norm(numpy.float64(b))


def test_one_argument_moves_a_program_to_the_gpu(pair, rng):
    outs = []
    for cache in pair:
        random = numpy.random.default_rng(1)
        for layer in range(LAYERS):
            cache.append(layer, *random.standard_normal((2, 3, 300, KV_HEADS, DIM)).astype(numpy.float16))
        for step in range(70):
            for layer in range(LAYERS):
                cache.append(layer, *random.standard_normal((2, 3, 1, KV_HEADS, DIM)).astype(numpy.float16))
                out = cache.attend(layer, random.standard_normal((3, 1, Q_HEADS, DIM)).astype(numpy.float32))
        outs.append(out)
        for step in range(70):
            for layer in range(LAYERS):
                out = cache.step(layer, random.standard_normal((3, 1, Q_HEADS, DIM)).astype(numpy.float16),
                                 *random.standard_normal((2, 3, 1, KV_HEADS, DIM)).astype(numpy.float16))
        outs.append(out)
    assert close(outs[2], outs[0]) and close(outs[3], outs[1])
    cpu, gpu = pair
    assert repr(cpu.length(0, 2)) == repr(gpu.length(0, 2))
    for sequence in range(3):
        blob = cpu.export_sequence(sequence)
        assert gpu.export_sequence(sequence) == blob
        gpu.import_sequence(sequence, blob)
        assert gpu.export_sequence(sequence) == blob
    for of_cpu, of_gpu in zip(cpu.dequantize(1, 0), gpu.dequantize(1, 0)):
        numpy.testing.assert_array_equal(of_cpu, of_gpu)


def test_host_arrays_with_gaps_and_skipped_rows(pair, rng):
    """Every other head of wider arrays, in and out; what is not written stays as it was."""
    k = rng.standard_normal((3, 200, 2 * KV_HEADS, DIM + 5)).astype(numpy.float32)[:, :, ::2, 3:-2]
    q = rng.standard_normal((3, 2, Q_HEADS, DIM)).astype(numpy.float16)
    outs = []
    for cache in pair:
        cache.append(0, k, numpy.broadcast_to(k[:1, :1], k.shape), counts=[200, 0, 77])
        wide = numpy.full((3, 2, 2 * Q_HEADS, DIM), 7, numpy.float16)
        lse = numpy.full((3, 2, Q_HEADS), 7, numpy.float32)
        result = cache.attend(0, q, wide[:, :, 1::2], sequences=[2, -1, 0], counts=[2, 2, 1], lse=lse, soft_cap=30.0,
                              learned_sinks=numpy.linspace(-1, 1, Q_HEADS, dtype=numpy.float32))
        assert result.base is not None
        assert (wide[:, :, ::2] == 7).all() and (wide[1] == 7).all() and (wide[2, 1] == 7).all()
        assert (lse[1] == 7).all()
        outs.append((wide, lse))
    assert close(outs[1][0], outs[0][0]) and close(outs[1][1], outs[0][1])


def test_a_failed_call_changes_no_host_array(pair, rng):
    _, gpu = pair
    k = rng.standard_normal((1, 2000, KV_HEADS, DIM)).astype(numpy.float16)
    with pytest.raises(kivi.CapacityError, match="max_tokens"):
        gpu.append(0, k, k)
    out = numpy.full((1, 1, Q_HEADS, DIM), 7, numpy.float32)
    with pytest.raises(kivi.InvalidArgumentError, match="q"):
        gpu.attend(0, numpy.zeros((1, 1, Q_HEADS + 1, DIM), numpy.float32), out)
    assert (out == 7).all()
    with pytest.raises((kivi.InvalidArgumentError, TypeError), match="out"):
        gpu.attend(0, numpy.zeros((1, 1, Q_HEADS, DIM), numpy.float32), numpy.broadcast_to(out[:1, :1, :1], out.shape))


def test_moments_from_host_arrays(rng):
    k = kivi.Spec(bits=3, axis="channel", group=64, rounding="query_aware")
    q = rng.standard_normal((1, 256, Q_HEADS, DIM)).astype(numpy.float32)
    keys = rng.standard_normal((1, 300, KV_HEADS, DIM)).astype(numpy.float32)
    with make("cpu", k=k) as cpu, make("cuda", k=k) as gpu:
        gpu.moments_accumulate(0, q)
        gpu.moments_commit(0)
        gpu.append(0, keys, keys)
        cpu.moments_import(0, gpu.moments_export(0))
        cpu.append(0, keys, keys)
        for of_cpu, of_gpu in zip(cpu.dequantize(0, 0), gpu.dequantize(0, 0)):
            numpy.testing.assert_array_equal(of_cpu, of_gpu)
        gpu.reset()
        gpu.moments_set(0, numpy.tile(numpy.eye(DIM, dtype=numpy.float32), (KV_HEADS, 1, 1)))


def test_tensors_of_the_gpu_stay_there(pair, rng):
    torch = pytest.importorskip("torch")
    cpu, gpu = pair
    kv = rng.standard_normal((2, 1, 300, KV_HEADS, DIM)).astype(numpy.float16)
    q = rng.standard_normal((1, 1, Q_HEADS, DIM)).astype(numpy.float16)
    cpu.append(0, *kv)
    expected = cpu.attend(0, q)
    torch.cuda.set_device(0)  # whatever other libraries have left
    for stream in [torch.cuda.Stream(0) for _ in range(2)]:
        with torch.cuda.stream(stream):
            k, v = (torch.from_numpy(x).cuda() for x in kv)
            gpu.sequence_reset(0, stream=stream.cuda_stream)
            gpu.append(0, k, v, stream=stream.cuda_stream)
            out = gpu.attend(0, torch.from_numpy(q).cuda(), stream=stream.cuda_stream)
        stream.synchronize()
        assert out.is_cuda and out.dtype == torch.float16
        assert close(out.cpu().numpy(), expected)
    workspace = torch.empty(gpu.attend_workspace(0, 1, 1), dtype=torch.int32, device="cuda")
    out = gpu.attend(0, torch.from_numpy(q).cuda(), workspace=workspace)
    torch.cuda.synchronize()
    assert close(out.cpu().numpy(), expected)
    expected = cpu.step(0, q, *kv[:, :, :1])
    out = gpu.step(0, *(torch.from_numpy(x).cuda() for x in (q, *kv[:, :, :1])), workspace=workspace)
    torch.cuda.synchronize()
    assert out.is_cuda and close(out.cpu().numpy(), expected)


def test_a_steady_loop_takes_no_device_memory(pair, rng):
    torch = pytest.importorskip("torch")
    _, gpu = pair
    k = rng.standard_normal((1, 1, KV_HEADS, DIM)).astype(numpy.float16)
    q = rng.standard_normal((1, 1, Q_HEADS, DIM)).astype(numpy.float16)

    def step():
        gpu.append(0, k, k)
        gpu.attend(0, q)
        gpu.step(0, q, k, k)

    step()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(200):
        step()
    assert torch.cuda.mem_get_info()[0] == before
