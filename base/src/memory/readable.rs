//! Memory that a guard keeps readable.

use crate::block::Segment;

/// A guard that keeps memory mapped, initialized and unwritten.
///
/// # Safety
/// [`segments`](Readable::segments) must stay mapped, initialized and unwritten while the guard lives.
pub unsafe trait Readable: Send + Sync + 'static {
    /// Where the memory is, in the order of its bytes.
    fn segments(&self) -> Vec<Segment>;
}

// SAFETY: the value in the box promises it, and moving the box does not move it.
unsafe impl<T: Readable> Readable for Box<T> {
    fn segments(&self) -> Vec<Segment> {
        (**self).segments()
    }
}
