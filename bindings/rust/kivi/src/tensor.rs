//! Borrowed views of the caller's memory. A view that exists covers only elements of its slice, so no safe
//! call can make the library read or write outside of it.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

use crate::buffer::DeviceMemory;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sys;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE binary32.
    F32 = sys::KIVI_F32 as isize,
    /// IEEE binary16.
    F16 = sys::KIVI_F16 as isize,
    /// The upper half of a binary32.
    Bf16 = sys::KIVI_BF16 as isize,
}

/// Types that tensors can consist of.
///
/// # Safety
/// The type has the size and the format of `DTYPE`, and every bit pattern is a valid value.
pub unsafe trait Element: Copy + Send + Sync + 'static {
    /// What the library calls this type.
    const DTYPE: Dtype;
}

// SAFETY: binary32.
unsafe impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

macro_rules! sixteen_bits {
    ($name:ident, $dtype:expr, $doc:literal) => {
        #[doc = $doc]
        ///
        /// It carries the bits and does no arithmetic; crates that do (such as `half`) share the layout, and
        /// their slices of `u16` become tensors through [`slice`](Self::slice) and
        /// [`slice_mut`](Self::slice_mut) without a copy.
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub u16);

        impl $name {
            /// The same memory, read as elements.
            pub fn slice(bits: &[u16]) -> &[$name] {
                // SAFETY: transparent over u16.
                unsafe { std::slice::from_raw_parts(bits.as_ptr().cast(), bits.len()) }
            }

            /// The same memory, read and written as elements.
            pub fn slice_mut(bits: &mut [u16]) -> &mut [$name] {
                // SAFETY: transparent over u16, borrowed alone.
                unsafe { std::slice::from_raw_parts_mut(bits.as_mut_ptr().cast(), bits.len()) }
            }
        }

        // SAFETY: transparent over the 16 bits of that format.
        unsafe impl Element for $name {
            const DTYPE: Dtype = $dtype;
        }
    };
}

sixteen_bits!(F16, Dtype::F16, "The bits of an IEEE binary16 number.");
sixteen_bits!(Bf16, Dtype::Bf16, "The bits of a bfloat16 number.");

/// A tensor to read: `[rows, tokens, heads, dim]`, `[tokens, heads, dim]` or as a call says.
///
/// Strides count elements. The innermost is 1; another may be 0, which repeats what lies below it. The slice
/// outlives the view:
///
/// ```compile_fail,E0505
/// # use kivi::TensorRef;
/// let data = vec![0.0f32; 16];
/// let view = TensorRef::new(&data, &[2, 8])?;
/// drop(data);
/// println!("{view:?}");
/// # Ok::<(), kivi::Error>(())
/// ```
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    raw: sys::kivi_tensor,
    memory: PhantomData<&'a [u8]>,
}

/// A tensor to write, of the same shapes as [`TensorRef`]; no two of its elements share memory, and nothing else
/// reads or writes them while it exists:
///
/// ```compile_fail,E0502
/// # use kivi::{TensorMut, TensorRef};
/// let mut data = [0.0f32; 16];
/// let input = TensorRef::new(&data, &[2, 8])?;
/// let output = TensorMut::new(&mut data, &[2, 8])?;
/// println!("{input:?}");
/// # Ok::<(), kivi::Error>(())
/// ```
#[repr(transparent)]
pub struct TensorMut<'a> {
    raw: sys::kivi_tensor,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is a `&[T]` with a shape, and every `Element` is Sync.
unsafe impl Send for TensorRef<'_> {}
// SAFETY: likewise.
unsafe impl Sync for TensorRef<'_> {}
// SAFETY: a view is a `&mut [T]` with a shape, and every `Element` is Send.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: nothing can be read or written through a shared reference to the view.
unsafe impl Sync for TensorMut<'_> {}

impl<'a> TensorRef<'a> {
    /// A view without gaps, the last size innermost. The slice must have as many elements as the shape.
    ///
    /// ```
    /// use kivi::TensorRef;
    /// let data = [0.0f32; 2 * 3 * 8];
    /// assert!(TensorRef::new(&data, &[2, 3, 8]).is_ok());
    /// assert!(TensorRef::new(&data, &[2, 4, 8]).is_err());
    /// ```
    #[inline]
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<TensorRef<'a>> {
        let raw = dense::<T>(data.as_ptr().cast_mut().cast(), data.len(), Device::Cpu, 0, shape)?;
        Ok(TensorRef { raw, memory: PhantomData })
    }

    /// A view whose element at `index` is `data[sum of index * stride]`. The slice may be longer than the
    /// view.
    ///
    /// ```
    /// use kivi::TensorRef;
    /// // Keys and values interleaved token by token, [tokens, 2, heads, dim]: the keys alone.
    /// let (tokens, heads, dim) = (5, 2, 8);
    /// let keys_and_values = vec![0.0f32; tokens * 2 * heads * dim];
    /// let strides = [2 * heads * dim, dim, 1];
    /// let keys = TensorRef::with_strides(&keys_and_values, &[tokens, heads, dim], &strides)?;
    /// # Ok::<(), kivi::Error>(())
    /// ```
    pub fn with_strides<T: Element>(
        data: &'a [T],
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorRef<'a>> {
        let raw = strided::<T>(data.as_ptr().cast_mut().cast(), data.len(), shape, strides)?;
        Ok(TensorRef { raw, memory: PhantomData })
    }

    /// A view of memory on a device.
    ///
    /// # Safety
    /// `data` points to elements of `dtype` on `device`, and every element of the view may be read until the
    /// device has finished each call that got the view, which can be later than the end of `'a`.
    pub unsafe fn from_device_ptr(
        data: *const c_void,
        dtype: Dtype,
        device: Device,
        device_id: i32,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorRef<'a>> {
        let raw = fill(data.cast_mut(), dtype, device, device_id, shape, strides)?;
        Ok(TensorRef { raw, memory: PhantomData })
    }

    /// Over all elements of a buffer, `length` of them.
    pub(crate) fn over_memory<T: Element>(
        memory: &'a DeviceMemory,
        length: usize,
        shape: &[usize],
    ) -> Result<TensorRef<'a>> {
        let raw = dense::<T>(memory.as_ptr(), length, memory.device, memory.device_id, shape)?;
        Ok(TensorRef { raw, memory: PhantomData })
    }

    /// The sizes, outermost first.
    pub fn shape(&self) -> &[i64] {
        &self.raw.shape[..self.raw.rank as usize]
    }

    pub(crate) fn as_raw(&self) -> *const sys::kivi_tensor {
        &self.raw
    }

    pub(crate) fn copy_raw(&self) -> sys::kivi_tensor {
        self.raw
    }
}

impl<'a> TensorMut<'a> {
    /// A view without gaps, the last size innermost. The slice must have as many elements as the shape.
    #[inline]
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<TensorMut<'a>> {
        let raw = dense::<T>(data.as_mut_ptr().cast(), data.len(), Device::Cpu, 0, shape)?;
        Ok(TensorMut { raw, memory: PhantomData })
    }

    /// A view whose element at `index` is `data[sum of index * stride]`, which must be a place of its own:
    /// each stride at least as long as what lies within it. The slice may be longer than the view.
    pub fn with_strides<T: Element>(
        data: &'a mut [T],
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorMut<'a>> {
        let raw = strided::<T>(data.as_mut_ptr().cast(), data.len(), shape, strides)?;
        no_overlap(shape, strides)?;
        Ok(TensorMut { raw, memory: PhantomData })
    }

    /// A view of memory on a device.
    ///
    /// # Safety
    /// As for [`TensorRef::from_device_ptr`]; and nobody else reads or writes the elements in that time.
    pub unsafe fn from_device_ptr(
        data: *mut c_void,
        dtype: Dtype,
        device: Device,
        device_id: i32,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<TensorMut<'a>> {
        let raw = fill(data, dtype, device, device_id, shape, strides)?;
        no_overlap(shape, strides)?;
        Ok(TensorMut { raw, memory: PhantomData })
    }

    /// Over all elements of a buffer, `length` of them.
    pub(crate) fn over_memory<T: Element>(
        memory: &'a DeviceMemory,
        length: usize,
        shape: &[usize],
    ) -> Result<TensorMut<'a>> {
        let raw = dense::<T>(memory.as_ptr(), length, memory.device, memory.device_id, shape)?;
        Ok(TensorMut { raw, memory: PhantomData })
    }

    /// The sizes, outermost first.
    pub fn shape(&self) -> &[i64] {
        &self.raw.shape[..self.raw.rank as usize]
    }

    pub(crate) fn as_raw(&mut self) -> *const sys::kivi_tensor {
        &self.raw
    }

    pub(crate) fn raw_mut(&mut self) -> &mut sys::kivi_tensor {
        &mut self.raw
    }
}

impl fmt::Debug for TensorRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_view(f, "TensorRef", &self.raw)
    }
}

impl fmt::Debug for TensorMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_view(f, "TensorMut", &self.raw)
    }
}

fn write_view(f: &mut fmt::Formatter<'_>, name: &str, raw: &sys::kivi_tensor) -> fmt::Result {
    let rank = raw.rank as usize;
    f.debug_struct(name)
        .field("dtype", &raw.dtype)
        .field("shape", &&raw.shape[..rank])
        .field("stride", &&raw.stride[..rank])
        .finish()
}

/// Largest rank; the smallest is 2.
const RANKS: usize = 4;

/// A view without gaps over all of `length` elements of type `T`.
#[inline]
fn dense<T: Element>(
    data: *mut c_void,
    length: usize,
    device: Device,
    device_id: i32,
    shape: &[usize],
) -> Result<sys::kivi_tensor> {
    let mut raw = blank(data, T::DTYPE, device, device_id, shape.len())?;
    let mut step = Some(1usize); // of an empty tensor too, all strides are positive
    for i in (0..shape.len()).rev() {
        raw.shape[i] = shape[i] as i64;
        raw.stride[i] = step.unwrap_or(0) as i64;
        step = step.and_then(|step| step.checked_mul(shape[i].max(1)));
    }
    match step {
        Some(step) if step <= i64::MAX as usize => {
            let elements = if shape.contains(&0) { 0 } else { step };
            if elements == length {
                Ok(raw)
            } else {
                Err(wrong_length(length, shape, elements))
            }
        }
        _ => Err(too_large(shape)),
    }
}

/// A host view over some of `length` elements of type `T`, refused if it would leave them.
fn strided<T: Element>(
    data: *mut c_void,
    length: usize,
    shape: &[usize],
    strides: &[usize],
) -> Result<sys::kivi_tensor> {
    let raw = fill(data, T::DTYPE, Device::Cpu, 0, shape, strides)?;
    let extent = extent(shape, strides)?;
    if extent <= length {
        return Ok(raw);
    }
    Err(Error::invalid(format!(
        "the slice has {length} elements, shape {shape:?} with strides {strides:?} needs {extent}"
    )))
}

fn fill(
    data: *mut c_void,
    dtype: Dtype,
    device: Device,
    device_id: i32,
    shape: &[usize],
    strides: &[usize],
) -> Result<sys::kivi_tensor> {
    let mut raw = blank(data, dtype, device, device_id, shape.len())?;
    if strides.len() != shape.len() {
        return Err(Error::invalid(format!("{} strides for {} sizes", strides.len(), shape.len())));
    }
    let (size, stride) = (shape[shape.len() - 1], strides[shape.len() - 1]);
    if size > 1 && stride != 1 {
        return Err(Error::invalid(format!("the innermost stride is {stride}, not 1")));
    }
    for i in 0..shape.len() {
        raw.shape[i] = shape[i].try_into().map_err(|_| too_large(shape))?;
        raw.stride[i] = strides[i].try_into().map_err(|_| too_large(shape))?;
    }
    Ok(raw)
}

/// A view of this rank whose sizes and strides are still to be set.
#[inline]
fn blank(
    data: *mut c_void,
    dtype: Dtype,
    device: Device,
    device_id: i32,
    rank: usize,
) -> Result<sys::kivi_tensor> {
    if !(2..=RANKS).contains(&rank) {
        return Err(wrong_rank(rank));
    }
    Ok(sys::kivi_tensor {
        data,
        dtype: dtype as i32,
        device: device as i32,
        device_id,
        rank: rank as i32,
        shape: [0; RANKS],
        stride: [0; RANKS],
    })
}

#[cold]
fn wrong_rank(rank: usize) -> Error {
    Error::invalid(format!("the shape has {rank} sizes, a tensor has 2, 3 or 4"))
}

#[cold]
fn wrong_length(length: usize, shape: &[usize], elements: usize) -> Error {
    Error::invalid(format!("the slice has {length} elements, shape {shape:?} has {elements}"))
}

#[cold]
fn too_large(shape: &[usize]) -> Error {
    Error::invalid(format!("shape {shape:?} with its strides exceeds 64-bit addresses"))
}

/// Elements from the first of the view to one past its last.
fn extent(shape: &[usize], strides: &[usize]) -> Result<usize> {
    if shape.contains(&0) {
        return Ok(0);
    }
    let mut extent = Some(1usize);
    for (&size, &stride) in shape.iter().zip(strides) {
        extent = extent.zip((size - 1).checked_mul(stride)).and_then(|(sum, step)| sum.checked_add(step));
    }
    extent.ok_or_else(|| too_large(shape))
}

/// Refuses views in which two indices could name one place. Taken from the shortest stride to the longest,
/// each must reach past everything that lies within it; a size of 1 takes no step.
fn no_overlap(shape: &[usize], strides: &[usize]) -> Result<()> {
    extent(shape, strides)?; // so that no sum below overflows
    if shape.contains(&0) {
        return Ok(());
    }
    let mut steps = [(usize::MAX, 1); RANKS];
    for (step, dimension) in steps.iter_mut().zip(strides.iter().copied().zip(shape.iter().copied())) {
        *step = dimension;
    }
    steps.sort_unstable();
    let mut within = 0; // distance from the first to the last element of the dimensions so far
    for (stride, size) in steps.into_iter().filter(|&(_, size)| size > 1) {
        if stride <= within {
            return Err(Error::invalid(format!(
                "an output of shape {shape:?} with strides {strides:?} overlaps itself"
            )));
        }
        within += (size - 1) * stride;
    }
    Ok(())
}
