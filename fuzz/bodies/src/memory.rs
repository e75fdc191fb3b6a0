//! How much memory a piece of work takes: counted by the allocator, thread by thread.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

struct Counting;

thread_local! {
    /// Bytes that this thread allocated less those that it freed; may be negative.
    static LIVE: Cell<i64> = const { Cell::new(0) };
    /// The most that `LIVE` was since it was last reset.
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    // A thread that is ending has no cells any more, and its memory is not counted.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        PEAK.try_with(|peak| peak.set(peak.get().max(live.get())))
    });
}

// SAFETY: every call goes to the system's allocator unchanged; only sums are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Does `work`, and panics if it took more than `bytes` of memory at any time.
pub fn bounded<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    let taken = PEAK.get() - before;
    assert!(taken <= bytes as i64, "took {taken} bytes, expected {bytes} at most");
    result
}

#[cfg(test)]
mod tests {
    use super::bounded;

    #[test]
    fn what_is_given_back_counts_at_its_peak_only() {
        let made = bounded(3000, || {
            drop(vec![0u8; 2000]);
            vec![0u8; 2500]
        });
        assert_eq!(made.len(), 2500);
    }

    #[test]
    #[should_panic(expected = "expected 1999 at most")]
    fn more_than_the_bound_is_found_out() {
        bounded(1999, || drop(vec![0u8; 2000]));
    }
}
