//! The table of registered buffers: first the arena's chunks, then regions that are added and removed.
//!
//! Generic over the [`Pinner`], so that the simulation can refuse to pin, as a kernel may.
//!
//! tokio-uring registers whole tables and cannot change an entry, so every change unregisters the table and registers a
//! new one: the kernel pins everything again, some 30 ms per GiB, on the caller's thread. Operations in flight keep the
//! pages that they started with. Entries keep their indices, because an operation that waits for submission names one.

use std::{any::Any, io, ptr, sync::Arc};

use super::REGIONS_MAX;
use crate::{block::FIXED_BYTES_MAX, io::memlock, memory::Lent, shield::log};

/// Pins one table of buffers at a time.
pub trait Pinner {
    /// Pins all of the entries, or none. Nothing is pinned when this is called.
    fn pin(&mut self, entries: &[Entry]) -> io::Result<()>;

    /// Unpins the table, if one is pinned.
    fn unpin(&mut self) -> io::Result<()>;

    /// True while a table is pinned.
    fn is_pinned(&self) -> bool;
}

/// A range of memory to pin, or a free entry.
#[derive(Clone)]
pub struct Entry {
    /// Null and 0 in a free entry.
    start: *mut u8,
    len: usize,
    /// Keeps the range mapped, unless a caller's contract does.
    _keep_alive: Option<Arc<dyn Any + Send + Sync>>,
}

impl Entry {
    /// A range of memory; `keep_alive` is dropped with the entry.
    pub fn new(start: *mut u8, len: usize, keep_alive: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        Entry { start, len, _keep_alive: keep_alive }
    }

    fn free() -> Self {
        Entry::new(ptr::null_mut(), 0, None)
    }

    /// Address of the first byte.
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }

    fn is_free(&self) -> bool {
        self.start.is_null()
    }

    /// Whether a range lies in this entry.
    pub fn contains(&self, start: usize, len: usize) -> bool {
        let begin = self.start.addr();
        start >= begin && len <= self.len && start - begin <= self.len - len
    }
}

/// The registered buffers of one engine.
#[derive(Default)]
pub struct Table<P> {
    /// The memory of each index, registered or not.
    entries: Vec<Entry>,
    pinner: P,
}

impl<P: Pinner> Table<P> {
    /// Registers all entries. If that fails, logs the reason and keeps none.
    pub fn new(entries: Vec<Entry>, pinner: P) -> Self {
        let mut table = Table { entries, pinner };
        if !table.renew_or_warn() {
            // A later, smaller region may still be registered; together with these entries it would be refused too.
            table.entries.clear();
        }
        table
    }

    /// True while memory is registered with the kernel.
    pub fn is_registered(&self) -> bool {
        self.pinner.is_pinned()
    }

    /// The pinner.
    #[cfg(feature = "sim")]
    pub fn pinner(&self) -> &P {
        &self.pinner
    }

    /// The pinner.
    #[cfg(feature = "sim")]
    pub fn pinner_mut(&mut self) -> &mut P {
        &mut self.pinner
    }

    /// The registered buffer that contains `buf`, if there is one.
    ///
    /// Callers may name indices that were refused, or that belong to other memory by now: only an index checked here
    /// may be passed to the kernel.
    pub fn fixed(&self, buf: &Lent) -> Option<u16> {
        let place = buf.fixed().filter(|_| self.is_registered())?;
        let entry = self.entries.get(usize::from(place))?;
        entry.contains(buf.as_ptr().addr(), buf.len()).then_some(place)
    }

    /// Registers a range in pieces of [`FIXED_BYTES_MAX`]; returns the index of the first.
    pub fn add(&mut self, start: *mut u8, len: usize) -> io::Result<u16> {
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

    /// Removes the range that [`add`](Self::add) registered at `first`.
    pub fn remove(&mut self, first: u16, len: usize) {
        self.entries[usize::from(first)..][..len.div_ceil(FIXED_BYTES_MAX)].fill(Entry::free());
        while self.entries.last().is_some_and(Entry::is_free) {
            self.entries.pop();
        }
        self.renew_or_warn();
    }

    /// Index of the first run of `pieces` free entries.
    fn room_for(&self, pieces: usize) -> usize {
        let is_room = |first: &usize| self.entries[*first..].iter().take(pieces).all(Entry::is_free);
        (0..self.entries.len()).find(is_room).unwrap_or(self.entries.len())
    }

    /// Registers the current entries; false if that fails: they keep their indices unregistered until the next change.
    fn renew_or_warn(&mut self) -> bool {
        let renewed = self.renew();
        if let Err(error) = &renewed {
            let wanted_bytes = self.entries.iter().map(|entry| entry.len as u64).sum();
            let refusal = memlock::refusal(wanted_bytes, error);
            log(|| tracing::warn!("{refusal}; reads and writes continue unregistered, which is slower"));
        }
        renewed.is_ok()
    }

    /// Replaces the registered table with `entries`.
    fn renew(&mut self) -> io::Result<()> {
        self.pinner.unpin()?;
        if self.entries.is_empty() { Ok(()) } else { self.pinner.pin(&self.entries) }
    }
}
