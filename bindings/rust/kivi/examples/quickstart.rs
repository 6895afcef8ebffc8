//! Stores a prompt and ten tokens of one sequence in about 3 bits an element, and attends to them:
//! `quickstart`, or `quickstart cuda`.

use kivi::{Attend, Batch, Buffer, Cache, Config, Device, Heads};

fn main() -> kivi::Result<()> {
    let on_gpu = std::env::args().any(|word| word == "cuda");
    let device = if on_gpu { Device::Cuda } else { Device::Cpu };

    // One layer here; a cache holds all layers of a model, and many sequences.
    let heads = Heads { q_heads: 8, kv_heads: 2, key_dim: 64, value_dim: 64 };
    let config = Config::preset("k3v2")?.device(device, 0).layer_count(1).heads(heads);
    let mut cache = Cache::new(&config.max_sequences(1).max_tokens(4096))?;
    let mut workspace = cache.workspace(None, 1, 1)?;

    // A prompt of 1000 tokens: [rows, tokens, heads, dim]. Then one token a step.
    let numbers = |n: usize| {
        let values: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        Buffer::from_slice(device, 0, &values)
    };
    let (k, v) = (numbers(1000 * 2 * 64)?, numbers(1000 * 2 * 64)?);
    cache.append(0, &Batch::first(1, 1000), &k.view(&[1, 1000, 2, 64])?, &v.view(&[1, 1000, 2, 64])?)?;

    let (k, v, q, mut out) = (numbers(2 * 64)?, numbers(2 * 64)?, numbers(8 * 64)?, numbers(8 * 64)?);
    let step = Batch::first(1, 1);
    for _ in 0..10 {
        let (k, v) = (k.view(&[1, 1, 2, 64])?, v.view(&[1, 1, 2, 64])?);
        let (q, mut out) = (q.view(&[1, 1, 8, 64])?, out.view_mut(&[1, 1, 8, 64])?);
        cache.step(0, &step, &q, &k, &v, &mut out, Attend::new(), &mut workspace)?;
    }

    let (length, first) = (cache.length(0, 0)?, out.to_vec()?[0]);
    println!("{} tokens, {} of them packed", length.length, length.key_border - length.sink);
    println!("{} bytes are read a step, first output {:.4}", cache.statistics(None)?.live_bytes, first);
    Ok(())
}
