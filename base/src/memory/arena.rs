//! The host tier's memory: consecutive slots, aligned for direct I/O.

use std::{fmt, ptr::NonNull};

use super::mapping::{HUGE_PAGE_BYTES, Mapping};
use crate::{
    block::{FIXED_BYTES_MAX, IO_ALIGN},
    error::{Error, Result},
};

/// Longest chunk: one registered buffer of a ring.
const CHUNK_BYTES_MAX: usize = FIXED_BYTES_MAX;

/// The memory of the host tier: slots of equal size, one after another.
///
/// The memory is page-aligned, zeroed, backed by huge pages where the system has them, and
/// divided into *chunks* of at most 1 GiB, each of which a ring can register as one buffer. No slot
/// straddles two chunks. Chunks lie one after another in one mapping, so that a slot's address is
/// one multiplication away, and a request for more than the machine can map fails at once.
///
/// The memory is committed on first use, or by [`populate`](Self::populate). It is not inherited by
/// `fork`, because pages shared copy-on-write would break direct I/O: a forked child must not use
/// the cache, and a process that starts another program (`std::process::Command`) is not affected.
///
/// An arena only hands out addresses; the owner of a slot decides which code reads and writes it.
/// Keep the arena alive (in an `Arc`) for as long as an address is in use.
pub struct Arena {
    chunks: Box<[(NonNull<u8>, usize)]>,
    slots: u32,
    slot_bytes: usize,
    slots_per_chunk: u32,
    memory: Mapping,
}

// SAFETY: `chunks` are addresses in `memory`, which is Send and which this value owns.
unsafe impl Send for Arena {}
// SAFETY: methods on `&self` read addresses and sizes, which never change, and touch no memory behind
// them. The owner of a slot, not this type, ensures its exclusive use.
unsafe impl Sync for Arena {}

impl Arena {
    /// An arena of `slots` slots of `slot_bytes` each: 1 slot at least, `slot_bytes` a positive
    /// multiple of 4 KiB up to 1 GiB.
    ///
    /// # Errors
    /// [`Error::Argument`] for a wrong `slot_bytes`; [`Error::Config`] on `host_blocks` if there
    /// is no slot, or if the system cannot map that much.
    pub fn new(slots: u32, slot_bytes: usize) -> Result<Self> {
        Self::with_chunks(slots, slot_bytes, CHUNK_BYTES_MAX)
    }

    fn with_chunks(slots: u32, slot_bytes: usize, chunk_bytes_max: usize) -> Result<Self> {
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(IO_ALIGN) || slot_bytes > chunk_bytes_max {
            return Err(Error::argument(
                "slot_bytes",
                slot_bytes.to_string(),
                format!("a positive multiple of {IO_ALIGN}, {chunk_bytes_max} at most"),
            ));
        }
        let wrong = |reason: &dyn fmt::Display| {
            Error::config(
                "host_blocks",
                format!(
                    "{slots} slots of {slot_bytes} bytes = {} bytes ({reason})",
                    u128::from(slots) * slot_bytes as u128
                ),
                "1 slot at least, and no more than this machine can map: change `host_blocks` or `block_bytes`",
            )
        };
        let slots_per_chunk = slots_per_chunk(slot_bytes, chunk_bytes_max);
        if slots == 0 {
            return Err(wrong(&"no slot"));
        }
        if (slots - 1) / slots_per_chunk > u32::from(u16::MAX) {
            return Err(wrong(&format_args!("more than 65536 chunks of {chunk_bytes_max} bytes")));
        }
        let Some(bytes) = usize::try_from(slots).ok().and_then(|slots| slots.checked_mul(slot_bytes)) else {
            return Err(wrong(&"more than the address space"));
        };
        let memory = Mapping::anonymous(bytes).map_err(|error| wrong(&error))?;
        let chunk_bytes = slots_per_chunk as usize * slot_bytes;
        let chunk = |start: usize| {
            // SAFETY: `start` is less than `bytes`, the length of the mapping at least.
            let ptr = unsafe { memory.ptr().add(start) };
            (ptr, chunk_bytes.min(bytes - start))
        };
        let chunks = (0..bytes).step_by(chunk_bytes).map(chunk).collect();
        Ok(Arena { chunks, slots, slot_bytes, slots_per_chunk, memory })
    }

    /// Commits all of the memory now (seconds for tens of GiB), so that no later first use has to wait. With too little
    /// memory the system fails this call, or kills the process.
    ///
    /// # Errors
    /// [`Error::Config`] on `host_blocks`, with the system's error.
    pub fn populate(&mut self) -> Result<()> {
        self.memory.populate().map_err(|error| {
            Error::config(
                "host_blocks",
                format!("{} bytes that cannot be committed ({error})", self.bytes()),
                "no more than this machine has free: lower `host_blocks` or `block_bytes`",
            )
        })
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes of all slots.
    pub fn bytes(&self) -> usize {
        self.slots as usize * self.slot_bytes
    }

    /// Address of the first byte of `slot`, valid while the arena lives.
    ///
    /// # Panics
    /// If there is no such slot: slot numbers come from this crate, never from users or files.
    pub fn slot_ptr(&self, slot: u32) -> NonNull<u8> {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        // SAFETY: a slot of the arena lies inside its mapping: `slot` is less than `slots`.
        unsafe { self.memory.ptr().add(slot as usize * self.slot_bytes) }
    }

    /// Gives the memory of `slot` to the system until it is used again. It reads as zeros from now on.
    ///
    /// # Errors
    /// If the system refuses; the memory then stays.
    ///
    /// # Safety
    /// The caller owns the slot, and no device and no ring has its memory registered.
    pub unsafe fn discard(&self, slot: u32) -> std::io::Result<()> {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        // SAFETY: a slot consists of whole pages, and the caller owns it.
        unsafe { self.memory.discard(slot as usize * self.slot_bytes, self.slot_bytes) }
    }

    /// The chunk that contains `slot`: its index in [`chunks`](Self::chunks), and its number as a registered buffer if
    /// all chunks are registered in order.
    ///
    /// # Panics
    /// As [`slot_ptr`](Self::slot_ptr).
    pub fn chunk_of(&self, slot: u32) -> u16 {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        u16::try_from(slot / self.slots_per_chunk).expect("at most 65536 chunks, checked when the arena was made")
    }

    /// Start and length of every chunk, for registration with a ring or a device.
    pub fn chunks(&self) -> &[(NonNull<u8>, usize)] {
        &self.chunks
    }
}

debug_fields!(Arena, arena => slots: arena.slots, slot_bytes: arena.slot_bytes, chunks: arena.chunks.len());

/// Slots per chunk: as many as fit, or a few less if the next chunk then starts on a huge page, because a huge page
/// shared by two buffers is pinned and counted twice.
fn slots_per_chunk(slot_bytes: usize, chunk_bytes_max: usize) -> u32 {
    let most = chunk_bytes_max / slot_bytes;
    let huge_bits = HUGE_PAGE_BYTES.trailing_zeros();
    let step = 1_usize << (huge_bits - slot_bytes.trailing_zeros().min(huge_bits));
    let slots = if most >= step { most - most % step } else { most };
    u32::try_from(slots).expect("1 GiB holds at most 2^18 slots of 4 KiB")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;

    fn addr(ptr: NonNull<u8>) -> usize {
        ptr.as_ptr().addr()
    }

    proptest! {
        /// Every slot lies within its chunk, aligned for direct I/O. Chunks cover the slots without gaps, and none
        /// exceeds the limit.
        #[test]
        fn slots_lie_whole_in_their_chunks(slots in 1..2000_u32, pages in 1..20_usize, chunk_pages in 20..3000_usize) {
            let (slot_bytes, chunk_bytes_max) = (pages * IO_ALIGN, chunk_pages * IO_ALIGN);
            let arena = Arena::with_chunks(slots, slot_bytes, chunk_bytes_max).expect("under 160 MiB, not touched");
            for slot in 0..slots {
                let start = addr(arena.slot_ptr(slot));
                prop_assert!(start.is_multiple_of(IO_ALIGN));
                prop_assert_eq!(start, addr(arena.slot_ptr(0)) + slot as usize * slot_bytes);
                let (chunk, len) = arena.chunks()[usize::from(arena.chunk_of(slot))];
                prop_assert!(start >= addr(chunk) && start + slot_bytes <= addr(chunk) + len);
            }
            let mut next = addr(arena.slot_ptr(0));
            for &(chunk, len) in arena.chunks() {
                prop_assert_eq!(addr(chunk), next);
                prop_assert!(len > 0 && len <= chunk_bytes_max);
                next += len;
            }
            prop_assert_eq!(next - addr(arena.slot_ptr(0)), arena.bytes());
        }

        /// Chunks are as long as they can be, less a huge page's worth of slots where that lets
        /// all chunks begin on a huge page.
        #[test]
        fn chunks_begin_on_huge_pages_where_they_can(pages in 1..=262_144_usize) {
            let slot_bytes = pages * IO_ALIGN;
            let chunk_bytes = slots_per_chunk(slot_bytes, CHUNK_BYTES_MAX) as usize * slot_bytes;
            prop_assert!(chunk_bytes <= CHUNK_BYTES_MAX && chunk_bytes > CHUNK_BYTES_MAX / 2);
            let aligned_slots_fit = (1..=512).any(|n| {
                n * slot_bytes <= CHUNK_BYTES_MAX && (n * slot_bytes).is_multiple_of(HUGE_PAGE_BYTES)
            });
            prop_assert_eq!(chunk_bytes.is_multiple_of(HUGE_PAGE_BYTES), aligned_slots_fit);
        }
    }

    #[test]
    fn real_chunks_are_a_gibibyte() {
        // Address space only: nothing is touched.
        let arena = Arena::new(2 * 16_384 + 1, 64 * KIB).expect("2 GiB of address space");
        let lengths: Vec<usize> = arena.chunks().iter().map(|&(_, len)| len).collect();
        assert_eq!(lengths, [1 << 30, 1 << 30, 64 * KIB]);
        assert!(arena.chunks().iter().all(|&(ptr, _)| addr(ptr).is_multiple_of(HUGE_PAGE_BYTES)));
        assert_eq!((arena.chunk_of(16_383), arena.chunk_of(16_384), arena.chunk_of(32_768)), (0, 1, 2));
    }

    #[test]
    fn slots_are_separate_writable_memory() {
        let mut arena = Arena::with_chunks(5, 4 * KIB, 8 * KIB).expect("20 KiB");
        arena.populate().expect("20 KiB");
        for slot in 0..5_u8 {
            // SAFETY: a slot of the arena, known to this test only.
            unsafe { arena.slot_ptr(slot.into()).write_bytes(slot + 1, 4 * KIB) };
        }
        for slot in 0..5_u8 {
            // SAFETY: a slot of the arena, known to this test only, and initialized by the loop above.
            let bytes = unsafe { std::slice::from_raw_parts(arena.slot_ptr(slot.into()).as_ptr(), 4 * KIB) };
            assert!(bytes.iter().all(|&byte| byte == slot + 1));
        }
    }

    #[test]
    fn a_discarded_slot_takes_no_memory_and_reads_as_zeros() {
        let arena = Arena::new(3, 64 * KIB).expect("192 KiB");
        let resident = |slot| {
            let mut pages = [0u8; 16];
            // SAFETY: the range is mapped, and `pages` has a byte for each of its pages.
            let rc = unsafe { libc::mincore(arena.slot_ptr(slot).as_ptr().cast(), 64 * KIB, pages.as_mut_ptr()) };
            assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
            pages.iter().filter(|page| **page & 1 == 1).count()
        };
        for slot in 0..3 {
            // SAFETY: a slot of the arena, known to this test only.
            unsafe { arena.slot_ptr(slot).write_bytes(7, 64 * KIB) };
        }
        // SAFETY: only this test knows the slot, and nothing is registered.
        unsafe { arena.discard(1) }.expect("anonymous memory");
        assert_eq!([0, 1, 2].map(resident), [16, 0, 16]);
        // SAFETY: mapped slots that only this test knows.
        let [before, between, after] = [0, 1, 2].map(|slot| unsafe { arena.slot_ptr(slot).read() });
        assert_eq!((before, between, after), (7, 0, 7));
    }

    #[test]
    fn wrong_sizes_are_errors_that_name_them() {
        for slot_bytes in [0, 1, 4095, 4097, (1 << 30) + 4096, usize::MAX] {
            let error = Arena::new(1, slot_bytes).expect_err("a wrong slot size").to_string();
            assert!(error.starts_with(&format!("slot_bytes: found {slot_bytes}, expected")), "{error}");
        }
        let error = Arena::new(0, MIB).expect_err("no slot").to_string();
        assert!(error.starts_with("host_blocks: found 0 slots"), "{error}");
    }

    #[test]
    fn more_than_the_machine_has_is_an_error_that_names_the_bytes() {
        for (slots, slot_bytes, bytes) in [
            (u32::MAX, 1 << 30, "4611686017353646080 bytes"),
            (1 << 16, 1 << 30, "70368744177664 bytes"), // 65536 chunks, the most there may be
        ] {
            match Arena::new(slots, slot_bytes) {
                Err(Error::Config { field: "host_blocks", found, .. }) => assert!(found.contains(bytes), "{found}"),
                other => panic!("{slots} slots of {slot_bytes} bytes: {other:?}"),
            }
        }
    }

    #[test]
    #[should_panic(expected = "slot 3 of 3")]
    fn a_slot_past_the_end_has_no_address() {
        Arena::new(3, 4096).expect("12 KiB").slot_ptr(3);
    }

    #[test]
    fn an_arena_can_own_memory_across_threads() {
        fn owner<T: std::any::Any + Send + Sync>() {}
        owner::<Arena>();
    }
}
