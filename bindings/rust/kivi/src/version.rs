//! The version of the library that runs, checked once before anything else is asked of it.

use std::fmt;
use std::sync::OnceLock;

use crate::error::{text, Error, ErrorKind, Result};
use crate::sys;

/// A version of libkivi.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Raised when old programs no longer run; 0 until the first stable release.
    pub major: i32,
    /// Raised when something is added; before 1.0 also when old programs no longer run.
    pub minor: i32,
    /// Raised when something is repaired.
    pub patch: i32,
}

impl Version {
    /// The version whose header this crate was made from: the oldest one that it accepts.
    pub const BINDINGS: Version = Version {
        major: sys::KIVI_VERSION_MAJOR as i32,
        minor: sys::KIVI_VERSION_MINOR as i32,
        patch: sys::KIVI_VERSION_PATCH as i32,
    };

    fn from_number(number: i32) -> Version {
        Version { major: number / 10000, minor: number / 100 % 100, patch: number % 100 }
    }

    /// Whether a program made for `self` runs with the library `library`: one that is as new, of the same
    /// major version, and before 1.0 of the same minor version.
    pub fn runs_with(self, library: Version) -> bool {
        let same_abi = library.major == self.major && (self.major > 0 || library.minor == self.minor);
        same_abi && library >= self
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The version of the library that runs.
pub fn version() -> Version {
    // SAFETY: no arguments, no state.
    Version::from_number(unsafe { sys::kivi_version() })
}

/// One line about the library's build: compiler, instruction sets, CUDA architectures or "no CUDA".
pub fn build_info() -> String {
    // SAFETY: a static string.
    unsafe { text(sys::kivi_build_info()) }
}

/// Refuses a library that this crate was not made for. Called wherever a program can enter the library; what
/// needs a cache need not ask again.
pub(crate) fn check_library() -> Result<()> {
    static FITS: OnceLock<bool> = OnceLock::new();
    if *FITS.get_or_init(|| Version::BINDINGS.runs_with(version())) {
        return Ok(());
    }
    let message = format!(
        "libkivi is version {}, this crate was made for {} and needs that or a newer one with the same ABI",
        version(),
        Version::BINDINGS
    );
    Err(Error::new(ErrorKind::LibraryVersion, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits(bindings: i32, library: i32) -> bool {
        Version::from_number(bindings).runs_with(Version::from_number(library))
    }

    #[test]
    fn numbers_are_taken_apart() {
        assert_eq!(Version::from_number(10203), Version { major: 1, minor: 2, patch: 3 });
        assert_eq!(Version::from_number(10203).to_string(), "1.2.3");
    }

    #[test]
    fn before_1_0_a_minor_version_is_another_abi() {
        assert!(fits(101, 101));
        assert!(fits(101, 102));
        assert!(!fits(101, 100));
        assert!(!fits(101, 200));
        assert!(!fits(201, 199));
        assert!(!fits(101, 10101));
    }

    #[test]
    fn from_1_0_newer_minor_versions_fit() {
        assert!(fits(10200, 10200));
        assert!(fits(10200, 10300));
        assert!(!fits(10200, 10199));
        assert!(!fits(10200, 20200));
    }
}
