"""Configs are values: what goes in is what the library sees, and nothing edits it."""

import dataclasses

import numpy
import pytest

import kivi


def test_presets_carry_the_published_numbers():
    by_name = {preset.name: preset for preset in kivi.presets()}
    assert by_name["k3v2"].k == kivi.Spec(bits=3, axis="channel", group=64, param_dtype=by_name["k3v2"].k.param_dtype)
    assert by_name["k3v2"].v.transform == "hadamard" and by_name["k3v2"].v.bits == 2
    paper = by_name["kivi2-paper"]
    assert (paper.schedule, paper.recent, paper.k.bits, paper.v.bits, paper.k.group) == ("published", 128, 2, 2, 32)
    assert by_name["f16"].k.bits == 16
    assert all(preset.what for preset in by_name.values())


@pytest.mark.parametrize("preset", kivi.presets(), ids=lambda preset: preset.name)
def test_a_preset_through_config_is_the_preset(small, preset):
    config = kivi.Config.preset(preset.name, **small)
    assert (config.layers[0].k, config.layers[0].v) == (preset.k, preset.v)
    assert (config.sink, config.recent, config.flush, config.schedule) == (
        preset.sink, preset.recent, preset.flush, preset.schedule)
    assert kivi.query_support(config).supported


def test_fault_43_two_caches_from_one_config(small):
    """Models of 2 and 30 layers from one config; neither changes it for the other."""
    config = kivi.Config.preset("k3v2", **small)
    before = dataclasses.asdict(config)
    deep = dataclasses.replace(config, layers=config.layers[:1] * 30)
    ones = numpy.ones((3, 2, 64), numpy.float16)
    with kivi.Cache(config) as shallow_cache, kivi.Cache(deep) as deep_cache, kivi.Cache(config) as again:
        deep_cache.append(29, ones, ones)
        shallow_cache.append(1, ones, ones)
        with pytest.raises(kivi.InvalidArgumentError):
            shallow_cache.append(2, ones, ones)
        assert deep_cache.length(29, 0).length == 3
        assert again.length(1, 0).length == 0
        assert shallow_cache.memory().total_bytes == again.memory().total_bytes
    assert dataclasses.asdict(config) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sink = 0


def test_estimate_is_what_create_takes(small):
    for preset in kivi.presets():
        config = kivi.Config.preset(preset.name, **small)
        with kivi.Cache(config) as cache:
            estimate, memory = kivi.estimate(config), cache.memory()
            assert repr(estimate) == repr(memory)
            parts = ("page_bytes", "window_bytes", "table_bytes", "moment_bytes", "scratch_bytes")
            assert memory.total_bytes == sum(getattr(memory, part) for part in parts)
            assert memory.page_bytes == memory.blocks * memory.block_bytes


def test_a_table_of_unlike_layers(rng):
    spec = kivi.Spec(bits=4, axis="token", group=32)
    wide = kivi.Layer(kv_heads=1, q_heads=8, key_dim=128, value_dim=64, k=spec, v=kivi.Spec(bits=16))
    narrow = kivi.Layer(kv_heads=2, q_heads=2, key_dim=64, value_dim=64, k=spec, v=spec)
    with kivi.Cache("kivi4", layers=[wide, kivi.Layer(kv_heads=0), narrow], max_tokens=512) as cache:
        cache.append(0, *(rng.standard_normal((2, 1, d)).astype(numpy.float16) for d in (128, 64)))
        cache.append(2, *rng.standard_normal((2, 2, 2, 64)).astype(numpy.float16))
        assert cache.attend(0, numpy.ones((1, 8, 128), numpy.float32)).shape == (1, 8, 64)
        with pytest.raises(kivi.Error, match="layer"):
            cache.append(1, *rng.standard_normal((2, 2, 2, 64)).astype(numpy.float16))
    with pytest.raises(TypeError, match="layers"):
        kivi.Config.preset("kivi4", layers=[wide], kv_heads=2, max_tokens=512)


def test_devices_and_versions():
    devices = kivi.devices()
    assert devices[0].device == "cpu" and devices[0].available and devices[0].threads >= 1
    assert kivi.__version__ == kivi.version() and kivi.version().count(".") == 2
    assert kivi.build_info()


def test_reprs_show_every_field(cache):
    assert repr(cache.length(0, 0)) == "Length(length=0, sink=0, key_border=0, value_border=0)" or \
        repr(cache.length(0, 0)).startswith("Length(length=0, sink=0, key_border=")
    assert repr(cache).startswith("<kivi.Cache on cpu, 2 layers")
    assert "key_rounding='nearest'" in repr(cache.statistics())
