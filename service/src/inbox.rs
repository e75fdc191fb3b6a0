//! Bytes that have come on a connection and are not read yet.
//!
//! A frame says how long it is, but takes memory as its bytes come. Up to 64 KiB are each connection's own. Those of
//! longer frames are counted over all connections of a service; where they are too many, the connection whose frame
//! has been incomplete for longest is cut off: a client that sends what it announced is never that one for long.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::Notify;

use super::protocol::{HEADER_BYTES, Header};

/// Room for bytes that come, at least.
const RECEIVE_BYTES: usize = 16 << 10;
/// A buffer larger than this is counted among those of all connections, and given back once it is empty.
const OWN_BYTES_MAX: usize = 64 << 10;
/// Bytes of these, of all connections.
pub(super) const UNREAD_BYTES_MAX: usize = 64 << 20;

/// The bytes of long frames of all connections.
#[derive(Clone, Default)]
pub(super) struct Unread(Arc<Mutex<Held>>);

#[derive(Default)]
struct Held {
    bytes: usize,
    next: u64,
    /// By the order in which the frames began.
    buffers: BTreeMap<u64, (usize, Arc<Notify>)>,
}

impl Unread {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().expect("nothing panics under it")
    }
}

/// One connection's part of [`Unread`].
struct Counted {
    unread: Unread,
    number: Option<u64>,
    crowded_out: Arc<Notify>,
}

impl Counted {
    /// The buffer has this many bytes from now on. `begins`: what it holds is the beginning of another frame.
    fn set(&mut self, bytes: usize, begins: bool) {
        let counted = if bytes > OWN_BYTES_MAX { bytes } else { 0 };
        if counted == 0 && self.number.is_none() {
            return;
        }
        let mut held = self.unread.lock();
        if let Some(number) = self.number
            && let Some((bytes, _)) = held.buffers.remove(&number)
        {
            held.bytes -= bytes;
        }
        if counted == 0 {
            self.number = None;
            return;
        }
        let number = self.number.filter(|_| !begins).unwrap_or_else(|| {
            held.next += 1;
            held.next
        });
        self.number = Some(number);
        held.bytes += counted;
        held.buffers.insert(number, (counted, Arc::clone(&self.crowded_out)));
        while held.bytes > UNREAD_BYTES_MAX
            && let Some((_, (bytes, oldest))) = held.buffers.pop_first()
        {
            held.bytes -= bytes;
            oldest.notify_one();
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.set(0, false);
    }
}

#[derive(Default)]
pub(super) struct Inbox {
    /// All of it may be received into; its length is not that of what has come.
    bytes: Vec<u8>,
    /// Bytes at the beginning that have been read.
    read: usize,
    /// Bytes at the beginning that have come.
    filled: usize,
    counted: Option<Counted>,
}

impl Inbox {
    pub(super) fn count_in(&mut self, unread: &Unread) {
        self.counted = Some(Counted { unread: unread.clone(), number: None, crowded_out: Arc::default() });
    }

    pub(super) async fn is_crowded_out(&self) {
        match &self.counted {
            Some(counted) => counted.crowded_out.notified().await,
            None => std::future::pending().await,
        }
    }

    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.read..self.filled]
    }

    /// Room after the bytes that have come: for the rest of the frame that they begin, but for no more than has come,
    /// nor for more than takes some microseconds to receive.
    pub(super) fn room(&mut self) -> &mut [u8] {
        let come = self.filled - self.read;
        let header = self.unread().first_chunk().and_then(|header| Header::decode(header).ok());
        let rest = header.map_or(0, |header| (HEADER_BYTES + header.body_bytes as usize).saturating_sub(come));
        self.make_room(rest.min(come).clamp(RECEIVE_BYTES, OWN_BYTES_MAX));
        &mut self.bytes[self.filled..]
    }

    /// Whether there is no room after the bytes that have come.
    pub(super) fn is_full(&self) -> bool {
        self.filled == self.bytes.len() && self.filled > 0
    }

    /// Makes more room than [`room`](Self::room), for a frame that begins at its end.
    pub(super) fn more_room(&mut self) {
        self.make_room(self.bytes.len() - self.filled + RECEIVE_BYTES);
    }

    fn make_room(&mut self, room: usize) {
        if self.bytes.len() - self.filled < room {
            if self.read > 0 {
                self.bytes.copy_within(self.read..self.filled, 0);
                (self.filled, self.read) = (self.filled - self.read, 0);
            }
            if self.bytes.len() - self.filled < room {
                self.bytes.resize(self.filled + room, 0);
                self.count(false);
            }
        }
    }

    fn count(&mut self, begins: bool) {
        let bytes = self.bytes.len();
        self.counted.iter_mut().for_each(|counted| counted.set(bytes, begins));
    }

    /// Bytes have come into the room.
    pub(super) fn fill(&mut self, len: usize) {
        self.filled += len;
    }

    /// Bytes have come elsewhere.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.make_room(bytes.len());
        self.bytes[self.filled..][..bytes.len()].copy_from_slice(bytes);
        self.filled += bytes.len();
    }

    /// Whether the bytes that have come, and `more` that lie in the room, hold a whole frame that `is_it`.
    pub(super) fn would_hold(&self, more: usize, is_it: impl Fn(&Header, &[u8]) -> bool) -> bool {
        let mut rest = self.bytes.get(self.read..self.filled + more).unwrap_or_default();
        while let Some(Ok(header)) = rest.first_chunk().map(Header::decode) {
            let end = HEADER_BYTES + header.body_bytes as usize;
            let Some(body) = rest.get(HEADER_BYTES..end) else { return false };
            if is_it(&header, body) {
                return true;
            }
            rest = &rest[end..];
        }
        false
    }

    pub(super) fn read(&mut self, len: usize) {
        self.read += len;
        if self.read == self.filled {
            (self.read, self.filled) = (0, 0);
            if self.bytes.len() > OWN_BYTES_MAX {
                self.bytes = Vec::new();
            }
        }
        self.count(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announce(inbox: &mut Inbox, body_bytes: u32) {
        inbox.append(&Header { body_bytes, kind: 7, id: 1 }.encode());
    }

    /// Lets bytes of the frame come; how many there was room for.
    fn come(inbox: &mut Inbox, most: usize) -> usize {
        let len = inbox.room().len().min(most);
        inbox.fill(len);
        len
    }

    #[test]
    fn a_frame_takes_memory_as_its_bytes_come() {
        let mut inbox = Inbox::default();
        announce(&mut inbox, 2 << 20);
        let mut left = 2 << 20;
        while left > 0 {
            let came = inbox.unread().len();
            assert!(inbox.room().len() <= came.clamp(2 * RECEIVE_BYTES, OWN_BYTES_MAX), "{came} bytes have come");
            left -= come(&mut inbox, left);
            assert!(inbox.bytes.len() <= 2 * inbox.unread().len().max(2 * RECEIVE_BYTES));
        }
        assert!(inbox.would_hold(0, |header, body| header.kind == 7 && body.len() == 2 << 20));
        inbox.read(HEADER_BYTES + (2 << 20));
        assert_eq!(inbox.bytes.len(), 0, "the memory is given back");
    }

    #[test]
    fn the_oldest_of_too_many_incomplete_frames_is_cut_off() {
        let unread = Unread::default();
        let half = |unread: &Unread| {
            let mut inbox = Inbox::default();
            inbox.count_in(unread);
            announce(&mut inbox, 2 << 20);
            while inbox.unread().len() < 1 << 20 {
                let left = (1 << 20) - inbox.unread().len();
                come(&mut inbox, left);
            }
            inbox
        };
        let is_out = |inbox: &Inbox| futures_util::FutureExt::now_or_never(inbox.is_crowded_out()).is_some();
        let mut first = half(&unread);
        let mut inboxes = vec![half(&unread)];
        // Its frame is read, and another one begins: it is no longer the oldest.
        first.append(&vec![0; (1 << 20) + HEADER_BYTES]);
        first.read(HEADER_BYTES + (2 << 20));
        announce(&mut first, 2 << 20);
        while first.unread().len() < 1 << 20 {
            come(&mut first, 1 << 20);
        }
        while !is_out(&inboxes[0]) {
            assert!(unread.lock().bytes <= UNREAD_BYTES_MAX && !is_out(&first));
            inboxes.push(half(&unread));
            assert!(inboxes.len() < 100, "{} bytes are held", unread.lock().bytes);
        }
        drop((first, inboxes));
        let held = unread.lock();
        assert_eq!((held.bytes, held.buffers.len()), (0, 0));
    }
}
