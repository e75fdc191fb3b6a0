//! Registered buffers: the arena's chunks first, then regions that come and go.
//!
//! Generic over who pins them, so that a simulation refuses what a kernel may refuse.
//!
//! tokio-uring registers whole tables and has no way to change an entry, so a change takes the table out and puts
//! another in: the kernel pins all of it anew, some 30 ms a GiB, on the caller's thread. Operations under way keep the
//! pages that they began with. Entries keep their places, since an operation that waits to be submitted names one.

use std::{any::Any, io, ptr, sync::Arc};

use super::REGIONS_MAX;
use crate::{block::FIXED_BYTES_MAX, io::memlock, memory::Lent};

/// Pins one table of buffers at a time.
pub(in crate::io) trait Pinner {
    /// Pins all of the entries, or none. Called while nothing is pinned.
    fn pin(&mut self, entries: &[Entry]) -> io::Result<()>;

    /// Lets go of what is pinned, if anything is.
    fn unpin(&mut self) -> io::Result<()>;

    /// True while a table is pinned.
    fn is_pinned(&self) -> bool;
}

/// A range of memory for the kernel to pin, or a place that is free.
#[derive(Clone)]
pub(in crate::io) struct Entry {
    /// Null and 0 where the place is free.
    start: *mut u8,
    len: usize,
    /// What keeps the range mapped, if not a caller's promise.
    _keep_alive: Option<Arc<dyn Any + Send + Sync>>,
}

impl Entry {
    pub(in crate::io) fn new(start: *mut u8, len: usize, keep_alive: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        Entry { start, len, _keep_alive: keep_alive }
    }

    fn free() -> Self {
        Entry::new(ptr::null_mut(), 0, None)
    }

    pub(in crate::io) fn start(&self) -> *mut u8 {
        self.start
    }

    pub(in crate::io) fn len(&self) -> usize {
        self.len
    }

    fn is_free(&self) -> bool {
        self.start.is_null()
    }

    pub(in crate::io) fn contains(&self, start: usize, len: usize) -> bool {
        let begin = self.start.addr();
        start >= begin && len <= self.len && start - begin <= self.len - len
    }
}

/// What the kernel has registered for one engine.
#[derive(Default)]
pub(in crate::io) struct Table<P> {
    /// Which memory has which place, whether or not the kernel has registered it.
    entries: Vec<Entry>,
    pinner: P,
}

impl<P: Pinner> Table<P> {
    /// Registers all entries or none, and then says why in the log. Nothing is pinned yet.
    pub(in crate::io) fn new(entries: Vec<Entry>, pinner: P) -> Self {
        let wanted_bytes = bytes(&entries);
        let mut table = Table { entries, pinner };
        if let Err(error) = table.renew() {
            let refusal = memlock::Refusal { wanted_bytes, error: &error };
            tracing::warn!(wanted_bytes, "{refusal}; reads and writes go on unregistered, slower");
            // A region that is small enough may be registered yet; with these beside it, it would be refused too.
            table.entries.clear();
        }
        table
    }

    /// True while the kernel has memory registered.
    pub(in crate::io) fn is_registered(&self) -> bool {
        self.pinner.is_pinned()
    }

    /// Who pins.
    #[cfg(any(test, feature = "sim"))]
    pub(in crate::io) fn pinner(&self) -> &P {
        &self.pinner
    }

    /// The registered buffer that `buf` lies in, if it does.
    pub(in crate::io) fn fixed(&self, buf: &Lent) -> Option<u16> {
        buf.fixed().filter(|&place| self.holds(place, buf.as_ptr(), buf.len()))
    }

    /// Whether the kernel has registered memory at this place that all of the range lies in.
    ///
    /// Callers name places that were refused, or that belong to other memory since: only what is found here may be
    /// named to the kernel.
    fn holds(&self, place: u16, start: *const u8, len: usize) -> bool {
        let entry = self.entries.get(usize::from(place));
        self.is_registered() && entry.is_some_and(|entry| entry.contains(start.addr(), len))
    }

    /// Registers a range too, in pieces of [`FIXED_BYTES_MAX`]; the place of the first.
    pub(in crate::io) fn add(&mut self, start: *mut u8, len: usize) -> io::Result<u16> {
        let pieces = len.div_ceil(FIXED_BYTES_MAX);
        let first = self.room_for(pieces);
        if first + pieces > REGIONS_MAX {
            let text = format!("{pieces} more buffers in a table of {REGIONS_MAX} with {} in use", self.entries.len());
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        }
        let before = self.entries.clone();
        self.entries.resize(before.len().max(first + pieces), Entry::free());
        for (piece, entry) in self.entries[first..][..pieces].iter_mut().enumerate() {
            let at = piece * FIXED_BYTES_MAX;
            *entry = Entry::new(start.wrapping_add(at), (len - at).min(FIXED_BYTES_MAX), None);
        }
        if let Err(refused) = self.renew() {
            self.entries = before;
            self.renew_or_warn();
            return Err(refused);
        }
        Ok(u16::try_from(first).expect("REGIONS_MAX fits in 16 bits"))
    }

    /// Takes out what [`add`](Self::add) put at `first`.
    pub(in crate::io) fn remove(&mut self, first: u16, len: usize) {
        self.entries[usize::from(first)..][..len.div_ceil(FIXED_BYTES_MAX)].fill(Entry::free());
        while self.entries.last().is_some_and(Entry::is_free) {
            self.entries.pop();
        }
        self.renew_or_warn();
    }

    /// Where so many neighboring places are free.
    fn room_for(&self, pieces: usize) -> usize {
        let is_room = |first: &usize| self.entries[*first..].iter().take(pieces).all(Entry::is_free);
        (0..self.entries.len()).find(is_room).unwrap_or(self.entries.len())
    }

    /// Registers what is entered now. Where that is refused the entries keep their places, unregistered, until the
    /// next change.
    fn renew_or_warn(&mut self) {
        if let Err(error) = self.renew() {
            let refusal = memlock::Refusal { wanted_bytes: bytes(&self.entries), error: &error };
            tracing::warn!("{refusal}; reads and writes go on unregistered, slower");
        }
    }

    /// Replaces what the kernel has registered by `entries`.
    fn renew(&mut self) -> io::Result<()> {
        self.pinner.unpin()?;
        if self.entries.is_empty() { Ok(()) } else { self.pinner.pin(&self.entries) }
    }
}

fn bytes(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| entry.len as u64).sum()
}
