//! Which module of the library may import which. One that needs another is listed with it here, or the code goes where
//! it belongs. The compiler holds the walls between crates.

use std::collections::{BTreeMap, BTreeSet};

/// The library's modules, from the top down: nobody imports what stands above it.
pub const ALLOWED: &[(&str, &str)] = &[
    ("internals", "cache remote device config shield"),
    ("cache", "mover state device disk runtime config io machine metrics block shield sync"),
    ("mover", "state device disk config remote io block shield sync urgency"),
    ("state", "device disk config remote io metrics block shield sync urgency"),
    ("device", "config io metrics block"),
    ("store", "disk runtime config io metrics block"),
    ("disk", "config io block"),
    ("runtime", "config io"),
    ("config", "remote block size"),
    ("remote", "block sync"),
    ("machine", ""),
    ("io", "metrics block shield sync urgency"),
    ("metrics", "block shield"),
    ("block", ""),
    ("shield", ""),
    ("size", ""),
    ("sync", ""),
    ("urgency", ""),
];

/// The modules that code names by `crate::`.
pub fn imported(code: &str) -> BTreeSet<&str> {
    let mut found = BTreeSet::new();
    for (at, word) in code.match_indices("crate::") {
        let rest = &code[at + word.len()..];
        match rest.strip_prefix('{') {
            Some(list) => found.extend(top_level(list).map(first)),
            None => _ = found.insert(first(rest)),
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

/// What is wrong with the imports, given as modules and what a file of them imports.
pub fn check<'a>(imports: impl IntoIterator<Item = (&'a str, BTreeSet<&'a str>)>) -> Vec<String> {
    let place: BTreeMap<&str, usize> = ALLOWED.iter().enumerate().map(|(at, (name, _))| (*name, at)).collect();
    let mut unused: BTreeSet<(&str, &str)> =
        ALLOWED.iter().flat_map(|(from, to)| to.split_whitespace().map(move |to| (*from, to))).collect();
    let allowed = unused.clone();
    let mut wrong: Vec<String> = allowed
        .iter()
        .filter(|(from, to)| place.get(to).is_none_or(|at| *at <= place[from]))
        .map(|(from, to)| format!("{from} may import {to}, which is not below it"))
        .collect();
    for (from, to) in imports.into_iter().flat_map(|(from, to)| to.into_iter().map(move |to| (from, to))) {
        if from != to && place.contains_key(from) && place.contains_key(to) {
            unused.remove(&(from, to));
            if !allowed.contains(&(from, to)) {
                wrong.push(format!("{from} imports {to}, expected what its entry has"));
            }
        }
    }
    wrong.extend(unused.iter().map(|(from, to)| format!("{from} may import {to} and does not: delete the entry")));
    wrong
}

#[test]
fn an_import_against_the_list_is_found() {
    let code = "use crate::{\n    block::{self, Route}, disk::Slots,\n    Error,\n};\nfn f() { crate::mover::g() }";
    assert_eq!(imported(code), ["block", "disk", "mover"].into());
    let all = || ALLOWED.iter().map(|(from, to)| (*from, to.split_whitespace().collect::<BTreeSet<_>>()));
    assert_eq!(check(all()), [""; 0]);
    assert_eq!(check(all().chain([("disk", ["mover"].into())])), ["disk imports mover, expected what its entry has"]);
    assert_eq!(check(all().skip(1)).len(), ALLOWED[0].1.split_whitespace().count(), "entries that nobody needs");
}
