//! The lines of a trace, one at a time.

use std::io::{BufRead, Read};

/// A longer line is refused: a session of a thousand turns over a million tokens is one line.
pub const LINE_BYTES_MAX: u64 = 128 << 20;

/// The line that is being read.
pub struct Lines<R> {
    reader: R,
    /// Counted from 1, blank ones too.
    pub number: u64,
    pub line: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    pub fn new(reader: R) -> Self {
        Lines { reader, number: 0, line: Vec::new() }
    }

    /// Reads the next line that is not blank; false at the end.
    pub fn advance(&mut self) -> Result<bool, String> {
        loop {
            self.number += 1;
            self.line.clear();
            match self.reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut self.line) {
                Ok(0) => return Ok(false),
                Ok(_) if self.line.len() as u64 > LINE_BYTES_MAX => {
                    return Err(self.wrong(&format!("found more than {LINE_BYTES_MAX} bytes, expected a shorter line")));
                }
                Ok(_) if self.line.iter().all(u8::is_ascii_whitespace) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(self.wrong(&error.to_string())),
            }
        }
    }

    /// The line as JSON.
    pub fn json<'a, T: serde::Deserialize<'a>>(&'a self, expected: &str) -> Result<T, String> {
        serde_json::from_slice(&self.line).map_err(|error| {
            let text = error.to_string();
            // Its lines are those of this line alone.
            let what = text.strip_suffix(&format!(" at line {} column {}", error.line(), error.column()));
            // A line that ends too early has its error in column 0 of the next one.
            let column = if error.is_eof() { self.line.trim_ascii_end().len() } else { error.column() };
            let what = what.unwrap_or(&text);
            let found = if error.is_data() { what.to_owned() } else { format!("found no JSON ({what})") };
            format!("line {}, column {column}: {found}; {expected}", self.number)
        })
    }

    /// An error that begins with the line.
    pub fn wrong(&self, what: &str) -> String {
        format!("line {}: {what}", self.number)
    }
}
