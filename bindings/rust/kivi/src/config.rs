//! What a cache is made from: presets, windows, layers, capacities.

use std::ffi::CString;

use crate::device::Device;
use crate::error::{check, text, Error, Result};
use crate::report::{Memory, Support};
use crate::spec::Spec;
use crate::sys;
use crate::tensor::Dtype;
use crate::version::check_library;

/// Heads and dims of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Query heads: a multiple of `kv_heads`.
    pub q_heads: i32,
    /// Key and value heads.
    pub kv_heads: i32,
    /// Channels of a query or key head: a multiple of 8, at most 512.
    pub key_dim: i32,
    /// Channels of a value head: likewise; may differ from `key_dim`.
    pub value_dim: i32,
}

/// One layer of a model whose layers differ.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// Its heads; `None`: the layer keeps nothing here.
    pub heads: Option<Heads>,
    /// How its keys are stored.
    pub k: Spec,
    /// How its values are stored.
    pub v: Spec,
}

impl Layer {
    fn to_raw(self) -> sys::kivi_layer {
        match self.heads {
            Some(heads) => sys::kivi_layer {
                kv_heads: heads.kv_heads,
                q_heads: heads.q_heads,
                key_dim: heads.key_dim,
                value_dim: heads.value_dim,
                k: self.k.0,
                v: self.v.0,
                ..Default::default()
            },
            None => sys::kivi_layer::default(),
        }
    }
}

/// When tokens are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Schedule {
    /// By the windows, as [`Windows`] says.
    Rolling = sys::KIVI_SCHEDULE_ROLLING as isize,
    /// KIVI as published (arXiv 2402.02750), with `recent` as its residual length.
    Published = sys::KIVI_SCHEDULE_PUBLISHED as isize,
}

impl Schedule {
    fn from_raw(raw: i32) -> Option<Schedule> {
        [Schedule::Rolling, Schedule::Published].into_iter().find(|schedule| *schedule as i32 == raw)
    }
}

/// The tokens that stay in full precision.
///
/// After an append that ends at length `n`, tokens `sink` to `flush * floor((n - recent) / flush)` are
/// packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Windows {
    /// The first tokens of a sequence that stay.
    pub sink: i32,
    /// The newest tokens that stay, at least.
    pub recent: i32,
    /// Tokens packed at a time.
    pub flush: i32,
    /// When they are packed.
    pub schedule: Schedule,
}

/// Everything about a cache. It is read once, by [`Cache::new`](crate::Cache::new).
///
/// ```
/// use kivi::{Config, Heads, Spec};
/// let heads = Heads { q_heads: 32, kv_heads: 8, key_dim: 128, value_dim: 128 };
/// let config = Config::preset("k3v2")?.layer_count(32).heads(heads).max_sequences(4).max_tokens(32768);
/// println!("{} bytes", config.estimate()?.total_bytes);
///
/// let own = config.k(Spec::channel(4, 32)).v(Spec::token(2, 32));
/// assert!(own.query_support(0)?.supported);
/// # Ok::<(), kivi::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Config {
    raw: sys::kivi_config, // its layer table stays NULL, see with_raw
    layers: Vec<sys::kivi_layer>,
}

// SAFETY: every pointer in `raw` is NULL.
unsafe impl Send for Config {}
// SAFETY: likewise.
unsafe impl Sync for Config {}

impl Config {
    /// The defaults: CPU, windows in f16, preset `k3v2`. Layers, heads and capacities must still be set.
    pub fn new() -> Result<Config> {
        check_library()?;
        let mut raw = sys::kivi_config::default();
        // SAFETY: at most the given size is written.
        check(unsafe { sys::kivi_config_init(&mut raw, size_of::<sys::kivi_config>()) })?;
        Ok(Config { raw, layers: Vec::new() })
    }

    /// The specs and windows of a preset, by its name; [`presets`] lists them.
    pub fn preset(name: &str) -> Result<Config> {
        let mut config = Config::new()?;
        let c_name = CString::new(name)
            .map_err(|_| Error::invalid(format!("preset {name:?} has a zero byte in its name")))?;
        // SAFETY: an initialised config and a C string.
        check(unsafe { sys::kivi_config_preset(&mut config.raw, c_name.as_ptr()) })?;
        Ok(config)
    }

    /// The device of the cache.
    pub fn device(mut self, device: Device, device_id: i32) -> Config {
        self.raw.device = device as i32;
        self.raw.device_id = device_id;
        self
    }

    pub(crate) fn device_kind(&self) -> Device {
        if self.raw.device == Device::Cuda as i32 {
            Device::Cuda
        } else {
            Device::Cpu
        }
    }

    pub(crate) fn device_id(&self) -> i32 {
        self.raw.device_id
    }

    /// All layers alike, this many of them.
    pub fn layer_count(mut self, layer_count: i32) -> Config {
        self.layers.clear();
        self.raw.layer_count = layer_count;
        self
    }

    /// Heads and dims of every layer.
    pub fn heads(mut self, heads: Heads) -> Config {
        self.raw.layer.q_heads = heads.q_heads;
        self.raw.layer.kv_heads = heads.kv_heads;
        self.raw.layer.key_dim = heads.key_dim;
        self.raw.layer.value_dim = heads.value_dim;
        self
    }

    /// How the keys of every layer are stored.
    pub fn k(mut self, spec: Spec) -> Config {
        self.raw.layer.k = spec.0;
        self
    }

    /// How the values of every layer are stored.
    pub fn v(mut self, spec: Spec) -> Config {
        self.raw.layer.v = spec.0;
        self
    }

    /// Layers that differ, instead of [`layer_count`](Config::layer_count), [`heads`](Config::heads),
    /// [`k`](Config::k) and [`v`](Config::v).
    pub fn layers(mut self, layers: &[Layer]) -> Config {
        self.layers = layers.iter().map(|layer| layer.to_raw()).collect();
        self.raw.layer_count = layers.len().try_into().unwrap_or(i32::MAX);
        self
    }

    /// The type of the sink window, the tail and of specs that do not pack.
    pub fn window_dtype(mut self, dtype: Dtype) -> Config {
        self.raw.window_dtype = dtype as i32;
        self
    }

    /// Sink window, recent window, flush unit and schedule.
    pub fn windows(mut self, windows: Windows) -> Config {
        self.raw.sink = windows.sink;
        self.raw.recent = windows.recent;
        self.raw.flush = windows.flush;
        self.raw.schedule = windows.schedule as i32;
        self
    }

    /// Sequences have the numbers `0` to `max_sequences - 1`.
    pub fn max_sequences(mut self, max_sequences: i32) -> Config {
        self.raw.max_sequences = max_sequences;
        self
    }

    /// The longest sequence.
    pub fn max_tokens(mut self, max_tokens: i64) -> Config {
        self.raw.max_tokens = max_tokens;
        self
    }

    /// Packed tokens that all sequences share; 0: enough for every sequence at its longest.
    pub fn pool_tokens(mut self, pool_tokens: i64) -> Config {
        self.raw.pool_tokens = pool_tokens;
        self
    }

    /// Threads of the cache on the CPU, the caller's included; 0: one a core.
    pub fn threads(mut self, threads: i32) -> Config {
        self.raw.threads = threads;
        self
    }

    /// Plain double-precision code, slow: what tests compare with.
    pub fn reference(mut self) -> Config {
        self.raw.flags |= u64::from(sys::KIVI_CACHE_REFERENCE);
        self
    }

    /// The spec of the keys, as set last; not that of a layer table.
    pub fn key_spec(&self) -> Spec {
        Spec(self.raw.layer.k)
    }

    /// The spec of the values, likewise.
    pub fn value_spec(&self) -> Spec {
        Spec(self.raw.layer.v)
    }

    /// The bytes that a cache of this config takes, exactly.
    pub fn estimate(&self) -> Result<Memory> {
        let mut memory = sys::kivi_memory::default();
        // SAFETY: the config lives during the call, at most the given size is written.
        check(unsafe {
            self.with_raw(|raw| sys::kivi_cache_estimate(raw, &mut memory, size_of_val(&memory)))
        })?;
        Ok(Memory::from_raw(&memory))
    }

    /// What making a cache would say to one layer of this config, and which code would serve it.
    pub fn query_support(&self, layer: i32) -> Result<Support> {
        let mut support = sys::kivi_support::default();
        // SAFETY: likewise.
        check(unsafe {
            self.with_raw(|raw| sys::kivi_query_support(raw, layer, &mut support, size_of_val(&support)))
        })?;
        Ok(Support::from_raw(&support))
    }

    /// Calls with the C config, whose layer table then points to ours.
    pub(crate) fn with_raw<R>(&self, call: impl FnOnce(*const sys::kivi_config) -> R) -> R {
        let mut raw = self.raw;
        if !self.layers.is_empty() {
            raw.layers = self.layers.as_ptr();
        }
        call(&raw)
    }
}

/// A named pair of specs with windows.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Preset {
    /// What [`Config::preset`] takes.
    pub name: String,
    /// One line about it.
    pub what: String,
    /// How it stores keys.
    pub k: Spec,
    /// How it stores values.
    pub v: Spec,
    /// As in [`Windows`].
    pub sink: i32,
    /// Likewise.
    pub recent: i32,
    /// Likewise.
    pub flush: i32,
    /// When it packs; `None`: a schedule that this crate does not know, the library is newer.
    pub schedule: Option<Schedule>,
}

/// All presets of the library.
///
/// ```
/// assert!(kivi::presets()?.iter().any(|preset| preset.name == "k3v2"));
/// # Ok::<(), kivi::Error>(())
/// ```
pub fn presets() -> Result<Vec<Preset>> {
    check_library()?;
    // SAFETY: no arguments.
    let count = unsafe { sys::kivi_preset_count() };
    (0..count)
        .map(|index| {
            let mut preset = sys::kivi_preset::default();
            // SAFETY: at most the given size is written.
            check(unsafe { sys::kivi_preset_at(index, &mut preset, size_of_val(&preset)) })?;
            // SAFETY: static strings.
            let (name, what) = unsafe { (text(preset.name), text(preset.what)) };
            Ok(Preset {
                name,
                what,
                k: Spec(preset.k),
                v: Spec(preset.v),
                sink: preset.sink,
                recent: preset.recent,
                flush: preset.flush,
                schedule: Schedule::from_raw(preset.schedule),
            })
        })
        .collect()
}
