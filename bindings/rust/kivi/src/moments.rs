//! Second moments of the queries: what [query-aware](crate::Spec::query_aware) rounding minimises against.

use crate::batch::Batch;
use crate::cache::{Basis, Cache, NO_STREAM};
use crate::error::{check, Result};
use crate::sys;
use crate::tensor::TensorRef;

/// Moments of a layer are accumulated or set, then committed, while nothing of the layer is packed.
/// Accumulating or setting after a commit asks for another commit.
impl Cache {
    /// Adds queries, as attend would be given them, `[rows, tokens, q_heads, key_dim]` or without rows. The
    /// batch's sequences are not looked at. Any text of the model's kind serves; a few hundred tokens give
    /// most of the gain.
    pub fn moments_accumulate(&mut self, layer: i32, batch: &Batch<'_>, q: &TensorRef<'_>) -> Result<()> {
        let batch = batch.to_raw();
        // SAFETY: a live handle, ours alone; the view covers memory that lives during the call.
        check(unsafe { sys::kivi_moments_accumulate(self.exclusive(), layer, &batch, q.as_raw(), NO_STREAM) })
    }

    /// Sets the moments: f32 `[kv_heads, key_dim, key_dim]`, symmetric, finite, with a positive diagonal.
    pub fn moments_set(&mut self, layer: i32, moments: &TensorRef<'_>, basis: Basis) -> Result<()> {
        // SAFETY: likewise.
        check(unsafe {
            sys::kivi_moments_set(self.exclusive(), layer, moments.as_raw(), basis.flags(), NO_STREAM)
        })
    }

    /// Factors the moments and uses them from now on.
    pub fn moments_commit(&mut self, layer: i32) -> Result<()> {
        // SAFETY: a live handle, ours alone.
        check(unsafe { sys::kivi_moments_commit(self.exclusive(), layer, NO_STREAM) })
    }

    /// The exact size of [`moments_export`](Cache::moments_export)' blob.
    pub fn moments_export_size(&self, layer: i32) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: a live handle, one number is written.
        check(unsafe { sys::kivi_moments_export_size(self.shared(), layer, &mut bytes) })?;
        Ok(bytes)
    }

    /// The committed moments of a layer, with the tables made from them.
    pub fn moments_export(&self, layer: i32) -> Result<Vec<u8>> {
        let mut blob = vec![0u8; self.moments_export_size(layer)?];
        let mut written = 0;
        // SAFETY: a live handle; at most the length of the blob is written.
        check(unsafe {
            sys::kivi_moments_export(self.shared(), layer, blob.as_mut_ptr().cast(), blob.len(), &mut written)
        })?;
        blob.truncate(written);
        Ok(blob)
    }

    /// Commits a blob of moments; one of a single KV head serves any number of replicated heads.
    pub fn moments_import(&mut self, layer: i32, blob: &[u8]) -> Result<()> {
        // SAFETY: a live handle, ours alone; the length of the blob is given.
        check(unsafe {
            sys::kivi_moments_import(self.exclusive(), layer, blob.as_ptr().cast(), blob.len(), NO_STREAM)
        })
    }
}
