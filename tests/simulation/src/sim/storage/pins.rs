//! A kernel that pins buffers, or refuses to.

use std::{io, ops::Range};

use kvhoist::internals::{
    io::Lent,
    seams::{Entry, Pinner},
};

use super::{SimOptions, rng::Rng};

/// The buffers that the simulated kernel has pinned.
pub(super) struct Pins {
    bytes_max: u64,
    refusals: f64,
    rng: Rng,
    pinned: Option<Vec<Entry>>,
    refused: u64,
    /// Memory that is not mapped any more.
    unmapped: Vec<Range<usize>>,
}

impl Pins {
    pub(super) fn new(seed: u64, options: &SimOptions) -> Self {
        // By draws of its own: all else of a seed stays as it is.
        let rng = Rng::new(seed ^ 0x9122_ed00_0000_0000);
        let (bytes_max, refusals) = (options.pinned_bytes_max, options.pin_refusals);
        Pins { bytes_max, refusals, rng, pinned: None, refused: 0, unmapped: Vec::new() }
    }

    /// Refuses tables with an entry in this memory from now on.
    pub(super) fn unmap(&mut self, range: Range<usize>) {
        self.unmapped.push(range);
    }

    /// What the kernel has under that number, if all of the range lies in it.
    pub(super) fn reaches(&self, place: u16, buf: &Lent) -> bool {
        let entry = self.pinned.as_ref().and_then(|entries| entries.get(usize::from(place)));
        entry.is_some_and(|entry| entry.contains(buf.as_ptr().addr(), buf.len()))
    }

    /// How often it has refused.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }
}

impl Pinner for Pins {
    fn pin(&mut self, entries: &[Entry]) -> io::Result<()> {
        let bytes: u64 = entries.iter().map(|entry| entry.bytes() as u64).sum();
        if bytes > self.bytes_max || self.rng.chance(self.refusals) {
            self.refused += 1;
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let is_unmapped = |entry: &Entry| {
            let (start, end) = (entry.start().addr(), entry.start().addr() + entry.bytes());
            self.unmapped.iter().any(|range| start < range.end && range.start < end)
        };
        if entries.iter().any(is_unmapped) {
            self.refused += 1;
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        self.pinned = Some(entries.to_vec());
        Ok(())
    }

    fn unpin(&mut self) -> io::Result<()> {
        self.pinned = None;
        Ok(())
    }

    fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }
}
