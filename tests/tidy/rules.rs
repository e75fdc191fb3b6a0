//! The rules, as functions from a text to what is wrong in it.

use std::{
    fmt,
    path::{Path, PathBuf},
};

const LINE_CHARS_MAX: usize = 120;
const LINES_MAX: usize = 400;
/// Begins the line with the reason why a file is longer.
const LONG: &str = "// Over 400 lines: ";

/// A place that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    file: PathBuf,
    line: usize,
    what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.what)
    }
}

/// Rules for Rust files: what rustfmt leaves as it is.
pub fn check_rust(file: &Path, text: &str) -> Vec<Finding> {
    let finding = |line: usize, what: String| Finding { file: file.into(), line: line + 1, what };
    let long = |(_, line): &(usize, &str)| {
        line.chars().count() > LINE_CHARS_MAX && !line.contains("https://") && !line.contains("http://")
    };
    let told = |(at, line): (usize, &str)| {
        finding(at, format!("{} characters, expected {LINE_CHARS_MAX} at most", line.chars().count()))
    };
    let mut findings: Vec<Finding> = text.lines().enumerate().filter(long).map(told).collect();
    let lines = text.lines().count();
    if lines > LINES_MAX && !text.lines().any(|line| line.len() > LONG.len() && line.starts_with(LONG)) {
        let what = format!("{lines} lines in one file, expected {LINES_MAX} at most, or `{LONG}` and a reason");
        findings.push(finding(LINES_MAX, what));
    }
    findings
}

/// The code of a file: without lines of comment, and up to the tests at its end.
pub fn code(text: &str) -> String {
    let end = text.find("\n#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..end].split_inclusive('\n').filter(|line| !line.trim_start().starts_with("//")).collect()
}

/// Rules for every text file: nothing that is true on one machine only.
pub fn check_text(file: &Path, text: &str) -> Vec<Finding> {
    // In pieces, so that this file passes its own rule.
    let folders = [concat!("/wo", "rk"), concat!("/ro", "ot")];
    let hosts =
        [concat!(".inter", "nal/"), concat!(".svc.clus", "ter"), concat!("arti", "factory"), concat!("nex", "us.")];
    let mut findings = Vec::new();
    for (line, text) in text.lines().enumerate() {
        for folder in folders {
            if names_folder(text, folder) {
                let what = format!("found a path under {folder}, expected one that exists on every machine");
                findings.push(Finding { file: file.into(), line: line + 1, what });
            }
        }
        for host in hosts {
            if text.contains(host) {
                let what = format!("found a host of a private network ({host}), expected public ones");
                findings.push(Finding { file: file.into(), line: line + 1, what });
            }
        }
    }
    findings
}

/// True where `folder` stands in `text` as the start of an absolute path.
fn names_folder(text: &str, folder: &str) -> bool {
    text.match_indices(folder).any(|(at, _)| {
        let part_of_path = |c: char| c.is_alphanumeric() || "._-/~})*".contains(c);
        let before = text[..at].chars().next_back().is_some_and(part_of_path);
        let after = text[at + folder.len()..].chars().next();
        !before && !after.is_some_and(|c| c.is_alphanumeric() || "._-".contains(c))
    })
}

/// Rules for `Cargo.lock`: packages of crates.io, or of this tree.
pub fn check_lock(file: &Path, text: &str) -> Vec<Finding> {
    let expected = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
    let wrong = |(_, line): &(usize, &str)| line.starts_with("source = ") && *line != expected;
    let finding = |(line, text)| Finding {
        file: file.into(),
        line: line + 1,
        what: format!("found {text}, expected {expected}"),
    };
    text.lines().enumerate().filter(wrong).map(finding).collect()
}

#[test]
fn what_breaks_a_rule_is_found() {
    let long = format!("// {}\n", "x".repeat(LINE_CHARS_MAX));
    assert_eq!(check_rust("a.rs".as_ref(), &long).len(), 1);
    let lines = "\n".repeat(LINES_MAX + 1);
    assert_eq!(check_rust("a.rs".as_ref(), &lines).len(), 1);
    assert_eq!(check_rust("a.rs".as_ref(), &format!("{LONG}one table.{lines}")), []);
    let found = |text: &str| check_text("a.md".as_ref(), text).len();
    let folder = concat!("/wo", "rk");
    for text in [format!("cd {folder}"), format!("`{folder}/x`"), format!("({folder})"), format!("x={folder}:y")] {
        assert_eq!(found(&text), 1, "{text}");
    }
    for text in ["/workspace", "./work/x", "my/work/x", "/work.d", "https://a.b/work/x", "$DIR/root/x"] {
        assert_eq!(found(text), 0, "{text}");
    }
    assert_eq!(found(concat!("https://crates", ".inter", "nal/x")), 1);
    let lock = "source = \"registry+https://github.com/rust-lang/crates.io-index\"\nsource = \"git+https://a.b/x\"";
    assert_eq!(check_lock("Cargo.lock".as_ref(), lock).len(), 1);
}
