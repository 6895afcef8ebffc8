//! A failure of each kind that a safe program can bring about: kind, sentence, and nothing changed.
//! `Device` and `Internal` need a broken device or library; their mapping is tested beside it.

mod support;

use kivi::{
    device_query, merge, Attend, Batch, Cache, Config, Device, Error, ErrorKind, Heads, Spec, TensorMut,
    TensorRef,
};
use support::*;

fn assert_kind<T: std::fmt::Debug>(result: kivi::Result<T>, kind: ErrorKind) -> Error {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().len() > 10, "a sentence: {error}");
    assert_eq!(error.to_string(), error.message());
    error
}

fn filled(preset: &str, n: usize) -> Cache {
    let mut cache = Cache::new(&config(preset, HEADS, 2, 300)).unwrap();
    append_random(&mut cache, HEADS, 0, n, &mut Random::new(1));
    cache
}

/// Everything that a failed call could have changed.
fn state(cache: &Cache) -> (Vec<u8>, kivi::Statistics, kivi::Length) {
    (cache.export_sequence(0).unwrap(), cache.statistics(None).unwrap(), cache.length(0, 1).unwrap())
}

#[test]
fn invalid_argument() {
    assert_kind(Config::preset("k9v9"), ErrorKind::InvalidArgument);
    assert_kind(Config::preset("k3\0v2"), ErrorKind::InvalidArgument);
    let mut cache = filled("k3v2", 200);
    let before = state(&cache);
    let one = vec![0.0f32; 2 * 64];
    let wrong = TensorRef::new(&one, &[1, 2, 1, 64]).unwrap();
    let right = TensorRef::new(&one, &[1, 1, 2, 64]).unwrap();
    assert_kind(cache.append(0, &Batch::first(1, 1), &wrong, &right), ErrorKind::InvalidArgument);
    assert_kind(cache.append(7, &Batch::first(1, 1), &right, &right), ErrorKind::InvalidArgument);
    assert_kind(cache.append(0, &Batch::uniform(&[2], 1), &right, &right), ErrorKind::InvalidArgument);
    assert_kind(cache.append(0, &Batch::uniform(&[-2], 1), &right, &right), ErrorKind::InvalidArgument);
    assert_kind(cache.append(0, &Batch::first(1, 2), &right, &right), ErrorKind::InvalidArgument);
    assert_kind(cache.append(0, &Batch::first(-1, 1), &right, &right), ErrorKind::InvalidArgument);
    assert_kind(cache.length(0, 2), ErrorKind::InvalidArgument);
    assert_kind(cache.statistics(Some(1)), ErrorKind::InvalidArgument);
    assert_kind(cache.sequence_reset(-1), ErrorKind::InvalidArgument);
    assert_eq!(state(&cache), before);
}

#[test]
fn rows_outside_of_a_tensor_are_refused() {
    let mut cache = filled("k3v2", 200);
    let before = state(&cache);
    let three = vec![0.0f32; 3 * 2 * 64];
    let view = TensorRef::new(&three, &[3, 2, 64]).unwrap();
    for (counts, offset) in [([4], 0), ([2], 2), ([1], 3), ([1], -1), ([1], i64::MAX), ([-1], 0)] {
        let (sequences, offsets) = ([1], [offset]);
        let batch = Batch::ragged(&sequences, &counts).unwrap().with_offsets(&offsets).unwrap();
        assert_kind(cache.append(0, &batch, &view, &view), ErrorKind::InvalidArgument);
    }
    // Without offsets the rows follow one another: 2 + 2 tokens of 3.
    assert_kind(cache.append(0, &Batch::first(2, 2), &view, &view), ErrorKind::InvalidArgument);
    // [rows, tokens, heads, dim] with more rows or tokens than there are.
    let view = TensorRef::new(&three, &[1, 3, 2, 64]).unwrap();
    assert_kind(cache.append(0, &Batch::first(2, 1), &view, &view), ErrorKind::InvalidArgument);
    assert_kind(cache.append(0, &Batch::first(1, 4), &view, &view), ErrorKind::InvalidArgument);
    assert_eq!(state(&cache), before);
}

#[test]
fn learned_sinks_are_as_many_as_query_heads() {
    let cache = filled("k3v2", 200);
    let q = vec![0.0f32; 6 * 64];
    let mut out = vec![5.0f32; 6 * 64];
    let mut workspace = cache.workspace(None, 1, 1).unwrap();
    let error = assert_kind(
        cache.attend(
            0,
            &Batch::first(1, 1),
            &TensorRef::new(&q, &[1, 1, 6, 64]).unwrap(),
            &mut TensorMut::new(&mut out, &[1, 1, 6, 64]).unwrap(),
            Attend::new().learned_sinks(&[0.0; 5]),
            &mut workspace,
        ),
        ErrorKind::InvalidArgument,
    );
    assert_eq!(error.message(), "5 learned sinks for 6 query heads");
    let (part, lse) = (TensorRef::new(&q, &[1, 6, 64]).unwrap(), TensorRef::new(&q[..6], &[1, 6]).unwrap());
    let mut merged = TensorMut::new(&mut out, &[1, 6, 64]).unwrap();
    assert_kind(merge(&[part], &[lse], Some(&[0.0; 7]), &mut merged, None), ErrorKind::InvalidArgument);
    assert_kind(merge(&[part], &[lse, lse], None, &mut merged, None), ErrorKind::InvalidArgument);
    assert!(out.iter().all(|&x| x == 5.0));
}

#[test]
fn a_refused_step_neither_attends_nor_appends() {
    let mut cache = filled("k3v2", 200);
    let before = state(&cache);
    let (q, kv) = (vec![0.5f32; 900 * 6 * 64], vec![0.5f32; 900 * 2 * 64]);
    let mut out = vec![5.0f32; 900 * 6 * 64];
    let mut workspace = cache.workspace(None, 1, 900).unwrap();
    let (q, kv) =
        (TensorRef::new(&q, &[1, 900, 6, 64]).unwrap(), TensorRef::new(&kv, &[1, 900, 2, 64]).unwrap());
    for (count, params, kind) in [
        (900, Attend::new(), ErrorKind::Capacity),
        (1, Attend::new().fresh(&kv, &kv), ErrorKind::InvalidArgument),
    ] {
        let mut out = TensorMut::new(&mut out, &[1, 900, 6, 64]).unwrap();
        let batch = Batch::first(1, count);
        assert_kind(cache.step(0, &batch, &q, &kv, &kv, &mut out, params, &mut workspace), kind);
        assert_eq!(state(&cache), before);
    }
    assert!(out.iter().all(|&x| x == 5.0));
}

#[test]
fn unsupported() {
    let mut cache = filled("kivi2-paper", 200);
    let before = state(&cache);
    assert_kind(cache.flush_residual(None, &Batch::first(1, 0)), ErrorKind::Unsupported);
    assert_eq!(state(&cache), before);
}

#[test]
fn a_config_is_refused_before_and_when_a_cache_is_made_of_it() {
    let refused = [
        config("k3v2", Heads { key_dim: 60, ..HEADS }, 1, 100),
        config("k3v2", Heads { q_heads: 5, ..HEADS }, 1, 100),
        config("k3v2", HEADS, 1, 100).k(Spec::channel(5, 64)),
        config("k3v2", HEADS, 1, 100).k(Spec::token(3, 64).query_aware()),
        config("k3v2", HEADS, 1, 100).v(Spec::token(2, 128)),
    ];
    for config in refused {
        let error = assert_kind(Cache::new(&config), ErrorKind::InvalidArgument);
        let support = config.query_support(0).unwrap();
        assert!(!support.supported);
        assert_eq!(support.reason, error.message());
    }
}

#[test]
fn out_of_memory() {
    // 128 KiB a token, 2^31 tokens: more than a process can address.
    let heads = Heads { q_heads: 64, kv_heads: 64, key_dim: 512, value_dim: 512 };
    assert_kind(Cache::new(&config("f16", heads, 1, 1 << 31)), ErrorKind::OutOfMemory);
}

#[test]
fn capacity() {
    let mut cache = filled("k3v2", 299);
    let before = state(&cache);
    let two = vec![0.0f32; 2 * 2 * 64];
    let view = TensorRef::new(&two, &[1, 2, 2, 64]).unwrap();
    let error = assert_kind(cache.append(0, &Batch::first(1, 2), &view, &view), ErrorKind::Capacity);
    assert!(error.message().contains("300"), "names the limit: {error}");
    assert_eq!(state(&cache), before);
}

#[test]
fn no_device() {
    assert_eq!(kivi::device_count(Device::Cpu).unwrap(), 1);
    let cpu = device_query(Device::Cpu, 0).unwrap();
    assert!(cpu.available && cpu.reason.is_empty() && !cpu.name.is_empty() && cpu.threads > 0);
    assert_kind(device_query(Device::Cpu, 1), ErrorKind::NoDevice);
    if kivi::device_count(Device::Cuda).unwrap() == 0 {
        let error = Cache::new(&config("k3v2", HEADS, 1, 100).device(Device::Cuda, 0)).unwrap_err();
        let without_cuda = kivi::build_info().contains("no CUDA");
        let kind = if without_cuda { ErrorKind::Unsupported } else { ErrorKind::NoDevice };
        assert_eq!(error.kind(), kind, "{error}");
    }
}

#[test]
fn state_and_buffer_too_small() {
    let mut cache = filled("k3v2", 200);
    assert_kind(cache.moments_commit(0), ErrorKind::InvalidArgument); // nearest rounding uses none
    let query_aware = config("k3v2", HEADS, 2, 300).k(Spec::channel(3, 64).query_aware());
    let mut frozen = Cache::new(&query_aware).unwrap();
    append_random(&mut frozen, HEADS, 0, 200, &mut Random::new(2));
    let q = Random::new(3).normals(300 * 6 * 64);
    let q = TensorRef::new(&q, &[300, 6, 64]).unwrap();
    let before = state(&frozen);
    let outcome = frozen.moments_accumulate(0, &Batch::first(1, 300), &q);
    if outcome.is_ok() {
        assert_kind(frozen.moments_commit(0), ErrorKind::State);
        assert_eq!(frozen.export_sequence(0).unwrap(), before.0);
    } else {
        assert_kind(outcome, ErrorKind::State);
        assert_eq!(state(&frozen), before);
    }

    let size = cache.export_size(0).unwrap();
    let mut buffer = vec![3u8; size - 1];
    assert_kind(cache.export_sequence_into(0, &mut buffer), ErrorKind::BufferTooSmall);
    assert!(buffer.iter().all(|&x| x == 3));

    let (q, mut out) = (vec![0.0f32; 6 * 64], vec![5.0f32; 6 * 64]);
    let needed = cache.workspace(None, 1, 1).unwrap().bytes();
    if needed > 0 {
        let outcome = cache.attend(
            0,
            &Batch::first(1, 1),
            &TensorRef::new(&q, &[1, 1, 6, 64]).unwrap(),
            &mut TensorMut::new(&mut out, &[1, 1, 6, 64]).unwrap(),
            Attend::new(),
            &mut kivi::Workspace::with_bytes(kivi::Device::Cpu, 0, 0).unwrap(),
        );
        assert_kind(outcome, ErrorKind::BufferTooSmall);
        assert!(out.iter().all(|&x| x == 5.0));
    }
}

#[test]
fn corrupt_and_mismatch() {
    let mut cache = filled("k3v2", 200);
    let blob = cache.export_sequence(0).unwrap();
    let before = state(&cache);
    let mut damaged = blob.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    assert_kind(cache.import_sequence(0, &damaged), ErrorKind::Corrupt);
    assert_kind(cache.import_sequence(0, &blob[..blob.len() - 1]), ErrorKind::Corrupt);
    assert_kind(cache.import_sequence(0, &[]), ErrorKind::Corrupt);
    let mut other = filled("kivi2-sink", 200);
    assert_kind(cache.import_sequence(0, &other.export_sequence(0).unwrap()), ErrorKind::Mismatch);
    assert_kind(other.import_sequence(0, &blob), ErrorKind::Mismatch);
    assert_eq!(state(&cache), before);
    let mut small = Cache::new(&config("k3v2", HEADS, 2, 150)).unwrap();
    assert_kind(small.import_sequence(0, &blob), ErrorKind::Capacity);
}
