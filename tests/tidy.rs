//! The tree keeps its own rules: every `unsafe` argued, no long lines or files, nothing left over.

use std::{
    fs,
    path::{Path, PathBuf},
};

const LINE_CHARS_MAX: usize = 120;
const FILE_LINES_MAX: usize = 700;

#[test]
fn the_tree_is_tidy() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "cli", "tests", "benches", "examples", "fuzz", "python"] {
        collect(&root.join(folder), &mut files);
    }
    assert!(files.len() > 40, "only {} files found", files.len());
    let complaints: Vec<String> = files
        .iter()
        .flat_map(|path| {
            let name = path.strip_prefix(root).expect("found below the root").display().to_string();
            check(&name, &fs::read_to_string(path).expect("a text file"))
        })
        .collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.expect("a readable folder").path()) {
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            collect(&path, files);
        } else if path.extension().is_some_and(|suffix| suffix == "rs") {
            files.push(path);
        }
    }
}

fn check(name: &str, text: &str) -> Vec<String> {
    let library = name.starts_with("src/");
    let product = library || name.starts_with("cli/src/");
    let mut complaints = Vec::new();
    let mut tests_began = false;
    let lines: Vec<&str> = text.lines().collect();
    if library && lines.len() > FILE_LINES_MAX {
        complaints.push(format!("{name}: {} lines, at most {FILE_LINES_MAX}", lines.len()));
    }
    for (i, line) in lines.iter().enumerate() {
        let mut complain = |what: &str| complaints.push(format!("{name}:{}: {what}", i + 1));
        let code = line.split("//").next().unwrap_or(line);
        tests_began |= line.trim_start().starts_with("#[cfg(test)]");
        if line.chars().count() > LINE_CHARS_MAX && !line.contains("://") {
            complain("a line over 120 characters");
        }
        if opens_unsafe(code) && !argued(&lines, i) {
            complain("unsafe without SAFETY");
        }
        if [concat!("db", "g!("), concat!("to", "do!("), concat!("unimple", "mented!(")]
            .iter()
            .any(|m| code.contains(m))
        {
            complain("left over");
        }
        if product && !tests_began && code.contains(concat!(".unw", "rap()")) {
            complain("unwrap outside tests");
        }
        if library && !tests_began && code.contains(concat!("print", "ln!(")) {
            complain("a library does not print");
        }
    }
    complaints
}

/// True where a line begins a block or an impl that the compiler cannot check.
fn opens_unsafe(code: &str) -> bool {
    [concat!("uns", "afe {"), concat!("uns", "afe impl")].iter().any(|word| code.contains(word))
}

/// True where the comment block above the statement says SAFETY.
fn argued(lines: &[&str], at: usize) -> bool {
    lines[..=at].iter().rev().take(9).any(|line| line.contains("SAFETY:"))
}

#[test]
fn the_check_finds_what_it_is_for() {
    let bad = |name: &str, text: &str| check(name, text).len();
    let unsafe_block = concat!("let x = uns", "afe { y() };");
    assert_eq!(bad("src/a.rs", unsafe_block), 1);
    assert_eq!(bad("src/a.rs", &format!("// SAFETY: because\n{unsafe_block}")), 0);
    assert_eq!(bad("src/a.rs", &"x".repeat(121)), 1);
    assert_eq!(bad("src/a.rs", &"x\n".repeat(701)), 1);
    assert_eq!(bad("tests/a.rs", &"x\n".repeat(701)), 0);
    assert_eq!(bad("src/a.rs", concat!("a.unw", "rap();")), 1);
    assert_eq!(bad("src/a.rs", concat!("#[cfg(test)]\na.unw", "rap();")), 0);
    assert_eq!(bad("cli/src/a.rs", concat!("print", "ln!(1);")), 0);
    assert_eq!(bad("src/a.rs", concat!("print", "ln!(1);")), 1);
    assert_eq!(bad("benches/a.rs", concat!("to", "do!()")), 1);
}
