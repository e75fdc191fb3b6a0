//! The pieces that are left, by drive.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::plan::Piece;

/// Pieces of a transfer, by drive: a thread stays with a drive, so that each has as many requests under way as the
/// others. Threads that took one piece of each drive in turn would all end up waiting for the slowest.
pub(crate) struct Queues {
    drives: Vec<Drive>,
    threads: usize,
}

/// Pieces of a drive, in order.
struct Drive {
    pieces: Vec<Piece>,
    next: AtomicUsize,
}

/// Which drive a thread takes its next piece from.
pub(crate) struct Cursor(usize);

impl Queues {
    /// For so many threads at most.
    pub(crate) fn new(drives: Vec<Vec<Piece>>, threads: usize) -> Self {
        let total: usize = drives.iter().map(Vec::len).sum();
        let drives = drives.into_iter().map(|pieces| Drive { pieces, next: AtomicUsize::new(0) }).collect();
        Queues { drives, threads: threads.min(total).max(1) }
    }

    /// How many threads have something to do.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Where the thread of this number begins: threads are spread over the drives.
    pub(crate) fn cursor(&self, thread: usize) -> Cursor {
        Cursor(thread)
    }

    /// The next piece of the thread's drive, or of another one when that has none left.
    pub(crate) fn take(&self, cursor: &mut Cursor) -> Option<&Piece> {
        let count = self.drives.len();
        let first = cursor.0;
        // Fewer threads than drives visit them in turn.
        if self.threads < count {
            cursor.0 += self.threads;
        }
        (0..count).find_map(|other| {
            let drive = &self.drives[(first + other) % count];
            drive.pieces.get(drive.next.fetch_add(1, Ordering::Relaxed))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queues(pieces: &[usize], threads: usize) -> Queues {
        let piece = |file, n: usize| Piece { file, start: n as u64, end: n as u64 + 1, parts: Vec::new() };
        let drives = pieces.iter().enumerate().map(|(file, &count)| (0..count).map(|n| piece(file, n)).collect());
        Queues::new(drives.collect(), threads)
    }

    #[test]
    fn threads_stay_with_their_drives_and_then_help_the_others() {
        let queues = queues(&[3, 5, 1], 6);
        let mut cursors: Vec<Cursor> = (0..6).map(|n| queues.cursor(n)).collect();
        let mut take = |n: usize| queues.take(&mut cursors[n]).map(|piece| (piece.file, piece.start));
        // Two threads a drive.
        assert_eq!([take(0), take(1), take(2)], [Some((0, 0)), Some((1, 0)), Some((2, 0))]);
        assert_eq!([take(3), take(4), take(0)], [Some((0, 1)), Some((1, 1)), Some((0, 2))]);
        // The third drive has no more, and then the first has none.
        assert_eq!([take(5), take(2), take(1)], [Some((1, 2)), Some((1, 3)), Some((1, 4))]);
        assert_eq!([take(0), take(1), take(5)], [None, None, None]);
    }

    #[test]
    fn fewer_threads_than_drives_visit_all_of_them() {
        for threads in 1..5 {
            let queues = queues(&[4; 5], threads);
            assert_eq!(queues.threads(), threads);
            let mut cursors: Vec<Cursor> = (0..threads).map(|n| queues.cursor(n)).collect();
            let mut taken = [0; 5];
            for turn in 0..20 {
                let piece = queues.take(&mut cursors[turn % threads]).expect("20 of them");
                assert_eq!(piece.start, taken[piece.file]);
                taken[piece.file] += 1;
                let (least, most) = (taken.iter().min().expect("5"), taken.iter().max().expect("5"));
                assert!(most - least <= 2, "{threads} threads: {taken:?}");
            }
        }
        assert_eq!((queues(&[], 4).threads(), queues(&[1, 1], 9).threads()), (1, 2));
        assert!(queues(&[], 4).take(&mut Cursor(0)).is_none());
    }
}
