//! Which module of the library may import which. The compiler holds the walls between crates.

use std::path::Path;

/// The library's modules, from the top down: none imports what stands above it.
const LAYERS: [&str; 18] = [
    "internals",
    "cache",
    "mover",
    "state",
    "device",
    "store",
    "disk",
    "runtime",
    "config",
    "remote",
    "machine",
    "io",
    "metrics",
    "block",
    "shield",
    "size",
    "sync",
    "urgency",
];

/// The modules that code names by `crate::`.
fn imported(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for (at, word) in code.match_indices("crate::") {
        let rest = &code[at + word.len()..];
        match rest.strip_prefix('{') {
            Some(list) => found.extend(top_level(list).map(first)),
            None => found.push(first(rest)),
        }
    }
    found.retain(|name| name.starts_with(|c: char| c.is_ascii_lowercase()));
    found
}

/// The identifier at the beginning of a path.
fn first(path: &str) -> &str {
    let path = path.trim_start();
    path.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default()
}

/// The parts of a list in braces between its own commas, up to its end.
fn top_level(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 1;
    let end = list.find(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        depth == 0
    });
    let mut depth = 0;
    list[..end.unwrap_or(list.len())].split(move |c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    })
}

/// What is wrong with the imports of a file in `src`.
pub fn check(file: &Path, code: &str) -> Vec<String> {
    let module = file.iter().nth(1).and_then(|name| Path::new(name).file_stem()?.to_str()).unwrap_or_default();
    let place = |module: &str| LAYERS.iter().position(|layer| *layer == module);
    let Some(own) = place(module) else { return Vec::new() };
    let above = imported(code).into_iter().filter(|name| place(name).is_some_and(|at| at < own));
    above.map(|name| format!("{}: {module} imports {name}, which stands above it", file.display())).collect()
}

#[test]
fn an_import_of_what_stands_above_is_found() {
    let code = "use crate::{\n    block::{self, Route}, disk::Slots,\n    Error,\n};\nfn f() { crate::mover::g() }";
    assert_eq!(imported(code), ["block", "disk", "mover"]);
    assert_eq!(check("src/cache/open.rs".as_ref(), code), [""; 0]);
    let found = check("src/disk.rs".as_ref(), code);
    assert_eq!(found, ["src/disk.rs: disk imports mover, which stands above it"]);
}
