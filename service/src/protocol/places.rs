//! Where blocks lie in a client's memory.

use std::{borrow::Borrow, ops::Range};

use super::{
    table::{fields, get, put},
    wire::{Malformed, PLACES_MAX, Reader, Wire, Writer, malformed},
};

/// A range of a registered region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
pub struct Place {
    /// The client's number for the region.
    pub region: u32,
    /// Bytes of the range.
    pub len: u32,
    /// Bytes from the region's beginning.
    pub offset: u64,
}

fields!(Place { region, len, offset });

const PLACE_BYTES: usize = 16;

/// The places of each of some blocks, as they are on the wire: all bytes are places, so that a frame with as many as
/// it may have is read by one copy, and each place when its block's turn comes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockPlaces {
    bytes: Vec<u8>,
    /// For each block, how many places there are up to its last one.
    ends: Vec<u32>,
}

impl BlockPlaces {
    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        self.ends.len()
    }

    fn places(&self, blocks: Range<usize>) -> Range<usize> {
        let begin = |block: usize| block.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        begin(blocks.start)..begin(blocks.end)
    }

    /// The number of places of some blocks.
    pub fn count(&self, blocks: Range<usize>) -> usize {
        self.places(blocks).len()
    }

    /// The places of some blocks, in the order of their bytes.
    pub fn of(&self, blocks: Range<usize>) -> impl Iterator<Item = Place> {
        let Range { start, end } = self.places(blocks);
        let (places, _) = self.bytes[start * PLACE_BYTES..end * PLACE_BYTES].as_chunks();
        places.iter().map(|bytes: &[u8; PLACE_BYTES]| {
            Place::get(&mut Reader::new(bytes), "place").expect("all bytes are places")
        })
    }
}

/// From the places of each block.
impl<P: IntoIterator<Item: Borrow<Place>>> FromIterator<P> for BlockPlaces {
    fn from_iter<B: IntoIterator<Item = P>>(blocks: B) -> Self {
        let (mut writer, mut ends, mut count) = (Writer::plain(0), Vec::new(), 0);
        for places in blocks {
            for place in places {
                place.borrow().put(&mut writer);
                count += 1;
            }
            ends.push(count);
        }
        BlockPlaces { bytes: writer.into_bytes(), ends }
    }
}

/// The number of all places, the number of each block's places, and the places. The number of blocks is that of the
/// keys before them.
impl BlockPlaces {
    pub(super) fn put(&self, writer: &mut Writer) {
        writer.reserve(4 + self.ends.len() * 4 + self.bytes.len());
        writer.count(self.bytes.len() / PLACE_BYTES);
        (0..self.blocks()).for_each(|block| writer.count(self.count(block..block + 1)));
        writer.bytes(&self.bytes);
    }

    pub(super) fn get(reader: &mut Reader<'_>, blocks: usize) -> Result<Self, Malformed> {
        let total = reader.count("number of places", PLACES_MAX, PLACE_BYTES)?;
        let (mut ends, mut sum) = (Vec::with_capacity(blocks), 0);
        for _ in 0..blocks {
            sum += u64::from(u32::get(reader, "places of a block")?);
            ends.push(sum as u32);
        }
        if sum != total as u64 {
            return Err(malformed("places of all blocks", sum, format!("{total}, the number before them")));
        }
        Ok(BlockPlaces { bytes: reader.take("places", total * PLACE_BYTES)?.to_vec(), ends })
    }
}
