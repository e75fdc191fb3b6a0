//! Other ways of blocks from disk, beside the cache: what an engine does without it.

use std::{fs::File, io, os::unix::fs::FileExt};

use kvhoist::internals::checksum::checksum;

use crate::{
    drive::{measured, other},
    measure::Entrant,
    pattern::shuffled,
    scratch::Slab,
};

/// Threads of a peer: each has one block in flight.
pub const THREADS: usize = 16;

/// Where the blocks of a store lie in its file.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    /// Opened for direct I/O.
    pub file: &'a File,
    /// The first block's place.
    pub data_offset: u64,
    /// A block follows the other.
    pub block_bytes: usize,
    /// How many there are.
    pub blocks: u64,
}

/// The caller's own `pread` and checksum, one block after the other: what a single fetch is compared with.
///
/// # Errors
/// Without memory.
pub fn pread_and_sum(places: Places<'_>) -> io::Result<Entrant<'_>> {
    let mut slab = Slab::new(places.block_bytes, 1)?;
    Ok(Entrant::new("pread + checksum", move |round| {
        // An order of its own, as the cache's.
        let order: Vec<u64> = shuffled(round ^ (1 << 32), places.blocks).collect();
        measured(places.blocks * places.block_bytes as u64, || {
            let block = slab.block(0);
            order.iter().try_for_each(|n| {
                places.file.read_exact_at(block, places.data_offset + n * places.block_bytes as u64)?;
                std::hint::black_box(checksum(block));
                check_stamped(block)
            })
        })
    }))
}

/// Fails if a page of a block was never written: for readers of the file that do not know which block is where.
///
/// # Errors
/// What was found.
pub fn check_stamped(block: &[u8]) -> io::Result<()> {
    let stamped = block.chunks(4096).all(|page| page.iter().take(8).any(|byte| *byte != 0));
    if stamped { Ok(()) } else { Err(other("an empty page where every slot is full")) }
}
