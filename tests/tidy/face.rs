//! What users can name, and its documentation.

/// At most so many public names in each file that has some; what only tests and tools need belongs to `internals`.
pub const NAMES_MAX: [(&str, usize); 4] =
    [("src/lib.rs", 45), ("src/remote/mod.rs", 8), ("src/store/mod.rs", 7), ("service/src/lib.rs", 18)];

/// The public names of a file's items at the margin: what is indented are fields, methods and inline modules' names.
pub fn names(code: &str) -> Vec<&str> {
    let items: Vec<&str> = code.split("\npub ").collect();
    let shown = items.windows(2).filter(|pair| !pair[0].trim_end().ends_with("#[doc(hidden)]"));
    shown.flat_map(|pair| exported(pair[1])).collect()
}

/// The names of one item: `use a::{B, c::D}`, or `struct E`.
fn exported(item: &str) -> Vec<&str> {
    match item.split_once(' ') {
        Some(("use", tree)) => {
            let tree = tree.split(';').next().unwrap_or_default();
            let leaves = tree.split(['{', '}', ',']).map(str::trim);
            let leaves = leaves.filter(|leaf| !leaf.is_empty() && !leaf.ends_with("::"));
            leaves.map(|leaf| leaf.rsplit("::").next().unwrap_or(leaf)).collect()
        }
        Some((_, rest)) => rest.split(|c: char| !c.is_alphanumeric() && c != '_').take(1).collect(),
        None => Vec::new(),
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
        let root = "mod a;\n#[doc(hidden)]\npub mod hidden;\npub mod shown;\npub use a::{B, c::{D, E}};\n\
                    pub use a::F;\npub mod inline {\n    pub use a::G;\n}\npub struct K<T> {\n    pub field: u8,\n}\n";
        assert_eq!(names(root), ["shown", "B", "D", "E", "F", "inline", "K"]);
    }
}
