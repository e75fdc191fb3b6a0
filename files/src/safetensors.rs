//! The header of a safetensors file, with the checks that the format's authors make.
//!
//! Format: <https://github.com/huggingface/safetensors#format>. Eight bytes with the header's length (little-endian),
//! the header (JSON), the tensors' bytes.

use ::safetensors::tensor::Metadata;

use crate::{Error, Result, SourceFile, file::Way};

/// Longest header that the format allows, in bytes.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Bytes before the header.
const LEN_BYTES: u64 = 8;

/// A tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The format's name of its type: `F32`, `BF16`, ...
    pub dtype: String,
    /// Elements by dimension.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: usize,
}

/// What a header says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// The tensors, in the file's order.
    pub tensors: Vec<Tensor>,
    /// What the file says of itself, by key.
    pub metadata: Vec<(String, String)>,
    /// First byte of the tensors in the file.
    pub data_offset: u64,
}

/// Reads the header of an open file.
///
/// # Errors
/// [`Error::Format`] with what was found; [`Error::Io`].
pub fn header(file: &SourceFile) -> Result<Header> {
    let read = |start: u64, to: &mut [u8]| file.read(Way::Buffered, start, to).map(drop);
    let refuse = |problem: String| Error::Format { path: file.path().to_owned(), problem };
    decode(file.size(), read, refuse)
}

/// Reads the header of a file of `size` bytes, of which `read` fills in a range.
pub(crate) fn decode<E>(
    size: u64,
    read: impl Fn(u64, &mut [u8]) -> std::result::Result<(), E>,
    refuse: impl Fn(String) -> E,
) -> std::result::Result<Header, E> {
    let mut len = [0; LEN_BYTES as usize];
    if size < LEN_BYTES {
        return Err(refuse(format!("found {size} bytes, expected a safetensors file, which begins with 8")));
    }
    read(0, &mut len)?;
    let len = u64::from_le_bytes(len);
    if len > HEADER_BYTES_MAX {
        return Err(refuse(format!(
            "found a header of {len} bytes, expected at most {HEADER_BYTES_MAX} (header too large): this is no \
             safetensors file, or a damaged one"
        )));
    }
    let data_offset = LEN_BYTES + len;
    if data_offset > size {
        return Err(refuse(format!("found {size} bytes, expected a header that ends at {data_offset}")));
    }
    let mut text = vec![0; len as usize];
    read(LEN_BYTES, &mut text)?;
    let found: Metadata = serde_json::from_slice(&text)
        .map_err(|error| refuse(format!("found a header that is not one of safetensors: {error}")))?;
    let end = data_offset.checked_add(found.data_len() as u64);
    if end != Some(size) {
        return Err(refuse(format!(
            "found {size} bytes, expected {}: the file was cut off, or is not complete yet",
            end.map_or_else(|| "fewer than 2^64".into(), |end| end.to_string())
        )));
    }
    let tensors = found.offset_keys().into_iter().map(|name| {
        let info = found.info(&name).expect("the header names it");
        let ((start, end), shape) = (info.data_offsets, info.shape.clone());
        // Of one without elements, too: readers compute strides.
        let times = |all: i64, &one: &usize| all.checked_mul(i64::try_from(one.max(1)).ok()?);
        if shape.iter().try_fold(1, times).is_none() {
            let expected = "expected dimensions whose product is below 2^63, those of 0 left out";
            return Err(refuse(format!("found the tensor {name} of shape {shape:?}, {expected}")));
        }
        let (dtype, offset) = (info.dtype.to_string(), data_offset + start as u64);
        Ok(Tensor { name, dtype, shape, offset, len: end - start })
    });
    let tensors = tensors.collect::<std::result::Result<_, E>>()?;
    let mut metadata: Vec<_> = found.metadata().clone().into_iter().flatten().collect();
    metadata.sort();
    Ok(Header { tensors, metadata, data_offset })
}
