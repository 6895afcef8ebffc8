//! Where caches can live.

use crate::error::{check, field_text, Result};
use crate::sys;
use crate::version::check_library;

/// A kind of device, numbered as in DLPack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// The host.
    Cpu = sys::KIVI_CPU as isize,
    /// An NVIDIA GPU.
    Cuda = sys::KIVI_CUDA as isize,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Whether a cache can be made there.
    pub available: bool,
    /// Why not, or empty.
    pub reason: String,
    /// The product; on the CPU the instruction set in use.
    pub name: String,
    /// Cores of a CPU, multiprocessors of a GPU.
    pub threads: i32,
    /// 10 * major + minor of a GPU's compute capability; 0 on the CPU.
    pub capability: i32,
    /// All of its memory.
    pub memory_bytes: u64,
}

/// How many devices of a kind there are: 1 CPU, and no GPU without a driver or in a build without CUDA.
///
/// ```
/// assert_eq!(kivi::device_count(kivi::Device::Cpu)?, 1);
/// # Ok::<(), kivi::Error>(())
/// ```
pub fn device_count(device: Device) -> Result<i32> {
    check_library()?;
    let mut count = 0;
    // SAFETY: one number is written.
    check(unsafe { sys::kivi_device_count(device as i32, &mut count) })?;
    Ok(count)
}

/// What device number `device_id` of a kind is.
pub fn device_query(device: Device, device_id: i32) -> Result<DeviceInfo> {
    check_library()?;
    let mut info = sys::kivi_device_info::default();
    // SAFETY: at most the given size is written.
    check(unsafe { sys::kivi_device_query(device as i32, device_id, &mut info, size_of_val(&info)) })?;
    Ok(DeviceInfo {
        available: info.available != 0,
        reason: field_text(&info.reason),
        name: field_text(&info.name),
        threads: info.threads,
        capability: info.capability,
        memory_bytes: info.memory_bytes,
    })
}
