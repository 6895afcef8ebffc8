"""Lengths, statistics, editing, blobs, moments and probe through Python."""

import numpy
import pytest

import kivi


def append(cache, rng, tokens, sequence=0, layers=(0, 1)):
    for layer in layers:
        k, v = rng.standard_normal((2, tokens, 2, 64)).astype(numpy.float16)
        cache.append(layer, k, v, sequences=[sequence])


def contents(cache, sequence=0):
    return [part for layer in (0, 1) for part in cache.dequantize(layer, sequence)]


def assert_same(one, other):
    for a, b in zip(one, other):
        numpy.testing.assert_array_equal(a, b)


def test_borders_follow_the_windows(cache, rng):
    append(cache, rng, 300)
    length = cache.length(0, 0)
    assert (length.length, length.sink) == (300, 64)
    assert length.key_border == length.value_border == 64 * ((300 - 64) // 64)
    statistics = cache.statistics(0)
    assert statistics.tokens == 300 and statistics.packed_tokens == length.key_border - 64
    assert cache.statistics().tokens == 600
    cache.flush_residual()
    cache.flush_residual(0, sequences=[0])
    assert cache.length(1, 0).key_border == cache.length(0, 0).key_border == 256


def test_resets(cache, rng):
    append(cache, rng, 300)
    append(cache, rng, 200, sequence=1)
    cache.sequence_reset(0)
    assert [cache.length(0, s).length for s in (0, 1)] == [0, 200]
    cache.reset()
    assert cache.statistics().tokens == 0 and cache.statistics().blocks_used == 0


def test_reserve_enlarges_the_pool(small, rng):
    with kivi.Cache("k3v2", **small, pool_tokens=128) as cache:
        with pytest.raises(kivi.CapacityError):
            append(cache, rng, 1000)
        before = cache.memory().blocks
        cache.reserve(1024)
        assert cache.memory().blocks > before
        append(cache, rng, 1000)


def test_a_sequence_reserves_its_blocks(cache, rng):
    cache.sequence_reserve(0, 500)
    reserved = cache.statistics().blocks_used
    assert reserved > 0
    append(cache, rng, 500)
    cache.synchronize()
    assert cache.length(0, 0).length == 500
    assert cache.statistics().blocks_used == reserved
    with pytest.raises(kivi.CapacityError):
        cache.sequence_reserve(0, 1 << 40)


def test_dequantize_ranges_and_outputs(cache, rng):
    append(cache, rng, 300)
    k, v = cache.dequantize(0, 0)
    part_k, part_v = cache.dequantize(0, 0, 50, 250)
    numpy.testing.assert_array_equal(part_k, k[50:250])
    numpy.testing.assert_array_equal(part_v, v[50:250])
    only_v = numpy.zeros((20, 2, 64), numpy.float32)
    nothing, same = cache.dequantize(0, 0, 280, v=only_v)
    assert nothing is None and same is only_v
    numpy.testing.assert_array_equal(only_v, v[280:])
    stored_k, stored_v = cache.dequantize(0, 0, stored_basis=True)
    numpy.testing.assert_array_equal(stored_k, k)  # the keys of k3v2 have no transform, its values have
    assert not numpy.array_equal(stored_v, v)
    with pytest.raises(kivi.InvalidArgumentError):
        cache.dequantize(0, 0, 10, 301)


def test_blobs_carry_a_sequence_to_another_cache(cache, small, rng):
    append(cache, rng, 333)
    blob = cache.export_sequence(0)
    assert isinstance(blob, bytes) and blob == cache.export_sequence(0)
    with kivi.Cache("k3v2", **small) as other:
        for kind in (bytes, bytearray, memoryview, lambda b: numpy.frombuffer(b, numpy.uint8)):
            other.reset()
            other.import_sequence(1, kind(blob))
            assert other.export_sequence(1) == blob
            assert_same(contents(other, 1), contents(cache))


def test_a_failed_import_leaves_the_old_contents(cache, rng):
    append(cache, rng, 150)
    before = cache.export_sequence(0)
    for size in (0, 1, len(before) // 2, len(before) - 1):
        with pytest.raises(kivi.Error):
            cache.import_sequence(0, before[:size])
        assert cache.export_sequence(0) == before


@pytest.fixture
def aware(small):
    key = kivi.Spec(bits=3, axis="channel", group=64, rounding="query_aware")
    with kivi.Cache("k3v2", **small, k=key) as cache:
        yield cache


def test_moments_from_queries_equal_moments_set(aware, small, rng):
    # Queries that live near 8 directions: only then can one channel's error make up for another's.
    q = rng.standard_normal((256, 4, 8)) @ rng.standard_normal((8, 64)) + 0.1 * rng.standard_normal((256, 4, 64))
    q = q.astype(numpy.float32)
    key = aware.config.layers[0].k
    mean = numpy.stack([
        sum(q[:, h].astype(numpy.float64).T @ q[:, h].astype(numpy.float64) for h in heads) / (2 * len(q))
        for heads in ((0, 1), (2, 3))
    ])
    assert aware.statistics(0).moments == "none"
    aware.moments_accumulate(0, q)
    assert aware.statistics(0).moments == "accumulated" and aware.statistics(0).moment_queries > 0
    with kivi.Cache("k3v2", **small, k=key) as other:
        other.moments_set(0, mean.astype(numpy.float32))
        for cache in (aware, other):
            cache.moments_commit(0)
            assert cache.statistics(0).moments == "committed" and cache.statistics(0).key_rounding == "query_aware"
        keys, values = rng.standard_normal((2, 400, 2, 64)).astype(numpy.float32)
        score_errors = []
        with kivi.Cache("k3v2", **small) as nearest:
            for cache in (aware, other, nearest):
                cache.append(0, keys, values)
                error = cache.dequantize(0, 0)[0] - keys
                score_errors.append(numpy.sqrt(numpy.mean(numpy.einsum("thd,hde,the->th", error, mean, error))))
        assert score_errors[0] == pytest.approx(score_errors[1], rel=0.05)
        assert score_errors[0] < 0.8 * score_errors[2]


def test_moments_as_blobs(aware, small, rng):
    aware.moments_accumulate(0, rng.standard_normal((3, 100, 4, 64)).astype(numpy.float16), counts=[100, 0, 50])
    aware.moments_commit(0)
    blob = aware.moments_export(0)
    with kivi.Cache("k3v2", **small, k=aware.config.layers[0].k) as other:
        other.moments_import(0, blob)
        assert other.moments_export(0) == blob
        k = rng.standard_normal((300, 2, 64)).astype(numpy.float32)
        for cache in (aware, other):
            cache.append(0, k, k)
        numpy.testing.assert_array_equal(aware.dequantize(0, 0)[0], other.dequantize(0, 0)[0])
        with pytest.raises(kivi.StateError):
            other.moments_import(0, blob)


def test_moments_need_query_aware_keys(cache, rng):
    with pytest.raises(kivi.Error):
        cache.moments_accumulate(0, rng.standard_normal((8, 4, 64)).astype(numpy.float32))


def test_probe_sees_outlier_channels(rng):
    """Keys with an outlier channel: groups along channels hurt scores less than groups along tokens."""
    k = rng.standard_normal((512, 2, 64)).astype(numpy.float32)
    k[:, :, 7] *= 20
    v = rng.standard_normal((512, 2, 64)).astype(numpy.float32)
    q = rng.standard_normal((64, 4, 64)).astype(numpy.float32)
    value = kivi.Spec(bits=2, axis="token", group=32)
    per_axis = {}
    for axis in ("channel", "token"):
        key = kivi.Spec(bits=2, axis=axis, group=32)
        total, heads = kivi.probe(q, k, v, key, value, sink=0, recent=32, flush=32)
        assert len(heads) == 2 and all(isinstance(head, kivi.ProbeResult) for head in heads)
        per_axis[axis] = total
        assert 0 <= total.sparsity <= 1 and total.output_error > 0
    assert per_axis["channel"].score_error < per_axis["token"].score_error
    assert per_axis["channel"].attention_kl < per_axis["token"].attention_kl
    with pytest.raises(kivi.InvalidArgumentError):
        kivi.probe(q[:, :3], k, v, key, value)


def test_probe_takes_specs_and_windows_of_k3v2_unless_given(rng):
    q = rng.standard_normal((8, 2, 64)).astype(numpy.float32)
    k, v = rng.standard_normal((2, 400, 1, 64)).astype(numpy.float32)
    preset = next(p for p in kivi.presets() if p.name == "k3v2")
    windows = dict(sink=preset.sink, recent=preset.recent, flush=preset.flush, schedule=preset.schedule)
    given, _ = kivi.probe(q, k, v, preset.k, preset.v, window_dtype="float16", **windows)
    assert repr(kivi.probe(q, k, v)[0]) == repr(given)
    assert repr(kivi.probe(q, k, v, sink=0)[0]) != repr(given)


def test_work_of_no_length(cache):
    """No rows, no tokens, empty lists: nothing happens, and the shapes come back."""
    def zeros(*shape):
        return numpy.zeros(shape, numpy.float32)

    cache.append(0, zeros(0, 3, 2, 64), zeros(0, 3, 2, 64))
    cache.append(0, zeros(2, 0, 2, 64), zeros(2, 0, 2, 64))
    cache.append(0, zeros(0, 2, 64), zeros(0, 2, 64))
    cache.append(0, zeros(5, 2, 64), zeros(5, 2, 64), sequences=[], counts=[])
    cache.append(0, zeros(5, 2, 64), zeros(5, 2, 64), sequences=[1], counts=[0])
    assert cache.statistics().tokens == 0
    assert cache.attend(0, zeros(0, 1, 4, 64)).shape == (0, 1, 4, 64)
    assert cache.attend(0, zeros(2, 0, 4, 64)).shape == (2, 0, 4, 64)
    lse = zeros(1, 4)
    assert not cache.attend(0, numpy.ones((1, 4, 64), numpy.float32), lse=lse).any()
    assert (lse == -numpy.inf).all()
    assert [part.shape for part in cache.dequantize(0, 0)] == [(0, 2, 64), (0, 2, 64)]
