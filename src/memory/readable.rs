//! Memory that a guard keeps readable.

use crate::block::Segment;

/// Memory to be read that a guard keeps mapped, initialized and unwritten.
///
/// # Safety
/// [`segments`](Readable::segments) are all of that for as long as the guard lives.
pub(crate) unsafe trait Readable: Send + Sync + 'static {
    fn segments(&self) -> Vec<Segment>;
}
