//! The design page's path of a call: each file that it names is there, and each function lies in its file and is called
//! from a file of the same walk.

use std::collections::BTreeSet;

/// A step of a walk: a file under `src`, and the functions that the call passes through there.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    pub file: String,
    pub functions: Vec<String>,
    /// After the word `Back:`: the result returns to the caller.
    pub back: bool,
}

/// The walks of the page: their titles and steps.
pub fn walks(page: &str) -> Vec<(String, Vec<Step>)> {
    let (_, section) = page.split_once("The path of a call, file by file").expect("the page has the walks");
    let (_, section) = section.split_once("\n- *").expect("a list of walks");
    let end = section.find("\n\n").unwrap_or(section.len());
    section[..end].split("\n- *").map(walk).collect()
}

fn walk(item: &str) -> (String, Vec<Step>) {
    let (title, path) = item.split_once("*:").expect("a title, and then the path");
    let mut steps: Vec<Step> = Vec::new();
    // Names between backticks; a function's is in the parentheses after its file.
    let (mut in_parentheses, mut back) = (false, false);
    for (at, text) in path.split('`').enumerate() {
        if at % 2 == 0 {
            back |= text.contains("Back:");
            let last = text.rfind(['(', ')']);
            in_parentheses = last.map_or(in_parentheses, |at| text[at..].starts_with('('));
        } else if text.ends_with(".rs") {
            steps.push(Step { file: text.into(), functions: Vec::new(), back });
        } else if in_parentheses && let Some(step) = steps.last_mut() {
            step.functions.push(text.into());
        }
    }
    (title.into(), steps)
}

/// What is wrong with a call that may pass through `files_max` files, and through each of them once before its result
/// returns.
pub fn check_length(title: &str, steps: &[Step], files_max: usize) -> Vec<String> {
    let files: BTreeSet<&str> = steps.iter().map(|step| step.file.as_str()).collect();
    let mut wrong = Vec::new();
    if files.len() > files_max {
        wrong.push(format!("{title}: passes through {} files, expected at most {files_max}: {files:?}", files.len()));
    }
    let mut seen = BTreeSet::new();
    let twice = steps.iter().filter(|step| !step.back && !seen.insert(&step.file));
    wrong.extend(twice.map(|step| format!("{title}: comes to src/{} twice on the way out", step.file)));
    wrong
}

/// What is wrong with a walk; `code` has the code of a file under `src`, if there is one.
pub fn check(title: &str, steps: &[Step], code: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut wrong = Vec::new();
    let codes: Vec<_> = steps.iter().map(|step| code(&step.file)).collect();
    // The user calls the first one.
    let entry = steps.iter().flat_map(|step| &step.functions).next();
    for (step, code) in steps.iter().zip(&codes) {
        let Some(code) = code else {
            wrong.push(format!("{title}: there is no file src/{}", step.file));
            continue;
        };
        for name in &step.functions {
            let defines = |rest: &str| rest.starts_with(['(', '<']);
            if !code.split(&format!("fn {name}")).skip(1).any(defines) {
                wrong.push(format!("{title}: src/{} has no function {name}", step.file));
            }
            if Some(name) != entry && !codes.iter().flatten().any(|code| calls(code, name)) {
                wrong.push(format!("{title}: no file of the walk calls {name} of src/{}", step.file));
            }
        }
    }
    wrong
}

/// True if `code` calls a function or method of this name.
fn calls(code: &str, name: &str) -> bool {
    code.match_indices(&format!("{name}(")).any(|(at, _)| {
        let before = &code[..at];
        !before.ends_with("fn ") && !before.ends_with(|char: char| char.is_alphanumeric() || char == '_')
    })
}

#[test]
fn a_walk_that_is_wrong_is_found() {
    let page = "The path of a call, file by file.\n\n- *Fetch*: `a.rs` (`fetch`) -> `b.rs` (`read`; L1:\n  `c` it), \
                then `gone.rs`.\n- *Evict*: `b.rs`\n\nMore.";
    let walks = walks(page);
    assert_eq!(walks.len(), 2);
    let (title, steps) = &walks[0];
    let files: Vec<_> = steps.iter().map(|step| step.file.as_str()).collect();
    assert_eq!((title.as_str(), files), ("Fetch", vec!["a.rs", "b.rs", "gone.rs"]));
    let code = |file: &str| match file {
        "a.rs" => Some("fn fetch() { fetch() }".into()),
        "b.rs" => Some("fn read_all() { bread(1) }".into()),
        _ => None,
    };
    let wrong = check(title, steps, code);
    let expected = [
        "Fetch: src/b.rs has no function read",
        "Fetch: no file of the walk calls read of src/b.rs",
        "Fetch: src/b.rs has no function c",
        "Fetch: no file of the walk calls c of src/b.rs",
        "Fetch: there is no file src/gone.rs",
    ];
    assert_eq!(wrong, expected);
}

#[test]
fn a_walk_that_is_too_long_is_found() {
    let page = |path: &str| format!("The path of a call, file by file.\n\n- *Fetch*: {path}\n\nMore.");
    let check = |path: &str| check_length("Fetch", &walks(&page(path))[0].1, 2);
    assert_eq!(check("`a.rs` -> `b.rs`. Back: `a.rs` -> `b.rs`"), [""; 0]);
    assert_eq!(check("`a.rs` -> `b.rs` -> `a.rs`"), ["Fetch: comes to src/a.rs twice on the way out"]);
    let third = check("`a.rs` -> `b.rs`. Back: `c.rs`");
    assert!(third[0].starts_with("Fetch: passes through 3 files, expected at most 2"), "{third:?}");
}
