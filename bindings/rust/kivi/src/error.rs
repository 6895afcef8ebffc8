//! What a failed call says: the kind, and the library's sentence.

use std::ffi::{c_char, CStr};
use std::fmt;

use crate::sys;

/// The result of every call that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed: one kind for each status of the C API, and two of the binding's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The caller's mistake: out of range or of the wrong shape.
    InvalidArgument,
    /// Well-formed, but this build or device does not do it.
    Unsupported,
    /// Host or device memory ran out.
    OutOfMemory,
    /// The cache or a sequence is full.
    Capacity,
    /// No driver or no such device.
    NoDevice,
    /// A device call failed; the cache then answers queries only.
    Device,
    /// Not allowed now: conflicting use, or moments that are frozen.
    State,
    /// A blob is damaged.
    Corrupt,
    /// A sound blob of another layout, spec or encoder table.
    Mismatch,
    /// The workspace or the export buffer is too small.
    BufferTooSmall,
    /// A fault of the library.
    Internal,
    /// The library that runs is not one that this crate was made for.
    LibraryVersion,
    /// A status that this crate does not know: the library is newer.
    Unknown(i32),
}

/// A failed call. Nothing has changed, neither the cache nor the outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into() }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Error {
        Error::new(ErrorKind::InvalidArgument, message)
    }

    /// What went wrong, to match on.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// One sentence that names the argument, its value and the limit.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

fn kind_of(status: sys::kivi_status) -> ErrorKind {
    match status {
        sys::KIVI_ERROR_INVALID_ARGUMENT => ErrorKind::InvalidArgument,
        sys::KIVI_ERROR_UNSUPPORTED => ErrorKind::Unsupported,
        sys::KIVI_ERROR_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        sys::KIVI_ERROR_CAPACITY => ErrorKind::Capacity,
        sys::KIVI_ERROR_NO_DEVICE => ErrorKind::NoDevice,
        sys::KIVI_ERROR_DEVICE => ErrorKind::Device,
        sys::KIVI_ERROR_STATE => ErrorKind::State,
        sys::KIVI_ERROR_CORRUPT => ErrorKind::Corrupt,
        sys::KIVI_ERROR_MISMATCH => ErrorKind::Mismatch,
        sys::KIVI_ERROR_BUFFER_TOO_SMALL => ErrorKind::BufferTooSmall,
        sys::KIVI_ERROR_INTERNAL => ErrorKind::Internal,
        other => ErrorKind::Unknown(other),
    }
}

/// Turns a status into a result. Takes the thread's error text at once: the next failing call replaces it.
#[inline]
pub(crate) fn check(status: sys::kivi_status) -> Result<()> {
    if status == sys::KIVI_OK {
        Ok(())
    } else {
        Err(failure(status))
    }
}

#[cold]
fn failure(status: sys::kivi_status) -> Error {
    // SAFETY: never NULL, valid until the next failing call on this thread.
    let sentence = unsafe { text(sys::kivi_last_error()) };
    Error::new(kind_of(status), sentence)
}

/// The C name of a status number, such as that of [`ErrorKind::Unknown`].
///
/// ```
/// assert_eq!(kivi::status_name(-4), "KIVI_ERROR_CAPACITY");
/// ```
pub fn status_name(status: i32) -> String {
    // SAFETY: a static string, whatever the number.
    unsafe { text(sys::kivi_status_name(status)) }
}

/// Copies a C string.
///
/// # Safety
/// `pointer` is a C string that lives during the call.
pub(crate) unsafe fn text(pointer: *const c_char) -> String {
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// The text of a fixed-size field of a C struct, up to its first zero.
pub(crate) fn field_text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_its_own_kind() {
        let kinds: Vec<ErrorKind> = (-11..=-1).map(kind_of).collect();
        for (i, kind) in kinds.iter().enumerate() {
            assert!(!matches!(kind, ErrorKind::Unknown(_)), "status -{}", 11 - i);
            assert!(!kinds[..i].contains(kind), "{kind:?} twice");
        }
        assert_eq!(kind_of(sys::KIVI_ERROR_DEVICE), ErrorKind::Device);
        assert_eq!(kind_of(sys::KIVI_ERROR_INTERNAL), ErrorKind::Internal);
    }

    #[test]
    fn a_status_of_a_newer_library_is_kept() {
        assert_eq!(kind_of(-12), ErrorKind::Unknown(-12));
        assert_eq!(kind_of(3), ErrorKind::Unknown(3));
    }

    #[test]
    fn field_text_ends_at_the_first_zero_or_at_the_end() {
        assert_eq!(field_text(&[b'a' as c_char, b'b' as c_char, 0, b'c' as c_char]), "ab");
        assert_eq!(field_text(&[b'a' as c_char]), "a");
        assert_eq!(field_text(&[]), "");
    }
}
