//! Errors where they are consumed, through the binding.

mod support;

use kivi::{ErrorKind, Probe, Schedule, Spec, TensorRef, Windows};
use support::*;

#[test]
fn more_bits_mean_less_error_and_16_none() {
    let mut random = Random::new(1);
    let (q, k, v) = (random.normals(8 * 6 * 64), random.normals(300 * 2 * 64), random.normals(300 * 2 * 64));
    let q = TensorRef::new(&q, &[8, 6, 64]).unwrap();
    let k = TensorRef::new(&k, &[300, 2, 64]).unwrap();
    let v = TensorRef::new(&v, &[300, 2, 64]).unwrap();
    let windows = Windows { sink: 32, recent: 32, flush: 32, schedule: Schedule::Rolling };
    let probe = |k_spec, v_spec| {
        let report = Probe::new(&q, &k, &v)
            .specs(k_spec, v_spec)
            .windows(windows)
            .window_dtype(kivi::Dtype::F32)
            .run()
            .unwrap();
        assert_eq!(report.per_head.len(), 2);
        report.total
    };
    let exact = probe(Spec::full(), Spec::full());
    assert_eq!((exact.key_error, exact.value_error), (0.0, 0.0));
    assert!(exact.output_error < 1e-6 && exact.attention_kl.abs() < 1e-9);
    let two = probe(Spec::channel(2, 32), Spec::token(2, 32));
    let four = probe(Spec::channel(4, 32), Spec::token(4, 32));
    for (two, four) in [
        (two.key_error, four.key_error),
        (two.value_error, four.value_error),
        (two.score_error, four.score_error),
        (two.attention_kl, four.attention_kl),
        (two.output_error, four.output_error),
    ] {
        assert!(0.0 < four && four < two, "{four} {two}");
    }
    assert!(two.sparsity >= 0.0 && two.sparsity <= 1.0);
    let keys_only = probe(Spec::channel(2, 32), Spec::full());
    assert!((keys_only.output_error - two.output_error_key).abs() < 1e-9);

    let flat = TensorRef::new(&[0.0f32; 64], &[1, 64]).unwrap();
    let error = Probe::new(&q, &flat, &v).run().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn specs_and_windows_are_those_of_k3v2_unless_given() {
    let mut random = Random::new(2);
    let (q, k, v) = (random.normals(8 * 2 * 64), random.normals(400 * 64), random.normals(400 * 64));
    let q = TensorRef::new(&q, &[8, 2, 64]).unwrap();
    let k = TensorRef::new(&k, &[400, 1, 64]).unwrap();
    let v = TensorRef::new(&v, &[400, 1, 64]).unwrap();
    let preset = kivi::Config::preset("k3v2").unwrap();
    let windows = Windows { sink: 64, recent: 64, flush: 64, schedule: Schedule::Rolling };
    let given = Probe::new(&q, &k, &v).specs(preset.key_spec(), preset.value_spec()).windows(windows);
    assert_eq!(Probe::new(&q, &k, &v).run().unwrap(), given.run().unwrap());
}
