//! The memory that a read of a store fills.

use std::{any::Any, fmt, mem};

use super::RemoteError;
use crate::checksum::Digest;

/// A slot of a cache, which a read fills.
pub(crate) trait Slot: Any + Send {
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Memory that a read of a [`RemoteStore`](super::RemoteStore) fills from its beginning to its end: slots of the cache,
/// one after the other, or a buffer.
///
/// A store receives into [`spare`](Self::spare) and tells [`advance`](Self::advance) how many bytes came, or copies by
/// [`put`](Self::put). Each byte of a slot is checksummed then, while it is in the processor's cache, and cannot be
/// changed any more.
///
/// ```
/// use kvhoist::remote::ReadBuffer;
///
/// let mut buffer = ReadBuffer::new(5);
/// buffer.spare()[..2].copy_from_slice(b"ab");
/// buffer.advance(2);
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

    /// Memory that is not filled yet, the next part of it; empty once all is filled.
    pub fn spare(&mut self) -> &mut [u8] {
        match self.parts.get_mut(self.at) {
            Some(part) => {
                let filled = part.filled;
                &mut part.memory()[filled..]
            }
            None => &mut [],
        }
    }

    /// Notes that the first `bytes` of [`spare`](Self::spare) are filled.
    ///
    /// # Panics
    /// If that has fewer.
    pub fn advance(&mut self, bytes: usize) {
        let Some(part) = self.parts.get_mut(self.at) else {
            assert_eq!(bytes, 0, "all is filled");
            return;
        };
        let (from, to) = (part.filled, part.filled + bytes);
        let memory = match &mut part.memory {
            Memory::Slot(slot) => {
                let memory = slot.bytes_mut();
                part.digest.update(&memory[from..to]);
                memory
            }
            Memory::Bytes(memory) => memory,
        };
        assert!(to <= memory.len(), "more than the spare memory");
        let is_full = to == memory.len();
        part.filled = to;
        self.at += usize::from(is_full);
        self.remaining -= bytes;
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
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let spare = self.spare();
            let (now, later) = bytes.split_at(bytes.len().min(spare.len()));
            spare[..now.len()].copy_from_slice(now);
            self.advance(now.len());
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
    /// [`RemoteError::Invalid`] if a part is not full, or is none of a cache.
    pub(crate) fn into_slots<S: Slot>(self) -> Result<Vec<(S, u64)>, RemoteError> {
        let slot = |part: Part| {
            let Memory::Slot(slot) = part.memory else { return Err(another()) };
            let slot: Box<dyn Any> = slot;
            Ok((*slot.downcast::<S>().map_err(|_| another())?, part.digest.finish()))
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
        let mut buffer = ReadBuffer::of_slots(vec![[0; 4], [0; 4]]);
        buffer.put(b"abc").expect("room");
        assert_eq!((buffer.remaining(), buffer.spare().len()), (5, 1));
        buffer.spare()[0] = b'd';
        buffer.advance(1);
        assert_eq!(buffer.spare().len(), 4, "the next slot");
        assert!(matches!(buffer.put(b"efghi"), Err(RemoteError::Invalid { .. })), "a byte too many");
        buffer.put(b"efgh").expect("room");
        assert_eq!((buffer.remaining(), buffer.spare().len()), (0, 0));
        buffer.advance(0);
        let slots = buffer.into_slots::<[u8; 4]>().expect("full");
        assert_eq!(slots, [(*b"abcd", checksum(b"abcd")), (*b"efgh", checksum(b"efgh"))]);
    }

    #[test]
    fn what_is_not_full_or_is_anothers_is_refused() {
        let mut buffer = ReadBuffer::of_slots(vec![[0; 4]]);
        buffer.put(b"abc").expect("room");
        assert!(matches!(buffer.into_slots::<[u8; 4]>(), Err(RemoteError::Invalid { .. })));
        assert!(ReadBuffer::new(0).into_slots::<[u8; 4]>().is_err(), "no slot of a cache");
        assert!(ReadBuffer::of_slots(Vec::<[u8; 4]>::new()).into_bytes().is_err(), "no buffer");
        assert!(ReadBuffer::new(1).into_bytes().is_err());
        assert_eq!(ReadBuffer::new(0).into_bytes(), Ok(Vec::new()));
    }

    #[test]
    #[should_panic(expected = "range end index 5 out of range")]
    fn more_than_the_spare_memory_is_not_filled() {
        ReadBuffer::of_slots(vec![[0; 4]]).advance(5);
    }
}
