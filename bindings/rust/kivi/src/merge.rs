//! Partial attention results put together.

use crate::attend::check_learned_sinks;
use crate::cache::NO_STREAM;
use crate::error::{check, Error, Result};
use crate::sys;
use crate::tensor::{TensorMut, TensorRef};
use crate::version::check_library;
use std::ptr;

/// Combines partial results of the same queries over disjoint keys: the mean of the outputs, weighted by
/// `exp(lse)`, computed without overflow.
///
/// `outs[i]` and `out` `[rows, tokens, q_heads, dim]` or `[tokens, q_heads, dim]`; `lses[i]` and `lse` f32
/// without the last size. `learned_sinks`, one logit a query head, belongs to the last merge only. Parts that
/// saw nothing (LSE minus infinity) do not contribute.
///
/// ```
/// use kivi::{merge, TensorMut, TensorRef};
/// let (first, second) = ([1.0f32; 8], [3.0f32; 8]);
/// let lse = [0.5f32];
/// let (first, second) = (TensorRef::new(&first, &[1, 1, 8])?, TensorRef::new(&second, &[1, 1, 8])?);
/// let lse = TensorRef::new(&lse, &[1, 1])?;
/// let mut out = [0.0f32; 8];
/// merge(&[first, second], &[lse, lse], None, &mut TensorMut::new(&mut out, &[1, 1, 8])?, None)?;
/// assert!(out.iter().all(|x| (x - 2.0).abs() < 1e-6));
/// # Ok::<(), kivi::Error>(())
/// ```
pub fn merge(
    outs: &[TensorRef<'_>],
    lses: &[TensorRef<'_>],
    learned_sinks: Option<&[f32]>,
    out: &mut TensorMut<'_>,
    lse: Option<&mut TensorMut<'_>>,
) -> Result<()> {
    check_library()?;
    if outs.len() != lses.len() {
        return Err(Error::invalid(format!("{} LSEs for {} outputs", lses.len(), outs.len())));
    }
    let parts = outs
        .len()
        .try_into()
        .map_err(|_| Error::invalid(format!("{} parts are too many to merge", outs.len())))?;
    if let Some(logits) = learned_sinks {
        check_learned_sinks(logits.len(), out.shape())?;
    }
    // SAFETY: views are transparent over the C struct and cover memory that lives during the call; what is
    // written is borrowed alone; learned sinks are as many as out has heads.
    check(unsafe {
        sys::kivi_merge(
            parts,
            outs.as_ptr().cast(),
            lses.as_ptr().cast(),
            learned_sinks.map_or(ptr::null(), <[f32]>::as_ptr),
            out.as_raw(),
            lse.map_or(ptr::null(), |lse| lse.as_raw()),
            NO_STREAM,
        )
    })
}
