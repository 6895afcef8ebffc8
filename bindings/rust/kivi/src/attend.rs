//! What an attend can be told beside its tensors, and the memory that it works in.

use std::ffi::c_void;
use std::ptr;

use crate::buffer::{Buffer, DeviceMemory};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sys;
use crate::tensor::{TensorMut, TensorRef};

/// The parameters of [`Cache::attend`](crate::Cache::attend) and [`Cache::step`](crate::Cache::step);
/// [`new`](Attend::new) gives the defaults.
///
/// ```
/// use kivi::{Attend, TensorMut};
/// let mut lse = [0.0f32; 4];
/// let mut lse = TensorMut::new(&mut lse, &[1, 1, 4])?;
/// let params = Attend::new().soft_cap(50.0).window_left(4096).lse(&mut lse);
/// # Ok::<(), kivi::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Attend<'a> {
    scale: f32,
    soft_cap: f32,
    window_left: Option<i64>,
    fresh: Option<(&'a TensorRef<'a>, &'a TensorRef<'a>)>,
    learned_sinks: Option<Logits<'a>>,
    lse: Option<&'a mut sys::kivi_tensor>,
    invariant: bool,
}

impl<'a> Attend<'a> {
    /// Scale `1 / sqrt(key_dim)`, every stored token seen, nothing else.
    pub fn new() -> Attend<'a> {
        Attend::default()
    }

    /// What `q . k` is multiplied by; 0: `1 / sqrt(key_dim)`.
    pub fn scale(mut self, scale: f32) -> Attend<'a> {
        self.scale = scale;
        self
    }

    /// A score becomes `cap * tanh(score / cap)` after scaling; 0: it does not.
    pub fn soft_cap(mut self, cap: f32) -> Attend<'a> {
        self.soft_cap = cap;
        self
    }

    /// How many keys left of its own position a query sees.
    pub fn window_left(mut self, keys: i64) -> Attend<'a> {
        self.window_left = Some(keys);
        self
    }

    /// Keys and values that are not appended yet, shaped as in append, as many as queries; they are
    /// not quantised (`kivi_attend_params`).
    pub fn fresh(mut self, k: &'a TensorRef<'a>, v: &'a TensorRef<'a>) -> Attend<'a> {
        self.fresh = Some((k, v));
        self
    }

    /// One logit a query head, added to the softmax's denominator; not part of the LSE.
    pub fn learned_sinks(mut self, logits: &'a [f32]) -> Attend<'a> {
        self.learned_sinks = Some(Logits::Host(logits));
        self
    }

    /// Likewise, where the cache is on a GPU.
    pub fn learned_sinks_in(mut self, logits: &'a Buffer<f32>) -> Attend<'a> {
        self.learned_sinks = Some(Logits::Device(logits));
        self
    }

    /// Gets the natural logarithm of the sum of `exp(score)`: f32, `[rows, tokens, q_heads]` or
    /// `[tokens, q_heads]`; minus infinity for a query that sees nothing.
    pub fn lse(mut self, lse: &'a mut TensorMut<'_>) -> Attend<'a> {
        self.lse = Some(lse.raw_mut());
        self
    }

    /// The bits of the result shall not depend on batch, threads, page placement or capacity; always so on
    /// the CPU.
    pub fn invariant(mut self) -> Attend<'a> {
        self.invariant = true;
        self
    }

    /// For queries `q`; the pointers in it live as long as `self` and what it borrows.
    #[inline]
    pub(crate) fn to_raw(&self, q: &TensorRef<'_>) -> Result<sys::kivi_attend_params> {
        if let Some(logits) = &self.learned_sinks {
            check_learned_sinks(logits.len(), q.shape())?;
        }
        Ok(sys::kivi_attend_params {
            struct_size: size_of::<sys::kivi_attend_params>(),
            scale: self.scale,
            soft_cap: self.soft_cap,
            window_left: self.window_left.unwrap_or(-1),
            k: self.fresh.map_or(ptr::null(), |(k, _)| k.as_raw()),
            v: self.fresh.map_or(ptr::null(), |(_, v)| v.as_raw()),
            learned_sinks: self.learned_sinks.as_ref().map_or(ptr::null(), Logits::as_ptr),
            lse: self.lse.as_deref().map_or(ptr::null(), |lse| lse as *const sys::kivi_tensor),
            flags: if self.invariant { u64::from(sys::KIVI_ATTEND_INVARIANT) } else { 0 },
            reserved: [ptr::null(); 4],
        })
    }
}

/// The C API takes a bare pointer: as many logits as the tensor `[.., heads, dim]` has heads.
pub(crate) fn check_learned_sinks(count: usize, shape: &[i64]) -> Result<()> {
    let heads = shape[shape.len() - 2];
    if count as i64 == heads {
        return Ok(());
    }
    Err(Error::invalid(format!("{count} learned sinks for {heads} query heads")))
}

/// Where logits are.
#[derive(Debug)]
enum Logits<'a> {
    Host(&'a [f32]),
    Device(&'a Buffer<f32>),
}

impl Logits<'_> {
    fn len(&self) -> usize {
        match self {
            Logits::Host(logits) => logits.len(),
            Logits::Device(logits) => logits.len(),
        }
    }

    fn as_ptr(&self) -> *const f32 {
        match self {
            Logits::Host(logits) => logits.as_ptr(),
            Logits::Device(logits) => logits.as_ptr(),
        }
    }
}

/// The memory that an attend or a step works in, made by [`Cache::workspace`](crate::Cache::workspace). One serves any
/// number of calls one after the other; calls that run together need one each.
#[derive(Debug)]
pub struct Workspace {
    memory: DeviceMemory,
}

impl Workspace {
    /// A workspace of a given size, on the device of the caches that it is for.
    pub fn with_bytes(device: Device, device_id: i32, bytes: usize) -> Result<Workspace> {
        Ok(Workspace { memory: DeviceMemory::new(device, device_id, bytes)? })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut c_void {
        self.memory.as_ptr()
    }
}
