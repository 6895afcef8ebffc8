//! One sequence as a self-describing, checksummed blob, the same from every backend: `kivi_export` and
//! `kivi_import`, named as in the other bindings, where the bare words are reserved.

use crate::cache::{Cache, NO_STREAM};
use crate::error::{check, Result};
use crate::sys;

impl Cache {
    /// The exact size of [`export_sequence`](Cache::export_sequence)'s blob.
    pub fn export_size(&self, sequence: i32) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: a live handle, one number is written.
        check(unsafe { sys::kivi_export_size(self.shared(), sequence, &mut bytes) })?;
        Ok(bytes)
    }

    /// All layers of one sequence, which must have the same length.
    pub fn export_sequence(&self, sequence: i32) -> Result<Vec<u8>> {
        let mut blob = vec![0; self.export_size(sequence)?];
        let written = self.export_sequence_into(sequence, &mut blob)?;
        blob.truncate(written);
        Ok(blob)
    }

    /// Writes the blob to the front of `buffer` and returns its size.
    pub fn export_sequence_into(&self, sequence: i32, buffer: &mut [u8]) -> Result<usize> {
        let mut written = 0;
        // SAFETY: a live handle; at most the length of the buffer is written.
        check(unsafe {
            sys::kivi_export(
                self.shared(),
                sequence,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &mut written,
                NO_STREAM,
            )
        })?;
        Ok(written)
    }

    /// Replaces a sequence by the contents of a blob. If the blob is damaged, does not match this cache or
    /// does not fit, the old contents stay.
    pub fn import_sequence(&mut self, sequence: i32, blob: &[u8]) -> Result<()> {
        // SAFETY: a live handle, ours alone; the length of the blob is given.
        check(unsafe {
            sys::kivi_import(self.exclusive(), sequence, blob.as_ptr().cast(), blob.len(), NO_STREAM)
        })
    }
}
