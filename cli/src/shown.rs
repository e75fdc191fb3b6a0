//! Text of users and files on a terminal.

use std::{borrow::Cow, io, path::Path};

/// The text with every character escaped that could drive a terminal, break a line or turn text around.
pub fn plain(text: &str) -> Cow<'_, str> {
    if !text.contains(is_active) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_active(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
    }
    shown.into()
}

/// A path for people, as [`plain`] shows it.
pub fn shown(path: &Path) -> String {
    plain(&path.to_string_lossy()).into_owned()
}

/// Why the system refused something, without the number.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Control characters (C0 and C1), line separators, and what changes the direction of text.
fn is_active(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_drives_a_terminal_is_escaped() {
        assert_eq!(plain("/mnt/na\u{ef}ve 'x' \\ \u{1f600}"), "/mnt/na\u{ef}ve 'x' \\ \u{1f600}");
        assert_eq!(plain("a\u{1b}[31mb\n\u{9b}2J\u{202e}\u{7f}"), "a\\u{1b}[31mb\\n\\u{9b}2J\\u{202e}\\u{7f}");
    }
}
