//! Stores a prompt and ten tokens of one sequence in about 3 bits an element, and attends to them.

use kivi::{Attend, Batch, Cache, Config, Heads, TensorMut, TensorRef};

fn main() -> kivi::Result<()> {
    // One layer here; a cache holds all layers of a model, and many sequences.
    let heads = Heads { q_heads: 8, kv_heads: 2, key_dim: 64, value_dim: 64 };
    let config = Config::preset("k3v2")?.layer_count(1).heads(heads).max_sequences(1).max_tokens(4096);
    let mut cache = Cache::new(&config)?;
    let mut workspace = cache.workspace(None, 1, 1)?;

    // A prompt of 1000 tokens: [rows, tokens, heads, dim]. Then one token a step.
    let numbers = |n: usize| (0..n).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<f32>>();
    let (k, v) = (numbers(1000 * 2 * 64), numbers(1000 * 2 * 64));
    let (k, v) = (TensorRef::new(&k, &[1, 1000, 2, 64])?, TensorRef::new(&v, &[1, 1000, 2, 64])?);
    cache.append(0, &Batch::first(1, 1000), &k, &v)?;

    let (k, v, q) = (numbers(2 * 64), numbers(2 * 64), numbers(8 * 64));
    let (k, v) = (TensorRef::new(&k, &[1, 1, 2, 64])?, TensorRef::new(&v, &[1, 1, 2, 64])?);
    let q = TensorRef::new(&q, &[1, 1, 8, 64])?;
    let mut out = vec![0.0f32; 8 * 64];
    let step = Batch::first(1, 1);
    for _ in 0..10 {
        cache.append(0, &step, &k, &v)?;
        let mut out = TensorMut::new(&mut out, &[1, 1, 8, 64])?;
        cache.attend(0, &step, &q, &mut out, Attend::new(), &mut workspace)?;
    }

    let length = cache.length(0, 0)?;
    println!("{} tokens, {} of them packed", length.length, length.key_border - length.sink);
    println!("{} bytes are read a step, first output {:.4}", cache.statistics(None)?.live_bytes, out[0]);
    Ok(())
}
