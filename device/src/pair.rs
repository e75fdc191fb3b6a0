//! Pairs the segments of two layouts of a block into copies.

use std::borrow::Borrow;

use kvhoist_base::{
    block::{CopyOp, Segment},
    error::{Error, Result},
};

/// The copies that bring the bytes of the `src` segments, in order, to the `dst` segments, in order. Scatters one
/// segment into many, gathers many into one, and anything between. Yields fewer copies than both sides have segments
/// together; none is empty.
///
/// Takes slices, or iterators such as
/// [`DevicePool::segments`](crate::DevicePool::segments).
///
/// ```
/// use kvhoist::{Segment, internals::device::pair_segments};
/// let (mut host, mut keys, mut values) = ([0_u8; 10], [0_u8; 6], [0_u8; 4]);
/// let of = |bytes: &mut [u8]| Segment { ptr: bytes.as_mut_ptr(), len: bytes.len() };
/// let ops = pair_segments(&[of(&mut host)], &[of(&mut keys), of(&mut values)])?;
/// assert_eq!(ops.iter().map(|op| op.len).collect::<Vec<_>>(), [6, 4]);
/// # Ok::<(), kvhoist::Error>(())
/// ```
///
/// # Errors
/// [`Error::Argument`] if the two sides are not equally long.
pub fn pair_segments<S, D>(src: S, dst: D) -> Result<Vec<CopyOp>>
where
    S: IntoIterator<Item: Borrow<Segment>>,
    D: IntoIterator<Item: Borrow<Segment>>,
{
    let mut src = src.into_iter().map(|segment| *segment.borrow()).filter(|segment| segment.len > 0);
    let mut dst = dst.into_iter().map(|segment| *segment.borrow()).filter(|segment| segment.len > 0);
    let mut ops = Vec::with_capacity(src.size_hint().1.unwrap_or(0).max(dst.size_hint().1.unwrap_or(0)));
    let (mut from, mut to) = (src.next(), dst.next());
    while let (Some(source), Some(target)) = (from, to) {
        let len = source.len.min(target.len);
        ops.push(CopyOp { src: source.ptr, dst: target.ptr, len });
        from = rest(source, len).or_else(|| src.next());
        to = rest(target, len).or_else(|| dst.next());
    }
    if from.is_none() && to.is_none() {
        return Ok(ops);
    }
    let paired: u128 = ops.iter().map(|op| op.len as u128).sum();
    let total = |left: Option<Segment>, others: &mut dyn Iterator<Item = Segment>| {
        paired + left.into_iter().chain(others).map(|segment| segment.len as u128).sum::<u128>()
    };
    let (src_bytes, dst_bytes) = (total(from, &mut src), total(to, &mut dst));
    Err(Error::argument(
        "segments",
        format!("{src_bytes} bytes to copy into {dst_bytes} bytes"),
        "sources and destinations of equal length in all",
    ))
}

/// What is left of a segment after its first `len` bytes.
fn rest(segment: Segment, len: usize) -> Option<Segment> {
    // `wrapping_add`, not `add`: the segment may be in device memory, which is no allocation of this program.
    (len < segment.len).then(|| Segment { ptr: segment.ptr.wrapping_add(len), len: segment.len - len })
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// Segments of these lengths one after another from `base` on.
    fn cut(base: *mut u8, lengths: &[usize]) -> Vec<Segment> {
        let mut start = 0;
        let segment = |&len: &usize| {
            start += len;
            Segment { ptr: base.wrapping_add(start - len), len }
        };
        lengths.iter().map(segment).collect()
    }

    /// Lengths, some of them 0, that sum to `total`.
    fn lengths(total: usize, cuts: &[usize]) -> Vec<usize> {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (total + 1)).collect();
        cuts.extend([0, total]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    proptest! {
        /// However both sides are cut, and in whatever order their segments lie in memory, every
        /// byte arrives at its place, once.
        #[test]
        fn bytes_arrive_in_order(
            total in 0..500_usize,
            src_cuts in vec(any::<usize>(), 0..12),
            dst_cuts in vec(any::<usize>(), 0..12),
            order in any::<prop::sample::Index>(),
        ) {
            let data: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
            let (mut from, mut to) = (data.clone(), vec![255; total]);
            let src = cut(from.as_mut_ptr(), &lengths(total, &src_cuts));
            // The target's segments are rotated, so that neighbors in the block are not in memory.
            let mut dst = cut(to.as_mut_ptr(), &lengths(total, &dst_cuts));
            let middle = order.index(dst.len());
            dst.rotate_left(middle);

            let ops = pair_segments(&src, &dst).expect("equal totals");
            prop_assert!(ops.len() <= (src.len() + dst.len()).saturating_sub(1));
            for op in &ops {
                prop_assert!(op.len > 0);
                // SAFETY: ranges of `from` and `to`, which are separate and alive.
                unsafe { std::ptr::copy_nonoverlapping(op.src, op.dst, op.len) };
            }
            let mut arrived = Vec::new();
            for segment in &dst {
                let start = segment.ptr.addr() - to.as_ptr().addr();
                arrived.extend_from_slice(&to[start..start + segment.len]);
            }
            prop_assert_eq!(arrived, data);
            let by_value = pair_segments(src.iter().copied(), dst.iter().copied()).expect("equal totals");
            prop_assert_eq!(by_value.len(), ops.len());
        }

        /// Unequal totals are refused with both totals.
        #[test]
        fn unequal_totals_are_refused(src in vec(0..50_usize, 0..8), dst in vec(0..50_usize, 0..8)) {
            let (src_bytes, dst_bytes): (usize, usize) = (src.iter().sum(), dst.iter().sum());
            let nowhere = std::ptr::null_mut();
            match pair_segments(cut(nowhere, &src), cut(nowhere, &dst)) {
                Ok(_) => prop_assert_eq!(src_bytes, dst_bytes),
                Err(error) => {
                    prop_assert_ne!(src_bytes, dst_bytes);
                    let found = format!("segments: found {src_bytes} bytes to copy into {dst_bytes} bytes, ");
                    prop_assert!(error.to_string().starts_with(&found), "{}", error);
                }
            }
        }
    }

    #[test]
    fn lengths_that_pass_the_end_of_memory_do_not_overflow() {
        let all = Segment { ptr: std::ptr::null_mut(), len: usize::MAX };
        let error = pair_segments([all; 3], [all; 2]).expect_err("3 are not 2").to_string();
        assert!(error.contains("55340232221128654845 bytes to copy into 36893488147419103230 bytes"), "{error}");
    }
}
