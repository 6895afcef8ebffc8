//! Which sequences a call is about, and how many tokens each brings.

use std::ptr;

use crate::error::{Error, Result};
use crate::sys;

/// The rows of a call: row `r` is one sequence with a number of tokens.
///
/// With tensors `[rows, tokens, heads, dim]`, row `r` uses the first of its tokens; with tensors `[tokens,
/// heads, dim]`, the rows follow one another without gaps, or stand at their [offsets](Batch::with_offsets).
/// A row with sequence -1 or with no tokens is skipped; a sequence may stand in one row only.
///
/// ```
/// use kivi::Batch;
/// let decode_step = Batch::first(4, 1);                  // sequences 0 to 3, one token each
/// let some = Batch::uniform(&[2, 0, -1], 1);             // 2 and 0; the last row is skipped
/// let prompts = Batch::ragged(&[0, 1], &[300, 17])?;     // 300 tokens of 0, 17 of 1
/// # Ok::<(), kivi::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    rows: i32,
    max_count: i32,
    sequences: Option<&'a [i32]>,
    counts: Option<&'a [i32]>,
    offsets: Option<&'a [i64]>,
}

impl<'a> Batch<'a> {
    /// Sequences `0` to `rows - 1`, each with `count` tokens.
    #[inline]
    pub fn first(rows: i32, count: i32) -> Batch<'a> {
        Batch { rows, max_count: count, sequences: None, counts: None, offsets: None }
    }

    /// These sequences, each with `count` tokens.
    #[inline]
    pub fn uniform(sequences: &'a [i32], count: i32) -> Batch<'a> {
        Batch {
            rows: rows_of(sequences),
            max_count: count,
            sequences: Some(sequences),
            counts: None,
            offsets: None,
        }
    }

    /// These sequences, each with its own number of tokens.
    pub fn ragged(sequences: &'a [i32], counts: &'a [i32]) -> Result<Batch<'a>> {
        if sequences.len() != counts.len() {
            return Err(Error::invalid(format!("{} counts for {} sequences", counts.len(), sequences.len())));
        }
        Ok(Batch {
            rows: rows_of(sequences),
            max_count: 0,
            sequences: Some(sequences),
            counts: Some(counts),
            offsets: None,
        })
    }

    /// Where each row begins in tensors `[tokens, heads, dim]`.
    pub fn with_offsets(self, offsets: &'a [i64]) -> Result<Batch<'a>> {
        if offsets.len() as i64 != i64::from(self.rows) {
            return Err(Error::invalid(format!("{} offsets for {} rows", offsets.len(), self.rows)));
        }
        Ok(Batch { offsets: Some(offsets), ..self })
    }

    #[inline]
    pub(crate) fn to_raw(self) -> sys::kivi_batch {
        sys::kivi_batch {
            struct_size: size_of::<sys::kivi_batch>(),
            rows: self.rows,
            max_count: self.max_count,
            sequences: self.sequences.map_or(ptr::null(), <[i32]>::as_ptr),
            counts: self.counts.map_or(ptr::null(), <[i32]>::as_ptr),
            offsets: self.offsets.map_or(ptr::null(), <[i64]>::as_ptr),
            ..Default::default()
        }
    }
}

/// The library refuses batches that are far shorter than the largest number of rows.
fn rows_of(sequences: &[i32]) -> i32 {
    sequences.len().try_into().unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_different_lengths_are_refused() {
        assert_eq!(Batch::ragged(&[0, 1], &[1]).unwrap_err().message(), "1 counts for 2 sequences");
        assert!(Batch::first(2, 1).with_offsets(&[0]).is_err());
        assert!(Batch::first(-1, 1).with_offsets(&[]).is_err());
        assert!(Batch::ragged(&[0, 1], &[3, 4]).unwrap().with_offsets(&[0, 9]).is_ok());
    }

    #[test]
    fn the_arrays_reach_the_library_as_they_are() {
        let (sequences, counts, offsets) = ([4, -1], [3, 0], [7, 0]);
        let raw = Batch::ragged(&sequences, &counts).unwrap().with_offsets(&offsets).unwrap().to_raw();
        assert_eq!((raw.rows, raw.max_count, raw.device), (2, 0, 0));
        assert_eq!(raw.sequences, sequences.as_ptr());
        assert_eq!(raw.counts, counts.as_ptr());
        assert_eq!(raw.offsets, offsets.as_ptr());
        let raw = Batch::first(5, 2).to_raw();
        assert_eq!((raw.rows, raw.max_count), (5, 2));
        assert!(raw.sequences.is_null() && raw.counts.is_null() && raw.offsets.is_null());
    }
}
