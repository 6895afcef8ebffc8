//! Finds libkivi and links it. In this order:
//!
//! 1. `DOCS_RS` set: nothing is linked, the documentation needs no library.
//! 2. `KIVI_LIB_DIR` names the folder of libkivi, `KIVI_INCLUDE_DIR` that of `kivi/kivi.h` (if it is not
//!    `../include` from there).
//! 3. `KIVI_BUILD_FROM_SOURCE=1` builds it with cmake from the source tree around this package, or from
//!    `KIVI_SOURCE_DIR`; without CUDA unless `KIVI_WITH_CUDA=1`.
//! 4. `pkg-config` knows a version that fits.
//!
//! Linking is dynamic. Dependent packages get the metadata `lib`, `include` and `root`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// First version that fits, and the first that no longer does: before 1.0 every minor version may break.
const OLDEST: [u32; 3] = [0, 1, 0];
const BREAKS: [u32; 3] = [0, 2, 0];

const VARIABLES: [&str; 8] = [
    "DOCS_RS",
    "KIVI_LIB_DIR",
    "KIVI_INCLUDE_DIR",
    "KIVI_BUILD_FROM_SOURCE",
    "KIVI_SOURCE_DIR",
    "KIVI_WITH_CUDA",
    "PKG_CONFIG",
    "PKG_CONFIG_PATH",
];

struct Library {
    lib: PathBuf,
    include: PathBuf,
}

fn main() {
    for variable in VARIABLES {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    if env::var_os("DOCS_RS").is_some() {
        return;
    }
    match find().and_then(|library| check_header(&library.include).map(|()| library)) {
        Ok(library) => announce(&library),
        Err(reason) => {
            eprintln!("kivi-sys: {reason}");
            std::process::exit(1);
        }
    }
}

fn find() -> Result<Library, String> {
    if let Some(lib) = folder("KIVI_LIB_DIR")? {
        return given(lib);
    }
    if env::var("KIVI_BUILD_FROM_SOURCE").is_ok_and(|value| value == "1") {
        return built_from_source();
    }
    pkg_config().map_err(|reason| {
        format!(
            "libkivi from {} to below {} was not found ({reason}). Three ways to name it:\n\
             \x20 1. KIVI_LIB_DIR=/prefix/lib, with KIVI_INCLUDE_DIR=/prefix/include if it stands elsewhere\n\
             \x20 2. PKG_CONFIG_PATH=/prefix/lib/pkgconfig, where kivi.pc is\n\
             \x20 3. KIVI_BUILD_FROM_SOURCE=1, which needs cmake and a C++ compiler, with KIVI_SOURCE_DIR \
             outside the source tree",
            dotted(OLDEST),
            dotted(BREAKS)
        )
    })
}

/// The folder that a variable names, absolute; an error if it is none.
fn folder(variable: &str) -> Result<Option<PathBuf>, String> {
    match env::var_os(variable) {
        None => Ok(None),
        Some(path) => fs::canonicalize(&path)
            .ok()
            .filter(|found| found.is_dir())
            .map(Some)
            .ok_or(format!("{variable} is {path:?}, which is not a folder")),
    }
}

fn given(lib: PathBuf) -> Result<Library, String> {
    let names = ["libkivi.so", "libkivi.dylib", "kivi.lib"];
    if !names.iter().any(|name| lib.join(name).exists()) {
        return Err(format!("KIVI_LIB_DIR is {lib:?}, which holds none of {}", names.join(", ")));
    }
    let include = match folder("KIVI_INCLUDE_DIR")? {
        Some(include) => include,
        None => lib.join("../include"),
    };
    Ok(Library { lib, include })
}

fn built_from_source() -> Result<Library, String> {
    let source = match folder("KIVI_SOURCE_DIR")? {
        Some(source) => source,
        None => PathBuf::from(variable("CARGO_MANIFEST_DIR")?).join("../../.."),
    };
    let header = source.join("include/kivi/kivi.h");
    if !header.exists() || !source.join("CMakeLists.txt").exists() {
        return Err(format!("{source:?} is not the source tree of libkivi: set KIVI_SOURCE_DIR"));
    }
    for part in ["CMakeLists.txt", "cmake", "core", "include"] {
        println!("cargo:rerun-if-changed={}", source.join(part).display());
    }
    let out = PathBuf::from(variable("OUT_DIR")?);
    let (build, prefix) = (out.join("build"), out.join("prefix"));
    let cuda = if env::var("KIVI_WITH_CUDA").is_ok_and(|value| value == "1") { "ON" } else { "OFF" };
    run(Command::new("cmake")
        .arg("-S")
        .arg(&source)
        .arg("-B")
        .arg(&build)
        .arg(format!("-DCMAKE_INSTALL_PREFIX={}", prefix.display()))
        .args(["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_INSTALL_LIBDIR=lib"])
        .args(["-DKIVI_BUILD_TESTS=OFF", "-DKIVI_BUILD_EXAMPLES=OFF", "-DKIVI_BUILD_BENCH=OFF"])
        .arg(format!("-DKIVI_CUDA={cuda}")))?;
    run(Command::new("cmake").arg("--build").arg(&build).args(["--parallel", &variable("NUM_JOBS")?]))?;
    run(Command::new("cmake").arg("--install").arg(&build))?;
    Ok(Library { lib: prefix.join("lib"), include: prefix.join("include") })
}

fn pkg_config() -> Result<Library, String> {
    let range = [format!("kivi >= {}", dotted(OLDEST)), format!("kivi < {}", dotted(BREAKS))];
    let program = env::var_os("PKG_CONFIG").unwrap_or("pkg-config".into());
    run(Command::new(&program).args(["--print-errors", "--exists"]).args(range))?;
    let ask = |name: &str| run(Command::new(&program).arg(format!("--variable={name}")).arg("kivi"));
    Ok(Library { lib: ask("libdir")?.into(), include: ask("includedir")?.into() })
}

/// Refuses a header whose version does not fit, so that a wrong folder shows here and not at run time.
fn check_header(include: &Path) -> Result<(), String> {
    let header = include.join("kivi/kivi.h");
    println!("cargo:rerun-if-changed={}", header.display());
    let text = fs::read_to_string(&header)
        .map_err(|error| format!("{header:?} cannot be read ({error}): set KIVI_INCLUDE_DIR"))?;
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("#define {name} ")));
        line.and_then(|rest| rest.trim().parse().ok()).ok_or(format!("{header:?} does not define {name}"))
    };
    let version =
        [number("KIVI_VERSION_MAJOR")?, number("KIVI_VERSION_MINOR")?, number("KIVI_VERSION_PATCH")?];
    if OLDEST <= version && version < BREAKS {
        return Ok(());
    }
    Err(format!(
        "{header:?} is of version {}; from {} to below {} fits",
        dotted(version),
        dotted(OLDEST),
        dotted(BREAKS)
    ))
}

fn announce(library: &Library) {
    println!("cargo:rustc-link-search=native={}", library.lib.display());
    println!("cargo:rustc-link-lib=dylib=kivi");
    println!("cargo:lib={}", library.lib.display());
    println!("cargo:include={}", library.include.display());
    println!("cargo:root={}", library.lib.join("..").display());
}

fn run(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("{name} does not run: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name} failed: {}", String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|_| format!("{name} is not set: run by cargo only"))
}

fn dotted(version: [u32; 3]) -> String {
    format!("{}.{}.{}", version[0], version[1], version[2])
}
