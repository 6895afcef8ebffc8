//! A library of another version: the one before is refused with a clear error, the next one runs. The test
//! runs itself with a stand-in for `kivi_version` loaded before the library.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use kivi::{Config, ErrorKind, Version};

const CHILD: &str = "KIVI_TEST_VERSION_CHILD";

#[test]
fn this_library_fits() {
    if env::var_os(CHILD).is_some() {
        return;
    }
    assert!(Version::BINDINGS.runs_with(kivi::version()));
    assert!(kivi::build_info().len() > 3);
    Config::new().unwrap();
}

/// What the child runs: says how the first call went.
#[test]
fn report_of_the_child() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    match Config::new() {
        Ok(_) => println!("accepted {}", kivi::version()),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::LibraryVersion);
            let others = [
                kivi::presets().err(),
                kivi::device_count(kivi::Device::Cpu).err(),
                Config::preset("k3v2").err(),
            ];
            assert!(others.iter().flatten().all(|other| other.kind() == ErrorKind::LibraryVersion));
            println!("refused: {error}");
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn fault_115_the_version_before_is_refused_and_the_next_one_runs() {
    let mine = Version::BINDINGS;
    let number = |v: Version| v.major * 10000 + v.minor * 100 + v.patch;
    let before = number(mine) - 1;
    let next = number(mine) + 1;
    let said = with_library_version(before);
    assert!(said.contains("refused: libkivi is version") && said.contains(&mine.to_string()), "{said}");
    let said = with_library_version(next);
    assert!(said.contains("accepted"), "{said}");
}

#[cfg(target_os = "linux")]
fn with_library_version(version: i32) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (source, library) = (folder.join(format!("v{version}.rs")), folder.join(format!("libv{version}.so")));
    std::fs::write(
        &source,
        format!("#[no_mangle] pub extern \"C\" fn kivi_version() -> i32 {{ {version} }}"),
    )
    .unwrap();
    let rustc = env::var_os("RUSTC").unwrap_or("rustc".into());
    let made = Command::new(rustc)
        .args(["--crate-type", "cdylib", "-o"])
        .arg(&library)
        .arg(&source)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "report_of_the_child", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_PRELOAD", &library)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    said
}
