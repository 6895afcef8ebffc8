//! Seeded data, a cache filled with it, and attention restated in double precision over dequantised rows.
#![allow(dead_code)] // each test file uses its own part

use kivi::{Basis, Batch, Cache, Config, Heads, TensorMut, TensorRef};

/// Numbers with about the spread of a normal distribution, the same for the same seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// The sum of twelve uniform numbers: mean 0, variance 1.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

pub fn f16_bits(x: f32) -> u16 {
    // Small tests need only normal numbers within the range: round to 11 bits of mantissa, ties to even.
    assert!(x == 0.0 || (x.abs() >= 6.2e-5 && x.abs() < 65000.0), "{x} is no normal f16");
    let bits = x.to_bits();
    if x == 0.0 {
        return (bits >> 16) as u16;
    }
    let rounded = bits + 0x0fff + ((bits >> 13) & 1);
    ((bits >> 16) & 0x8000) as u16 | (((rounded & 0x7fff_ffff) >> 13) - (112 << 10)) as u16
}

pub fn f16_value(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    assert!(magnitude == 0 || (0x0400..0x7c00).contains(&magnitude), "{bits:#x} is no normal f16");
    let sign = u32::from(bits & 0x8000) << 16;
    f32::from_bits(if magnitude == 0 { sign } else { sign | ((magnitude << 13) + (112 << 23)) })
}

pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

pub fn bf16_value(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

pub const HEADS: Heads = Heads { q_heads: 6, kv_heads: 2, key_dim: 64, value_dim: 64 };

pub fn config(preset: &str, heads: Heads, sequences: i32, tokens: i64) -> Config {
    Config::preset(preset)
        .unwrap()
        .layer_count(1)
        .heads(heads)
        .max_sequences(sequences)
        .max_tokens(tokens)
        .threads(2)
}

/// Dims as usize, for shapes.
#[derive(Clone, Copy)]
pub struct Dims {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
}

pub fn dims(heads: Heads) -> Dims {
    Dims {
        q_heads: heads.q_heads as usize,
        kv_heads: heads.kv_heads as usize,
        key_dim: heads.key_dim as usize,
        value_dim: heads.value_dim as usize,
    }
}

/// Appends `n` random tokens to one sequence of layer 0.
pub fn append_random(cache: &mut Cache, heads: Heads, sequence: i32, n: usize, random: &mut Random) {
    let d = dims(heads);
    let k = random.normals(n * d.kv_heads * d.key_dim);
    let v = random.normals(n * d.kv_heads * d.value_dim);
    cache
        .append(
            0,
            &Batch::uniform(&[sequence], n as i32),
            &TensorRef::new(&k, &[1, n, d.kv_heads, d.key_dim]).unwrap(),
            &TensorRef::new(&v, &[1, n, d.kv_heads, d.value_dim]).unwrap(),
        )
        .unwrap();
}

/// Keys and values of a sequence as attend reads them, `[tokens, kv_heads, dim]`.
pub struct Rows {
    pub n: usize,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

pub fn read_back(cache: &Cache, heads: Heads, sequence: i32) -> Rows {
    let d = dims(heads);
    let n = cache.length(0, sequence).unwrap().length as usize;
    let mut k = vec![0.0f32; n * d.kv_heads * d.key_dim];
    let mut v = vec![0.0f32; n * d.kv_heads * d.value_dim];
    cache
        .dequantize(
            0,
            sequence,
            0..n as i64,
            Some(&mut TensorMut::new(&mut k, &[n, d.kv_heads, d.key_dim]).unwrap()),
            Some(&mut TensorMut::new(&mut v, &[n, d.kv_heads, d.value_dim]).unwrap()),
            Basis::Caller,
        )
        .unwrap();
    Rows { n, k, v }
}

/// What the restatement can be told; the defaults are those of `kivi::Attend`.
#[derive(Default, Clone, Copy)]
pub struct Options<'a> {
    pub scale: Option<f64>,
    pub soft_cap: Option<f64>,
    pub window_left: Option<usize>,
    pub learned_sinks: Option<&'a [f32]>,
}

/// Attention of `c` queries `[c, q_heads, key_dim]` whose last stands at the last row: outputs
/// `[c, q_heads, value_dim]` and LSEs `[c, q_heads]`.
pub fn attention(
    heads: Heads,
    rows: &Rows,
    q: &[f32],
    c: usize,
    options: Options<'_>,
) -> (Vec<f64>, Vec<f64>) {
    let d = dims(heads);
    let scale = options.scale.unwrap_or(1.0 / (d.key_dim as f64).sqrt());
    let mut out = vec![0.0; c * d.q_heads * d.value_dim];
    let mut lse = vec![f64::NEG_INFINITY; c * d.q_heads];
    for i in 0..c {
        let Some(position) = (rows.n + i).checked_sub(c) else { continue };
        let first = options.window_left.map_or(0, |left| position.saturating_sub(left));
        for h in 0..d.q_heads {
            let kv = h / (d.q_heads / d.kv_heads);
            let query = &q[(i * d.q_heads + h) * d.key_dim..][..d.key_dim];
            let scores: Vec<f64> = (first..=position)
                .map(|t| {
                    let key = &rows.k[(t * d.kv_heads + kv) * d.key_dim..][..d.key_dim];
                    let dot: f64 = query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    options.soft_cap.map_or(dot * scale, |cap| cap * (dot * scale / cap).tanh())
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            lse[i * d.q_heads + h] = top + sum.ln();
            let sink = options.learned_sinks.map_or(0.0, |logits| (f64::from(logits[h]) - top).exp());
            let target = &mut out[(i * d.q_heads + h) * d.value_dim..][..d.value_dim];
            for (t, score) in (first..).zip(&scores) {
                let weight = (score - top).exp() / (sum + sink);
                let value = &rows.v[(t * d.kv_heads + kv) * d.value_dim..][..d.value_dim];
                for (o, x) in target.iter_mut().zip(value) {
                    *o += weight * f64::from(*x);
                }
            }
        }
    }
    (out, lse)
}

/// The library's promise for the CPU: within 1e-3 of the output's norm over a call, 1e-2 for the worst row.
pub fn assert_agrees(got: &[f32], wanted: &[f64], row: usize) {
    let relative = |got: &[f32], wanted: &[f64]| {
        let error: f64 = got.iter().zip(wanted).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
        let norm: f64 = wanted.iter().map(|w| w * w).sum();
        if norm == 0.0 {
            error
        } else {
            (error / norm).sqrt()
        }
    };
    assert_eq!(got.len(), wanted.len());
    let whole = relative(got, wanted);
    assert!(whole <= 1e-3, "error {whole:e} of the output's norm");
    for (r, (got, wanted)) in got.chunks(row).zip(wanted.chunks(row)).enumerate() {
        let error = relative(got, wanted);
        assert!(error <= 1e-2, "error {error:e} in row {r}");
    }
}

pub fn assert_close(got: &[f32], wanted: &[f64], tolerance: f64) {
    assert_eq!(got.len(), wanted.len());
    for (i, (g, w)) in got.iter().zip(wanted).enumerate() {
        let same = f64::from(*g) == *w || (f64::from(*g) - w).abs() <= tolerance;
        assert!(same, "element {i} is {g}, not {w}");
    }
}
