//! The life of a cache: memory, lengths, windows, reset, moving, threads.

mod support;

use std::thread;

use kivi::{
    Attend, Basis, Batch, Cache, Config, Device, Error, Layer, Spec, TensorMut, TensorRef, Windows, Workspace,
};
use support::*;

#[test]
fn types_cross_threads() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<Cache>();
    sync::<Cache>();
    send::<Config>();
    sync::<Config>();
    send::<TensorRef<'_>>();
    sync::<TensorRef<'_>>();
    send::<TensorMut<'_>>();
    sync::<TensorMut<'_>>();
    send::<Batch<'_>>();
    send::<Workspace>();
    send::<Error>();
    sync::<Error>();
}

#[test]
fn attends_run_together_and_a_cache_moves_between_threads() {
    let mut random = Random::new(1);
    let mut cache = Cache::new(&config("k3v2", HEADS, 4, 600)).unwrap();
    let mut cache = thread::spawn(move || {
        for sequence in 0..4 {
            append_random(&mut cache, HEADS, sequence, 500, &mut random);
        }
        cache
    })
    .join()
    .unwrap();
    let q = Random::new(2).normals(6 * 64);
    let attend = |cache: &Cache, sequence: i32, workspace: &mut Workspace| {
        let mut out = vec![0.0f32; 6 * 64];
        cache
            .attend(
                0,
                &Batch::uniform(&[sequence], 1),
                &TensorRef::new(&q, &[1, 1, 6, 64]).unwrap(),
                &mut TensorMut::new(&mut out, &[1, 1, 6, 64]).unwrap(),
                Attend::new(),
                workspace,
            )
            .unwrap();
        out
    };
    let mut workspace = cache.workspace(None, 1, 1).unwrap();
    let alone: Vec<Vec<f32>> = (0..4).map(|sequence| attend(&cache, sequence, &mut workspace)).collect();
    thread::scope(|scope| {
        for (sequence, wanted) in (0..4).zip(&alone) {
            let (cache, attend) = (&cache, &attend);
            scope.spawn(move || {
                let mut workspace = cache.workspace(None, 1, 1).unwrap();
                for _ in 0..50 {
                    assert_eq!(attend(cache, sequence, &mut workspace), *wanted);
                    assert_eq!(cache.length(0, sequence).unwrap().length, 500);
                }
            });
        }
    });
    cache.reset().unwrap();
    assert_eq!(cache.statistics(None).unwrap().tokens, 0);
}

#[test]
fn caches_and_views_may_be_dropped_in_any_order() {
    let data = vec![0.5f32; 2 * 64];
    let one = TensorRef::new(&data, &[1, 1, 2, 64]).unwrap();
    let mut first = Cache::new(&config("k3v2", HEADS, 1, 100)).unwrap();
    let mut second = Cache::new(&config("f16", HEADS, 1, 100)).unwrap();
    first.append(0, &Batch::first(1, 1), &one, &one).unwrap();
    second.append(0, &Batch::first(1, 1), &one, &one).unwrap();
    let workspace = first.workspace(None, 1, 1).unwrap();
    drop(data.clone());
    drop(first);
    second.append(0, &Batch::first(1, 1), &one, &one).unwrap();
    drop(second);
    drop(workspace);
    assert_eq!(data[0], 0.5);
}

#[test]
fn a_raw_handle_comes_back() {
    let cache = std::mem::ManuallyDrop::new(Cache::new(&config("k3v2", HEADS, 1, 100)).unwrap());
    // SAFETY: the first owner never drops it.
    let again = unsafe { Cache::from_raw(cache.as_raw(), Device::Cpu, 0) }.unwrap();
    assert_eq!(again.length(0, 0).unwrap().length, 0);
    // SAFETY: NULL is refused, not used.
    assert!(unsafe { Cache::from_raw(std::ptr::null_mut(), Device::Cpu, 0) }.is_err());
}

#[test]
fn memory_is_known_before() {
    for preset in kivi::presets().unwrap() {
        assert!(!preset.what.is_empty());
        let config = config(&preset.name, HEADS, 3, 1000);
        assert_eq!(
            (config.key_spec().bits(), config.value_spec().bits()),
            (preset.k.bits(), preset.v.bits()),
            "{}",
            preset.name
        );
        let estimate = config.estimate().unwrap();
        let memory = Cache::new(&config).unwrap().memory().unwrap();
        assert_eq!(estimate, memory);
        let parts = memory.page_bytes
            + memory.window_bytes
            + memory.table_bytes
            + memory.moment_bytes
            + memory.scratch_bytes;
        assert_eq!(memory.total_bytes, parts);
        assert_eq!(memory.page_bytes, memory.blocks as u64 * memory.block_bytes);
    }
}

#[test]
fn a_preset_says_all_that_it_sets() {
    for preset in kivi::presets().unwrap() {
        let windows = Windows {
            sink: preset.sink,
            recent: preset.recent,
            flush: preset.flush,
            schedule: preset.schedule.unwrap(),
        };
        let by_hand = config("f16", HEADS, 3, 1000).k(preset.k).v(preset.v).windows(windows);
        let by_name = config(&preset.name, HEADS, 3, 1000);
        assert_eq!(by_hand.estimate().unwrap(), by_name.estimate().unwrap(), "{}", preset.name);
    }
}

#[test]
fn bits_per_element_are_those_of_the_presets() {
    for (preset, bits) in [("k3v2", 3.0), ("kivi2-sink", 3.0), ("k4v2", 3.5), ("kivi4", 5.0), ("f16", 16.0)] {
        let support = config(preset, HEADS, 1, 100).query_support(0).unwrap();
        assert!(support.supported, "{preset}: {}", support.reason);
        assert!((support.bits_per_element - bits).abs() < 1e-9, "{preset}: {}", support.bits_per_element);
    }
}

#[test]
fn lengths_follow_the_windows() {
    // k3v2: sink 64, recent 64, flush 64.
    let mut random = Random::new(3);
    let mut cache = Cache::new(&config("k3v2", HEADS, 2, 1000)).unwrap();
    let mut n = 0;
    for step in [10, 117, 1, 64, 300] {
        append_random(&mut cache, HEADS, 1, step, &mut random);
        n += step as i64;
        let length = cache.length(0, 1).unwrap();
        assert_eq!((length.length, length.sink), (n, n.min(64)));
        let packed = (64 * ((n - 64).div_euclid(64)) - 64).max(0);
        assert_eq!((length.key_border - length.sink).max(0), packed, "at {n}");
        assert_eq!(length.value_border, length.key_border);
        assert_eq!(cache.statistics(Some(0)).unwrap().packed_tokens, packed);
    }
    cache.flush_residual(None, &Batch::uniform(&[1], 0)).unwrap();
    let flushed = cache.export_sequence(1).unwrap();
    assert_eq!(cache.length(0, 1).unwrap().key_border, n / 64 * 64);
    cache.flush_residual(Some(0), &Batch::uniform(&[1], 0)).unwrap();
    assert_eq!(cache.export_sequence(1).unwrap(), flushed, "twice equals once");
    cache.sequence_reset(1).unwrap();
    assert_eq!(cache.length(0, 1).unwrap().length, 0);
    assert_eq!(cache.statistics(None).unwrap().blocks_used, 0);
}

#[test]
fn a_pool_can_be_enlarged() {
    let small = config("k3v2", HEADS, 2, 2000).pool_tokens(256);
    let mut cache = Cache::new(&small).unwrap();
    append_random(&mut cache, HEADS, 0, 300, &mut Random::new(4));
    let before = cache.export_sequence(0).unwrap();
    cache.reserve(3000).unwrap();
    assert!(cache.memory().unwrap().blocks * 128 >= 3000);
    assert_eq!(cache.export_sequence(0).unwrap(), before);
    append_random(&mut cache, HEADS, 1, 1500, &mut Random::new(5));
}

#[test]
fn a_sequence_reserves_its_blocks() {
    let mut cache = Cache::new(&config("k3v2", HEADS, 2, 2000)).unwrap();
    cache.sequence_reserve(1, 600).unwrap();
    let reserved = cache.statistics(None).unwrap().blocks_used;
    assert!(reserved > 0);
    append_random(&mut cache, HEADS, 1, 600, &mut Random::new(6));
    assert_eq!(cache.statistics(None).unwrap().blocks_used, reserved);
    assert!(cache.sequence_reserve(1, 2001).is_err());
}

#[test]
fn synchronize_changes_nothing_on_the_cpu() {
    let mut cache = Cache::new(&config("k3v2", HEADS, 1, 1000)).unwrap();
    append_random(&mut cache, HEADS, 0, 300, &mut Random::new(7));
    let before = (cache.export_sequence(0).unwrap(), cache.statistics(None).unwrap());
    cache.synchronize().unwrap();
    assert_eq!((cache.export_sequence(0).unwrap(), cache.statistics(None).unwrap()), before);
}

#[test]
fn layers_may_differ_and_be_absent() {
    let heads = |key_dim, value_dim| Some(kivi::Heads { key_dim, value_dim, ..HEADS });
    let layers = [
        Layer { heads: heads(64, 64), k: Spec::channel(3, 64), v: Spec::token(2, 64) },
        Layer { heads: None, k: Spec::full(), v: Spec::full() },
        Layer { heads: heads(128, 96), k: Spec::full(), v: Spec::full() },
    ];
    let config = config("k3v2", HEADS, 1, 500).layers(&layers);
    let mut cache = Cache::new(&config).unwrap();
    append_random(&mut cache, HEADS, 0, 200, &mut Random::new(6));
    let (k, v) = (vec![0.5f32; 200 * 2 * 128], vec![0.25f32; 200 * 2 * 96]);
    let (k, v) =
        (TensorRef::new(&k, &[1, 200, 2, 128]).unwrap(), TensorRef::new(&v, &[1, 200, 2, 96]).unwrap());
    assert!(cache.append(1, &Batch::first(1, 200), &k, &v).is_err());
    cache.append(2, &Batch::first(1, 200), &k, &v).unwrap();
    let mut read = vec![0.0f32; 200 * 2 * 96];
    cache
        .dequantize(
            2,
            0,
            0..200,
            None,
            Some(&mut TensorMut::new(&mut read, &[200, 2, 96]).unwrap()),
            Basis::Stored,
        )
        .unwrap();
    assert!(read.iter().all(|&x| x == 0.25));
    // One number of layers after a table of them: the table is gone, nothing outside of it is read.
    assert_eq!(
        config.layer_count(5).estimate().unwrap().layout_id,
        support::config("k3v2", HEADS, 1, 500).layer_count(5).estimate().unwrap().layout_id
    );
}

#[test]
fn a_sequence_moves_as_a_blob() {
    let mut cache = Cache::new(&config("k3v2", HEADS, 2, 600)).unwrap();
    append_random(&mut cache, HEADS, 0, 555, &mut Random::new(7));
    let blob = cache.export_sequence(0).unwrap();
    assert_eq!(blob.len(), cache.export_size(0).unwrap());
    let mut other = Cache::new(&config("k3v2", HEADS, 3, 800)).unwrap();
    append_random(&mut other, HEADS, 2, 44, &mut Random::new(8));
    other.import_sequence(2, &blob).unwrap();
    assert_eq!(other.export_sequence(2).unwrap(), blob);
    let (a, b) = (read_back(&cache, HEADS, 0), read_back(&other, HEADS, 2));
    assert_eq!((a.k, a.v), (b.k, b.v));
    // Both go on alike.
    append_random(&mut cache, HEADS, 0, 40, &mut Random::new(9));
    append_random(&mut other, HEADS, 2, 40, &mut Random::new(9));
    assert_eq!(cache.export_sequence(0).unwrap(), other.export_sequence(2).unwrap());
}

#[test]
fn the_stored_basis_differs_where_a_transform_is_on() {
    let mut cache = Cache::new(&config("k3v2", HEADS, 1, 300)).unwrap();
    append_random(&mut cache, HEADS, 0, 250, &mut Random::new(10));
    let read = |basis: Basis| {
        let (mut k, mut v) = (vec![0.0f32; 250 * 128], vec![0.0f32; 250 * 128]);
        cache
            .dequantize(
                0,
                0,
                0..250,
                Some(&mut TensorMut::new(&mut k, &[250, 2, 64]).unwrap()),
                Some(&mut TensorMut::new(&mut v, &[250, 2, 64]).unwrap()),
                basis,
            )
            .unwrap();
        (k, v)
    };
    let (caller, stored) = (read(Basis::Caller), read(Basis::Stored));
    assert_eq!(caller.0, stored.0, "keys of k3v2 are not transformed");
    assert_ne!(caller.1, stored.1, "values are");
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    assert!((norm(&caller.1) / norm(&stored.1) - 1.0).abs() < 1e-4, "orthonormally");
}
