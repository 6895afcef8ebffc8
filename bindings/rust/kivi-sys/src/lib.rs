//! The C API of libkivi, as `bindgen` reads it from `include/kivi/kivi.h`; the comments are the header's own.
//! Programs use the safe crate `kivi`; this one is for what that does not cover.
//!
//! How the build script finds the library stands at the top of `build.rs`. Packages that depend on this one
//! directly get `DEP_KIVI_LIB`, `DEP_KIVI_INCLUDE` and `DEP_KIVI_ROOT` in their build scripts.
#![no_std]
#![allow(non_camel_case_types)]

include!("bindings.rs");
