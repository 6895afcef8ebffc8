//! What a call through this crate costs over the C call: the same small attend both ways, in turns.
//! `cargo run --release --example overhead`

use std::mem::size_of;
use std::ptr;
use std::time::Instant;

use kivi::{sys, Attend, Batch, Cache, Config, Heads, TensorMut, TensorRef};

const ROUNDS: usize = 401;
const CALLS: usize = 500;
const LIMIT: f64 = 100.0; // ns that no machine could blame on noise in the median of so many rounds

fn main() -> kivi::Result<()> {
    // One thread, one head, few tokens: little else than the call itself.
    let heads = Heads { q_heads: 1, kv_heads: 1, key_dim: 64, value_dim: 64 };
    let config =
        Config::preset("k3v2")?.layer_count(1).heads(heads).max_sequences(1).max_tokens(64).threads(1);
    let mut cache = Cache::new(&config)?;
    let rows = vec![0.5f32; 8 * 64];
    let rows = TensorRef::new(&rows, &[1, 8, 1, 64])?;
    cache.append(0, &Batch::first(1, 8), &rows, &rows)?;
    let mut workspace = cache.workspace(None, 1, 1)?;
    let q = vec![0.25f32; 64];
    let (mut out, mut out_of_c) = (vec![0.0f32; 64], vec![0.0f32; 64]);

    let mut c_memory = vec![0u8; workspace.bytes()];
    let view = |data: *const f32| sys::kivi_tensor {
        data: data.cast_mut().cast(),
        dtype: sys::KIVI_F32 as i32,
        device: sys::KIVI_CPU as i32,
        device_id: 0,
        rank: 4,
        shape: [1, 1, 1, 64],
        stride: [64, 64, 64, 1],
    };
    let c_call = |memory: &mut [u8], out: &mut [f32]| {
        let (q, out) = (view(q.as_ptr()), view(out.as_mut_ptr()));
        let batch = sys::kivi_batch {
            struct_size: size_of::<sys::kivi_batch>(),
            rows: 1,
            max_count: 1,
            ..Default::default()
        };
        let params = sys::kivi_attend_params {
            struct_size: size_of::<sys::kivi_attend_params>(),
            window_left: -1,
            ..Default::default()
        };
        // SAFETY: a live handle, tensors that cover their memory.
        unsafe {
            let stream = ptr::null_mut();
            let bytes = memory.len();
            let memory = memory.as_mut_ptr().cast();
            sys::kivi_attend(cache.as_raw(), 0, &batch, &q, &out, &params, memory, bytes, stream)
        }
    };

    let (mut c_times, mut rust_times) = (Vec::with_capacity(ROUNDS), Vec::with_capacity(ROUNDS));
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..CALLS {
            assert_eq!(c_call(&mut c_memory, &mut out_of_c), sys::KIVI_OK);
        }
        c_times.push(start.elapsed().as_nanos() as f64 / CALLS as f64);

        let start = Instant::now();
        for _ in 0..CALLS {
            cache.attend(
                0,
                &Batch::first(1, 1),
                &TensorRef::new(&q, &[1, 1, 1, 64])?,
                &mut TensorMut::new(&mut out, &[1, 1, 1, 64])?,
                Attend::new(),
                &mut workspace,
            )?;
        }
        rust_times.push(start.elapsed().as_nanos() as f64 / CALLS as f64);
    }
    assert_eq!(out, out_of_c);

    let mut differences: Vec<f64> = rust_times.iter().zip(&c_times).map(|(rust, c)| rust - c).collect();
    println!("medians and quartiles of {ROUNDS} rounds of {CALLS} attends, views made anew for each");
    report("C call", &mut c_times);
    report("Rust call", &mut rust_times);
    let difference = report("Rust - C, round by round", &mut differences);
    assert!(difference < LIMIT, "a Rust call costs {difference:.1} ns more than a C call");
    Ok(())
}

/// Prints and returns the median.
fn report(what: &str, times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let quarter = |i: usize| times[(times.len() - 1) * i / 4];
    println!("{what:25} {:8.1} ns ({:.1} to {:.1})", quarter(2), quarter(1), quarter(3));
    quarter(2)
}
