//! Numbers, texts and keys as bytes: little-endian, every length checked before it is used.

use crate::block::BlockKey;

/// Bytes of a [`Header`].
pub const HEADER_BYTES: usize = 16;
/// Bytes that a frame may have after its header.
pub const FRAME_BYTES_MAX: usize = 2 << 20;
/// Keys in one request.
pub const KEYS_MAX: usize = 4096;
/// Places in one request.
pub const PLACES_MAX: usize = 65_536;
/// Bytes of a space's name.
pub const NAMESPACE_BYTES_MAX: usize = 255;
/// Bytes of an error's text; longer ones are cut off.
pub const TEXT_BYTES_MAX: usize = 1024;

const KEY_BYTES: usize = 32;

/// Bytes that the protocol does not know.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: found {found}, expected {expected}")]
pub struct Malformed {
    /// Which part of the frame.
    pub what: &'static str,
    /// The value that was found.
    pub found: String,
    /// The values that are accepted.
    pub expected: String,
}

/// A [`Malformed`] part.
pub(super) fn malformed(what: &'static str, found: impl ToString, expected: impl Into<String>) -> Malformed {
    Malformed { what, found: found.to_string(), expected: expected.into() }
}

/// The beginning of every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes that follow the header.
    pub body_bytes: u32,
    /// Which request or reply the body is.
    pub kind: u16,
    /// The request's id, also in its reply; 0 in frames without a request.
    pub id: u64,
}

impl Header {
    /// The header as it is sent.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.body_bytes.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..].copy_from_slice(&self.id.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`Malformed`] for a body that is too long, and for reserved bytes that are not 0.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Malformed> {
        let mut reader = Reader::new(bytes);
        let (body_bytes, kind) = (reader.u32("frame length")?, reader.u16("frame kind")?);
        let (reserved, id) = (reader.u16("reserved bytes")?, reader.u64("request id")?);
        if body_bytes as usize > FRAME_BYTES_MAX {
            return Err(malformed("frame length", format!("{body_bytes} bytes"), format!("at most {FRAME_BYTES_MAX}")));
        }
        if reserved != 0 {
            return Err(malformed("reserved bytes", reserved, "0"));
        }
        Ok(Header { body_bytes, kind, id })
    }
}

/// A frame that is being written.
pub(super) struct Writer(Vec<u8>);

impl Writer {
    /// A frame of `kind` whose body follows.
    pub(super) fn frame(kind: u16, id: u64) -> Self {
        Writer(Header { body_bytes: 0, kind, id }.encode().to_vec())
    }

    /// Bytes without a header.
    pub(super) fn plain(capacity: usize) -> Self {
        Writer(Vec::with_capacity(capacity))
    }

    /// The frame, with its length in its header.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let body = u32::try_from(self.0.len() - HEADER_BYTES).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&body.to_le_bytes());
        self.0
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    pub(super) fn reserve(&mut self, bytes: usize) {
        self.0.reserve(bytes);
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// A number of items. More than fit never pass the limits of a frame.
    pub(super) fn count(&mut self, items: usize) {
        self.u32(u32::try_from(items).unwrap_or(u32::MAX));
    }

    pub(super) fn keys(&mut self, keys: &[BlockKey]) {
        self.reserve(4 + keys.len() * KEY_BYTES);
        self.count(keys.len());
        for key in keys {
            self.bytes(key.as_bytes());
        }
    }

    /// A text of at most `max` bytes; the rest is cut off.
    pub(super) fn text(&mut self, text: &str, max: usize) {
        let text = cut(text, max.min(usize::from(u16::MAX)));
        self.u16(text.len() as u16);
        self.bytes(text.as_bytes());
    }
}

/// The first `max` bytes of a text, or fewer: no character is cut in two.
pub(super) fn cut(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Reads a body. Every method fails if the bytes end early.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes }
    }

    pub(super) fn take(&mut self, what: &'static str, len: usize) -> Result<&'a [u8], Malformed> {
        let Some((taken, rest)) = self.rest.split_at_checked(len) else {
            return Err(malformed(what, format!("{} bytes left", self.rest.len()), format!("{len} bytes")));
        };
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(what, N)?);
        Ok(bytes)
    }

    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, Malformed> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u16(&mut self, what: &'static str) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    pub(super) fn flag(&mut self, what: &'static str) -> Result<bool, Malformed> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(malformed(what, other, "0 or 1")),
        }
    }

    /// A number of items of at least `item_bytes` each, which the rest of the body must have room for.
    pub(super) fn count(&mut self, what: &'static str, max: usize, item_bytes: usize) -> Result<usize, Malformed> {
        let count = self.u32(what)? as usize;
        if count > max {
            return Err(malformed(what, count, format!("at most {max}")));
        }
        if count * item_bytes > self.rest.len() {
            return Err(malformed(what, format!("{count} in {} bytes", self.rest.len()), "as many as the frame holds"));
        }
        Ok(count)
    }

    pub(super) fn key(&mut self) -> Result<BlockKey, Malformed> {
        Ok(BlockKey::new(self.array("key")?))
    }

    pub(super) fn keys(&mut self) -> Result<Vec<BlockKey>, Malformed> {
        let count = self.count("number of keys", KEYS_MAX, KEY_BYTES)?;
        (0..count).map(|_| self.key()).collect()
    }

    pub(super) fn text(&mut self, what: &'static str, max: usize) -> Result<String, Malformed> {
        let len = usize::from(self.u16(what)?);
        if len > max {
            return Err(malformed(what, format!("{len} bytes"), format!("at most {max}")));
        }
        let bytes = self.take(what, len)?;
        let text = std::str::from_utf8(bytes).map_err(|error| malformed(what, error, "UTF-8"))?;
        Ok(text.to_owned())
    }

    /// Nothing may be left.
    pub(super) fn end(self) -> Result<(), Malformed> {
        if self.rest.is_empty() {
            return Ok(());
        }
        Err(malformed("frame", format!("{} bytes after its end", self.rest.len()), "none"))
    }
}
