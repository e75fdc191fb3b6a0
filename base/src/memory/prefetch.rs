//! Hints to the processor.

/// Hints to the processor that the value at `place` is about to be read or written: its first line of the cache, and
/// the others of a value that is aligned to lines. Any address will do.
#[inline]
pub fn prefetch<T>(place: *const T) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: a hint, which reads and writes nothing and cannot fault, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(place.wrapping_byte_add(line).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
