//! Writes the Rust declarations of a C header to standard output: `generator path/to/kivi.h`.

use bindgen::callbacks::ParseCallbacks;
use bindgen::{EnumVariation, Formatter, RustEdition, RustTarget};

/// Keeps the header's drawings and `[sizes]` as they stand: plain text to rustdoc, not Markdown.
#[derive(Debug)]
struct CommentsAsText;

impl ParseCallbacks for CommentsAsText {
    fn process_comment(&self, comment: &str) -> Option<String> {
        let lines: Vec<&str> = comment.lines().map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
        let text = lines.join("\n");
        if text.starts_with("----") {
            return Some(String::new()); // a heading between sections, not about the item below it
        }
        Some(format!("```text\n{}\n```", text.trim()))
    }
}

fn main() {
    let Some(header) = std::env::args().nth(1) else {
        eprintln!("usage: generator path/to/kivi.h");
        std::process::exit(2);
    };
    let oldest = RustTarget::stable(80, 0).expect("Rust 1.80 is known to bindgen");
    let bindings = bindgen::Builder::default()
        .header(header)
        .clang_arg("-fparse-all-comments")
        .allowlist_function("kivi_.*")
        .allowlist_type("kivi_.*")
        .allowlist_var("KIVI_.*")
        .blocklist_item("KIVI_API")
        // A Rust enum holding a number that it does not know is undefined behaviour, and a newer library may
        // return such numbers: constants.
        .default_enum_style(EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .layout_tests(true)
        .use_core()
        .rust_target(oldest)
        .rust_edition(RustEdition::Edition2021)
        .parse_callbacks(Box::new(CommentsAsText))
        .formatter(Formatter::Rustfmt)
        .generate();
    match bindings {
        Ok(bindings) => print!("{bindings}"),
        Err(error) => {
            eprintln!("generator: {error}");
            std::process::exit(1);
        }
    }
}
