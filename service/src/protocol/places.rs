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
    blocks: Listing,
}

/// Which places each block has.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Listing {
    /// For each block, how many places there are up to its last one.
    Each(Vec<u32>),
    /// All places, with so many bytes, modulo 2^64, added to their offsets.
    Shifted(Vec<u64>),
}

impl Default for Listing {
    fn default() -> Self {
        Listing::Each(Vec::new())
    }
}

impl BlockPlaces {
    /// The places of blocks that lie alike: those of one, with so many bytes, modulo 2^64, added to their offsets for
    /// each block.
    pub fn shifted(places: &[Place], shifts: Vec<u64>) -> Self {
        BlockPlaces { blocks: Listing::Shifted(shifts), ..BlockPlaces::from_iter([places]) }
    }

    /// The places and what is added to their offsets, of blocks that were given so.
    pub fn as_shifted(&self) -> Option<(impl Iterator<Item = Place>, &[u64])> {
        let Listing::Shifted(shifts) = &self.blocks else { return None };
        Some(((0..self.listed()).map(|at| self.place(at)), shifts))
    }

    /// The number of blocks.
    pub fn blocks(&self) -> usize {
        match &self.blocks {
            Listing::Each(ends) => ends.len(),
            Listing::Shifted(shifts) => shifts.len(),
        }
    }

    fn places(&self, blocks: Range<usize>) -> Range<usize> {
        let begin = |block: usize| match &self.blocks {
            Listing::Each(ends) => block.checked_sub(1).map_or(0, |before| ends[before] as usize),
            Listing::Shifted(_) => block * self.listed(),
        };
        begin(blocks.start)..begin(blocks.end)
    }

    fn listed(&self) -> usize {
        self.bytes.len() / PLACE_BYTES
    }

    /// A place that is listed.
    fn place(&self, at: usize) -> Place {
        let bytes = &self.bytes[at * PLACE_BYTES..][..PLACE_BYTES];
        Place::get(&mut Reader::new(bytes), "place").expect("all bytes are places")
    }

    /// The same of some of the blocks.
    pub(crate) fn part(&self, blocks: Range<usize>) -> Self {
        let places = self.places(blocks.clone());
        match &self.blocks {
            Listing::Each(ends) => BlockPlaces {
                bytes: self.bytes[places.start * PLACE_BYTES..places.end * PLACE_BYTES].to_vec(),
                blocks: Listing::Each(ends[blocks].iter().map(|end| end - places.start as u32).collect()),
            },
            Listing::Shifted(shifts) => {
                BlockPlaces { bytes: self.bytes.clone(), blocks: Listing::Shifted(shifts[blocks].to_vec()) }
            }
        }
    }

    /// The number of places of some blocks.
    pub fn count(&self, blocks: Range<usize>) -> usize {
        self.places(blocks).len()
    }

    /// The places of some blocks, in the order of their bytes.
    pub fn of(&self, blocks: Range<usize>) -> impl Iterator<Item = Place> {
        let listed = self.listed();
        self.places(blocks).map(move |at| match &self.blocks {
            Listing::Each(_) => self.place(at),
            Listing::Shifted(shifts) => {
                let place = self.place(at % listed);
                Place { offset: place.offset.wrapping_add(shifts[at / listed]), ..place }
            }
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
        BlockPlaces { bytes: writer.into_bytes(), blocks: Listing::Each(ends) }
    }
}

/// Whether the blocks are shifted, the number of the places that follow, and for each block the number of its places,
/// or its shift. The number of blocks is that of the keys before them.
impl BlockPlaces {
    pub(super) fn put(&self, writer: &mut Writer) {
        writer.reserve(5 + self.blocks() * 8 + self.bytes.len());
        matches!(self.blocks, Listing::Shifted(_)).put(writer);
        writer.count(self.listed());
        match &self.blocks {
            Listing::Each(_) => (0..self.blocks()).for_each(|block| writer.count(self.count(block..block + 1))),
            Listing::Shifted(shifts) => shifts.iter().for_each(|shift| shift.put(writer)),
        }
        writer.bytes(&self.bytes);
    }

    pub(super) fn get(reader: &mut Reader<'_>, blocks: usize) -> Result<Self, Malformed> {
        let is_shifted = bool::get(reader, "whether blocks are shifted")?;
        let total = reader.count("number of places", PLACES_MAX, PLACE_BYTES)?;
        if is_shifted {
            if total * blocks > PLACES_MAX {
                return Err(malformed("places of all blocks", total * blocks, format!("at most {PLACES_MAX}")));
            }
            let shifts = (0..blocks).map(|_| u64::get(reader, "shift")).collect::<Result<_, _>>()?;
            let bytes = reader.take("places", total * PLACE_BYTES)?.to_vec();
            return Ok(BlockPlaces { bytes, blocks: Listing::Shifted(shifts) });
        }
        let (mut ends, mut sum) = (Vec::with_capacity(blocks), 0);
        for _ in 0..blocks {
            sum += u64::from(u32::get(reader, "places of a block")?);
            ends.push(sum as u32);
        }
        if sum != total as u64 {
            return Err(malformed("places of all blocks", sum, format!("{total}, the number before them")));
        }
        Ok(BlockPlaces { bytes: reader.take("places", total * PLACE_BYTES)?.to_vec(), blocks: Listing::Each(ends) })
    }
}
