//! Traces in the format of the Mooncake project: one JSON object a line, with the prefix chain of a
//! request as `hash_ids`. Equal ids stand for equal prefixes up to there.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use serde::Deserialize;

use crate::{failure::Failure, shown::shown};

/// A longer line is refused.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// A request of more blocks is refused.
const BLOCKS_MAX: usize = 1 << 20;

/// One request.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Request {
    /// When it came, milliseconds.
    #[serde(default)]
    pub timestamp: f64,
    /// The prefix chain, first block first.
    pub hash_ids: Vec<u64>,
}

/// Reads a whole trace, from standard input where the path is `-`; errors name the line. What was compressed by gzip
/// or zstd is known by its first bytes.
///
/// # Errors
/// [`Failure::USAGE`] for what is no trace file.
pub fn read(path: &Path) -> Result<Vec<Request>, Failure> {
    let shown = if path == Path::new("-") { "standard input".to_owned() } else { shown(path) };
    let wrong = |what: String| Failure::usage(format!("--trace {shown}: {what}"));
    let failed = |error: io::Error| wrong(format!("{error}; expected a trace file"));
    if path == Path::new("-") {
        return parse(decompressed(io::stdin().lock()).map_err(failed)?).map_err(wrong);
    }
    let file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_dir() {
        return Err(wrong("found a directory, expected a trace file".into()));
    }
    parse(decompressed(BufReader::new(file)).map_err(failed)?).map_err(wrong)
}

/// The text, whether or not it was compressed.
fn decompressed<'a>(mut reader: impl BufRead + 'a) -> io::Result<Box<dyn BufRead + 'a>> {
    // A pipe may give its first bytes one at a time.
    let mut first = Vec::new();
    reader.by_ref().take(4).read_to_end(&mut first)?;
    let whole = io::Cursor::new(first.clone()).chain(reader);
    Ok(match first[..] {
        [0x1f, 0x8b, ..] => Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(whole))),
        [0x28, 0xb5, 0x2f, 0xfd] => Box::new(BufReader::new(zstd::Decoder::with_buffer(whole)?)),
        _ => Box::new(whole),
    })
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
            let text = error.to_string();
            // Its lines are those of this line alone.
            let what = text.strip_suffix(&format!(" at line {} column {}", error.line(), error.column()));
            // A line that ends too early has its error in column 0 of the next one.
            let column = if error.is_eof() { line.trim_ascii_end().len() } else { error.column() };
            format!(
                "line {number}, column {column}: {}; a request is an object with `hash_ids`, a list of numbers",
                what.unwrap_or(&text)
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
    use std::io::Write;

    use super::*;

    #[test]
    fn a_wrong_line_is_named_by_its_number() {
        let good = r#"{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0, 1]}"#;
        let cases =
            ["{", r#"{"hash_ids": [0, 1"#, r#"{"hash_ids": [-1]}"#, r#"{"hash_ids": 3}"#, "[]", r#"{"x": 1}"#, "\u{1}"];
        for bad in cases {
            let error = parse(format!("{good}\n\n{bad}").as_bytes()).expect_err(bad);
            assert!(error.starts_with("line 3, column "), "{bad}: {error}");
            assert_eq!(error.matches("line").count(), 1, "one number of a line: {error}");
            assert!(!error.contains("column 0"), "columns begin at 1: {error}");
        }
        assert_eq!(parse(good.as_bytes()).map(|requests| requests[0].hash_ids.clone()), Ok(vec![0, 1]));
        assert!(parse("".as_bytes()).is_err());
    }

    #[test]
    fn a_compressed_trace_is_known_by_its_first_bytes() {
        let text = "{\"timestamp\": 5, \"hash_ids\": [1, 2]}\n".repeat(300);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(text.as_bytes()).expect("memory");
        // Two of them, one after the other, are one text.
        let gzip = gzip.finish().expect("memory").repeat(2);
        let zstd = zstd::encode_all(text.as_bytes(), 1).expect("memory").repeat(2);
        for (bytes, requests) in [(text.clone().into_bytes(), 300), (gzip, 600), (zstd, 600)] {
            let dir = tempfile::tempdir().expect("a directory");
            let path = dir.path().join("trace");
            std::fs::write(&path, &bytes).expect("written");
            let read = read(&path).expect("a trace");
            assert_eq!((read.len(), read[0].timestamp, &read[299].hash_ids[..]), (requests, 5.0, &[1, 2][..]));
            if requests > 300 {
                std::fs::write(&path, &bytes[..bytes.len() - 9]).expect("cut");
                let cut = super::read(&path).expect_err("cut off").to_string();
                assert!(cut.contains("line ") && cut.starts_with("--trace "), "{cut}");
            }
        }
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
