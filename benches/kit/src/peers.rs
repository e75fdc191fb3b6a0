//! Other ways of blocks from disk to the device, beside the cache: what an engine does without it.

use std::{fs::File, io};

use crate::drive::other;

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

/// Fails if a page of a block was never written: for readers of the file that do not know which block is where.
///
/// # Errors
/// What was found.
pub fn check_stamped(block: &[u8]) -> io::Result<()> {
    let stamped = block.chunks(4096).all(|page| page.iter().take(8).any(|byte| *byte != 0));
    if stamped { Ok(()) } else { Err(other("an empty page where every slot is full")) }
}
