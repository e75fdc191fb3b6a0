//! The rules, as functions from a text to what is wrong in it.

use std::path::Path;

const LINE_CHARS_MAX: usize = 120;
const LINES_MAX: usize = 400;
/// Begins the line with the reason why a file is longer.
const LONG: &str = "// Over 400 lines: ";
const LEVELS: [&str; 5] =
    ["tracing::error!(", "tracing::warn!(", "tracing::info!(", "tracing::debug!(", "tracing::trace!("];

/// Rules for Rust files: what rustfmt leaves as it is.
pub fn check_rust(file: &Path, text: &str) -> Vec<String> {
    let is_long = |line: &str| line.chars().count() > LINE_CHARS_MAX && !line.contains("://");
    let long = (1..).zip(text.lines()).filter(|(_, line)| is_long(line));
    let told = |(at, _)| format!("{}:{at}: a line of more than {LINE_CHARS_MAX} characters", file.display());
    let mut findings: Vec<String> = long.map(told).collect();
    let lines = text.lines().count();
    if lines > LINES_MAX && !text.lines().any(|line| line.len() > LONG.len() && line.starts_with(LONG)) {
        let expected = format!("{LINES_MAX} at most, or `{LONG}` and a reason");
        findings.push(format!("{}: found {lines} lines, expected {expected}", file.display()));
    }
    findings
}

/// What a subscriber of the log throws must go nowhere: every event is written in a closure of `log`.
pub fn check_events(file: &Path, code: &str) -> Vec<String> {
    let is_caught = |at: usize| {
        let before = code[..at].trim_end();
        before.strip_suffix('{').map_or(before, str::trim_end).ends_with("log(||")
    };
    let events = LEVELS.iter().flat_map(|level| code.match_indices(level)).filter(|&(at, _)| !is_caught(at));
    events.map(|(_, event)| format!("{}: found {event}, expected log(|| {event}..))", file.display())).collect()
}

/// The code of a file: without lines of comment, and up to the tests at its end.
pub fn code(text: &str) -> String {
    let end = text.find("\n#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..end].split_inclusive('\n').filter(|line| !line.trim_start().starts_with("//")).collect()
}

/// Rules for every text file: nothing that is true on one machine only.
pub fn check_text(file: &Path, text: &str) -> Vec<String> {
    // In pieces, so that this file passes its own rule.
    let folders = [concat!("/wo", "rk"), concat!("/ro", "ot")];
    let hosts =
        [concat!(".inter", "nal/"), concat!(".svc.clus", "ter"), concat!("arti", "factory"), concat!("nex", "us.")];
    let mut findings = Vec::new();
    for (at, line) in (1..).zip(text.lines()) {
        let named = folders.iter().filter(|folder| names_folder(line, folder));
        let named = named.chain(hosts.iter().filter(|host| line.contains(**host)));
        let place = file.display();
        findings.extend(named.map(|name| format!("{place}:{at}: found {name}, expected what every machine has")));
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

#[test]
fn what_breaks_a_rule_is_found() {
    let long = format!("// {}\n", "x".repeat(LINE_CHARS_MAX));
    assert_eq!(check_rust("a.rs".as_ref(), &long).len(), 1);
    let lines = "\n".repeat(LINES_MAX + 1);
    assert_eq!(check_rust("a.rs".as_ref(), &lines).len(), 1);
    assert_eq!(check_rust("a.rs".as_ref(), &format!("{LONG}one table.{lines}")), [""; 0]);
    for (events, text) in
        [(0, "log(|| tracing::warn!(x))"), (0, "log(|| {\n    tracing::warn!(x);\n});"), (1, "tracing::warn!(x);")]
    {
        assert_eq!(check_events("a.rs".as_ref(), text).len(), events, "{text}");
    }
    let found = |text: &str| check_text("a.md".as_ref(), text).len();
    let folder = concat!("/wo", "rk");
    for text in [format!("cd {folder}"), format!("`{folder}/x`"), format!("({folder})"), format!("x={folder}:y")] {
        assert_eq!(found(&text), 1, "{text}");
    }
    for text in ["/workspace", "./work/x", "my/work/x", "/work.d", "https://a.b/work/x", "$DIR/root/x"] {
        assert_eq!(found(text), 0, "{text}");
    }
    assert_eq!(found(concat!("https://crates", ".inter", "nal/x")), 1);
}
