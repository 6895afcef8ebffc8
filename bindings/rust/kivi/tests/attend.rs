//! Attend against attention restated in double precision over the rows that the cache gives back.

mod support;

use kivi::{merge, Attend, Batch, Bf16, Cache, Dtype, Heads, Spec, TensorMut, TensorRef, F16};
use support::*;

/// Queries of one sequence, all parameters at their defaults.
fn attend_one(
    cache: &Cache,
    heads: Heads,
    sequence: i32,
    q: &[f32],
    c: usize,
    params: Attend<'_>,
) -> Vec<f32> {
    let d = dims(heads);
    let mut out = vec![0.0f32; c * d.q_heads * d.value_dim];
    let mut workspace = cache.workspace(Some(0), 1, c as i32).unwrap();
    cache
        .attend(
            0,
            &Batch::uniform(&[sequence], c as i32),
            &TensorRef::new(q, &[1, c, d.q_heads, d.key_dim]).unwrap(),
            &mut TensorMut::new(&mut out, &[1, c, d.q_heads, d.value_dim]).unwrap(),
            params,
            &mut workspace,
        )
        .unwrap();
    out
}

#[test]
fn every_preset_agrees() {
    for preset in kivi::presets().unwrap() {
        let mut random = Random::new(1);
        let mut cache = Cache::new(&config(&preset.name, HEADS, 1, 1000)).unwrap();
        for n in [300, 1, 1, 77] {
            append_random(&mut cache, HEADS, 0, n, &mut random);
            let q = random.normals(6 * 64);
            let out = attend_one(&cache, HEADS, 0, &q, 1, Attend::new());
            let (wanted, _) = attention(HEADS, &read_back(&cache, HEADS, 0), &q, 1, Options::default());
            assert_agrees(&out, &wanted, 64);
        }
    }
}

#[test]
fn head_dims_and_ratios_agree() {
    let shapes = [
        (1, 1, 64, 64),
        (8, 1, 80, 80),
        (7, 1, 96, 112),
        (12, 4, 128, 64),
        (10, 2, 192, 128),
        (3, 3, 256, 256),
    ];
    for (q_heads, kv_heads, key_dim, value_dim) in shapes {
        let heads = Heads { q_heads, kv_heads, key_dim, value_dim };
        let d = dims(heads);
        let mut random = Random::new(2);
        let mut cache = Cache::new(&config("k3v2", heads, 1, 500)).unwrap();
        append_random(&mut cache, heads, 0, 401, &mut random);
        let q = random.normals(3 * d.q_heads * d.key_dim);
        let out = attend_one(&cache, heads, 0, &q, 3, Attend::new());
        let (wanted, _) = attention(heads, &read_back(&cache, heads, 0), &q, 3, Options::default());
        assert_agrees(&out, &wanted, d.value_dim);
    }
}

#[test]
fn own_specs_agree_and_the_reference_cache_too() {
    let specs = [
        (Spec::channel(4, 32), Spec::token(2, 32)),
        (Spec::channel(3, 64).hadamard(), Spec::token(3, Spec::GROUP_HEAD).f32_params()),
        (Spec::token(8, 64), Spec::channel(4, 128)),
        (Spec::full(), Spec::token(2, 64).range_ratio(0.9)),
    ];
    for (k, v) in specs {
        let mut base = config("f16", HEADS, 1, 700).k(k).v(v).windows(kivi::Windows {
            sink: 128,
            recent: 5,
            flush: 128,
            schedule: kivi::Schedule::Rolling,
        });
        for _ in 0..2 {
            let mut random = Random::new(3);
            let mut cache = Cache::new(&base).unwrap();
            append_random(&mut cache, HEADS, 0, 600, &mut random);
            let q = random.normals(2 * 6 * 64);
            let out = attend_one(&cache, HEADS, 0, &q, 2, Attend::new());
            let (wanted, _) = attention(HEADS, &read_back(&cache, HEADS, 0), &q, 2, Options::default());
            assert_agrees(&out, &wanted, 64);
            base = base.reference();
        }
    }
}

#[test]
fn every_parameter_has_its_effect() {
    let mut random = Random::new(4);
    let mut cache = Cache::new(&config("k4v2", HEADS, 1, 400)).unwrap();
    append_random(&mut cache, HEADS, 0, 333, &mut random);
    let rows = read_back(&cache, HEADS, 0);
    let q = random.normals(2 * 6 * 64);
    let sinks = random.normals(6);
    let run = |params: Attend<'_>, options: Options<'_>| {
        let out = attend_one(&cache, HEADS, 0, &q, 2, params);
        let (wanted, _) = attention(HEADS, &rows, &q, 2, options);
        assert_agrees(&out, &wanted, 64);
        out
    };
    let plain = run(Attend::new(), Options::default());
    let others = [
        run(Attend::new().scale(0.3), Options { scale: Some(0.3), ..Options::default() }),
        run(Attend::new().soft_cap(0.7), Options { soft_cap: Some(0.7), ..Options::default() }),
        run(Attend::new().window_left(100), Options { window_left: Some(100), ..Options::default() }),
        run(
            Attend::new().learned_sinks(&sinks),
            Options { learned_sinks: Some(&sinks), ..Options::default() },
        ),
    ];
    assert!(others.iter().all(|other| *other != plain));
    assert_eq!(run(Attend::new().invariant(), Options::default()), plain);
    assert_eq!(
        run(Attend::new().window_left(0), Options { window_left: Some(0), ..Options::default() }).len(),
        768
    );
}

#[test]
fn a_ragged_batch_equals_its_rows_alone() {
    let mut random = Random::new(5);
    let mut cache = Cache::new(&config("k3v2", HEADS, 5, 500)).unwrap();
    // Rank 4, counts of their own, a skipped row and a row without tokens.
    let (sequences, counts) = ([3, -1, 0, 2], [211, 9, 0, 140]);
    let (k, v) = (random.normals(4 * 211 * 2 * 64), random.normals(4 * 211 * 2 * 64));
    let batch = Batch::ragged(&sequences, &counts).unwrap();
    let shape = [4, 211, 2, 64];
    cache
        .append(0, &batch, &TensorRef::new(&k, &shape).unwrap(), &TensorRef::new(&v, &shape).unwrap())
        .unwrap();
    let lengths: Vec<i64> = (0..5).map(|s| cache.length(0, s).unwrap().length).collect();
    assert_eq!(lengths, [0, 0, 140, 211, 0]);

    // Rank 3: three queries of sequence 3, one of sequence 2, two of the empty sequence 4, in an order of
    // ours.
    let q = random.normals(7 * 6 * 64);
    let mut out = vec![9.0f32; 7 * 6 * 64];
    let mut lse = vec![9.0f32; 7 * 6];
    let mut workspace = cache.workspace(None, 3, 3).unwrap();
    cache
        .attend(
            0,
            &Batch::ragged(&[3, 2, 4], &[3, 1, 2]).unwrap().with_offsets(&[4, 0, 1]).unwrap(),
            &TensorRef::new(&q, &[7, 6, 64]).unwrap(),
            &mut TensorMut::new(&mut out, &[7, 6, 64]).unwrap(),
            Attend::new().lse(&mut TensorMut::new(&mut lse, &[7, 6]).unwrap()),
            &mut workspace,
        )
        .unwrap();
    let row = 6 * 64;
    for (sequence, offset, count) in [(3, 4, 3), (2, 0, 1)] {
        let q = &q[offset * row..(offset + count) * row];
        let (wanted, wanted_lse) =
            attention(HEADS, &read_back(&cache, HEADS, sequence), q, count, Options::default());
        assert_agrees(&out[offset * row..(offset + count) * row], &wanted, 64);
        assert_close(&lse[offset * 6..(offset + count) * 6], &wanted_lse, 1e-3);
        assert_eq!(
            out[offset * row..(offset + count) * row],
            attend_one(&cache, HEADS, sequence, q, count, Attend::new())
        );
    }
    assert!(out[row..3 * row].iter().all(|&x| x == 0.0), "an empty sequence gives 0");
    assert!(lse[6..18].iter().all(|&x| x == f32::NEG_INFINITY));
    assert!(out[3 * row..4 * row].iter().all(|&x| x == 9.0), "a token of no row is not written");
}

#[test]
fn strided_views_read_and_write_only_their_own() {
    let mut random = Random::new(6);
    let (n, dim) = (150, 64);
    // Q, K and V in one row a token, as a fused projection gives them: 6 + 2 + 2 heads.
    let fused = random.normals(n * 10 * dim);
    let view = |head: usize, heads: usize| {
        TensorRef::with_strides(&fused[head * dim..], &[1, n, heads, dim], &[n * 10 * dim, 10 * dim, dim, 1])
            .unwrap()
    };
    let mut cache = Cache::new(&config("kivi2-sink", HEADS, 2, 300)).unwrap();
    cache.append(0, &Batch::first(1, n as i32), &view(6, 2), &view(8, 2)).unwrap();

    let dense = |head: usize, heads: usize| -> Vec<f32> {
        (0..n).flat_map(|t| fused[(t * 10 + head) * dim..][..heads * dim].to_vec()).collect()
    };
    let (q, k, v) = (dense(0, 6), dense(6, 2), dense(8, 2));
    cache
        .append(
            0,
            &Batch::uniform(&[1], n as i32),
            &TensorRef::new(&k, &[1, n, 2, dim]).unwrap(),
            &TensorRef::new(&v, &[1, n, 2, dim]).unwrap(),
        )
        .unwrap();
    assert_eq!(read_back(&cache, HEADS, 0).k, read_back(&cache, HEADS, 1).k);
    assert_eq!(read_back(&cache, HEADS, 0).v, read_back(&cache, HEADS, 1).v);

    // Every query of the prompt, written with a gap after each head.
    let mut out = vec![7.0f32; n * 6 * (dim + 3)];
    let mut workspace = cache.workspace(None, 1, n as i32).unwrap();
    cache
        .attend(
            0,
            &Batch::first(1, n as i32),
            &view(0, 6),
            &mut TensorMut::with_strides(&mut out, &[1, n, 6, dim], &[0, 6 * (dim + 3), dim + 3, 1]).unwrap(),
            Attend::new(),
            &mut workspace,
        )
        .unwrap();
    let (gaps, written): (Vec<_>, Vec<_>) =
        out.chunks(dim + 3).map(|head| (&head[dim..], &head[..dim])).unzip();
    assert!(gaps.concat().iter().all(|&x| x == 7.0));
    let (wanted, _) = attention(HEADS, &read_back(&cache, HEADS, 0), &q, n, Options::default());
    assert_agrees(&written.concat(), &wanted, dim);
}

#[test]
fn sixteen_bit_tensors_carry_the_same_numbers() {
    let mut random = Random::new(7);
    let n = 200;
    let q: Vec<f32> = random.normals(6 * 64).iter().map(|x| bf16_value(bf16_bits(*x))).collect();
    let values = random.normals(2 * n * 2 * 64);
    let as_f32: Vec<f32> = values.iter().map(|x| f16_value(f16_bits(x + 8.0f32.copysign(*x)))).collect();
    let as_f16: Vec<u16> = as_f32.iter().map(|x| f16_bits(*x)).collect();
    let half = n * 2 * 64;
    let shape = [1, n, 2, 64];
    let mut cache = Cache::new(&config("k4v2", HEADS, 2, 300).window_dtype(Dtype::F16)).unwrap();
    let f16 = F16::slice(&as_f16);
    let from_f16 =
        (TensorRef::new(&f16[..half], &shape).unwrap(), TensorRef::new(&f16[half..], &shape).unwrap());
    let from_f32 =
        (TensorRef::new(&as_f32[..half], &shape).unwrap(), TensorRef::new(&as_f32[half..], &shape).unwrap());
    cache.append(0, &Batch::uniform(&[0], n as i32), &from_f16.0, &from_f16.1).unwrap();
    cache.append(0, &Batch::uniform(&[1], n as i32), &from_f32.0, &from_f32.1).unwrap();
    assert_eq!(cache.export_sequence(0).unwrap(), cache.export_sequence(1).unwrap());

    let exact = attend_one(&cache, HEADS, 0, &q, 1, Attend::new());
    let q_bits: Vec<u16> = q.iter().map(|x| bf16_bits(*x)).collect();
    let mut out_bits = vec![0u16; 6 * 64];
    let mut workspace = cache.workspace(None, 1, 1).unwrap();
    cache
        .attend(
            0,
            &Batch::first(1, 1),
            &TensorRef::new(Bf16::slice(&q_bits), &[1, 1, 6, 64]).unwrap(),
            &mut TensorMut::new(Bf16::slice_mut(&mut out_bits), &[1, 1, 6, 64]).unwrap(),
            Attend::new(),
            &mut workspace,
        )
        .unwrap();
    let rounded: Vec<u16> = exact.iter().map(|x| bf16_bits(*x)).collect();
    assert_eq!(out_bits, rounded);
}

#[test]
fn fresh_tokens_are_seen_exactly() {
    let mut random = Random::new(8);
    let mut cache = Cache::new(&config("k3v2", HEADS, 1, 400)).unwrap();
    append_random(&mut cache, HEADS, 0, 200, &mut random);
    let c = 5;
    let (k, v, q) = (random.normals(c * 2 * 64), random.normals(c * 2 * 64), random.normals(c * 6 * 64));
    let (k_view, v_view) =
        (TensorRef::new(&k, &[1, c, 2, 64]).unwrap(), TensorRef::new(&v, &[1, c, 2, 64]).unwrap());
    let out = attend_one(&cache, HEADS, 0, &q, c, Attend::new().fresh(&k_view, &v_view));
    let mut rows = read_back(&cache, HEADS, 0);
    rows.n += c;
    rows.k.extend(&k);
    rows.v.extend(&v);
    let (wanted, _) = attention(HEADS, &rows, &q, c, Options::default());
    assert_agrees(&out, &wanted, 64);
    assert_eq!(cache.length(0, 0).unwrap().length, 200, "attend appends nothing");
}

#[test]
fn a_step_is_attend_with_fresh_tokens_and_then_append() {
    for preset in kivi::presets().unwrap() {
        let mut random = Random::new(10);
        let mut one = Cache::new(&config(&preset.name, HEADS, 2, 600)).unwrap();
        let mut two = Cache::new(&config(&preset.name, HEADS, 2, 600)).unwrap();
        for c in [100, 1, 1, 3, 60, 1, 200, 1] {
            let (k, v, q) = (
                random.normals(2 * c * 2 * 64),
                random.normals(2 * c * 2 * 64),
                random.normals(2 * c * 6 * 64),
            );
            let (k, v) =
                (TensorRef::new(&k, &[2, c, 2, 64]).unwrap(), TensorRef::new(&v, &[2, c, 2, 64]).unwrap());
            let q = TensorRef::new(&q, &[2, c, 6, 64]).unwrap();
            let batch = Batch::first(2, c as i32);
            let mut workspace = one.workspace(None, 2, c as i32).unwrap();
            let (mut out, mut lse) =
                ([vec![0.0f32; 2 * c * 6 * 64], vec![0.0f32; 2 * c * 6 * 64]], [[0.0f32; 2400]; 2]);
            for (i, cache) in [&mut one, &mut two].into_iter().enumerate() {
                let mut out = TensorMut::new(&mut out[i], &[2, c, 6, 64]).unwrap();
                let mut lse = TensorMut::new(&mut lse[i][..2 * c * 6], &[2, c, 6]).unwrap();
                let params = Attend::new().scale(0.2).lse(&mut lse);
                if i == 0 {
                    cache.step(0, &batch, &q, &k, &v, &mut out, params, &mut workspace).unwrap();
                } else {
                    cache.attend(0, &batch, &q, &mut out, params.fresh(&k, &v), &mut workspace).unwrap();
                    cache.append(0, &batch, &k, &v).unwrap();
                }
            }
            assert_eq!(out[0], out[1]);
            assert_eq!(lse[0], lse[1]);
        }
        for sequence in [0, 1] {
            assert_eq!(one.export_sequence(sequence).unwrap(), two.export_sequence(sequence).unwrap());
        }
    }
}

#[test]
fn merged_parts_equal_the_whole() {
    let mut random = Random::new(9);
    let mut cache = Cache::new(&config("f16", HEADS, 3, 400)).unwrap();
    let (n, first) = (300, 170);
    let (k, v) = (random.normals(n * 2 * 64), random.normals(n * 2 * 64));
    let mut append = |sequence: i32, begin: usize, end: usize| {
        let shape = [1, end - begin, 2, 64];
        cache
            .append(
                0,
                &Batch::uniform(&[sequence], (end - begin) as i32),
                &TensorRef::new(&k[begin * 128..end * 128], &shape).unwrap(),
                &TensorRef::new(&v[begin * 128..end * 128], &shape).unwrap(),
            )
            .unwrap();
    };
    append(0, 0, n);
    append(1, 0, first);
    append(2, first, n);

    let q = random.normals(6 * 64);
    let part = |sequence: i32| {
        let mut lse = vec![0.0f32; 6];
        let mut lse_view = TensorMut::new(&mut lse, &[1, 1, 6]).unwrap();
        let out = attend_one(&cache, HEADS, sequence, &q, 1, Attend::new().lse(&mut lse_view));
        (out, lse)
    };
    let (whole, a, b) = (part(0), part(1), part(2));
    let sinks = random.normals(6);
    let out_shape = [1, 1, 6, 64];
    let outs = [TensorRef::new(&a.0, &out_shape).unwrap(), TensorRef::new(&b.0, &out_shape).unwrap()];
    let lses = [TensorRef::new(&a.1, &[1, 1, 6]).unwrap(), TensorRef::new(&b.1, &[1, 1, 6]).unwrap()];
    let (mut out, mut lse) = (vec![0.0f32; 6 * 64], vec![0.0f32; 6]);
    merge(
        &outs,
        &lses,
        None,
        &mut TensorMut::new(&mut out, &out_shape).unwrap(),
        Some(&mut TensorMut::new(&mut lse, &[1, 1, 6]).unwrap()),
    )
    .unwrap();
    let double = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    assert_close(&out, &double(&whole.0), 1e-4);
    assert_close(&lse, &double(&whole.1), 1e-4);

    let with_sinks = attend_one(&cache, HEADS, 0, &q, 1, Attend::new().learned_sinks(&sinks));
    merge(&outs, &lses, Some(&sinks), &mut TensorMut::new(&mut out, &out_shape).unwrap(), None).unwrap();
    assert_close(&out, &double(&with_sinks), 1e-4);

    // An empty part changes no bit of the other.
    let (nothing, no_lse) = (vec![0.0f32; 6 * 64], vec![f32::NEG_INFINITY; 6]);
    merge(
        &[outs[0], TensorRef::new(&nothing, &out_shape).unwrap()],
        &[lses[0], TensorRef::new(&no_lse, &[1, 1, 6]).unwrap()],
        None,
        &mut TensorMut::new(&mut out, &out_shape).unwrap(),
        None,
    )
    .unwrap();
    assert_eq!(out, a.0);
}
