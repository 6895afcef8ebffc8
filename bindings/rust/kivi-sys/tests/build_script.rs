//! The build script, run as the program that it is: each way of finding the library, and what it says when
//! there is none. Needs cmake and pkg-config beside rustc.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The compiled build script.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("build_script");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("build.rs");
        let made = Command::new(env::var_os("RUSTC").unwrap_or("rustc".into()))
            .args(["--edition", "2021", "-o"])
            .args([&program, &source])
            .status();
        assert!(made.unwrap().success());
        program
    })
}

/// An empty folder of one test.
fn folder(test: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// An installed prefix, as far as a build script looks.
fn prefix(root: &Path, version: [u32; 3]) {
    let [major, minor, patch] = version;
    write(&root.join("lib/libkivi.so"), "");
    write(
        &root.join("include/kivi/kivi.h"),
        &format!(
            "#define KIVI_VERSION_MAJOR {major}\n#define KIVI_VERSION_MINOR {minor}\n\
             #define KIVI_VERSION_PATCH {patch}\n"
        ),
    );
    let pc = format!(
        "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib\nincludedir=${{prefix}}/include\n\
         Name: kivi\nDescription: test\nVersion: {major}.{minor}.{patch}\nLibs: -L${{libdir}} -lkivi\n"
    );
    write(&root.join("lib/pkgconfig/kivi.pc"), &pc);
}

/// Runs it with these variables and no others that it reads: what it told cargo, or its complaint.
fn run(test: &Path, variables: &[(&str, &Path)]) -> Result<String, String> {
    let mut command = Command::new(program());
    for name in ["DOCS_RS", "KIVI_LIB_DIR", "KIVI_INCLUDE_DIR", "KIVI_BUILD_FROM_SOURCE", "KIVI_SOURCE_DIR"] {
        command.env_remove(name);
    }
    let output = command
        .env("PKG_CONFIG_LIBDIR", test.join("nowhere"))
        .env_remove("PKG_CONFIG_PATH")
        .env("CARGO_MANIFEST_DIR", test)
        .env("OUT_DIR", test.join("out"))
        .env("NUM_JOBS", "2")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let (said, complaint) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    if output.status.success() {
        Ok(said)
    } else {
        assert!(!complaint.contains("panicked"), "{complaint}");
        Err(complaint)
    }
}

fn assert_links(said: &str, lib: &Path) {
    let lib = lib.canonicalize().unwrap();
    for line in ["rustc-link-search=native", "lib"] {
        let start = format!("cargo:{line}=");
        let named = said.lines().find_map(|line| line.strip_prefix(&start)).expect(&start);
        assert_eq!(Path::new(named).canonicalize().unwrap(), lib);
    }
    assert!(said.contains("cargo:rustc-link-lib=dylib=kivi\n"));
    assert!(said.contains("cargo:include=") && said.contains("cargo:root="));
    assert!(said.contains("cargo:rerun-if-env-changed=KIVI_LIB_DIR\n"));
}

#[test]
fn docs_rs_links_nothing() {
    let test = folder("docs_rs");
    let said = run(&test, &[("DOCS_RS", Path::new("1"))]).unwrap();
    assert!(!said.contains("link"), "{said}");
}

#[test]
fn without_a_library_the_three_ways_are_listed() {
    let complaint = run(&folder("none"), &[]).unwrap_err();
    for way in ["KIVI_LIB_DIR=", "PKG_CONFIG_PATH=", "KIVI_BUILD_FROM_SOURCE=1"] {
        assert!(complaint.contains(way), "{complaint}");
    }
}

#[test]
fn folders_that_are_named() {
    let test = folder("named");
    prefix(&test, [0, 1, 7]);
    let lib = test.join("lib");
    assert_links(&run(&test, &[("KIVI_LIB_DIR", &lib)]).unwrap(), &lib);
    let elsewhere = test.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::rename(test.join("include"), elsewhere.join("include")).unwrap();
    assert!(run(&test, &[("KIVI_LIB_DIR", &lib)]).unwrap_err().contains("set KIVI_INCLUDE_DIR"));
    let include = elsewhere.join("include");
    assert_links(&run(&test, &[("KIVI_LIB_DIR", &lib), ("KIVI_INCLUDE_DIR", &include)]).unwrap(), &lib);
    let complaint = run(&test, &[("KIVI_LIB_DIR", &include)]).unwrap_err();
    assert!(complaint.contains("holds none of libkivi.so"), "{complaint}");
    let complaint = run(&test, &[("KIVI_LIB_DIR", &test.join("absent"))]).unwrap_err();
    assert!(complaint.contains("KIVI_LIB_DIR is") && complaint.contains("not a folder"), "{complaint}");
}

#[test]
fn headers_of_another_abi_are_refused() {
    for (version, fits) in [([0, 1, 0], true), ([0, 1, 9], true), ([0, 0, 9], false), ([0, 2, 0], false)] {
        let test = folder("another_abi");
        prefix(&test, version);
        let outcome = run(&test, &[("KIVI_LIB_DIR", &test.join("lib"))]);
        assert_eq!(outcome.is_ok(), fits, "{version:?}");
        if let Err(complaint) = outcome {
            assert!(complaint.contains("from 0.1.0 to below 0.2.0 fits"), "{complaint}");
        }
    }
}

#[test]
fn pkg_config_inside_the_range() {
    for (version, fits) in [([0, 1, 3], true), ([0, 2, 0], false)] {
        let test = folder("pkg_config");
        prefix(&test, version);
        let outcome = run(&test, &[("PKG_CONFIG_PATH", &test.join("lib/pkgconfig"))]);
        match &outcome {
            Ok(said) => assert_links(said, &test.join("lib")),
            Err(complaint) => assert!(complaint.contains("Three ways"), "{complaint}"),
        }
        assert_eq!(outcome.is_ok(), fits, "{version:?}");
    }
    let test = folder("no_pkg_config");
    let complaint = run(&test, &[("PKG_CONFIG", &test.join("absent"))]).unwrap_err();
    assert!(complaint.contains("does not run") && complaint.contains("Three ways"), "{complaint}");
}

#[test]
fn a_source_tree_is_configured_built_and_installed() {
    let test = folder("source");
    let source = test.join("source");
    prefix(&source, [0, 1, 0]);
    write(
        &source.join("CMakeLists.txt"),
        "cmake_minimum_required(VERSION 3.24)\nproject(kivi LANGUAGES NONE)\n\
         add_custom_target(library ALL\n  \
         COMMAND ${CMAKE_COMMAND} -E copy ${PROJECT_SOURCE_DIR}/lib/libkivi.so .)\n\
         install(FILES ${PROJECT_BINARY_DIR}/libkivi.so DESTINATION ${CMAKE_INSTALL_LIBDIR})\n\
         install(DIRECTORY include/kivi DESTINATION include)\n\
         if(KIVI_BUILD_TESTS OR KIVI_CUDA)\n  message(FATAL_ERROR \"not asked for\")\nendif()\n",
    );
    let one = Path::new("1");
    let said = run(&test, &[("KIVI_BUILD_FROM_SOURCE", one), ("KIVI_SOURCE_DIR", &source)]).unwrap();
    assert_links(&said, &test.join("out/prefix/lib"));
    assert!(said.contains("cargo:rerun-if-changed="));
    let complaint = run(&test, &[("KIVI_BUILD_FROM_SOURCE", one)]).unwrap_err();
    assert!(complaint.contains("set KIVI_SOURCE_DIR"), "{complaint}");
    let cuda = [("KIVI_BUILD_FROM_SOURCE", one), ("KIVI_SOURCE_DIR", &source), ("KIVI_WITH_CUDA", one)];
    assert!(run(&test, &cuda).unwrap_err().contains("not asked for"));
}
