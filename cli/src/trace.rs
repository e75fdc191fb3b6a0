//! Traces in the format of the Mooncake project: one JSON object a line, with the prefix chain of a
//! request as `hash_ids`. Equal ids stand for equal prefixes up to there.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

use serde::Deserialize;

use crate::{failure::Failure, shown::shown};

/// A longer line is refused.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// A request of more blocks is refused.
const BLOCKS_MAX: usize = 1 << 20;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Request {
    /// The prefix chain, first block first.
    pub hash_ids: Vec<u64>,
}

/// Reads a whole trace; errors name the line.
///
/// # Errors
/// [`Failure::USAGE`] for what is no trace file.
pub fn read(path: &Path) -> Result<Vec<Request>, Failure> {
    let shown = shown(path);
    let wrong = |error: std::io::Error| Failure::usage(format!("--trace {shown}: {error}; expected a trace file"));
    let file = File::open(path).map_err(wrong)?;
    if file.metadata().map_err(wrong)?.is_dir() {
        return Err(Failure::usage(format!("--trace {shown}: found a directory, expected a trace file")));
    }
    parse(BufReader::new(file)).map_err(|what| Failure::usage(format!("--trace {shown}: {what}")))
}

/// Reads a trace from anything; errors begin with the line.
///
/// # Errors
/// What was found in which line, and what was expected.
pub fn parse(mut reader: impl BufRead) -> Result<Vec<Request>, String> {
    let mut requests = Vec::new();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line);
        match read {
            Ok(0) => break,
            Ok(_) if line.len() as u64 > LINE_BYTES_MAX => {
                return Err(format!("line {number}: found more than {LINE_BYTES_MAX} bytes, expected a shorter line"));
            }
            Ok(_) => {}
            Err(error) => return Err(format!("line {number}: {error}")),
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let request: Request = serde_json::from_slice(&line).map_err(|error| {
            format!(
                "line {number}: found {error}, expected an object with `hash_ids`, a list of numbers; mend the line"
            )
        })?;
        if request.hash_ids.len() > BLOCKS_MAX {
            let blocks = request.hash_ids.len();
            return Err(format!("line {number}: found {blocks} hash_ids, expected at most {BLOCKS_MAX}"));
        }
        requests.push(request);
    }
    if requests.is_empty() {
        return Err("found no request, expected one JSON object a line".into());
    }
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_line_is_named_by_its_number() {
        let good = r#"{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0, 1]}"#;
        let cases =
            ["{", r#"{"hash_ids": [0, 1"#, r#"{"hash_ids": [-1]}"#, r#"{"hash_ids": 3}"#, "[]", r#"{"x": 1}"#, "\u{1}"];
        for bad in cases {
            let error = parse(format!("{good}\n\n{bad}").as_bytes()).expect_err(bad);
            assert!(error.starts_with("line 3: "), "{bad}: {error}");
        }
        assert_eq!(parse(good.as_bytes()).map(|requests| requests[0].hash_ids.clone()), Ok(vec![0, 1]));
        assert!(parse("".as_bytes()).is_err());
    }

    #[test]
    fn an_endless_line_is_refused() {
        let error = parse(std::io::repeat(b'x').take(LINE_BYTES_MAX + 2).chain(&b""[..]).buffered()).expect_err("long");
        assert!(error.contains("line 1"), "{error}");
    }

    trait Buffered: Read + Sized {
        fn buffered(self) -> BufReader<Self> {
            BufReader::new(self)
        }
    }
    impl<R: Read> Buffered for R {}
}
