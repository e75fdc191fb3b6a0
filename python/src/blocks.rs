//! Where blocks lie: what Python gives as a list of blocks, to the engine's segment lists.

use kvhoist::{Cache, Region, Segment};
use pyo3::{
    prelude::*,
    types::{PyList, PyTuple},
};

use crate::{buffer::Buffer, errors, keys::type_name};

/// The segments of some blocks, and what keeps their memory where it is.
pub struct Blocks {
    pub segments: Vec<Vec<Segment>>,
    /// Registered for this call.
    lent: Vec<Region>,
    /// Dropped after `lent` was unregistered, with or without the interpreter's lock.
    _buffers: Vec<Buffer>,
}

impl Blocks {
    /// One entry per block: a buffer object, a pair (address, bytes) in registered memory, or a list of either, whose
    /// bytes in order are the block's. `writable`: blocks are loaded into them.
    pub fn from_python(cache: &Cache, blocks: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let mut this = Blocks { segments: Vec::new(), lent: Vec::new(), _buffers: Vec::new() };
        let parsed = blocks
            .cast::<PyList>()
            .map_err(|_| {
                errors::argument(blocks.py(), "blocks", type_name(blocks), "a list with one entry for each key")
            })
            .and_then(|list| {
                list.iter().try_for_each(|block| {
                    let mut segments = Vec::new();
                    if let Ok(parts) = block.cast::<PyList>() {
                        parts.iter().try_for_each(|part| this.part(cache, &part, writable, &mut segments))?;
                    } else {
                        this.part(cache, &block, writable, &mut segments)?;
                    }
                    this.segments.push(segments);
                    Ok(())
                })
            });
        match parsed {
            Ok(()) => Ok(this),
            Err(error) => {
                this.give_back(cache);
                Err(error)
            }
        }
    }

    /// Blocks of equally many segments each, as two flat lists of numbers: addresses and bytes.
    pub fn from_lists(
        py: Python<'_>,
        count: usize,
        addresses: &Bound<'_, PyList>,
        sizes: &Bound<'_, PyList>,
    ) -> PyResult<Self> {
        let each = addresses.len().checked_div(count).unwrap_or(0);
        if addresses.len() != sizes.len() || each * count != addresses.len() || each == 0 && count > 0 {
            let found = format!("{} addresses and {} sizes for {count} keys", addresses.len(), sizes.len());
            return Err(errors::argument(py, "segments", found, "the same number of each for every key"));
        }
        let mut segments = Vec::with_capacity(count);
        let mut pairs = addresses.iter().zip(sizes.iter());
        for _ in 0..count {
            let one = |(address, len): (Bound<'_, PyAny>, Bound<'_, PyAny>)| segment(&address, &len);
            segments.push(pairs.by_ref().take(each).map(one).collect::<PyResult<Vec<_>>>()?);
        }
        Ok(Blocks { segments, lent: Vec::new(), _buffers: Vec::new() })
    }

    fn part(
        &mut self,
        cache: &Cache,
        part: &Bound<'_, PyAny>,
        writable: bool,
        segments: &mut Vec<Segment>,
    ) -> PyResult<()> {
        if let Ok(pair) = part.cast::<PyTuple>() {
            if pair.len() != 2 {
                return Err(errors::argument(part.py(), "blocks", part, "(address, bytes)"));
            }
            segments.push(segment(&pair.get_item(0)?, &pair.get_item(1)?)?);
            return Ok(());
        }
        let buffer = Buffer::new(part, writable)?;
        let segment = Segment { ptr: buffer.ptr(), len: buffer.len() };
        if segment.len > 0 {
            // SAFETY: the export keeps the memory mapped until `give_back` has seen the region unused. That nobody
            // writes to it meanwhile is the caller's part, as documented; bytes are bytes, whatever they come to.
            let lent = unsafe { cache.lend_host(segment.ptr, segment.len) };
            self.lent.push(lent.map_err(|error| errors::to_python(part.py(), &error))?);
        }
        self._buffers.push(buffer);
        segments.push(segment);
        Ok(())
    }

    /// Waits until nothing uses the lent memory, and lets it go. Call before dropping.
    pub fn give_back(&mut self, cache: &Cache) {
        for region in self.lent.drain(..) {
            kvhoist::block_on(cache.unregister(region));
        }
    }
}

fn segment(address: &Bound<'_, PyAny>, len: &Bound<'_, PyAny>) -> PyResult<Segment> {
    let (address, len): (usize, usize) = (address.extract()?, len.extract()?);
    Ok(Segment { ptr: std::ptr::with_exposed_provenance_mut(address), len })
}
