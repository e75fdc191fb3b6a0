//! What the fuzz targets reach: without any promise.

use crate::{
    Range, plan,
    safetensors::{Header, decode},
};

/// One request: its file, where it begins and ends there, and the parts of ranges in it.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// The file.
    pub file: usize,
    /// First byte.
    pub start: u64,
    /// Behind the last byte.
    pub end: u64,
    /// Each with its range's number, first byte in the file, length, and first byte in memory.
    pub parts: Vec<(usize, u64, usize, usize)>,
}

/// The requests for these ranges, of one drive after the other; `drives` are those of the files.
pub fn requests(ranges: &[Range], piece_bytes: u64, align: u64, drives: &[u64]) -> Vec<Request> {
    let parts = |part: &plan::Part| (part.range, part.offset, part.len, part.address);
    let pieces = plan::by_drive(plan::plan(ranges, piece_bytes, align), drives).into_iter().flatten();
    pieces
        .map(|piece| Request {
            file: piece.file,
            start: piece.start,
            end: piece.end,
            parts: piece.parts.iter().map(parts).collect(),
        })
        .collect()
}

/// The header of a safetensors file that is these bytes, or why it is refused.
///
/// # Errors
/// What was found, and what was expected.
pub fn header_of(bytes: &[u8]) -> Result<Header, String> {
    let read = |start: u64, to: &mut [u8]| {
        to.copy_from_slice(&bytes[start as usize..start as usize + to.len()]);
        Ok(())
    };
    decode(bytes.len() as u64, read, |problem| problem)
}
