//! Values as bytes: little-endian, every length checked before it is used.

use kvhoist::BlockKey;

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
/// Bytes of a file's path: the frame is one that a client may send before it is attached.
pub const PATH_BYTES_MAX: usize = 4000;
/// Bytes of an error's text; longer ones are cut off.
pub const TEXT_BYTES_MAX: usize = 1024;

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
        let (body_bytes, kind) = (u32::get(&mut reader, "frame length")?, u16::get(&mut reader, "frame kind")?);
        let (reserved, id) = (u16::get(&mut reader, "reserved bytes")?, u64::get(&mut reader, "request id")?);
        if body_bytes as usize > FRAME_BYTES_MAX {
            return Err(malformed("frame length", format!("{body_bytes} bytes"), format!("at most {FRAME_BYTES_MAX}")));
        }
        if reserved != 0 {
            return Err(malformed("reserved bytes", reserved, "0"));
        }
        Ok(Header { body_bytes, kind, id })
    }
}

/// Gives a whole frame another request's id.
pub(crate) fn set_id(frame: &mut [u8], id: u64) {
    frame[8..HEADER_BYTES].copy_from_slice(&id.to_le_bytes());
}

/// A value of a frame.
pub(super) trait Wire: Sized {
    fn put(&self, writer: &mut Writer);

    /// Reads the value, which errors call `what`.
    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed>;
}

/// An item of a list, whose number comes first.
pub(super) trait Item: Wire {
    /// What errors call the item, and the number of items.
    const NAMES: [&'static str; 2];
    /// Bytes that each item takes at least: a list is not read if the frame has no room for it.
    const BYTES_MIN: usize;
    /// A reader refuses longer lists.
    const COUNT_MAX: usize;
}

macro_rules! numbers {
    ($($type:ident)*) => {
        $(impl Wire for $type {
            fn put(&self, writer: &mut Writer) {
                writer.bytes(&self.to_le_bytes());
            }

            fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
                Ok($type::from_le_bytes(reader.array(what)?))
            }
        })*
    };
}

numbers! { u8 u16 u32 u64 }

impl Wire for bool {
    fn put(&self, writer: &mut Writer) {
        u8::from(*self).put(writer);
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        match u8::get(reader, what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(malformed(what, other, "0 or 1")),
        }
    }
}

impl Item for bool {
    const NAMES: [&'static str; 2] = ["answer", "number of answers"];
    const BYTES_MIN: usize = 1;
    const COUNT_MAX: usize = KEYS_MAX;
}

/// The layer of a segment.
impl Item for u16 {
    const NAMES: [&'static str; 2] = ["layer", "number of segments"];
    const BYTES_MIN: usize = 2;
    const COUNT_MAX: usize = PLACES_MAX;
}

impl Wire for BlockKey {
    fn put(&self, writer: &mut Writer) {
        writer.bytes(self.as_bytes());
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        Ok(BlockKey::new(reader.array(what)?))
    }
}

impl Item for BlockKey {
    const NAMES: [&'static str; 2] = ["key", "number of keys"];
    const BYTES_MIN: usize = 32;
    const COUNT_MAX: usize = KEYS_MAX;
}

impl Wire for String {
    fn put(&self, writer: &mut Writer) {
        writer.text(self, TEXT_BYTES_MAX);
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        reader.text(what, TEXT_BYTES_MAX)
    }
}

/// A byte that says whether there is a value, and the value.
impl<T: Wire> Wire for Option<T> {
    fn put(&self, writer: &mut Writer) {
        self.is_some().put(writer);
        self.iter().for_each(|value| value.put(writer));
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        bool::get(reader, what)?.then(|| T::get(reader, what)).transpose()
    }
}

impl<T: Wire> Wire for Box<T> {
    fn put(&self, writer: &mut Writer) {
        T::put(self, writer);
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        T::get(reader, what).map(Box::new)
    }
}

impl<T: Wire + Copy + Default, const N: usize> Wire for [T; N] {
    fn put(&self, writer: &mut Writer) {
        self.iter().for_each(|value| value.put(writer));
    }

    fn get(reader: &mut Reader<'_>, what: &'static str) -> Result<Self, Malformed> {
        let mut values = [T::default(); N];
        for value in &mut values {
            *value = T::get(reader, what)?;
        }
        Ok(values)
    }
}

impl<T: Item> Wire for Vec<T> {
    fn put(&self, writer: &mut Writer) {
        writer.reserve(4 + self.len() * T::BYTES_MIN);
        writer.count(self.len());
        self.iter().for_each(|item| item.put(writer));
    }

    fn get(reader: &mut Reader<'_>, _: &'static str) -> Result<Self, Malformed> {
        let [item, number] = T::NAMES;
        let count = reader.count(number, T::COUNT_MAX, T::BYTES_MIN)?;
        (0..count).map(|_| T::get(reader, item)).collect()
    }
}

/// A frame that is being written.
pub(super) struct Writer(Vec<u8>);

impl Writer {
    /// A frame whose body follows.
    pub(super) fn frame(id: u64) -> Self {
        Writer(Header { body_bytes: 0, kind: 0, id }.encode().to_vec())
    }

    /// Bytes without a header.
    pub(super) fn plain(capacity: usize) -> Self {
        Writer(Vec::with_capacity(capacity))
    }

    /// The frame, with its kind and its length in its header.
    pub(super) fn finish(mut self, kind: u16) -> Vec<u8> {
        let body = u32::try_from(self.0.len() - HEADER_BYTES).unwrap_or(u32::MAX);
        self.0[..4].copy_from_slice(&body.to_le_bytes());
        self.0[4..6].copy_from_slice(&kind.to_le_bytes());
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

    /// A number of items. More than fit never pass the limits of a frame.
    pub(super) fn count(&mut self, items: usize) {
        u32::try_from(items).unwrap_or(u32::MAX).put(self);
    }

    /// A text of at most `max` bytes; the rest is cut off.
    pub(super) fn text(&mut self, text: &str, max: usize) {
        let text = cut(text, max.min(usize::from(u16::MAX)));
        (text.len() as u16).put(self);
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

    /// All that is left.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(what, N)?);
        Ok(bytes)
    }

    /// A number of items of at least `item_bytes` each, which the rest of the body must have room for.
    pub(super) fn count(&mut self, what: &'static str, max: usize, item_bytes: usize) -> Result<usize, Malformed> {
        let count = u32::get(self, what)? as usize;
        if count > max {
            return Err(malformed(what, count, format!("at most {max}")));
        }
        if count * item_bytes > self.rest.len() {
            return Err(malformed(what, format!("{count} in {} bytes", self.rest.len()), "as many as the frame holds"));
        }
        Ok(count)
    }

    pub(super) fn text(&mut self, what: &'static str, max: usize) -> Result<String, Malformed> {
        let len = usize::from(u16::get(self, what)?);
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
