//! The pages under docs/: none is longer than its reader's time, and each file that one names is there.

use std::path::{Path, PathBuf};

/// Pages that grow with every change, and their largest sizes in KiB. What comes to one takes something away.
pub const KIB_MAX: [(&str, usize); 5] =
    [("design.md", 24), ("gpu.md", 12), ("performance.md", 22), ("policies.md", 7), ("testing.md", 16)];

/// Ends of names of files that this tree may have.
const KINDS: [&str; 6] = [".rs", ".py", ".c", ".cu", ".csv", ".ptx"];

/// What is wrong with the length of a page.
pub fn check_length(name: &str, page: &str) -> Option<String> {
    let (_, max) = KIB_MAX.into_iter().find(|&(limited, _)| limited == name)?;
    let (found, max) = (page.len(), max << 10);
    (found > max).then(|| format!("docs/{name}: found {found} bytes, expected {max} at most: shorten it"))
}

/// Names of files, with a folder, that a page has as code and that end no path of the tree.
pub fn missing<'a>(page: &'a str, tree: &[PathBuf]) -> Vec<&'a str> {
    let code = page.split('`').skip(1).step_by(2).flat_map(str::split_whitespace);
    let is_name = |word: &&str| {
        let plain = |char: char| char.is_ascii_alphanumeric() || "_-./".contains(char);
        word.contains('/')
            && !word.starts_with('/')
            && KINDS.iter().any(|kind| word.ends_with(kind))
            && word.chars().all(plain)
    };
    code.filter(is_name).filter(|name| !tree.iter().any(|file| file.ends_with(Path::new(name)))).collect()
}

/// Lines of a page's Rust that rustdoc would hide, and that every other reader sees and copies.
pub fn hidden(page: &str) -> Vec<&str> {
    let is_rust = |block: &&str| block.starts_with("rust");
    let blocks = page.split("```").skip(1).step_by(2).filter(is_rust);
    blocks.flat_map(str::lines).filter(|line| matches!(line.trim().as_bytes(), [b'#'] | [b'#', b' ', ..])).collect()
}

#[test]
fn a_line_that_only_rustdoc_hides_is_found() {
    let page = "# Page\n```rust,no_run\n#[test]\n  # async fn run() {\n#\n```\n```sh\n# a remark\n```\n";
    assert_eq!(hidden(page), ["  # async fn run() {", "#"]);
}

#[test]
fn a_page_that_is_too_long_or_names_no_file_is_found() {
    assert_eq!(check_length("policies.md", &"x".repeat(7 << 10)), None);
    assert!(check_length("policies.md", &"x".repeat((7 << 10) + 1)).is_some_and(|text| text.contains("7169 bytes")));
    assert_eq!(check_length("vllm.md", &"x".repeat(1 << 20)), None);
    let tree = [PathBuf::from("src/state/lock.rs"), PathBuf::from("tests/process/fork.rs")];
    let page =
        "`state/lock.rs` and `python process/fork.rs --all`, `fork.rs`, `/mnt/a.rs`; `state/gone.rs` `ate/lock.rs`";
    assert_eq!(missing(page, &tree), ["state/gone.rs", "ate/lock.rs"]);
}
