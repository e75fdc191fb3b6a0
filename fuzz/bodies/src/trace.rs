//! Traces: text from anywhere, a list of requests or an error that names the line.

use kvhoist_cli::trace::parse;

use crate::memory::bounded;

/// Parses `data` as a trace.
pub fn run(data: &[u8]) {
    // A list of numbers takes 8 bytes for each two of text, twice that while it grows, and its old place beside it.
    let parsed = bounded(32 * data.len() + (64 << 10), || parse(data));
    let lines: Vec<&[u8]> = data.split(|byte| *byte == b'\n').collect();
    let is_blank = |line: &[u8]| line.iter().all(u8::is_ascii_whitespace);
    match parsed {
        Ok(requests) => {
            let filled: Vec<_> = lines.into_iter().filter(|line| !is_blank(line)).collect();
            assert_eq!(requests.len(), filled.len(), "one request a line");
            for (request, line) in requests.into_iter().zip(filled) {
                assert_eq!(parse(line), Ok(vec![request]), "a line means the same by itself");
            }
        }
        Err(what) => {
            let number = what
                .strip_prefix("line ")
                .and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<usize>().ok());
            match number {
                None => assert!(lines.iter().all(|line| is_blank(line)), "no line is blamed: {what}"),
                Some(number) => {
                    let blamed = lines[number - 1];
                    assert!(!is_blank(blamed) && parse(blamed).is_err(), "line {number} is sound: {what}");
                    if number > 1 {
                        let before = lines[..number - 1].join(&b'\n');
                        assert!(parse(&*before).is_ok() || before.iter().all(u8::is_ascii_whitespace), "{what}");
                    }
                }
            }
        }
    }
}
