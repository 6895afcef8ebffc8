//! Memory of a device that the library allocates, for programs without a runtime of their own for it.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

use crate::cache::NO_STREAM;
use crate::device::Device;
use crate::error::{check, Error, Result};
use crate::sys;
use crate::tensor::{Element, TensorMut, TensorRef};

/// Bytes on a device, owned.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    data: *mut c_void,
    bytes: usize,
    pub(crate) device: Device,
    pub(crate) device_id: i32,
}

// SAFETY: memory has no tie to the thread that asked for it.
unsafe impl Send for DeviceMemory {}
// SAFETY: through a shared reference it is only read, in the order of the device's default stream.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    pub(crate) fn new(device: Device, device_id: i32, bytes: usize) -> Result<DeviceMemory> {
        let mut data = ptr::null_mut();
        // SAFETY: one pointer is written.
        check(unsafe { sys::kivi_device_allocate(device as i32, device_id, bytes, &mut data) })?;
        Ok(DeviceMemory { data, bytes, device, device_id })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn as_ptr(&self) -> *mut c_void {
        self.data
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: ours alone; the library waits for the device's work before the memory goes.
        unsafe { sys::kivi_device_free(self.device as i32, self.device_id, self.data) };
    }
}

/// Elements in memory of a device, which views of any shape can be made of. A program that keeps its tensors in
/// buffers runs on the CPU and on a GPU alike:
///
/// ```
/// use kivi::{Buffer, Device};
/// let device = Device::Cpu; // or Device::Cuda
/// let mut buffer = Buffer::from_slice(device, 0, &[1.0f32; 2 * 8])?;
/// assert_eq!(buffer.view(&[2, 8])?.shape(), [2, 8]);
/// buffer.write(&[2.0; 16])?;
/// assert_eq!(buffer.to_vec()?, [2.0; 16]);
/// # Ok::<(), kivi::Error>(())
/// ```
///
/// Copies wait for the calls that were made before them; calls on a GPU do not wait for their own end.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    memory: DeviceMemory,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// A buffer with a copy of these elements.
    pub fn from_slice(device: Device, device_id: i32, values: &[T]) -> Result<Buffer<T>> {
        let memory = DeviceMemory::new(device, device_id, size_of_val(values))?;
        let mut buffer = Buffer { memory, len: values.len(), elements: PhantomData };
        buffer.write(values)?;
        Ok(buffer)
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Replaces all elements.
    pub fn write(&mut self, values: &[T]) -> Result<()> {
        if values.len() != self.len {
            return Err(Error::invalid(format!("{} values for {} elements", values.len(), self.len)));
        }
        // SAFETY: both stretches have so many bytes.
        check(unsafe { self.copy(self.memory.as_ptr(), values.as_ptr().cast()) })
    }

    /// A copy of all elements.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let mut values = Vec::<T>::with_capacity(self.len);
        // SAFETY: both stretches have so many bytes.
        check(unsafe { self.copy(values.as_mut_ptr().cast(), self.memory.as_ptr()) })?;
        // SAFETY: they were written, and every bit pattern is a value.
        unsafe { values.set_len(self.len) };
        Ok(values)
    }

    /// A view without gaps of all elements.
    pub fn view(&self, shape: &[usize]) -> Result<TensorRef<'_>> {
        TensorRef::over_memory::<T>(&self.memory, self.len, shape)
    }

    /// A view without gaps of all elements, to be written.
    pub fn view_mut(&mut self, shape: &[usize]) -> Result<TensorMut<'_>> {
        TensorMut::over_memory::<T>(&self.memory, self.len, shape)
    }

    pub(crate) fn as_ptr(&self) -> *const T {
        self.memory.as_ptr().cast()
    }

    /// Copies the buffer's size in bytes, after what was queued before.
    unsafe fn copy(&self, to: *mut c_void, from: *const c_void) -> sys::kivi_status {
        let DeviceMemory { device, device_id, bytes, .. } = self.memory;
        // SAFETY: as the caller says.
        unsafe { sys::kivi_device_copy(device as i32, device_id, to, from, bytes, NO_STREAM) }
    }
}
