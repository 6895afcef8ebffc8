//! What the library says about a config, a cache and its sequences.

use crate::error::field_text;
use crate::sys;

/// Bytes of a cache: exact before it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// The sum of the parts.
    pub total_bytes: u64,
    /// Pages: `blocks * block_bytes`.
    pub page_bytes: u64,
    /// Sink windows and tails.
    pub window_bytes: u64,
    /// Page tables, lengths, reference counts.
    pub table_bytes: u64,
    /// Query moments and the tables made from them.
    pub moment_bytes: u64,
    /// What threads work in.
    pub scratch_bytes: u64,
    /// Blocks of the pool; a block is 128 tokens of all layers and heads.
    pub blocks: i64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Names the byte order of pages.
    pub layout_id: u64,
}

impl Memory {
    pub(crate) fn from_raw(raw: &sys::kivi_memory) -> Memory {
        Memory {
            total_bytes: raw.total_bytes,
            page_bytes: raw.page_bytes,
            window_bytes: raw.window_bytes,
            table_bytes: raw.table_bytes,
            moment_bytes: raw.moment_bytes,
            scratch_bytes: raw.scratch_bytes,
            blocks: raw.blocks,
            block_bytes: raw.block_bytes,
            layout_id: raw.layout_id,
        }
    }
}

/// How long a sequence is, and what of it is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Length {
    /// Tokens.
    pub length: i64,
    /// Tokens in the sink window.
    pub sink: i64,
    /// Keys at `sink` to `key_border - 1` are packed, the rest is the tail.
    pub key_border: i64,
    /// Likewise for values.
    pub value_border: i64,
}

impl Length {
    pub(crate) fn from_raw(raw: &sys::kivi_length) -> Length {
        Length {
            length: raw.length,
            sink: raw.sink,
            key_border: raw.key_border,
            value_border: raw.value_border,
        }
    }
}

/// The code that serves a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Path {
    /// Refused.
    None,
    /// Plain double precision.
    Reference,
    /// Right for everything, unpacks before it multiplies.
    General,
    /// Made for this spec, multiplies the codes themselves.
    Fast,
    /// One that this crate does not know: the library is newer.
    Unknown(i32),
}

impl Path {
    fn from_raw(raw: i32) -> Path {
        match u32::try_from(raw) {
            Ok(sys::KIVI_PATH_NONE) => Path::None,
            Ok(sys::KIVI_PATH_REFERENCE) => Path::Reference,
            Ok(sys::KIVI_PATH_GENERAL) => Path::General,
            Ok(sys::KIVI_PATH_FAST) => Path::Fast,
            _ => Path::Unknown(raw),
        }
    }
}

/// What the library thinks of one layer of a config.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Support {
    /// Whether a cache can be made.
    pub supported: bool,
    /// Why not, or why not on the fast path, or empty.
    pub reason: String,
    /// What attends.
    pub attend_path: Path,
    /// What packs.
    pub pack_path: Path,
    /// Of a packed token, scale and min included, mean over keys and values.
    pub bits_per_element: f64,
}

impl Support {
    pub(crate) fn from_raw(raw: &sys::kivi_support) -> Support {
        Support {
            supported: raw.supported != 0,
            reason: field_text(&raw.reason),
            attend_path: Path::from_raw(raw.attend_path),
            pack_path: Path::from_raw(raw.pack_path),
            bits_per_element: raw.bits_per_element,
        }
    }
}

/// How codes of keys are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rounding {
    /// The nearest.
    Nearest,
    /// Against the moments of the queries.
    QueryAware,
    /// One that this crate does not know: the library is newer.
    Unknown(i32),
}

/// How far the moments of a layer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MomentState {
    /// There are none.
    None,
    /// Accumulated or set, not used yet.
    Accumulated,
    /// In use.
    Committed,
    /// One that this crate does not know: the library is newer.
    Unknown(i32),
}

/// What a cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Tokens over all sequences.
    pub tokens: i64,
    /// Packed keys over all sequences.
    pub packed_tokens: i64,
    /// Blocks in use, of the whole cache.
    pub blocks_used: i64,
    /// Blocks left.
    pub blocks_free: i64,
    /// Rows with finite values beyond the range of the window's type, clamped.
    pub saturated_rows: i64,
    /// How codes of keys are chosen now.
    pub key_rounding: Rounding,
    /// How far the moments are.
    pub moments: MomentState,
    /// Query rows accumulated for each KV head.
    pub moment_queries: i64,
    /// A device call has failed: only queries are answered.
    pub device_error: bool,
    /// Bytes of keys and values that attend would read.
    pub live_bytes: u64,
}

impl Statistics {
    pub(crate) fn from_raw(raw: &sys::kivi_statistics) -> Statistics {
        Statistics {
            tokens: raw.tokens,
            packed_tokens: raw.packed_tokens,
            blocks_used: raw.blocks_used,
            blocks_free: raw.blocks_free,
            saturated_rows: raw.saturated_rows,
            key_rounding: match u32::try_from(raw.key_rounding) {
                Ok(sys::KIVI_ROUND_NEAREST) => Rounding::Nearest,
                Ok(sys::KIVI_ROUND_QUERY_AWARE) => Rounding::QueryAware,
                _ => Rounding::Unknown(raw.key_rounding),
            },
            moments: match raw.moments {
                0 => MomentState::None,
                1 => MomentState::Accumulated,
                2 => MomentState::Committed,
                other => MomentState::Unknown(other),
            },
            moment_queries: raw.moment_queries,
            device_error: raw.device_error != 0,
            live_bytes: raw.live_bytes,
        }
    }
}
