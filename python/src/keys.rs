//! Keys: lists of `str` or `bytes` to the engine's keys, in one pass.

use kvhoist::BlockKey;
use pyo3::{
    prelude::*,
    types::{PyBytes, PyList, PyString, PyTuple},
};
use sha2::{Digest, Sha256};

use crate::errors;

/// What every digest of a name that is no digest itself begins with.
const NAME_DOMAIN: &[u8] = b"kvhoist python key v1\0";

/// The keys of a list or tuple.
///
/// A `str` of 64 hex characters and `bytes` of length 32 are keys as they are; anything else is a name, whose key is a
/// digest of it.
pub fn from_python(keys: &Bound<'_, PyAny>) -> PyResult<Vec<BlockKey>> {
    if let Ok(list) = keys.cast::<PyList>() {
        return list.iter().map(|item| one(&item)).collect();
    }
    if let Ok(tuple) = keys.cast::<PyTuple>() {
        return tuple.iter().map(|item| one(&item)).collect();
    }
    Err(errors::argument(keys.py(), "keys", type_name(keys), "a list of str or bytes"))
}

/// One key.
pub fn one(key: &Bound<'_, PyAny>) -> PyResult<BlockKey> {
    if let Ok(text) = key.cast::<PyString>() {
        let text = text.to_str()?;
        return Ok(from_hex(text.as_bytes()).unwrap_or_else(|| digest(text.as_bytes())));
    }
    if let Ok(bytes) = key.cast::<PyBytes>() {
        let bytes = bytes.as_bytes();
        return Ok(bytes.try_into().map_or_else(|_| digest(bytes), BlockKey::new));
    }
    Err(errors::argument(key.py(), "key", type_name(key), "a str or bytes"))
}

/// An optional key.
pub fn optional(key: Option<&Bound<'_, PyAny>>) -> PyResult<Option<BlockKey>> {
    key.map(one).transpose()
}

/// What a value is, for errors.
pub fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "something".into(), |name| name.to_string())
}

fn digest(name: &[u8]) -> BlockKey {
    BlockKey::new(Sha256::new().chain_update(NAME_DOMAIN).chain_update(name).finalize().into())
}

/// The value of each hex digit, and for all else a value with a bit above them.
const HEX: [u8; 256] = {
    let mut table = [0xff; 256];
    let mut digit = 0;
    while digit < 16 {
        table[b"0123456789abcdef"[digit] as usize] = digit as u8;
        table[b"0123456789ABCDEF"[digit] as usize] = digit as u8;
        digit += 1;
    }
    table
};

fn from_hex(text: &[u8]) -> Option<BlockKey> {
    let text: &[u8; 64] = text.try_into().ok()?;
    let (mut bytes, mut seen) = ([0; 32], 0);
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        let (high, low) = (HEX[usize::from(pair[0])], HEX[usize::from(pair[1])]);
        seen |= high | low;
        *byte = high << 4 | low & 15;
    }
    (seen < 16).then(|| BlockKey::new(bytes))
}
