//! The ring's registered buffers: the arena's chunks first, then regions that come and go.
//!
//! tokio-uring registers whole tables and has no way to change an entry, so a change takes the table out and puts
//! another in: the kernel pins all of it anew, some 30 ms a GiB, on the caller's thread. Operations under way keep the
//! pages that they began with. Entries keep their places, since an operation that waits to be submitted names one.

use std::{any::Any, io, ptr, sync::Arc};

use tokio_uring::buf::{IoBuf, IoBufMut, fixed::FixedBufRegistry};

use super::REGIONS_MAX;
use crate::io::{FIXED_BYTES_MAX, memlock};

/// A range of memory for the kernel to pin, or a place that is free.
#[derive(Clone)]
pub(super) struct Entry {
    /// Null and 0 where the place is free.
    start: *mut u8,
    len: usize,
    /// What keeps the range mapped, if not a caller's promise.
    _keep_alive: Option<Arc<dyn Any + Send + Sync>>,
}

impl Entry {
    pub(super) fn new(start: *mut u8, len: usize, keep_alive: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        Entry { start, len, _keep_alive: keep_alive }
    }

    fn free() -> Self {
        Entry::new(ptr::null_mut(), 0, None)
    }

    fn is_free(&self) -> bool {
        self.start.is_null()
    }
}

// SAFETY: the address does not change, and by the contracts of `Uring::new` and `Storage::register` the range is mapped
// for as long as it is in the table. A free place has no bytes.
unsafe impl IoBuf for Entry {
    fn stable_ptr(&self) -> *const u8 {
        self.start
    }

    fn bytes_init(&self) -> usize {
        self.len
    }

    fn bytes_total(&self) -> usize {
        self.len
    }
}

// SAFETY: as above. The registry hands out no buffer (`check_out` is never called): the range is
// only ever accessed through a `Lent`, whose contract is exclusive access.
unsafe impl IoBufMut for Entry {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        self.start
    }

    unsafe fn set_init(&mut self, _: usize) {}
}

/// What the kernel has registered for one engine.
#[derive(Default)]
pub(super) struct Table {
    entries: Vec<Entry>,
    /// The driver's copy of `entries`, where the kernel has them.
    registry: Option<FixedBufRegistry<Entry>>,
}

impl Table {
    /// Registers all entries or none, and then says why in the log.
    pub(super) fn new(entries: Vec<Entry>) -> Self {
        let mut table = Table::default();
        if !entries.is_empty() {
            let wanted_bytes = bytes(&entries);
            if let Err(error) = table.replace(entries) {
                let refusal = memlock::Refusal { wanted_bytes, error: &error };
                tracing::warn!(wanted_bytes, "{refusal}; reads and writes go on unregistered, slower");
            }
        }
        table
    }

    /// How many places there are; those below are registered, or free and named by nobody.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Registers a range too, in pieces of [`FIXED_BYTES_MAX`]; the place of the first.
    pub(super) fn add(&mut self, start: *mut u8, len: usize) -> io::Result<u16> {
        let pieces = len.div_ceil(FIXED_BYTES_MAX);
        let first = self.room_for(pieces);
        if first + pieces > REGIONS_MAX {
            let text = format!("{pieces} more buffers in a table of {REGIONS_MAX} with {} in use", self.len());
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        }
        let mut entries = self.entries.clone();
        entries.resize(entries.len().max(first + pieces), Entry::free());
        for (piece, entry) in entries[first..][..pieces].iter_mut().enumerate() {
            let at = piece * FIXED_BYTES_MAX;
            *entry = Entry::new(start.wrapping_add(at), (len - at).min(FIXED_BYTES_MAX), None);
        }
        self.replace(entries)?;
        Ok(u16::try_from(first).expect("REGIONS_MAX fits in 16 bits"))
    }

    /// Takes out what [`add`](Self::add) put at `first`.
    pub(super) fn remove(&mut self, first: u16, len: usize) {
        let mut entries = self.entries.clone();
        entries[usize::from(first)..][..len.div_ceil(FIXED_BYTES_MAX)].fill(Entry::free());
        while entries.last().is_some_and(Entry::is_free) {
            entries.pop();
        }
        if let Err(error) = self.replace(entries) {
            tracing::warn!(%error, "a region could not be taken from the ring's buffers; it stays in memory");
        }
    }

    /// Where so many neighboring places are free.
    fn room_for(&self, pieces: usize) -> usize {
        let is_room = |first: &usize| self.entries[*first..].iter().take(pieces).all(Entry::is_free);
        (0..self.entries.len()).find(is_room).unwrap_or(self.entries.len())
    }

    /// Puts another table in the place of this one. Where the kernel refuses it, this one again.
    fn replace(&mut self, entries: Vec<Entry>) -> io::Result<()> {
        if let Some(registry) = self.registry.take() {
            registry.unregister()?;
        }
        let refused = match self.put(entries) {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let before = std::mem::take(&mut self.entries);
        if before.is_empty() {
            return Err(refused);
        }
        if let Err(error) = self.put(before) {
            tracing::error!(%error, "the kernel does not register again what it had; reads and writes go on, slower");
        }
        Err(refused)
    }

    fn put(&mut self, entries: Vec<Entry>) -> io::Result<()> {
        if !entries.is_empty() {
            let registry = FixedBufRegistry::new(entries.iter().cloned());
            registry.register()?;
            self.registry = Some(registry);
        }
        self.entries = entries;
        Ok(())
    }
}

fn bytes(entries: &[Entry]) -> u64 {
    entries.iter().map(|entry| entry.len as u64).sum()
}
