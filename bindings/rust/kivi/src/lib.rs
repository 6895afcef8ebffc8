//! libkivi keeps the attention keys and values of a transformer in 2 to 4 bits and computes attention
//! straight from the packed form. This crate is its safe Rust face: it adds types and lifetimes, and no
//! behaviour.
//!
//! A [`Cache`] holds all layers of a model and many sequences. [`Cache::append`] stores keys and values,
//! [`Cache::attend`] computes attention over all that is stored, [`Cache::step`] does both for the tokens of a
//! decode step. Tensors are borrowed views ([`TensorRef`], [`TensorMut`]) over slices of the caller, or over a
//! [`Buffer`] on the CPU or a GPU. Which tokens of which sequence a call is about is said by a [`Batch`], how keys
//! and values are stored by a [`Config`].
//!
//! ```
//! use kivi::{Attend, Batch, Cache, Config, Heads, TensorMut, TensorRef};
//!
//! # fn main() -> kivi::Result<()> {
//! let heads = Heads { q_heads: 4, kv_heads: 2, key_dim: 64, value_dim: 64 };
//! let config = Config::preset("k3v2")?.layer_count(1).heads(heads).max_sequences(1).max_tokens(1024);
//! let mut cache = Cache::new(&config)?;
//!
//! // 300 tokens of sequence 0: rows, tokens, heads, dim.
//! let keys = vec![0.5f32; 300 * 2 * 64];
//! let values = vec![0.25f32; 300 * 2 * 64];
//! let tokens = Batch::first(1, 300);
//! let shape = [1, 300, 2, 64];
//! cache.append(0, &tokens, &TensorRef::new(&keys, &shape)?, &TensorRef::new(&values, &shape)?)?;
//!
//! // The query of the newest token.
//! let query = vec![1.0f32; 4 * 64];
//! let mut output = vec![0.0f32; 4 * 64];
//! let mut workspace = cache.workspace(None, 1, 1)?;
//! cache.attend(
//!     0,
//!     &Batch::first(1, 1),
//!     &TensorRef::new(&query, &[1, 1, 4, 64])?,
//!     &mut TensorMut::new(&mut output, &[1, 1, 4, 64])?,
//!     Attend::new(),
//!     &mut workspace,
//! )?;
//! assert!(output.iter().all(|x| (x - 0.25).abs() < 1e-3));
//! # Ok(())
//! # }
//! ```
//!
//! Calls have the names of `kivi.h`. Every call that can fail returns an [`Error`] with its kind and one
//! sentence; a failed call has changed nothing. [`Cache`] is `Send` and `Sync`: calls that take `&self` may run
//! together.
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod attend;
mod batch;
mod blob;
mod buffer;
mod cache;
mod config;
mod device;
mod error;
mod merge;
mod moments;
mod probe;
mod report;
mod spec;
mod tensor;
mod version;

pub use attend::{Attend, Workspace};
pub use batch::Batch;
pub use buffer::Buffer;
pub use cache::{Basis, Cache};
pub use config::{presets, Config, Heads, Layer, Preset, Schedule, Windows};
pub use device::{device_count, device_query, Device, DeviceInfo};
pub use error::{status_name, Error, ErrorKind, Result};
pub use kivi_sys as sys;
pub use merge::merge;
pub use probe::{Probe, ProbeErrors, ProbeReport};
pub use report::{Length, Memory, MomentState, Path, Rounding, Statistics, Support};
pub use spec::{Axis, Spec};
pub use tensor::{Bf16, Dtype, Element, TensorMut, TensorRef, F16};
pub use version::{build_info, version, Version};
