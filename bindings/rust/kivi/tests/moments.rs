//! Query-aware rounding through the binding: accumulate, set, commit, export, import.

mod support;

use kivi::{Basis, Batch, Cache, Config, MomentState, Rounding, Spec, TensorRef};
use support::*;

fn query_aware() -> Config {
    config("k3v2", HEADS, 1, 600).k(Spec::channel(2, 32).query_aware())
}

/// Queries near a space of six directions, so that errors of one channel can make up for those of another.
fn queries(n: usize) -> Vec<f32> {
    let mut random = Random::new(1);
    let directions = random.normals(6 * 64);
    (0..n * 6)
        .flat_map(|_| {
            let weights = random.normals(6);
            let noise = random.normals(64);
            let directions = &directions;
            let query = (0..64).map(move |c| {
                0.3 * noise[c] + (0..6).map(|i| weights[i] * directions[i * 64 + c]).sum::<f32>()
            });
            query.collect::<Vec<f32>>()
        })
        .collect()
}

#[test]
fn a_blob_makes_the_same_codes() {
    let mut cache = Cache::new(&query_aware()).unwrap();
    let q = queries(256);
    let fresh = cache.statistics(Some(0)).unwrap();
    assert_eq!((fresh.moments, fresh.key_rounding), (MomentState::None, Rounding::Nearest));
    cache.moments_accumulate(0, &Batch::first(1, 256), &TensorRef::new(&q, &[256, 6, 64]).unwrap()).unwrap();
    let accumulated = cache.statistics(Some(0)).unwrap();
    assert_eq!(accumulated.moments, MomentState::Accumulated);
    assert_eq!(accumulated.moment_queries, 256 * 3);
    cache.moments_commit(0).unwrap();
    let committed = cache.statistics(Some(0)).unwrap();
    assert_eq!((committed.moments, committed.key_rounding), (MomentState::Committed, Rounding::QueryAware));

    let blob = cache.moments_export(0).unwrap();
    assert_eq!(blob.len(), cache.moments_export_size(0).unwrap());
    let mut other = Cache::new(&query_aware()).unwrap();
    other.moments_import(0, &blob).unwrap();
    assert_eq!(other.moments_export(0).unwrap(), blob);
    let mut nearest = Cache::new(&query_aware()).unwrap();
    for cache in [&mut cache, &mut other, &mut nearest] {
        append_random(cache, HEADS, 0, 500, &mut Random::new(2));
    }
    assert_eq!(cache.export_sequence(0).unwrap(), other.export_sequence(0).unwrap());
    assert_ne!(read_back(&cache, HEADS, 0).k, read_back(&nearest, HEADS, 0).k);
    assert!(cache.moments_import(0, &blob).is_err(), "frozen once something is packed");
}

#[test]
fn scores_get_better_for_the_queries_that_come() {
    let q = queries(256);
    let score_error = |commit: bool| {
        let mut cache = Cache::new(&query_aware()).unwrap();
        if commit {
            cache
                .moments_accumulate(0, &Batch::first(1, 256), &TensorRef::new(&q, &[256, 6, 64]).unwrap())
                .unwrap();
            cache.moments_commit(0).unwrap();
        }
        append_random(&mut cache, HEADS, 0, 500, &mut Random::new(3));
        let exact = Random::new(3).normals(500 * 2 * 64);
        let stored = read_back(&cache, HEADS, 0).k;
        let mut sum = 0.0f64;
        for (query, head) in q.chunks(64).zip((0..6).cycle()) {
            for t in 64..384 {
                let at = (t * 2 + head / 3) * 64;
                let error: f32 = (0..64).map(|c| query[c] * (stored[at + c] - exact[at + c])).sum();
                sum += f64::from(error).powi(2);
            }
        }
        sum
    };
    let (nearest, aware) = (score_error(false), score_error(true));
    assert!(aware < 0.7 * nearest, "{aware} against {nearest}");
}

#[test]
fn moments_set_equal_accumulated_ones() {
    // The mean of q q' over the three query heads of each KV head.
    let q = queries(256);
    let mut sums = vec![0.0f64; 2 * 64 * 64];
    for (query, head) in q.chunks(64).zip((0..6).cycle()) {
        for i in 0..64 {
            for j in 0..64 {
                sums[(head / 3 * 64 + i) * 64 + j] += f64::from(query[i]) * f64::from(query[j]);
            }
        }
    }
    let moments: Vec<f32> = sums.iter().map(|sum| (sum / (256.0 * 3.0)) as f32).collect();
    let mut cache = Cache::new(&query_aware()).unwrap();
    cache.moments_set(0, &TensorRef::new(&moments, &[2, 64, 64]).unwrap(), Basis::Caller).unwrap();
    cache.moments_commit(0).unwrap();
    let mut other = Cache::new(&query_aware()).unwrap();
    other.moments_accumulate(0, &Batch::first(1, 256), &TensorRef::new(&q, &[256, 6, 64]).unwrap()).unwrap();
    other.moments_commit(0).unwrap();
    append_random(&mut cache, HEADS, 0, 500, &mut Random::new(4));
    append_random(&mut other, HEADS, 0, 500, &mut Random::new(4));
    let (a, b) = (read_back(&cache, HEADS, 0).k, read_back(&other, HEADS, 0).k);
    let same = a.iter().zip(&b).filter(|(a, b)| a == b).count();
    assert!(same * 1000 > a.len() * 999, "{same} of {} keys alike", a.len()); // sums in another order

    let mut negative = moments.clone();
    negative[65] = -1.0;
    let view = TensorRef::new(&negative, &[2, 64, 64]).unwrap();
    assert!(Cache::new(&query_aware()).unwrap().moments_set(0, &view, Basis::Caller).is_err());
}
