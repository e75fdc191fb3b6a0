//! Traces: text from anywhere, a list of requests or an error that names the line.

use kvhoist_workbench::trace::parse;

use crate::memory::bounded;

const BLOCK_BYTES: usize = 4096;

/// Parses `data` as a trace.
pub fn run(data: &[u8]) {
    // A list of numbers takes 8 bytes for each two of text, twice that while it grows, and its old place beside it.
    let parsed = bounded(32 * data.len() + (64 << 10), || parse(data, BLOCK_BYTES));
    let lines: Vec<&[u8]> = data.split(|byte| *byte == b'\n').collect();
    let is_blank = |line: &[u8]| line.iter().all(u8::is_ascii_whitespace);
    let filled: Vec<&[u8]> = lines.iter().copied().filter(|line| !is_blank(line)).collect();
    let first = filled.first().copied().unwrap_or_default();
    // The first line says how the others are read.
    let behind_first =
        |line: &[u8]| if line.as_ptr() == first.as_ptr() { line.to_vec() } else { [first, line].join(&b'\n') };
    let is_plain =
        !first.trim_ascii().starts_with(b"Timestamp,") && !first.windows(10).any(|part| part == b"\"requests\"");
    match parsed {
        Ok(requests) if is_plain => {
            assert_eq!(requests.len(), filled.len(), "one request a line");
            for (request, line) in requests.into_iter().zip(filled) {
                assert_eq!(parse(line, BLOCK_BYTES), Ok(vec![request]), "a line means the same by itself");
            }
        }
        Ok(requests) => {
            let of_first = count(first);
            let of_others = filled[1..].iter().map(|line| count(&[first, line].join(&b'\n')) - of_first);
            assert_eq!(requests.len(), of_first + of_others.sum::<usize>(), "a line means as many by itself");
        }
        Err(what) => match blamed(&what) {
            None => assert!(!is_plain || filled.is_empty(), "no line is blamed: {what}"),
            Some(number) => {
                let line = lines[number - 1];
                let alone = parse(&*behind_first(line), BLOCK_BYTES);
                assert!(!is_blank(line) && alone.is_err_and(|what| blamed(&what).is_some()), "it is sound: {what}");
                let before = parse(&*lines[..number - 1].join(&b'\n'), BLOCK_BYTES);
                assert!(before.err().as_deref().and_then(blamed).is_none(), "an earlier one is wrong: {what}");
            }
        },
    }
}

/// The requests of a trace, which may be none.
fn count(text: &[u8]) -> usize {
    parse(text, BLOCK_BYTES).map_or(0, |requests| requests.len())
}

/// The number of the line that an error blames.
fn blamed(what: &str) -> Option<usize> {
    what.strip_prefix("line ")?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
