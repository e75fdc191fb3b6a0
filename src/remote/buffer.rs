//! The memory that a read of a store fills.

use std::{any::Any, fmt, mem};

use super::RemoteError;
use crate::{checksum::Digest, memory::copy_past_cache};

/// Bytes that are checksummed and then copied, out of the first cache of the processor.
const PIECE_BYTES: usize = 16 << 10;

/// A slot of a cache, which a read fills.
pub(crate) trait Slot: Any + Send {
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Memory that a read of a [`RemoteStore`](super::RemoteStore) fills from its beginning to its end: slots of the cache,
/// one after the other, or a buffer.
///
/// A store receives some 100 KiB at a time into one buffer of its own, which stays in the processor's cache, and gives
/// them to [`put`](Self::put), which checksums each byte of a slot on the way. That costs less than to receive into a
/// slot, whose memory is read into the cache first, and then to read it once more for the checksum.
///
/// ```
/// use kvhoist::remote::ReadBuffer;
///
/// let mut buffer = ReadBuffer::new(5);
/// buffer.put(b"ab")?;
/// buffer.put(b"cde")?;
/// assert_eq!((buffer.remaining(), buffer.into_bytes()?), (0, b"abcde".to_vec()));
/// # Ok::<(), kvhoist::remote::RemoteError>(())
/// ```
pub struct ReadBuffer {
    parts: Vec<Part>,
    /// The part that is being filled.
    at: usize,
    /// Bytes that are not filled yet, of all parts.
    remaining: usize,
}

struct Part {
    memory: Memory,
    filled: usize,
    digest: Digest,
}

enum Memory {
    Slot(Box<dyn Slot>),
    Bytes(Vec<u8>),
}

impl fmt::Debug for ReadBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadBuffer").field("parts", &self.parts.len()).field("remaining", &self.remaining).finish()
    }
}

impl ReadBuffer {
    /// A buffer of so many bytes.
    pub fn new(bytes: usize) -> Self {
        Self::of([Memory::Bytes(vec![0; bytes])])
    }

    /// The slots, one after the other.
    pub(crate) fn of_slots<S: Slot>(slots: Vec<S>) -> Self {
        Self::of(slots.into_iter().map(|slot| Memory::Slot(Box::new(slot))))
    }

    fn of(parts: impl IntoIterator<Item = Memory>) -> Self {
        let part = |memory| Part { memory, filled: 0, digest: Digest::new() };
        let mut parts: Vec<Part> = parts.into_iter().map(part).collect();
        let remaining = parts.iter_mut().map(|part| part.memory().len()).sum();
        ReadBuffer { parts, at: 0, remaining }
    }

    /// The bytes that are not filled yet.
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Copies what came next.
    ///
    /// # Errors
    /// [`RemoteError::Invalid`] if it is more than remains.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), RemoteError> {
        if bytes.len() > self.remaining {
            let found = format!("{} bytes more than were asked for", bytes.len() - self.remaining);
            return Err(RemoteError::Invalid { found, expected: "as many as the range has".into() });
        }
        self.remaining -= bytes.len();
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let part = &mut self.parts[self.at];
            let room = part.memory().len() - part.filled;
            let (now, later) = bytes.split_at(bytes.len().min(room));
            now.chunks(PIECE_BYTES).for_each(|piece| part.put(piece));
            self.at += usize::from(now.len() == room);
            bytes = later;
        }
        Ok(())
    }

    /// What a buffer of [`new`](Self::new) has.
    ///
    /// # Errors
    /// [`RemoteError::Invalid`] if it is not full, or is no such buffer.
    pub fn into_bytes(self) -> Result<Vec<u8>, RemoteError> {
        let mut parts = self.whole()?.into_iter();
        match (parts.next(), parts.next()) {
            (Some(Part { memory: Memory::Bytes(bytes), .. }), None) => Ok(bytes),
            _ => Err(another()),
        }
    }

    /// The slots that it was made of, each with its checksum.
    ///
    /// # Errors
    /// [`RemoteError::Invalid`] if a part is not full, or is no slot of this cache, for which `is_own` is true.
    pub(crate) fn into_slots<S: Slot>(self, is_own: impl Fn(&S) -> bool) -> Result<Vec<(S, u64)>, RemoteError> {
        let slot = |part: Part| {
            let Memory::Slot(slot) = part.memory else { return Err(another()) };
            let slot: Box<dyn Any> = slot;
            let slot = slot.downcast::<S>().ok().filter(|slot| is_own(slot)).ok_or_else(another)?;
            Ok((*slot, part.digest.finish()))
        };
        self.whole()?.into_iter().map(slot).collect()
    }

    fn whole(mut self) -> Result<Vec<Part>, RemoteError> {
        if self.remaining > 0 {
            let found = format!("{} bytes too few", self.remaining);
            return Err(RemoteError::Invalid { found, expected: "as many as the range has".into() });
        }
        Ok(mem::take(&mut self.parts))
    }
}

impl Part {
    /// Adds a piece, which there is room for.
    fn put(&mut self, piece: &[u8]) {
        let end = self.filled + piece.len();
        match &mut self.memory {
            Memory::Slot(slot) => {
                self.digest.update(piece);
                copy_past_cache(&mut slot.bytes_mut()[self.filled..end], piece);
            }
            Memory::Bytes(bytes) => bytes[self.filled..end].copy_from_slice(piece),
        }
        self.filled = end;
    }

    fn memory(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Slot(slot) => slot.bytes_mut(),
            Memory::Bytes(bytes) => bytes,
        }
    }
}

/// A store has answered with what it was not given.
fn another() -> RemoteError {
    RemoteError::Invalid { found: "the buffer of another read".into(), expected: "the one that it was given".into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::checksum;

    impl Slot for [u8; 4] {
        fn bytes_mut(&mut self) -> &mut [u8] {
            self
        }
    }

    #[test]
    fn slots_are_filled_in_turn_and_checksummed_on_the_way() {
        let mut buffer = ReadBuffer::of_slots(vec![[0; 4], [0; 4], [0; 4]]);
        for (bytes, remaining) in [(&b"ab"[..], 10), (b"c", 9), (b"", 9), (b"defg", 5)] {
            buffer.put(bytes).expect("room");
            assert_eq!(buffer.remaining(), remaining);
        }
        assert!(matches!(buffer.put(b"hijklm"), Err(RemoteError::Invalid { .. })), "a byte too many");
        buffer.put(b"hijkl").expect("room");
        assert_eq!(buffer.remaining(), 0);
        buffer.put(b"").expect("nothing");
        let slots = buffer.into_slots::<[u8; 4]>(|_| true).expect("full");
        let filled = [*b"abcd", *b"efgh", *b"ijkl"];
        assert_eq!(slots, filled.map(|slot| (slot, checksum(&slot))));
    }

    #[test]
    fn what_is_not_full_or_is_anothers_is_refused() {
        let mut buffer = ReadBuffer::of_slots(vec![[0; 4]]);
        buffer.put(b"abc").expect("room");
        assert!(matches!(buffer.into_slots::<[u8; 4]>(|_| true), Err(RemoteError::Invalid { .. })));
        assert!(ReadBuffer::new(0).into_slots::<[u8; 4]>(|_| true).is_err(), "no slot of a cache");
        assert!(ReadBuffer::of_slots(Vec::<[u8; 4]>::new()).into_bytes().is_err(), "no buffer");
        assert!(ReadBuffer::new(1).into_bytes().is_err());
        assert_eq!(ReadBuffer::new(0).into_bytes(), Ok(Vec::new()));
    }
}
