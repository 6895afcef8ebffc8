//! The error of a spec on a model's own tensors, measured where they are consumed.

use std::ptr;

use crate::config::Windows;
use crate::error::{check, Error, Result};
use crate::spec::Spec;
use crate::sys;
use crate::tensor::{Dtype, TensorRef};
use crate::version::check_library;

/// Queries, keys and values of one layer, and what to try on them.
///
/// ```
/// use kivi::{Probe, Schedule, Spec, TensorRef, Windows};
/// # let noise = |n: usize| -> Vec<f32> { (0..n).map(|i| (i * 7919 % 1009) as f32 / 500.0 - 1.0).collect() };
/// let (q, k, v) = (noise(4 * 2 * 32), noise(256 * 32), noise(256 * 32));
/// let report = Probe::new(
///     &TensorRef::new(&q, &[4, 2, 32])?,     // the last 4 positions, 2 query heads
///     &TensorRef::new(&k, &[256, 1, 32])?,
///     &TensorRef::new(&v, &[256, 1, 32])?,
/// )
/// .specs(Spec::channel(2, 32), Spec::token(2, 32))
/// .windows(Windows { sink: 32, recent: 32, flush: 32, schedule: Schedule::Rolling })
/// .run()?;
/// println!("error of the output {:.3}", report.total.output_error);
/// assert_eq!(report.per_head.len(), 1);
/// # Ok::<(), kivi::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Probe<'a> {
    q: TensorRef<'a>,
    k: TensorRef<'a>,
    v: TensorRef<'a>,
    specs: Option<(Spec, Spec)>,
    windows: Option<Windows>,
    window_dtype: Option<Dtype>,
    scale: f32,
    soft_cap: f32,
    window_left: Option<i64>,
    moments: Option<&'a TensorRef<'a>>,
}

/// Relative errors, as Frobenius norms over all rows.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ProbeErrors {
    /// Of packed keys.
    pub key_error: f64,
    /// Of packed values.
    pub value_error: f64,
    /// Of the scores, centred per query.
    pub score_error: f64,
    /// Divergence of the attention weights from the exact ones, in nats.
    pub attention_kl: f64,
    /// Of the output.
    pub output_error: f64,
    /// Of the output if only keys are packed.
    pub output_error_key: f64,
    /// Of the output if only values are packed.
    pub output_error_value: f64,
    /// Share of exact weights below 1 % of their row's maximum.
    pub sparsity: f64,
}

/// What a probe has measured.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ProbeReport {
    /// Over all heads.
    pub total: ProbeErrors,
    /// Of each KV head.
    pub per_head: Vec<ProbeErrors>,
}

impl<'a> Probe<'a> {
    /// `q` `[queries, q_heads, key_dim]`, the last positions of the sequence, `k` `[tokens, kv_heads,
    /// key_dim]`, `v` `[tokens, kv_heads, value_dim]`. Specs and windows are those of the preset `k3v2`.
    pub fn new(q: &TensorRef<'a>, k: &TensorRef<'a>, v: &TensorRef<'a>) -> Probe<'a> {
        Probe {
            q: *q,
            k: *k,
            v: *v,
            specs: None,
            windows: None,
            window_dtype: None,
            scale: 0.0,
            soft_cap: 0.0,
            window_left: None,
            moments: None,
        }
    }

    /// How keys and values are stored, instead.
    pub fn specs(mut self, k: Spec, v: Spec) -> Probe<'a> {
        self.specs = Some((k, v));
        self
    }

    /// The windows, instead.
    pub fn windows(mut self, windows: Windows) -> Probe<'a> {
        self.windows = Some(windows);
        self
    }

    /// The type of what is not packed.
    pub fn window_dtype(mut self, dtype: Dtype) -> Probe<'a> {
        self.window_dtype = Some(dtype);
        self
    }

    /// As in [`Attend::scale`](crate::Attend::scale).
    pub fn scale(mut self, scale: f32) -> Probe<'a> {
        self.scale = scale;
        self
    }

    /// As in [`Attend::soft_cap`](crate::Attend::soft_cap).
    pub fn soft_cap(mut self, cap: f32) -> Probe<'a> {
        self.soft_cap = cap;
        self
    }

    /// As in [`Attend::window_left`](crate::Attend::window_left).
    pub fn window_left(mut self, keys: i64) -> Probe<'a> {
        self.window_left = Some(keys);
        self
    }

    /// Moments `[kv_heads, key_dim, key_dim]` for query-aware specs; without them those of `q` itself.
    pub fn moments(mut self, moments: &'a TensorRef<'a>) -> Probe<'a> {
        self.moments = Some(moments);
        self
    }

    /// Measures, in double precision on the CPU.
    pub fn run(&self) -> Result<ProbeReport> {
        check_library()?;
        let params = self.to_raw()?;
        let &[_, kv_heads, _] = self.k.shape() else {
            return Err(Error::invalid(format!("k has {} sizes, a probe needs 3", self.k.shape().len())));
        };
        let mut total = sys::kivi_probe_result::default();
        let mut per_head = vec![sys::kivi_probe_result::default(); kv_heads as usize];
        // SAFETY: the views cover memory that lives during the call; per_head has as many structs as k has
        // heads.
        check(unsafe {
            sys::kivi_probe(&params, &mut total, per_head.as_mut_ptr(), size_of::<sys::kivi_probe_result>())
        })?;
        Ok(ProbeReport {
            total: ProbeErrors::from_raw(&total),
            per_head: per_head.iter().map(ProbeErrors::from_raw).collect(),
        })
    }

    fn to_raw(self) -> Result<sys::kivi_probe_params> {
        let mut params = sys::kivi_probe_params::default();
        // SAFETY: at most the given size is written.
        check(unsafe { sys::kivi_probe_params_init(&mut params, size_of::<sys::kivi_probe_params>()) })?;
        params.q = self.q.copy_raw();
        params.k = self.k.copy_raw();
        params.v = self.v.copy_raw();
        if let Some((k, v)) = self.specs {
            (params.k_spec, params.v_spec) = (k.0, v.0);
        }
        if let Some(windows) = self.windows {
            params.sink = windows.sink;
            params.recent = windows.recent;
            params.flush = windows.flush;
            params.schedule = windows.schedule as i32;
        }
        if let Some(dtype) = self.window_dtype {
            params.window_dtype = dtype as i32;
        }
        params.scale = self.scale;
        params.soft_cap = self.soft_cap;
        params.window_left = self.window_left.unwrap_or(-1);
        params.moments = self.moments.map_or(ptr::null(), |moments| moments.as_raw());
        Ok(params)
    }
}

impl ProbeErrors {
    fn from_raw(raw: &sys::kivi_probe_result) -> ProbeErrors {
        ProbeErrors {
            key_error: raw.key_error,
            value_error: raw.value_error,
            score_error: raw.score_error,
            attention_kl: raw.attention_kl,
            output_error: raw.output_error,
            output_error_key: raw.output_error_key,
            output_error_value: raw.output_error_value,
            sparsity: raw.sparsity,
        }
    }
}
