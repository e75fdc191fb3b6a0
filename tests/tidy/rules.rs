//! The rules, as functions from a text to what is wrong in it.

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
};

use crate::mask::mask;

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

/// Rules for Rust files. `test_code`: the whole file is compiled for tests only.
pub fn check_rust(file: &Path, text: &str, test_code: bool) -> Vec<Finding> {
    let masked = mask(text);
    let (raw, code): (Vec<&str>, Vec<&str>) = (text.lines().collect(), masked.lines().collect());
    let in_tests = test_lines(&masked);
    let library = ["src", "doctor/src", "service/src"].iter().any(|folder| file.starts_with(folder));
    let shipped = library || ["workbench/src", "cli/src", "files/src"].iter().any(|folder| file.starts_with(folder));
    let mut findings = Vec::new();
    let mut find = |line: usize, what: String| findings.push(Finding { file: file.into(), line: line + 1, what });

    for (line, (&raw_line, &code_line)) in raw.iter().zip(&code).enumerate() {
        let chars = raw_line.chars().count();
        if chars > LINE_CHARS_MAX && !raw_line.contains("https://") && !raw_line.contains("http://") {
            find(line, format!("{chars} characters, expected {LINE_CHARS_MAX} at most"));
        }
        for name in ["dbg!", "todo!", "unimplemented!"] {
            if has_word(code_line, name) {
                find(line, format!("found {name}, expected finished code"));
            }
        }
        let tests = test_code || in_tests.contains(&line);
        for name in ["println!", "eprintln!", "print!", "eprint!"] {
            if library && !tests && has_word(code_line, name) {
                find(line, format!("found {name} in the library, expected tracing or an error"));
            }
        }
        if shipped && !tests && code_line.contains(".unwrap()") {
            find(line, "found .unwrap(), expected an error or expect(\"why it holds\")".into());
        }
        if let Some(what) = undocumented_unsafe(&raw, &code, line) {
            find(line, what);
        }
    }
    if raw.len() > LINES_MAX && !raw.iter().any(|line| line.len() > LONG.len() && line.starts_with(LONG)) {
        let found = raw.len();
        find(LINES_MAX, format!("{found} lines in one file, expected {LINES_MAX} at most, or `{LONG}` and a reason"));
    }
    findings
}

/// Says what is missing where `line` has an `unsafe` without its reason directly above.
fn undocumented_unsafe(raw: &[&str], code: &[&str], line: usize) -> Option<String> {
    let mut rest = code[line];
    while let Some(at) = find_word(rest, "unsafe") {
        let after = rest[at + "unsafe".len()..].trim_start();
        let next = if after.is_empty() { code.get(line + 1).map_or("", |next| next.trim_start()) } else { after };
        let comment = comment_above(raw, code, line);
        let reason = comment.contains("// SAFETY:");
        let contract = comment.contains("# Safety") || reason;
        if next.starts_with('{') && !reason {
            return Some("found an unsafe block, expected `// SAFETY:` directly above".into());
        }
        if (next.starts_with("impl") || is_foreign_block(next)) && !reason {
            return Some("found an unsafe impl or extern block, expected `// SAFETY:` directly above".into());
        }
        if (next.starts_with("trait") || declares_fn(next)) && !contract && !implements_trait(code, line) {
            return Some("found an unsafe fn or trait, expected `# Safety` in its docs".into());
        }
        rest = &rest[at + "unsafe".len()..];
    }
    None
}

/// True for a method of `impl Trait for Type`, whose contract is in the trait's docs. Relies on rustfmt's indentation.
fn implements_trait(code: &[&str], line: usize) -> bool {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let encloses = |above: &&&str| {
        !above.trim().is_empty() && indent(above) < indent(code[line]) && !["{", "where"].contains(&above.trim())
    };
    let block = code[..line].iter().rev().find(encloses);
    block.is_some_and(|block| has_word(block, "impl") && has_word(block, "for"))
}

/// `extern "C" {`, but not `extern "C" fn`.
fn is_foreign_block(code: &str) -> bool {
    code.starts_with("extern") && !code.contains(" fn")
}

/// `fn name`, with or without `extern ".."`, but not the type `fn(..)`.
fn declares_fn(code: &str) -> bool {
    let code = match code.strip_prefix("extern") {
        Some(abi) => abi.trim_start().trim_start_matches('"').trim_start().trim_start_matches('"').trim_start(),
        None => code,
    };
    code.strip_prefix("fn").is_some_and(|rest| rest.starts_with(' ') && !rest.trim_start().starts_with('('))
}

/// The comment directly above the statement that `line` is part of; attributes may stand in between.
fn comment_above(raw: &[&str], code: &[&str], line: usize) -> String {
    let mut at = line;
    let mut comment = Vec::new();
    while at > 0 {
        at -= 1;
        let (text, code) = (raw[at].trim(), code[at].trim());
        let between = comment.is_empty() && (code.starts_with("#[") || continues(code));
        if text.starts_with("//") {
            comment.push(text);
        } else if !between {
            break;
        }
    }
    comment.reverse();
    comment.join("\n")
}

/// True where a statement goes on in the next line.
fn continues(code: &str) -> bool {
    !code.is_empty() && !code.ends_with([';', '{', '}', ',', ']'])
}

/// Lines inside items marked `#[cfg(test)]`, counted from 0.
fn test_lines(masked: &str) -> BTreeSet<usize> {
    let mut lines = BTreeSet::new();
    for (start, item) in test_items(masked) {
        let first = masked[..start].matches('\n').count();
        lines.extend(first..=first + item.matches('\n').count());
    }
    lines
}

/// Items marked `#[cfg(test)]`, each with its place in the text.
fn test_items(masked: &str) -> Vec<(usize, &str)> {
    let mut items = Vec::new();
    for marker in ["#[cfg(test)]", "#[cfg(all(test"] {
        for (start, _) in masked.match_indices(marker) {
            let item = &masked[start..];
            let Some(open) = item.find(['{', ';']) else { continue };
            let mut depth = 0;
            let close = item[open..].find(|c| {
                depth += i32::from(c == '{') - i32::from(c == '}');
                depth == 0
            });
            items.push((start, &item[..close.map_or(item.len(), |close| open + close + 1)]));
        }
    }
    items
}

/// The code with its `#[cfg(test)]` items blanked out; lines stay where they are.
pub fn without_tests(masked: &str) -> String {
    let mut code = masked.to_owned();
    for (start, item) in test_items(masked) {
        let blank: String = item.chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
        // Replaced byte for byte only where all of it is ASCII; names that are not stay as they are.
        if blank.len() == item.len() {
            code.replace_range(start..start + item.len(), &blank);
        }
    }
    code
}

/// Where the files of `#[cfg(test)] mod name;` lie, without their extension.
pub fn test_modules(file: &Path, text: &str) -> Vec<PathBuf> {
    let masked = mask(text);
    let stem = file.file_stem().unwrap_or_default();
    let folder = if ["lib", "main", "mod"].iter().any(|name| stem == *name) {
        file.parent().unwrap_or(Path::new("")).to_path_buf()
    } else {
        file.with_extension("")
    };
    let name_of = |item: &str| Some(item.strip_suffix(';')?.rsplit_once("mod ")?.1.trim().to_owned());
    test_items(&masked).into_iter().filter_map(|(_, item)| Some(folder.join(name_of(item)?))).collect()
}

/// True for a file that only tests compile: `tests_only` is what [`test_modules`] found in all files.
pub fn is_test_code(file: &Path, tests_only: &BTreeSet<PathBuf>) -> bool {
    let shipped = ["src", "doctor/src", "service/src", "workbench/src", "cli/src", "files/src"].iter().any(|folder| file.starts_with(folder));
    !shipped || file.with_extension("").ancestors().any(|place| tests_only.contains(place))
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

fn has_word(text: &str, word: &str) -> bool {
    find_word(text, word).is_some()
}

/// Where `word` stands and is no part of a longer identifier.
fn find_word(text: &str, word: &str) -> Option<usize> {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    let whole = |&(at, _): &(usize, &str)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(part) && (word.ends_with('!') || !after.is_some_and(part))
    };
    text.match_indices(word).find(whole).map(|(at, _)| at)
}

#[path = "rules_tests.rs"]
#[cfg(test)]
mod tests;
