//! Copies into memory that nobody reads soon.

/// Copies `from` to `to`, which has the same length, past the processor's cache: the lines of `to` are not read from
/// memory before they are overwritten, and what is in the cache stays there. An ordinary copy where the processor has
/// no such stores.
pub fn copy_past_cache(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy of another length");
    #[cfg(target_arch = "x86_64")]
    lines::copy(to, from);
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

#[cfg(target_arch = "x86_64")]
mod lines {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    /// What the processor moves between its cache and memory.
    #[repr(C, align(64))]
    struct Line([__m128i; 4]);

    const LINE_BYTES: usize = size_of::<Line>();

    pub(super) fn copy(to: &mut [u8], from: &[u8]) {
        // SAFETY: a line is 64 bytes, of which every pattern is a valid value.
        let (before, lines, _) = unsafe { to.align_to_mut::<Line>() };
        let (start, count) = (before.len(), lines.len());
        let end = start + count * LINE_BYTES;
        for (line, bytes) in lines.iter_mut().zip(from[start..end].chunks_exact(LINE_BYTES)) {
            for (part, bytes) in line.0.iter_mut().zip(bytes.chunks_exact(size_of::<__m128i>())) {
                // SAFETY: every x86-64 has SSE2; `part` is 16 bytes of an aligned line, and `bytes` has as many.
                unsafe { _mm_stream_si128(part, _mm_loadu_si128(bytes.as_ptr().cast())) };
            }
        }
        // SAFETY: as above. Such stores are in no order with others: whoever is told of these bytes must see them.
        unsafe { _mm_sfence() };
        to[..start].copy_from_slice(&from[..start]);
        to[end..].copy_from_slice(&from[end..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_wherever_it_begins_and_ends() {
        let from: Vec<u8> = (0..400u32).map(|n| (n % 251) as u8 + 1).collect();
        for start in 0..65 {
            for length in (0..=200).chain([300]) {
                let mut to = [0; 400];
                copy_past_cache(&mut to[start..start + length], &from[7..7 + length]);
                let expected: Vec<u8> =
                    [&vec![0; start], &from[7..7 + length], &vec![0; 400 - start - length]].concat();
                assert_eq!(to[..], expected, "{length} bytes from {start} on");
            }
        }
    }

    #[test]
    #[should_panic(expected = "a copy of another length")]
    fn another_length_is_refused() {
        copy_past_cache(&mut [0; 3], &[0; 4]);
    }
}
