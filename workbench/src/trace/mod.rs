//! Traces: what was asked of a cache, recorded by others. The first line of a file says in which of three forms it is.

mod lines;
mod mlperf;
mod mooncake;
mod request;
mod weka;

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Read},
    path::Path,
};

use lines::Lines;
pub use request::{Chain, Request};

/// Reads a whole trace, from standard input where the path is `-`. What was compressed by gzip or zstd is known by its
/// first bytes. Objects are cut into blocks of `block_bytes`.
///
/// # Errors
/// What was found, in which line, and what was expected.
pub fn read(path: &Path, block_bytes: usize) -> Result<Vec<Request>, String> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => "found no such file, expected a trace file".to_owned(),
        // Of the system, without its number.
        _ if error.raw_os_error().is_some() => {
            let text = error.to_string();
            let why = text.split(" (os error").next().unwrap_or_default();
            format!("cannot be read ({why}), expected a trace file")
        }
        _ => format!("{error}; expected a trace file"),
    };
    if path == Path::new("-") {
        return parse(decompressed(io::stdin().lock()).map_err(failed)?, block_bytes);
    }
    let file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_dir() {
        return Err("found a directory, expected a trace file".into());
    }
    parse(decompressed(BufReader::new(file)).map_err(failed)?, block_bytes)
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
pub fn parse(reader: impl BufRead, block_bytes: usize) -> Result<Vec<Request>, String> {
    let mut lines = Lines::new(reader);
    let mut requests = Vec::new();
    if lines.advance()? {
        requests = match lines.line.trim_ascii() {
            mlperf::HEADER => mlperf::parse(&mut lines, block_bytes as u64),
            first if first.windows(weka::FIELD.len()).any(|part| part == weka::FIELD) => weka::parse(&mut lines),
            _ => mooncake::parse(&mut lines),
        }?;
    }
    if requests.is_empty() {
        return Err("found no request, expected requests or sessions in JSON, or the CSV of kv-cache.py".into());
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
            let error = parse(format!("{good}\n\n{bad}").as_bytes(), 1).expect_err(bad);
            assert!(error.starts_with("line 3, column "), "{bad}: {error}");
            assert_eq!(error.matches("line").count(), 1, "one number of a line: {error}");
            assert!(!error.contains("column 0"), "columns begin at 1: {error}");
        }
        let text = parse(format!("{good}\nroot:x:0:0:root\n").as_bytes(), 1).expect_err("no JSON");
        assert!(text.contains("column 1: found no JSON") && text.contains("a request is an object with"), "{text}");
        let chain = Chain::Listed(vec![0, 1]);
        assert_eq!(parse(good.as_bytes(), 1), Ok(vec![Request { timestamp: 0.0, chain }]));
        assert!(parse("".as_bytes(), 1).is_err());
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
            let read = read(&path, 1).expect("a trace");
            assert_eq!((read.len(), read[0].timestamp), (requests, 5.0));
            assert_eq!(read[299].chain, Chain::Listed(vec![1, 2]));
            if requests > 300 {
                std::fs::write(&path, &bytes[..bytes.len() - 9]).expect("cut");
                let cut = super::read(&path, 1).expect_err("cut off");
                assert!(cut.contains("line "), "{cut}");
            }
        }
    }

    #[test]
    fn what_is_no_file_is_said_in_words() {
        let folder = tempfile::tempdir().expect("a directory");
        let refused = |path: &Path| read(path, 1).expect_err("no trace");
        assert_eq!(refused(&folder.path().join("none")), "found no such file, expected a trace file");
        assert_eq!(refused(folder.path()), "found a directory, expected a trace file");
        assert!(refused(Path::new("/dev/null/x")).starts_with("cannot be read (Not a directory), expected"));
    }

    #[test]
    fn an_endless_line_is_refused() {
        let error = parse(std::io::repeat(b'x').take(lines::LINE_BYTES_MAX + 2).buffered(), 1).expect_err("long");
        assert!(error.contains("line 1"), "{error}");
    }

    trait Buffered: Read + Sized {
        fn buffered(self) -> BufReader<Self> {
            BufReader::new(self)
        }
    }
    impl<R: Read> Buffered for R {}
}
