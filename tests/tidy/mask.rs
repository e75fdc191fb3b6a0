//! Rust text with its comments and literals blanked out, so that rules see code only.

/// Replaces what is inside comments, strings and character literals by spaces. Line breaks stay where they are, and
/// quotes too, so that line numbers hold and `extern "C"` keeps its shape.
pub fn mask(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = match chars[at] {
            '/' if chars.get(at + 1) == Some(&'/') => line_comment_end(&chars, at),
            '/' if chars.get(at + 1) == Some(&'*') => block_comment_end(&chars, at),
            '"' => string_end(&chars, at),
            'r' | 'b' | 'c' if !follows_identifier(&chars, at) => raw_string_end(&chars, at).unwrap_or(at),
            '\'' => char_end(&chars, at).unwrap_or(at),
            _ => at,
        };
        if end == at {
            out.push(chars[at]);
            at += 1;
            continue;
        }
        for (place, &c) in chars[at..end].iter().enumerate() {
            let quote = c == '"' && (place == 0 || at + place + 1 == end);
            out.push(if c == '\n' || quote { c } else { ' ' });
        }
        at = end;
    }
    out
}

fn follows_identifier(chars: &[char], at: usize) -> bool {
    at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_')
}

fn line_comment_end(chars: &[char], at: usize) -> usize {
    chars[at..].iter().position(|&c| c == '\n').map_or(chars.len(), |len| at + len)
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

fn string_end(chars: &[char], start: usize) -> usize {
    let mut at = start + 1;
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// The end of `r"..."`, `r#"..."#`, `br"..."` and so on; `None` where no raw string starts. Plain `b".."` and `c".."`
/// are left to the quote that follows.
fn raw_string_end(chars: &[char], start: usize) -> Option<usize> {
    let mut at = start + usize::from(chars[start] != 'r');
    if chars.get(at) != Some(&'r') {
        return None;
    }
    at += 1;
    let hashes = chars[at..].iter().take_while(|&&c| c == '#').count();
    at += hashes;
    if chars.get(at) != Some(&'"') {
        return None;
    }
    for end in at + 1..chars.len() {
        if chars[end] == '"' && chars[end + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes {
            return Some(end + 1 + hashes);
        }
    }
    Some(chars.len())
}

/// The end of a character literal; `None` for a lifetime or a label.
fn char_end(chars: &[char], start: usize) -> Option<usize> {
    if chars.get(start + 1) == Some(&'\\') {
        // The escaped character may itself be a quote.
        let close = chars.get(start + 3..)?.iter().position(|&c| c == '\'')?;
        return Some(start + 3 + close + 1);
    }
    (chars.get(start + 2) == Some(&'\'')).then_some(start + 3)
}

#[cfg(test)]
mod tests {
    use super::mask;

    #[test]
    fn only_code_is_left() {
        let cases = [
            ("a // b", "a     "),
            ("a /* b /* c */ d */ e", "a                   e"),
            (r#"f("x", y)"#, r#"f(" ", y)"#),
            (r#"f("\"x", y)"#, r#"f("   ", y)"#),
            (r###"f(r#"a"b"#, y)"###, "f(        , y)"),
            (r#"f(b"x", br"y")"#, r#"f(b" ",     ")"#),
            ("'x' 'a: &'b '\\'' '\\u{1F}' c", "    'a: &'b               c"),
            ("for r in b", "for r in b"),
            ("\"a\nb\" c", "\" \n \" c"),
            ("\"never closed", "\"            "),
        ];
        for (text, expected) in cases {
            assert_eq!(mask(text), expected, "{text}");
        }
    }

    #[test]
    fn lines_and_columns_stay() {
        let text = include_str!("mask.rs");
        let masked = mask(text);
        assert!(text.lines().map(|line| line.chars().count()).eq(masked.lines().map(|line| line.chars().count())));
    }
}
