"""Results against float64 attention over the dequantised cache, for every way of calling."""

import itertools

import ml_dtypes
import numpy
import pytest

import kivi
from reference import attention, error

DTYPES = {
    "float32": numpy.float32,
    "float16": numpy.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
# What rounding the output to its dtype alone may cost, beside the library's own 1e-3.
BOUND = {"float32": 1e-3, "float16": 1.5e-3, "bfloat16": 5e-3}


def fill(cache, rng, tokens, layer=0, sequence=0, dtype=numpy.float32):
    shape = cache.config.layers[layer]
    k = rng.standard_normal((tokens, shape.kv_heads, shape.key_dim)).astype(dtype)
    v = rng.standard_normal((tokens, shape.kv_heads, shape.value_dim)).astype(dtype)
    cache.append(layer, k, v, sequences=[sequence])
    return k, v


@pytest.mark.parametrize("preset", [preset.name for preset in kivi.presets()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_attention_over_the_dequantised_cache(small, rng, preset, dtype):
    with kivi.Cache(preset, **small) as cache:
        fill(cache, rng, 400)
        fill(cache, rng, 133, sequence=1)
        q = rng.standard_normal((2, 1, 4, 64)).astype(DTYPES[dtype])
        out = numpy.full_like(q, numpy.nan)
        lse = numpy.zeros((2, 1, 4), numpy.float32)
        assert cache.attend(0, q, out, lse=lse) is out
        expected = [attention(q[s], *cache.dequantize(0, s)) for s in (0, 1)]
        assert error(out, numpy.stack([o for o, _ in expected])) < BOUND[dtype]
        assert numpy.abs(lse - numpy.stack([l for _, l in expected])).max() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantised_values_are_the_appended_ones_within_their_windows(small, rng, dtype):
    with kivi.Cache("f16", **{**small, "window_dtype": dtype}) as cache:
        k, v = fill(cache, rng, 40, dtype=DTYPES[dtype])
        back_k, back_v = cache.dequantize(0, 0)
        numpy.testing.assert_array_equal(back_k, k.astype(numpy.float32))
        numpy.testing.assert_array_equal(back_v, v.astype(numpy.float32))


@pytest.mark.parametrize("soft_cap,window_left,sinks,scale", list(itertools.product(
    (0.0, 5.0), (-1, 70), (False, True), (None, 0.05))))
def test_options_of_attend(cache, rng, soft_cap, window_left, sinks, scale):
    fill(cache, rng, 300)
    q = rng.standard_normal((3, 4, 64)).astype(numpy.float32)  # rank 3: three queries of one sequence
    learned = rng.standard_normal(4).astype(numpy.float32) + 3 if sinks else None
    lse = numpy.zeros((3, 4), numpy.float32)
    out = cache.attend(0, q, soft_cap=soft_cap, window_left=window_left, learned_sinks=learned, lse=lse,
                       scale=scale or 0.0)
    expected, expected_lse = attention(q, *cache.dequantize(0, 0), soft_cap=soft_cap, window_left=window_left,
                                       learned_sinks=learned, scale=scale)
    assert error(out, expected) < 1e-3
    assert numpy.abs(lse - expected_lse).max() < 2e-3


def test_fresh_keys_and_values_are_read_exactly(cache, rng):
    fill(cache, rng, 200)
    past_k, past_v = cache.dequantize(0, 0)
    q = rng.standard_normal((5, 4, 64)).astype(numpy.float32)
    k, v = rng.standard_normal((2, 5, 2, 64)).astype(numpy.float32)
    out = cache.attend(0, q, k=k, v=v)
    expected, _ = attention(q, numpy.concatenate([past_k, k]), numpy.concatenate([past_v, v]))
    assert error(out, expected) < 1e-3
    assert cache.length(0, 0).length == 200


@pytest.mark.parametrize("preset", [preset.name for preset in kivi.presets()])
@pytest.mark.parametrize("dtype", DTYPES)
def test_step_is_attend_with_fresh_keys_and_values_and_then_append(small, rng, preset, dtype):
    with kivi.Cache(preset, **small) as one, kivi.Cache(preset, **small) as two:
        for layer, step in itertools.product((0, 1), range(8)):
            counts = [step % 3, 90 if step == 2 else 1]
            q = rng.standard_normal((2, max(counts), 4, 64)).astype(DTYPES[dtype])
            k, v = rng.standard_normal((2, 2, max(counts), 2, 64)).astype(DTYPES[dtype])
            lse_one, lse_two = numpy.zeros((2, 2, max(counts), 4), numpy.float32)
            options = dict(counts=counts, scale=0.2, soft_cap=9.0, window_left=60, invariant=step > 4,
                           learned_sinks=numpy.float32([1, 2, 3, 4]) if step % 2 else None)
            out = one.step(layer, q, k, v, lse=lse_one, **options)
            expected = two.attend(layer, q, k=k, v=v, lse=lse_two, **options)
            two.append(layer, k, v, counts=counts)
            assert out.dtype == q.dtype
            numpy.testing.assert_array_equal(out.astype(numpy.float32), expected.astype(numpy.float32))
            numpy.testing.assert_array_equal(lse_one, lse_two)
        for sequence in (0, 1):
            assert one.export_sequence(sequence) == two.export_sequence(sequence)


def test_step_writes_to_out_and_works_in_the_workspace_that_it_is_given(cache, rng):
    q, k = rng.standard_normal((1, 4, 64)), rng.standard_normal((1, 2, 64))
    q, k = q.astype(numpy.float32), k.astype(numpy.float32)
    out = numpy.full_like(q, numpy.nan)
    workspace = numpy.zeros(cache.attend_workspace(0, 1, 1), numpy.uint8)
    assert cache.step(0, q, k, k, out, sequences=[1], workspace=workspace) is out
    assert error(out, numpy.repeat(k, 2, axis=1)) < 1e-6  # one token sees itself
    assert (cache.length(0, 0).length, cache.length(0, 1).length) == (0, 1)
    with pytest.raises(kivi.BufferTooSmallError):
        cache.step(0, q, k, k, out, workspace=workspace[:-1])


def test_ragged_rows_by_counts_and_by_offsets(small, rng):
    with kivi.Cache("k3v2", **small) as by_rows, kivi.Cache("k3v2", **small) as by_offsets:
        k, v = rng.standard_normal((2, 2, 150, 2, 64)).astype(numpy.float16)
        counts = [150, 37]
        by_rows.append(0, k, v, counts=counts)
        packed_k = numpy.concatenate([k[1, :37], k[0]])  # the other order, so that offsets matter
        packed_v = numpy.concatenate([v[1, :37], v[0]])
        by_offsets.append(0, packed_k, packed_v, counts=counts, offsets=[37, 0])
        for sequence in (0, 1):
            assert by_rows.length(0, sequence).length == counts[sequence]
            for one, other in zip(by_rows.dequantize(0, sequence), by_offsets.dequantize(0, sequence)):
                numpy.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("make", [list, tuple, numpy.int32, numpy.int64, "strided"])
def test_ids_and_counts_as_lists_and_arrays(small, rng, make):
    def ints(values):
        if make == "strided":
            return numpy.repeat(numpy.array(values, numpy.int64), 2)[::2]
        return numpy.array(values, make) if make in (numpy.int32, numpy.int64) else make(values)

    with kivi.Cache("k3v2", **small) as cache:
        k = rng.standard_normal((3, 9, 2, 64)).astype(numpy.float32)
        cache.append(0, k, k, sequences=ints([1, -1, 0]), counts=ints([4, 9, 7]))
        assert [cache.length(0, s).length for s in (0, 1)] == [7, 4]


def test_fault_S13_ragged_batch_with_window_soft_cap_and_lse(small, rng):
    """Rows of different lengths and query counts in one call, with every option that could be ignored."""
    with kivi.Cache("k3v2", **small) as cache:
        fill(cache, rng, 301)
        fill(cache, rng, 77, sequence=1)
        counts = [2, 5]
        q = rng.standard_normal((7, 4, 64)).astype(numpy.float32)
        lse = numpy.zeros((7, 4), numpy.float32)
        out = cache.attend(0, q, counts=counts, soft_cap=4.0, window_left=50, lse=lse)
        for sequence, rows in ((0, slice(0, 2)), (1, slice(2, 7))):
            expected, expected_lse = attention(q[rows], *cache.dequantize(0, sequence), soft_cap=4.0, window_left=50)
            assert error(out[rows], expected) < 1e-3
            assert numpy.abs(lse[rows] - expected_lse).max() < 2e-3


def test_rows_that_are_skipped_are_not_written(cache, rng):
    fill(cache, rng, 20)
    q = rng.standard_normal((2, 1, 4, 64)).astype(numpy.float32)
    out = numpy.full_like(q, 5)
    cache.attend(0, q, out, sequences=[0, -1])
    assert (out[1] == 5).all() and (out[0] != 5).any()


def test_out_of_another_value_dim(rng):
    layer = dict(layers=1, q_heads=4, kv_heads=4, head_dim=64, value_dim=128, max_tokens=256)
    with kivi.Cache("kivi4", **layer) as cache:
        fill(cache, rng, 100)
        q = rng.standard_normal((1, 4, 64)).astype(numpy.float16)
        out = cache.attend(0, q)
        assert out.shape == (1, 4, 128) and out.dtype == numpy.float16
        assert error(out, attention(q, *cache.dequantize(0, 0))[0]) < BOUND["float16"]


def test_merge_of_two_halves_is_the_whole(small, rng):
    arguments = {**small, "sink": 0, "recent": 0, "max_sequences": 3}
    spec = kivi.Spec(bits=4, axis="token", group=32)
    with kivi.Cache("kivi4", **arguments, k=spec, v=spec) as cache:
        k, v = rng.standard_normal((2, 256, 2, 64)).astype(numpy.float32)
        cache.append(0, numpy.concatenate([k, k[:128], k[128:]]), numpy.concatenate([v, v[:128], v[128:]]),
                     counts=[256, 128, 128])
        q = numpy.broadcast_to(rng.standard_normal((1, 1, 4, 64)).astype(numpy.float32), (3, 1, 4, 64))
        lse = numpy.zeros((3, 1, 4), numpy.float32)
        out = cache.attend(0, q, lse=lse)
        merged_lse = numpy.zeros((1, 1, 4), numpy.float32)
        merged = kivi.merge([out[1:2], out[2:3]], [lse[1:2], lse[2:3]], lse=merged_lse)
        assert error(merged, out[:1]) < 1e-3
        assert numpy.abs(merged_lse - lse[:1]).max() < 2e-3


def test_the_callers_workspace_is_used_and_judged(cache, rng):
    fill(cache, rng, 300)
    q = rng.standard_normal((1, 4, 64)).astype(numpy.float32)
    size = cache.attend_workspace(0, rows=1, max_count=1)
    workspace = numpy.zeros(max(size, 1), numpy.uint8)
    numpy.testing.assert_array_equal(cache.attend(0, q, workspace=workspace), cache.attend(0, q))
    if size > 0:
        with pytest.raises(kivi.BufferTooSmallError):
            cache.attend(0, q, workspace=workspace[: size - 1])


def test_the_workspace_grows_with_the_batch(small, rng):
    with kivi.Cache("k3v2", **small) as cache:
        fill(cache, rng, 300)
        fill(cache, rng, 300, sequence=1)
        for rows, count in ((1, 1), (2, 9), (1, 40), (2, 1)):
            q = rng.standard_normal((rows, count, 4, 64)).astype(numpy.float32)
            out = cache.attend(0, q)
            for row in range(rows):
                assert error(out[row], attention(q[row], *cache.dequantize(0, row))[0]) < 1e-3
