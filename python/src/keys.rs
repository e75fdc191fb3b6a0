//! Keys: lists of `str` or `bytes` to the engine's keys, in one pass.

use kvhoist::BlockKey;
use pyo3::{
    prelude::*,
    types::{PyByteArray, PyBytes, PyList, PyMemoryView, PySequence, PyString, PyTuple},
};
use sha2::{Digest, Sha256};

use crate::errors;

/// The prefix of what is hashed for a name that is no digest itself.
const NAME_DOMAIN: &[u8] = b"kvhoist python key v1\0";

/// The keys of a sequence.
///
/// A `str` of 64 hex characters and `bytes` of length 32 are keys as they are; anything else is a name, whose key is a
/// digest of it.
pub fn from_python(keys: &Bound<'_, PyAny>) -> PyResult<Vec<BlockKey>> {
    if let Ok(list) = keys.cast::<PyList>() {
        return all(list.iter());
    }
    match items(keys)? {
        Some(items) => all(items.into_iter()),
        None => Err(errors::argument(keys.py(), "keys", type_name(keys), "a list or another sequence of str or bytes")),
    }
}

/// The items of a list, a tuple or another sequence; `None` for other objects, and for text and bytes.
pub fn items<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Ok(Some(list.iter().collect()));
    }
    if let Ok(tuple) = value.cast::<PyTuple>() {
        return Ok(Some(tuple.iter().collect()));
    }
    let flat = value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyByteArray>()
        || value.is_instance_of::<PyMemoryView>();
    if flat || value.cast::<PySequence>().is_err() {
        return Ok(None);
    }
    value.try_iter()?.collect::<PyResult<Vec<_>>>().map(Some)
}

fn all<'py>(items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>) -> PyResult<Vec<BlockKey>> {
    let mut keys = Vec::with_capacity(items.len());
    for item in items {
        keys.push(one(&item)?);
    }
    Ok(keys)
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

/// The key of an engine's chunk, whose name is a hash already: an engine asks for thousands of them in a step, and a
/// digest of each would cost more than the look-up.
///
/// A hash of 32 bytes with the number of its group behind it lends 28 bytes of the hash to the key, and the number. A
/// shorter hash is filled up with zeros and its length, where groups have numbers below 2^31. Whatever else there may
/// be is digested.
pub fn of_chunk(name: &[u8]) -> BlockKey {
    let mut key = [0; 32];
    match name.len() {
        36 => {
            key[..28].copy_from_slice(&name[..28]);
            key[28..].copy_from_slice(&name[32..]);
        }
        length @ 0..=28 => {
            key[..length].copy_from_slice(name);
            key[28..].copy_from_slice(&(1 << 31 | length as u32).to_be_bytes());
        }
        _ => return digest(name),
    }
    BlockKey::new(key)
}

/// The keys of chunks, as `bytes`.
#[pyfunction]
pub fn chunk_keys<'py>(py: Python<'py>, names: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyList>> {
    let keys = names.iter().map(|name| match name.cast::<PyBytes>() {
        Ok(name) => Ok(PyBytes::new(py, of_chunk(name.as_bytes()).as_bytes())),
        Err(_) => Err(errors::argument(py, "names", type_name(&name), "a list of bytes")),
    });
    PyList::new(py, keys.collect::<PyResult<Vec<_>>>()?)
}

/// An optional key.
pub fn optional(key: Option<&Bound<'_, PyAny>>) -> PyResult<Option<BlockKey>> {
    key.map(one).transpose()
}

/// Describes a value, for errors.
pub fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "something".into(), |name| name.to_string())
}

fn digest(name: &[u8]) -> BlockKey {
    BlockKey::new(Sha256::new().chain_update(NAME_DOMAIN).chain_update(name).finalize().into())
}

/// Without branches or tables, so that the compiler makes vector code of it: prompts have thousands of keys.
fn from_hex(text: &[u8]) -> Option<BlockKey> {
    let text: &[u8; 64] = text.try_into().ok()?;
    let (mut digits, mut wrong) = ([0; 64], false);
    for (digit, &character) in digits.iter_mut().zip(text) {
        let (number, letter) = (character.wrapping_sub(b'0'), (character | 0x20).wrapping_sub(b'a'));
        *digit = if number < 10 { number } else { letter.wrapping_add(10) };
        wrong |= number >= 10 && letter >= 6;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    (!wrong).then(|| BlockKey::new(bytes))
}
