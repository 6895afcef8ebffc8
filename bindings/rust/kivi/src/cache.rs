//! The cache: made, filled, asked, read back.

use std::ops::Range;
use std::ptr::{self, NonNull};

use crate::attend::{Attend, Workspace};
use crate::batch::Batch;
use crate::config::Config;
use crate::device::Device;
use crate::error::{check, Result};
use crate::report::{Length, Memory, Statistics};
use crate::sys;
use crate::tensor::{TensorMut, TensorRef};
use crate::version::check_library;

/// The basis of rows that are read back or handed over, where a spec transforms them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Basis {
    /// As the caller gives and gets rows.
    #[default]
    Caller,
    /// As rows are stored: a transform is not undone.
    Stored,
}

impl Basis {
    pub(crate) fn flags(self) -> u64 {
        match self {
            Basis::Caller => 0,
            Basis::Stored => u64::from(sys::KIVI_STORED_BASIS),
        }
    }
}

/// The keys and values of all layers of a model, for many sequences.
///
/// Calls that take `&self` may run together, from several threads; dropping the cache frees everything.
#[derive(Debug)]
pub struct Cache {
    raw: NonNull<sys::kivi_cache>,
    device: Device,
    device_id: i32,
}

// SAFETY: a cache has no tie to the thread that made it.
unsafe impl Send for Cache {}
// SAFETY: `&self` reaches only C calls that take a const cache, which may run together; attend writes to its
// own workspace.
unsafe impl Sync for Cache {}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: ours alone, and not used after this.
        unsafe { sys::kivi_cache_destroy(self.raw.as_ptr()) }
    }
}

/// On the CPU the stream is NULL, and every call is complete on return. On a GPU NULL is the default stream, which has
/// the calls in their order.
pub(crate) const NO_STREAM: sys::kivi_stream = ptr::null_mut();

/// The C API's number of a layer, or of all of them.
pub(crate) fn layer_or_all(layer: Option<i32>) -> i32 {
    layer.unwrap_or(-1)
}

impl Cache {
    /// Makes a cache and all of its memory. A config that is not supported is refused here, with the rule
    /// that it breaks, and nothing is refused for it later.
    pub fn new(config: &Config) -> Result<Cache> {
        let mut raw = ptr::null_mut();
        // SAFETY: the config lives during the call and is not kept.
        check(unsafe { config.with_raw(|config| sys::kivi_cache_create(config, &mut raw)) })?;
        // SAFETY: a handle after success, and nobody else has it.
        unsafe { Cache::from_raw(raw, config.device_kind(), config.device_id()) }
    }

    /// Takes over a handle of the C API.
    ///
    /// # Safety
    /// `raw` is a live handle, of a cache on this device, that nobody else uses or destroys from now on.
    pub unsafe fn from_raw(raw: *mut sys::kivi_cache, device: Device, device_id: i32) -> Result<Cache> {
        check_library()?;
        let raw = NonNull::new(raw).ok_or_else(|| crate::Error::invalid("the handle is NULL"))?;
        Ok(Cache { raw, device, device_id })
    }

    /// The handle for calls of the C API; the cache keeps it.
    ///
    /// # Safety
    /// Not to be destroyed, nor used after the cache is dropped, nor against the thread rules of `kivi.h`.
    pub unsafe fn as_raw(&self) -> *mut sys::kivi_cache {
        self.raw.as_ptr()
    }

    pub(crate) fn shared(&self) -> *const sys::kivi_cache {
        self.raw.as_ptr()
    }

    pub(crate) fn exclusive(&mut self) -> *mut sys::kivi_cache {
        self.raw.as_ptr()
    }

    /// Empties every sequence; committed moments stay.
    pub fn reset(&mut self) -> Result<()> {
        // SAFETY: a live handle, ours alone.
        check(unsafe { sys::kivi_cache_reset(self.exclusive(), NO_STREAM) })
    }

    /// Empties one sequence and returns its blocks.
    pub fn sequence_reset(&mut self, sequence: i32) -> Result<()> {
        // SAFETY: likewise.
        check(unsafe { sys::kivi_sequence_reset(self.exclusive(), sequence, NO_STREAM) })
    }

    /// Enlarges the pool to at least `tokens` packed tokens over all sequences.
    pub fn reserve(&mut self, tokens: i64) -> Result<()> {
        // SAFETY: likewise.
        check(unsafe { sys::kivi_reserve(self.exclusive(), tokens, NO_STREAM) })
    }

    /// Gives one sequence all blocks that it needs at a length of `tokens`, so that appends up to there take none.
    pub fn sequence_reserve(&mut self, sequence: i32, tokens: i64) -> Result<()> {
        // SAFETY: likewise.
        check(unsafe { sys::kivi_sequence_reserve(self.exclusive(), sequence, tokens, NO_STREAM) })
    }

    /// Waits for the work queued on a device and takes the lengths from there. An error of kind
    /// [`Capacity`](crate::ErrorKind::Capacity) names a sequence for which an append found no room on the
    /// device. Does nothing on the CPU.
    pub fn synchronize(&mut self) -> Result<()> {
        // SAFETY: likewise.
        check(unsafe { sys::kivi_synchronize(self.exclusive(), NO_STREAM) })
    }

    /// The bytes that the cache takes.
    pub fn memory(&self) -> Result<Memory> {
        let mut memory = sys::kivi_memory::default();
        // SAFETY: a live handle, at most the given size is written.
        check(unsafe { sys::kivi_cache_memory(self.shared(), &mut memory, size_of_val(&memory)) })?;
        Ok(Memory::from_raw(&memory))
    }

    /// How long a sequence is in one layer: within a step the layers advance one after the other.
    pub fn length(&self, layer: i32, sequence: i32) -> Result<Length> {
        let mut length = sys::kivi_length::default();
        // SAFETY: likewise.
        check(unsafe {
            sys::kivi_sequence_length(self.shared(), layer, sequence, &mut length, size_of_val(&length))
        })?;
        Ok(Length::from_raw(&length))
    }

    /// What a layer holds; `None`: all layers together.
    pub fn statistics(&self, layer: Option<i32>) -> Result<Statistics> {
        let mut statistics = sys::kivi_statistics::default();
        // SAFETY: likewise.
        check(unsafe {
            sys::kivi_query_statistics(
                self.shared(),
                layer_or_all(layer),
                &mut statistics,
                size_of_val(&statistics),
            )
        })?;
        Ok(Statistics::from_raw(&statistics))
    }

    /// Appends the tokens of the batch: `k` `[rows, tokens, kv_heads, key_dim]`, `v` `[rows, tokens,
    /// kv_heads, value_dim]`, or both without rows. If one sequence has no room, none gets anything.
    #[inline]
    pub fn append(
        &mut self,
        layer: i32,
        batch: &Batch<'_>,
        k: &TensorRef<'_>,
        v: &TensorRef<'_>,
    ) -> Result<()> {
        let batch = batch.to_raw();
        // SAFETY: a live handle, ours alone; the views cover memory that lives during the call.
        check(unsafe { sys::kivi_append(self.exclusive(), layer, &batch, k.as_raw(), v.as_raw(), NO_STREAM) })
    }

    /// Packs the tails of the batch's sequences as far as whole groups go, in one layer or (`None`) in all.
    /// The batch's counts are not used.
    pub fn flush_residual(&mut self, layer: Option<i32>, batch: &Batch<'_>) -> Result<()> {
        let batch = batch.to_raw();
        // SAFETY: a live handle, ours alone.
        check(unsafe { sys::kivi_flush_residual(self.exclusive(), layer_or_all(layer), &batch, NO_STREAM) })
    }

    /// A workspace for any attend or step on `layer` (`None`: on any layer) of at most `rows` rows with at most
    /// `max_count` queries each, at any length.
    pub fn workspace(&self, layer: Option<i32>, rows: i32, max_count: i32) -> Result<Workspace> {
        let mut bytes = 0usize;
        // SAFETY: a live handle, one number is written.
        check(unsafe {
            sys::kivi_attend_workspace(self.shared(), layer_or_all(layer), rows, max_count, &mut bytes)
        })?;
        Workspace::with_bytes(self.device, self.device_id, bytes)
    }

    /// Attention of the batch's queries over everything stored of their sequences, causal: the last query of
    /// a row stands at the newest token.
    ///
    /// `q` `[rows, tokens, q_heads, key_dim]`, `out` `[rows, tokens, q_heads, value_dim]`, or both without
    /// rows. A query that sees nothing gives 0.
    #[inline]
    pub fn attend(
        &self,
        layer: i32,
        batch: &Batch<'_>,
        q: &TensorRef<'_>,
        out: &mut TensorMut<'_>,
        params: Attend<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let batch = batch.to_raw();
        let params = params.to_raw(q)?;
        // SAFETY: a live handle; the views cover memory that lives during the call, what is written is
        // borrowed alone; learned sinks are as many as q has heads.
        check(unsafe {
            sys::kivi_attend(
                self.shared(),
                layer,
                &batch,
                q.as_raw(),
                out.as_raw(),
                &params,
                workspace.as_mut_ptr(),
                workspace.bytes(),
                NO_STREAM,
            )
        })
    }

    /// One step of a layer: attends to everything stored and to the new tokens `k` and `v` as with
    /// [`fresh`](Attend::fresh), then appends them. One call that happens whole or not at all; on a GPU one
    /// launch where it can (`kivi.h`).
    ///
    /// `q` and `out` as in [`attend`](Cache::attend), `k` and `v` as in [`append`](Cache::append); `params`
    /// without [`fresh`](Attend::fresh) tokens.
    #[allow(clippy::too_many_arguments)] // as the C call has them
    #[inline]
    pub fn step(
        &mut self,
        layer: i32,
        batch: &Batch<'_>,
        q: &TensorRef<'_>,
        k: &TensorRef<'_>,
        v: &TensorRef<'_>,
        out: &mut TensorMut<'_>,
        params: Attend<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        let batch = batch.to_raw();
        let params = params.to_raw(q)?;
        // SAFETY: a live handle, ours alone; else as in attend.
        check(unsafe {
            sys::kivi_step(
                self.exclusive(),
                layer,
                &batch,
                q.as_raw(),
                k.as_raw(),
                v.as_raw(),
                out.as_raw(),
                &params,
                workspace.as_mut_ptr(),
                workspace.bytes(),
                NO_STREAM,
            )
        })
    }

    /// Reads back tokens of one sequence as attend reads them: `k` `[tokens, kv_heads, key_dim]`,
    /// `v` `[tokens, kv_heads, value_dim]`; either may be left out. Not for the hot path.
    pub fn dequantize(
        &self,
        layer: i32,
        sequence: i32,
        tokens: Range<i64>,
        k: Option<&mut TensorMut<'_>>,
        v: Option<&mut TensorMut<'_>>,
        basis: Basis,
    ) -> Result<()> {
        let k = k.map_or(ptr::null(), |k| k.as_raw());
        let v = v.map_or(ptr::null(), |v| v.as_raw());
        // SAFETY: a live handle; the views cover memory that is borrowed alone during the call.
        check(unsafe {
            sys::kivi_dequantize(
                self.shared(),
                layer,
                sequence,
                tokens.start,
                tokens.end,
                k,
                v,
                basis.flags(),
                NO_STREAM,
            )
        })
    }
}
