//! Who imports whom: the paths of a crate's code, each resolved to the file that defines what it names.

use std::collections::{BTreeMap, BTreeSet};

/// A module, by its path from the crate's root.
pub type Module = Vec<String>;

/// The code of one file: its module, and its text without comments, literals and tests.
pub struct Source {
    pub file: String,
    pub module: Module,
    pub code: String,
}

/// One file imports from another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Import {
    pub from: Module,
    pub to: Module,
    /// Where, for messages.
    pub file: String,
    pub line: usize,
    pub path: String,
}

/// A path as it stands in the code, from the crate's root.
struct Path {
    segments: Vec<String>,
    /// The name that it has afterwards, if it stands in a `use`.
    name: Option<String>,
    /// A `pub use` of a name that the file does not use: it offers what another file defines and needs nothing of it.
    offers: bool,
    at: usize,
}

/// The imports among the files of one crate.
pub fn imports(sources: &[Source]) -> Vec<Import> {
    let modules: BTreeSet<Module> = sources.iter().map(|source| source.module.clone()).collect();
    let paths: Vec<Vec<Path>> = sources.iter().map(|source| paths(source, &modules)).collect();
    // What a module has under a name that is defined elsewhere: private imports count, since children see them.
    let mut names: BTreeMap<(Module, String), Vec<String>> = BTreeMap::new();
    for (source, paths) in sources.iter().zip(&paths) {
        for path in paths {
            if let Some(name) = &path.name {
                names.insert((source.module.clone(), name.clone()), path.segments.clone());
            }
        }
    }
    let mut found = Vec::new();
    for (source, paths) in sources.iter().zip(paths) {
        for path in paths.into_iter().filter(|path| !path.offers) {
            let Some(to) = resolve(&path.segments, &modules, &names) else { continue };
            if to != source.module {
                let line = source.code[..path.at].matches('\n').count() + 1;
                let path = path.segments.join("::");
                found.push(Import { from: source.module.clone(), to, file: source.file.clone(), line, path });
            }
        }
    }
    found
}

/// The module whose file defines what a path names; `None` for paths out of the crate.
fn resolve(
    path: &[String],
    modules: &BTreeSet<Module>,
    names: &BTreeMap<(Module, String), Vec<String>>,
) -> Option<Module> {
    let mut path = path.to_vec();
    // Each turn follows one `use`; there are no chains of them that are longer.
    for _ in 0..8 {
        let len = (0..=path.len()).rev().find(|&len| modules.contains(&path[..len]))?;
        let module = path[..len].to_vec();
        match path.get(len).and_then(|item| names.get(&(module.clone(), item.clone()))) {
            Some(target) if target[..] != path[..=len] => {
                path = target.iter().chain(&path[len + 1..]).cloned().collect();
            }
            _ => return Some(module),
        }
    }
    None
}

/// The paths in a file's code that begin with `crate`, `self`, `super`, or the name of a module below this one.
fn paths(source: &Source, modules: &BTreeSet<Module>) -> Vec<Path> {
    let is_child = |name: &str| {
        let child: Module = source.module.iter().map(String::as_str).chain([name]).map(String::from).collect();
        modules.contains(&child)
    };
    let absolute = |segments: &[String]| -> Option<Vec<String>> {
        let up = segments.iter().take_while(|segment| *segment == "super").count();
        let (base, rest): (&[String], _) = match segments.first()?.as_str() {
            "crate" => (&[], &segments[1..]),
            "self" => (&source.module, &segments[1..]),
            "super" => (&source.module[..source.module.len().checked_sub(up)?], &segments[up..]),
            name if is_child(name) => (&source.module, segments),
            _ => return None,
        };
        Some(base.iter().chain(rest).cloned().collect())
    };
    let mut found = Vec::new();
    let (uses, rest) = use_items(&source.code);
    for (at, public, tree) in uses {
        for (segments, name) in flatten(&tree) {
            if let Some(segments) = absolute(&segments) {
                let below = segments.starts_with(&source.module) && segments.len() > source.module.len();
                let offers = public && below && (is_child(&name) || !words(&rest).any(|word| word == name));
                found.push(Path { segments, name: Some(name), offers, at });
            }
        }
    }
    for (at, segments) in plain_paths(&rest) {
        found.extend(absolute(&segments).map(|segments| Path { segments, name: None, offers: false, at }));
    }
    found
}

/// The `use` items of a file (where each is, whether it is visible outside, its tree), and the code without them.
fn use_items(code: &str) -> (Vec<(usize, bool, String)>, String) {
    let (mut items, mut rest, mut at) = (Vec::new(), code.to_owned(), 0);
    for line in code.split_inclusive('\n') {
        let text = line.trim_start();
        let (public, text) = match text.strip_prefix("pub") {
            Some(after) if after.starts_with('(') => (true, after.split_once(") ").map_or("", |(_, text)| text)),
            Some(after) => (true, after.trim_start()),
            None => (false, text),
        };
        if text.starts_with("use ") {
            let start = at + line.len() - text.len();
            let end = start + code[start..].find(';').unwrap_or(code.len() - start);
            items.push((at, public, code[start + "use ".len()..end].to_owned()));
            let blank: String = code[at..end].chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
            rest.replace_range(at..end, &blank);
        }
        at += line.len();
    }
    (items, rest)
}

/// The paths of a `use` tree, each with the name that it brings.
fn flatten(tree: &str) -> Vec<(Vec<String>, String)> {
    let tree = tree.trim();
    if let Some((prefix, list)) = tree.split_once('{') {
        let prefix: Vec<String> = segments(prefix);
        let list = list.trim_end().strip_suffix('}').unwrap_or(list);
        return top_level(list)
            .flat_map(flatten)
            .map(|(path, name)| {
                let mut path: Vec<String> = prefix.iter().cloned().chain(path).collect();
                if name == "self" {
                    // `{self}` brings the module under its own name.
                    path.pop();
                    return (path.clone(), path.pop().unwrap_or_default());
                }
                (path, name)
            })
            .collect();
    }
    let (path, name) = match tree.split_once(" as ") {
        Some((path, name)) => (segments(path), name.trim().to_owned()),
        None => (segments(tree), segments(tree).pop().unwrap_or_default()),
    };
    if path.is_empty() { Vec::new() } else { vec![(path, name)] }
}

fn segments(path: &str) -> Vec<String> {
    path.split("::").map(str::trim).filter(|segment| !segment.is_empty()).map(String::from).collect()
}

/// The parts of a list between its own commas.
fn top_level(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    list.split(move |c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    })
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Paths of two segments or more, outside of `use`.
fn plain_paths(code: &str) -> Vec<(usize, Vec<String>)> {
    let part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    let mut at = 0;
    for word in code.split_inclusive(|c| !part(c)) {
        let path = word.trim_end_matches(|c| !part(c));
        if path.contains("::") && !path.starts_with(':') {
            found.push((at, segments(path)));
        }
        at += word.len();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(module: &str, code: &str) -> Source {
        Source { file: format!("{module}.rs"), module: segments(module), code: code.into() }
    }

    fn edges(sources: &[Source]) -> Vec<(String, String)> {
        imports(sources).into_iter().map(|import| (import.from.join("::"), import.to.join("::"))).collect()
    }

    fn pair(from: &str, to: &str) -> (String, String) {
        (from.into(), to.into())
    }

    #[test]
    fn paths_lead_to_the_file_that_defines_what_they_name() {
        let sources = [
            source("", "pub use a::Thing;\npub mod a; mod b;"),
            source("a", "pub use part::Thing;\npub(crate) use part::{self, Other as Renamed};\nmod part;"),
            source("a::part", "use super::super::b::B;\n"),
            source("b", "use crate::{\n    a::{Thing, Renamed},\n};\n"),
            source("c", "fn f() { crate::Thing::new(); super::a::part::x() }"),
            source("d", "use std::fmt;\nuse other::a;\nuse self::x::Y;\nfn f() { fmt::x(); }"),
        ];
        let expected = [
            pair("a::part", "b"),
            pair("b", "a::part"),
            pair("b", "a::part"),
            pair("c", "a::part"),
            pair("c", "a::part"),
        ];
        assert_eq!(edges(&sources), expected);
    }

    #[test]
    fn a_parent_needs_a_child_where_it_uses_it_and_not_where_it_offers_it() {
        let offers = [source("a", "mod b;\npub use b::B;\n"), source("a::b", "")];
        assert_eq!(edges(&offers), []);
        let uses = [source("a", "mod b;\nuse b::B;\nfn f() { b::g() }"), source("a::b", "use super::f;")];
        assert_eq!(edges(&uses), [pair("a", "a::b"), pair("a", "a::b"), pair("a::b", "a")]);
        let both = [source("a", "mod b;\npub use b::B;\nstruct A(B);"), source("a::b", "")];
        assert_eq!(edges(&both), [pair("a", "a::b")]);
    }

    #[test]
    fn an_import_has_its_line() {
        let sources = [source("a", "\n\nuse crate::b::{\n    B,\n};\n\nfn f() { crate::b::g() }"), source("b", "")];
        assert_eq!(imports(&sources).iter().map(|import| import.line).collect::<Vec<_>>(), [3, 7]);
    }
}
