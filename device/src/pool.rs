//! The slots of the device tier: the pool's memory, and where the segments of each block lie in it.

use std::{fmt, ptr::NonNull, sync::Arc};

use kvhoist_base::{
    block::{Direction, Layout, Segment},
    error::{Error, Result},
    memory::{BUFFER_ALIGN, DeviceMemory, Mapping},
};

/// Where the segments of every slot lie inside the memory of a pool.
///
/// A pool has one buffer for each segment of its [`Layout`]; buffer `i` holds segment `i` of all
/// slots, one after another. Segment `i` of slot `s` lies at `buffer_i + s * len_i`:
///
/// ```text
/// buffer 0: | slot 0, segment 0 | slot 1, segment 0 | ... |   K of layer 0, say, or all K
/// buffer 1: | slot 0, segment 1 | slot 1, segment 1 | ... |   K of layer 1,      or all V
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolLayout {
    slots: u32,
    layout: Layout,
    /// Where each buffer begins.
    buffers: Box<[usize]>,
    bytes: usize,
}

impl PoolLayout {
    /// A pool of `slots` slots (at least 1) for blocks of this `layout`.
    ///
    /// # Errors
    /// [`Error::Config`] on `device_blocks` if `slots` is 0 or the pool would exceed the address space.
    pub fn new(slots: u32, layout: Layout) -> Result<Self> {
        let most = isize::MAX.unsigned_abs();
        let mut buffers = Vec::with_capacity(layout.segments().len());
        let mut end = Some(0_usize);
        for &len in layout.segments() {
            let start = end.and_then(|end| end.checked_next_multiple_of(BUFFER_ALIGN));
            buffers.push(start.unwrap_or(most));
            let buffer_bytes = usize::try_from(slots).ok().and_then(|slots| slots.checked_mul(len));
            end = start.zip(buffer_bytes).and_then(|(start, bytes)| start.checked_add(bytes));
        }
        match end.filter(|&end| slots > 0 && end <= most) {
            Some(bytes) => Ok(PoolLayout { slots, layout, buffers: buffers.into(), bytes }),
            None if slots == 0 => Err(wrong_pool(slots, &layout, &"no slot")),
            None => Err(wrong_pool(slots, &layout, &"more than the address space")),
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Segment lengths of a block.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Bytes of the pool, including alignment padding between buffers.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Offset and length of every segment of `slot`, in block order.
    ///
    /// # Panics
    /// If there is no such slot: slot numbers come from this crate, never from users or files.
    pub fn segments(&self, slot: u32) -> impl ExactSizeIterator<Item = (usize, usize)> {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        let lengths = self.layout.segments().iter();
        self.buffers.iter().zip(lengths).map(move |(&buffer, &len)| (buffer + slot as usize * len, len))
    }
}

fn wrong_pool(slots: u32, layout: &Layout, reason: &dyn fmt::Display) -> Error {
    let (block_bytes, bytes) = (layout.block_bytes(), u128::from(slots) * layout.block_bytes() as u128);
    Error::config(
        "device_blocks",
        format!("{slots} slots of {block_bytes} bytes = {bytes} bytes ({reason})"),
        "1 slot at least, and no more than the device can give: change device_blocks or block_bytes",
    )
}

/// The slots of the device tier.
///
/// A pool only hands out addresses; the owner of a slot decides which code reads and writes it. Keep the pool alive (in
/// an `Arc`) for as long as an address is in use.
pub struct DevicePool {
    layout: PoolLayout,
    memory: Arc<dyn DeviceMemory>,
}

impl DevicePool {
    /// A pool of this layout at the start of `memory`.
    ///
    /// # Errors
    /// [`Error::Argument`] if `memory` is too short or not aligned to [`BUFFER_ALIGN`].
    pub fn new(memory: Box<dyn DeviceMemory>, layout: PoolLayout) -> Result<Self> {
        let wrong = |found, expected| Err(Error::argument("memory", found, expected));
        if memory.bytes() < layout.bytes() {
            return wrong(format!("{} bytes", memory.bytes()), format!("{} bytes at least", layout.bytes()));
        }
        if !memory.base().as_ptr().addr().is_multiple_of(BUFFER_ALIGN) {
            return wrong(format!("address {:p}", memory.base()), format!("a multiple of {BUFFER_ALIGN}"));
        }
        Ok(DevicePool { layout, memory: Arc::from(memory) })
    }

    /// A pool of a simulated device, in host memory, for machines without a device and for tests.
    ///
    /// # Errors
    /// [`Error::Config`] on `device_blocks` if there is no slot, or if the system cannot map the memory.
    pub fn simulated(slots: u32, layout: Layout) -> Result<Self> {
        let layout = PoolLayout::new(slots, layout)?;
        let memory = Mapping::anonymous(layout.bytes()).map_err(|error| wrong_pool(slots, layout.layout(), &error))?;
        DevicePool::new(Box::new(Simulated(memory)), layout)
    }

    /// The segments of `slot`, in block order, valid while the pool lives. Allocates nothing.
    ///
    /// # Panics
    /// If there is no such slot: slot numbers come from this crate, never from users or files.
    pub fn segments(&self, slot: u32) -> impl ExactSizeIterator<Item = Segment> {
        let base = self.memory.base().as_ptr();
        // `wrapping_add`, not `add`: device memory is no allocation of this program.
        self.layout.segments(slot).map(move |(offset, len)| Segment { ptr: base.wrapping_add(offset), len })
    }

    /// The first segment of every buffer, and the number of segments of that length in the buffer.
    pub fn buffers(&self) -> impl Iterator<Item = (Segment, u32)> {
        self.segments(0).map(|segment| (segment, self.slots()))
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.layout.slots()
    }

    /// Bytes of device memory that the slots take.
    pub fn bytes(&self) -> usize {
        self.layout.bytes()
    }

    /// Where the segments of each slot lie.
    pub fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    /// The memory of the pool, with its copy directions and name.
    pub fn memory(&self) -> &dyn DeviceMemory {
        &*self.memory
    }

    /// The memory of the pool, kept alive by the returned handle.
    pub fn shared_memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(&self.memory)
    }
}

debug_fields!(DevicePool, pool => kind: pool.memory.kind(), slots: pool.slots(), bytes: pool.bytes());

struct Simulated(Mapping);

/// Host memory of a simulated device.
#[cfg_attr(not(feature = "rdma"), expect(dead_code, reason = "the self-test of an RDMA device uses it"))]
pub(super) fn simulated_memory(bytes: usize) -> std::io::Result<Arc<dyn DeviceMemory>> {
    Ok(Arc::new(Simulated(Mapping::anonymous(bytes)?)))
}

// SAFETY: one mapping, fixed in place and length until dropped, that the host can read and write.
unsafe impl DeviceMemory for Simulated {
    fn kind(&self) -> &'static str {
        "simulated"
    }

    fn base(&self) -> NonNull<u8> {
        self.0.ptr()
    }

    fn bytes(&self) -> usize {
        self.0.len()
    }

    // These are host addresses, which an engine must not take for device addresses.
    fn promote_direction(&self) -> Direction {
        Direction::HostToHost
    }

    fn demote_direction(&self) -> Direction {
        Direction::HostToHost
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use kvhoist_base::block::BlockGeometry;

    fn small() -> BlockGeometry {
        BlockGeometry::Mha { kv_heads: 2, head_dim: 64, layers: 3, tokens: 4, dtype_bytes: 2 }
    }

    proptest! {
        /// Every segment of every slot lies inside the pool, has the length its layout says, and
        /// shares no byte with another; every buffer is aligned.
        #[test]
        fn segments_lie_apart_inside_the_pool(slots in 1..40_u32, lengths in vec(1..700_usize, 1..12)) {
            let pool = PoolLayout::new(slots, Layout::new(lengths.clone()).expect("lengths over 0")).expect("small");
            let mut ranges = Vec::new();
            for slot in 0..slots {
                let segments: Vec<_> = pool.segments(slot).collect();
                prop_assert!(segments.iter().map(|&(_, len)| len).eq(lengths.iter().copied()));
                if slot == 0 {
                    prop_assert!(segments.iter().all(|&(offset, _)| offset.is_multiple_of(BUFFER_ALIGN)));
                }
                ranges.extend(segments);
            }
            ranges.sort_unstable();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
            let (offset, len) = *ranges.last().expect("a segment");
            prop_assert_eq!(offset + len, pool.bytes());
            let padding = BUFFER_ALIGN * (lengths.len() - 1);
            prop_assert!(pool.bytes() - ranges.iter().map(|range| range.1).sum::<usize>() <= padding);
        }
    }

    #[test]
    fn layer_first_has_a_buffer_a_layer_and_page_first_a_buffer_a_half() {
        let layer_bytes = 2 * 64 * 4 * 2; // a multiple of the alignment, so buffers touch
        let pool = PoolLayout::new(10, small().layer_first().expect("small")).expect("10 slots");
        let expected: Vec<_> = (0..6).map(|i| (i * 10 * layer_bytes + 7 * layer_bytes, layer_bytes)).collect();
        assert_eq!(pool.segments(7).collect::<Vec<_>>(), expected);

        let half = 3 * layer_bytes;
        let pool = PoolLayout::new(10, small().page_first().expect("small")).expect("10 slots");
        assert_eq!(pool.segments(7).collect::<Vec<_>>(), [(7 * half, half), (10 * half + 7 * half, half)]);
    }

    #[test]
    fn a_simulated_pool_is_memory_of_its_own_for_every_slot() {
        let pool = DevicePool::simulated(9, Layout::new(vec![100, 300, 5]).expect("three segments")).expect("4 KiB");
        let starts: Vec<usize> = pool.segments(0).map(|segment| segment.ptr.addr()).collect();
        assert!(starts.iter().all(|start| start.is_multiple_of(BUFFER_ALIGN)));
        for slot in 0..9_u8 {
            for segment in pool.segments(slot.into()) {
                // SAFETY: a segment of the pool, known to this test only.
                unsafe { segment.ptr.write_bytes(slot, segment.len) };
            }
        }
        for slot in 0..9_u8 {
            for segment in pool.segments(slot.into()) {
                // SAFETY: a segment of the pool, known to this test only, and initialized by the loop above.
                let bytes = unsafe { std::slice::from_raw_parts(segment.ptr, segment.len) };
                assert!(bytes.iter().all(|&byte| byte == slot));
            }
        }
        assert_eq!((pool.memory().kind(), pool.memory().promote_direction()), ("simulated", Direction::HostToHost));
        assert!(pool.bytes() >= 9 * 405 && pool.bytes() <= pool.memory().bytes());
    }

    #[test]
    fn an_impossible_pool_is_an_error_that_names_the_bytes() {
        let block = |bytes| Layout::contiguous(bytes).expect("over 0");
        for (slots, bytes, wanted) in [
            (0, 4096, "= 0 bytes (no slot)"),
            (u32::MAX, 1 << 30, "= 4611686017353646080 bytes"),
            (u32::MAX, isize::MAX.unsigned_abs(), "bytes (more than the address space)"),
        ] {
            match DevicePool::simulated(slots, block(bytes)) {
                Err(Error::Config { field: "device_blocks", found, .. }) => assert!(found.contains(wanted), "{found}"),
                other => panic!("{slots} slots of {bytes} bytes: {other:?}"),
            }
        }
        // Only the padding between buffers pushes the sum past the end of memory.
        let most = isize::MAX.unsigned_abs();
        let padded = Layout::new(vec![1, most - 100]).expect("fits without padding");
        assert!(PoolLayout::new(1, padded).is_err());
    }

    #[test]
    fn memory_too_short_for_its_layout_is_refused() {
        let memory = Mapping::anonymous(4096).expect("4 KiB");
        let layout = PoolLayout::new(1, Layout::contiguous(memory.len() + 1).expect("over 0")).expect("1 slot");
        let error = DevicePool::new(Box::new(Simulated(memory)), layout).expect_err("a byte too short").to_string();
        assert!(error.starts_with("memory: found 4096 bytes, expected 4097 bytes at least"), "{error}");
    }

    #[test]
    #[should_panic(expected = "slot 2 of 2")]
    fn a_slot_past_the_end_has_no_segments() {
        let pool = DevicePool::simulated(2, Layout::contiguous(10).expect("10 bytes")).expect("20 bytes");
        let _ = pool.segments(2);
    }
}
