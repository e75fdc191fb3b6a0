//! Converts Python's lists of blocks to the engine's segment lists.

use kvhoist::{Cache, Region, Segment};
use pyo3::{
    PyTraverseError, PyVisit,
    prelude::*,
    types::{PyInt, PyList, PyTuple},
};

use crate::{
    buffer::Buffer,
    errors,
    keys::{self, type_name},
    wait,
};

/// The segments of some blocks, and the exports that keep their memory mapped.
///
/// Dropping it waits until no movement uses the memory.
pub struct Blocks {
    pub segments: Vec<Vec<Segment>>,
    /// The memory of the buffers, lent for this call.
    pub region: Region,
    cache: Cache,
    buffers: Vec<Buffer>,
}

impl Blocks {
    /// One entry per block: a buffer object, a pair (address, bytes) in registered memory, or a sequence of either,
    /// whose bytes in order are the block's. `writable`: blocks are loaded into them.
    pub fn from_python(cache: &Cache, blocks: &Bound<'_, PyAny>, writable: bool) -> PyResult<Self> {
        let py = blocks.py();
        let (segments, buffers) = parse(blocks, writable)?;
        let lent: Vec<_> = buffers.iter().map(Buffer::segment).collect();
        // SAFETY: the exports keep the memory mapped until this is dropped, which waits until it is unused. That nobody
        // writes to it meanwhile is the caller's part, as documented; bytes are bytes, whatever they come to.
        let region = unsafe { cache.lend(&lent) }.map_err(|error| errors::to_python(py, &error))?;
        Ok(Blocks { segments, region, cache: cache.clone(), buffers })
    }

    /// Blocks of equally many segments each, as two flat lists of numbers: addresses and bytes.
    pub fn from_lists(
        cache: &Cache,
        count: usize,
        addresses: &Bound<'_, PyList>,
        sizes: &Bound<'_, PyList>,
    ) -> PyResult<Self> {
        let segments = parse_lists(count, addresses, sizes)?;
        Ok(Blocks::registered(cache, segments))
    }

    /// Blocks in registered memory that are all cut in the same way, as [`parse_addresses`] has them.
    pub fn from_addresses(
        cache: &Cache,
        count: usize,
        addresses: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let segments = parse_addresses(count, addresses, sizes)?;
        Ok(Blocks::registered(cache, segments))
    }

    /// Blocks in registered memory alone.
    fn registered(cache: &Cache, segments: Vec<Vec<Segment>>) -> Self {
        // SAFETY: no memory is lent.
        let region = unsafe { cache.lend(&[]) }.expect("no range is refused");
        Blocks { segments, region, cache: cache.clone(), buffers: Vec::new() }
    }

    /// Waits until no movement uses the memory, which no later call uses.
    pub async fn release(&self) {
        self.cache.unregister(&self.region).await.expect("this cache has lent it");
    }

    /// Shows the objects that are kept to the collector of cycles.
    pub fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.buffers.iter().try_for_each(|buffer| buffer.visit(visit))
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // No call can begin any more.
        if self.region.is_unused() {
            return;
        }
        let waited = Python::try_attach(|py| wait::to_the_end(py, self.release()));
        if waited.is_none() {
            // No interpreter to give the memory back to: it stays as it is for the movements that use it.
            self.buffers.drain(..).for_each(std::mem::forget);
        }
    }
}

/// The segments of blocks, and the exports of the buffer objects among them, as `Blocks::from_python` has them.
pub fn parse(blocks: &Bound<'_, PyAny>, writable: bool) -> PyResult<(Vec<Vec<Segment>>, Vec<Buffer>)> {
    let entries = keys::items(blocks)?.ok_or_else(|| {
        errors::argument(blocks.py(), "blocks", type_name(blocks), "a sequence with one entry for each key")
    })?;
    let (mut segments, mut buffers) = (Vec::with_capacity(entries.len()), Vec::new());
    for entry in entries {
        let mut parts = Vec::new();
        if let Some(all) = several(&entry)? {
            all.iter().try_for_each(|one| part(one, writable, &mut parts, &mut buffers))?;
        } else {
            part(&entry, writable, &mut parts, &mut buffers)?;
        }
        segments.push(parts);
    }
    Ok((segments, buffers))
}

/// The segments of blocks that have equally many of them each.
pub fn parse_lists(
    count: usize,
    addresses: &Bound<'_, PyList>,
    sizes: &Bound<'_, PyList>,
) -> PyResult<Vec<Vec<Segment>>> {
    let each = addresses.len().checked_div(count).unwrap_or(0);
    if addresses.len() != sizes.len() || each * count != addresses.len() || each == 0 && count > 0 {
        let found = format!("{} addresses and {} sizes for {count} keys", addresses.len(), sizes.len());
        return Err(errors::argument(addresses.py(), "segments", found, "the same number of each for every key"));
    }
    let mut segments = Vec::with_capacity(count);
    let mut pairs = addresses.iter().zip(sizes.iter());
    for _ in 0..count {
        let one = |(address, len): (Bound<'_, PyAny>, Bound<'_, PyAny>)| segment(&address, &len);
        segments.push(pairs.by_ref().take(each).map(one).collect::<PyResult<Vec<_>>>()?);
    }
    Ok(segments)
}

/// The segments of blocks that are all cut in the same way: the addresses of every block's segments, 64-bit
/// integers of this machine in a buffer object, and the bytes of each segment of one block.
pub fn parse_addresses(
    count: usize,
    addresses: &Bound<'_, PyAny>,
    sizes: &Bound<'_, PyAny>,
) -> PyResult<Vec<Vec<Segment>>> {
    let py = addresses.py();
    let sizes: Vec<usize> = sizes.extract().map_err(|_| {
        errors::argument(py, "sizes", errors::shown(sizes), "a sequence with the bytes of each segment of one block")
    })?;
    let buffer = Buffer::new(addresses, false)?;
    let wanted = count.checked_mul(sizes.len()).and_then(|segments| segments.checked_mul(size_of::<usize>()));
    if wanted != Some(buffer.len()) {
        let found = format!("{} bytes", buffer.len());
        let expected = format!("{} addresses of 8 bytes for each of {count} keys", sizes.len());
        return Err(errors::argument(py, "addresses", found, expected));
    }
    let bytes = match buffer.len() {
        0 => &[][..],
        // SAFETY: the export keeps so many bytes mapped until it is dropped, below, and the interpreter's lock
        // keeps other threads from writing to them.
        len => unsafe { std::slice::from_raw_parts(buffer.ptr().cast_const(), len) },
    };
    let mut addresses = bytes
        .chunks_exact(size_of::<usize>())
        .map(|one| usize::from_ne_bytes(one.try_into().expect("chunks are of this size")));
    let mut segment = |len: &usize| {
        let start = addresses.next().expect("there are as many addresses as segments");
        Segment { ptr: std::ptr::with_exposed_provenance_mut(start), len: *len }
    };
    Ok((0..count).map(|_| sizes.iter().map(&mut segment).collect()).collect())
}

/// The parts of an entry that has several: a list, or a tuple that is no pair (address, bytes).
fn several<'py>(entry: &Bound<'py, PyAny>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
    if let Ok(tuple) = entry.cast::<PyTuple>() {
        let pair = tuple.get_item(0).is_ok_and(|first| first.is_instance_of::<PyInt>());
        return if pair { Ok(None) } else { keys::items(entry) };
    }
    if entry.is_instance_of::<PyList>() { keys::items(entry) } else { Ok(None) }
}

fn part(
    part: &Bound<'_, PyAny>,
    writable: bool,
    segments: &mut Vec<Segment>,
    buffers: &mut Vec<Buffer>,
) -> PyResult<()> {
    if let Ok(pair) = part.cast::<PyTuple>() {
        if pair.len() != 2 {
            return Err(errors::argument(part.py(), "blocks", errors::shown(part), "(address, bytes)"));
        }
        segments.push(segment(&pair.get_item(0)?, &pair.get_item(1)?)?);
        return Ok(());
    }
    let buffer = Buffer::new(part, writable)?;
    segments.push(Segment { ptr: buffer.ptr(), len: buffer.len() });
    buffers.push(buffer);
    Ok(())
}

fn segment(address: &Bound<'_, PyAny>, len: &Bound<'_, PyAny>) -> PyResult<Segment> {
    let (Ok(start), Ok(bytes)) = (address.extract::<usize>(), len.extract::<usize>()) else {
        let found = format!("({}, {})", errors::shown(address), errors::shown(len));
        return Err(errors::argument(address.py(), "segments", found, "an address and a number of bytes"));
    };
    Ok(Segment { ptr: std::ptr::with_exposed_provenance_mut(start), len: bytes })
}
