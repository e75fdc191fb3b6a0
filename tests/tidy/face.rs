//! What users can name: the names that the library exports, module by module.

use std::collections::BTreeMap;

/// At most so many public names in each module of a library; what only tests and tools need belongs to `internals`.
pub const NAMES_MAX: [(&str, &[(&str, usize)]); 2] =
    [("src", &[("", 41), ("gpu", 1), ("rdma", 1), ("remote", 8), ("store", 7)]), ("service/src", &[("", 18)])];

/// The public names of each module, from the root's code and `read`, which gives the code of a module's file.
pub fn names(root: &str, read: impl Fn(&str) -> String) -> BTreeMap<String, Vec<String>> {
    let mut modules = BTreeMap::new();
    let mut of_root = Vec::new();
    let mut rest = root;
    while let Some(at) = rest.find("pub ") {
        let hidden = rest[..at].trim_end().ends_with("#[doc(hidden)]");
        rest = &rest[at + 4..];
        let end = rest.find([';', '{']).unwrap_or(rest.len());
        let Some(module) = rest.strip_prefix("mod ") else {
            let end = rest.find(';').unwrap_or(rest.len());
            of_root.extend(exported(&rest[..end]));
            rest = &rest[end..];
            continue;
        };
        let name = module[..end - 4].trim().to_owned();
        let inline = rest[end..].starts_with('{');
        let close = if inline { end + rest[end..].find("\n}").unwrap_or(0) } else { end };
        if !hidden {
            let code = if inline { rest[end..close].to_owned() } else { read(&name) };
            modules.insert(name, code.split("pub ").skip(1).flat_map(exported).collect());
        }
        rest = &rest[close..];
    }
    modules.insert(String::new(), of_root);
    modules
}

/// The names of one item: `use a::{B, c::D}`, or `struct E`.
fn exported(item: &str) -> Vec<String> {
    let words = item.split_once(char::is_whitespace);
    let Some((kind, rest)) = words.filter(|(kind, _)| !kind.is_empty()) else { return Vec::new() };
    match kind {
        "use" => {
            let tree = rest.split(';').next().unwrap_or_default();
            let leaves = tree.split(['{', '}', ',']).map(str::trim);
            let leaves = leaves.filter(|leaf| !leaf.is_empty() && !leaf.ends_with("::"));
            leaves.map(|leaf| leaf.rsplit("::").next().unwrap_or(leaf).to_owned()).collect()
        }
        // A field or a method has no kind that begins an item at the margin.
        // A module within a module would hide names from the count.
        "mod" => panic!("found a public module in a public module ({rest:.30}), expected names only"),
        "struct" | "enum" | "fn" | "trait" | "type" | "const" => {
            let name = |c: char| c.is_alphanumeric() || c == '_';
            vec![rest.chars().take_while(|&c| name(c)).collect()]
        }
        _ => Vec::new(),
    }
}

/// The public methods in a file's `impl` blocks of `name`, in order and without hidden ones, and whether the
/// documentation of each has an example.
pub fn methods(text: &str, name: &str) -> Vec<(String, bool)> {
    let (mut methods, mut inside, mut has_example, mut hidden) = (Vec::new(), false, false, false);
    let begin = format!("impl {name} {{");
    for line in text.lines() {
        match line {
            _ if line == begin => inside = true,
            "}" => inside = false,
            _ if !inside => {}
            _ if line.trim_start().starts_with("///") => has_example |= line.trim_start().starts_with("/// ```"),
            _ if line.trim_start() == "#[doc(hidden)]" => hidden = true,
            _ if line.trim_start().starts_with("#[") => {}
            _ => {
                let name = line.strip_prefix("    pub ").and_then(|item| item.split_once("fn "));
                let name = name.and_then(|(_, rest)| rest.split(['(', '<']).next());
                methods.extend(name.filter(|_| !hidden).map(|name| (name.to_owned(), has_example)));
                (has_example, hidden) = (false, false);
            }
        }
    }
    methods
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_without_an_example_is_found() {
        let text = "impl Cache {\n    /// One.\n    ///\n    /// ```\n    /// x\n    /// ```\n    #[inline]\n    \
                    pub fn one(&self) {\n    }\n\n    /// Two.\n    pub async unsafe fn two<T>() {\n    }\n    \
                    pub(crate) fn three() {}\n\n    /// Five.\n    #[doc(hidden)]\n    pub fn five() {}\n}\n\
                    impl Other {\n    pub fn four() {}\n}\n";
        assert_eq!(methods(text, "Cache"), [("one".to_owned(), true), ("two".to_owned(), false)]);
    }

    #[test]
    fn names_are_counted_where_users_find_them() {
        let root = "mod a;\n#[doc(hidden)]\npub mod hidden;\npub mod shown;\n\
                    pub use a::{B, c::{D, E}};\npub use a::F;\npub mod inline {\n    pub use a::{G, h};\n}\n";
        let found = names(root, |_| "pub use x::{I, J};\npub struct K {\n    field: u8,\n}\n".into());
        assert_eq!(found[""], ["B", "D", "E", "F"]);
        assert_eq!(found["inline"], ["G", "h"]);
        assert_eq!(found["shown"], ["I", "J", "K"]);
        assert_eq!(found.len(), 3, "{found:?}");
    }
}
