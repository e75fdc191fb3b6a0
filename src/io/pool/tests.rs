//! The order in which workers take queued transfers.

use std::{fs::File, sync::Arc};

use super::{
    Urgency::{Awaited, Background},
    queue::PASSES_MAX,
    *,
};
use crate::{block::FileId, io::transfer::OpenFile, memory::AlignedBuf};

const PAGE: usize = 4096;

/// A queue with transfers that are known by their offsets; `sum_bytes` as of [`Waiter::new`].
struct Queued(Pool, Arc<File>);

impl Queued {
    fn new(rings: u32) -> Self {
        Queued(Pool::new(rings, rings, WAKE_BYTES), Arc::new(File::open("/dev/null").expect("a file")))
    }

    fn push(&self, kind: OpKind, urgency: Urgency, offset: u64, sum_bytes: usize) {
        let file = OpenFile { file: Arc::clone(&self.1), id: FileId(0), by_calls: false };
        let transfer = Transfer { kind, file, offset, buf: AlignedBuf::zeroed(PAGE).lend() };
        self.0.push_transfer(urgency, transfer, Waiter::new(sum_bytes).0).wake();
    }

    /// The offsets of what a worker takes.
    fn take(&self, reads: usize, writes: usize, writing: usize) -> Vec<u64> {
        let taken = self.0.lock().take(Room { reads, writes, writing }, true);
        taken.transfers.iter().chain(&taken.unsummed).map(|(transfer, _)| transfer.offset).collect()
    }
}

#[test]
fn awaited_transfers_go_before_others_and_no_read_waits_for_a_write() {
    let queue = Queued::new(1);
    for n in 0..3 {
        queue.push(OpKind::Write, Awaited, 10 + n, 0);
        queue.push(OpKind::Read, Background(n), 20 + n, 0);
    }
    queue.push(OpKind::Read, Awaited, 30, 0);
    assert_eq!(queue.take(2, 2, 0), [30, 20, 10, 11], "each kind has room of its own");
    assert_eq!(queue.take(1, 0, 2), [21], "there is no room for writes");
    assert_eq!(queue.take(1, 1, 1), [22, 12]);
    assert_eq!(queue.take(1, 1, 0), [0_u64; 0]);
    assert_eq!(queue.0.lock().bytes, 0);
}

#[test]
fn while_awaited_reads_wait_a_worker_writes_one_awaited_block_at_a_time() {
    for sum_bytes in [0, PAGE] {
        let queue = Queued::new(1);
        queue.push(OpKind::Write, Background(1), 10, sum_bytes);
        queue.push(OpKind::Write, Awaited, 11, sum_bytes);
        queue.push(OpKind::Write, Awaited, 12, sum_bytes);
        queue.push(OpKind::Read, Awaited, 20, 0);
        queue.push(OpKind::Read, Awaited, 21, 0);
        let (room, busy) = (Room { reads: 0, writes: 9, writing: 0 }, Room { reads: 0, writes: 8, writing: 1 });
        assert!(queue.0.lock().has_transfer_for(room) && !queue.0.lock().has_transfer_for(busy));
        assert_eq!(queue.take(0, 9, 0), [11], "one write, and none that nobody awaits");
        assert_eq!(queue.take(0, 8, 1), [0_u64; 0], "it is in flight");
        assert_eq!(queue.take(0, 9, 0), [12]);
        assert!(!queue.0.lock().has_transfer_for(room), "the other write is a background one");
        assert_eq!(queue.take(2, 9, 0)[..2], [20, 21]);
        let left = queue.take(2, 9, 0);
        assert!(left == [10] || left.is_empty() && sum_bytes == 0, "no read waits: {left:?}");
    }
}

#[test]
fn a_write_that_is_due_to_be_checksummed_takes_the_room_of_other_writes() {
    let queue = Queued::new(1);
    queue.push(OpKind::Write, Awaited, 10, 0);
    queue.push(OpKind::Write, Awaited, 11, 0);
    queue.push(OpKind::Write, Awaited, 12, PAGE);
    queue.push(OpKind::Read, Awaited, 20, 0);
    queue.0.lock().passes = PASSES_MAX;
    assert_eq!(queue.take(0, 9, 0), [12], "one awaited write beside awaited reads, the one that is due");
    assert_eq!(queue.take(0, 9, 0), [10]);
    queue.push(OpKind::Write, Awaited, 13, PAGE);
    queue.0.lock().passes = PASSES_MAX;
    assert_eq!(queue.take(0, 8, 1), [0_u64; 0], "one is in flight");
    assert_eq!(queue.take(1, 1, 0), [20, 13], "it is due still, and there is room for one write");
    assert_eq!(queue.take(0, 1, 0), [11]);
}

#[test]
fn a_transfer_that_comes_after_the_end_is_told_to_be_lost() {
    let queue = Queued::new(1);
    queue.0.close();
    let (told, ended) = std::sync::mpsc::channel();
    let memory = Arc::downgrade(&queue.1);
    let file = OpenFile { file: Arc::clone(&queue.1), id: FileId(0), by_calls: false };
    let transfer = Transfer { kind: OpKind::Read, file, offset: 0, buf: AlignedBuf::zeroed(PAGE).lend() };
    let told = move |result: Option<waiter::Transferred>| {
        told.send((result.is_none(), memory.strong_count())).expect("awaited");
    };
    let pushed = queue.0.push_transfer(Awaited, transfer, Waiter::calling(PAGE, told));
    assert!(ended.try_recv().is_err(), "not under the locks of its caller");
    pushed.wake();
    assert_eq!(ended.try_recv(), Ok((true, 1)), "once its memory and its file are let go");
}

#[test]
fn work_and_awaited_writes_are_done_however_many_reads_are_queued() {
    let queue = Queued::new(1);
    queue.push(OpKind::Write, Awaited, 10, PAGE);
    queue.push(OpKind::Write, Background(1), 11, PAGE);
    queue.0.push_work(0, Box::new(|| ()));
    let (mut works, mut writes, mut reads) = (0, Vec::new(), 0);
    // A thread that always has a completed transfer, and more reads in the queue than room.
    for n in 0..3 * PASSES_MAX {
        (0..2).for_each(|at| queue.push(OpKind::Read, Background(u64::from(2 * n + at)), 20, 0));
        let taken = queue.0.lock().take(Room { reads: 1, writes: 1, writing: 0 }, false);
        works += usize::from(taken.work.is_some());
        writes.extend(taken.unsummed.iter().map(|(transfer, _)| transfer.offset));
        reads += taken.transfers.len();
    }
    assert_eq!((works, writes, reads), (1, vec![10], 3 * PASSES_MAX as usize), "nobody awaits the other write");
}

#[test]
fn an_awaited_write_has_its_turn_however_much_work_is_queued() {
    let queue = Queued::new(1);
    (0..2).for_each(|n| queue.push(OpKind::Write, Awaited, 10 + n, PAGE));
    queue.push(OpKind::Write, Background(1), 12, PAGE);
    let turns: Vec<Vec<u64>> = std::iter::repeat_with(|| {
        (0..2).for_each(|_| queue.0.push_work(0, Box::new(|| ())));
        queue.take(1, 1, 0)
    })
    .take(5)
    .collect();
    assert_eq!(turns, [vec![], vec![10], vec![], vec![11], vec![]], "in turns with work, and none that nobody awaits");
}

#[test]
fn a_queued_transfer_that_a_caller_joins_goes_before_those_that_nobody_awaits() {
    let queue = Queued::new(1);
    (0..4).for_each(|n| queue.push(OpKind::Read, Background(n), 20 + n, 0));
    queue.push(OpKind::Write, Background(7), 10, 0);
    queue.0.raise(&[2, 7], false);
    assert_eq!(queue.take(2, 0, 0), [22, 20]);
    queue.push(OpKind::Read, Awaited, 30, 0);
    assert_eq!(queue.take(0, 1, 0), [10], "it is awaited, and the only write");
    queue.0.raise(&[], true);
    assert_eq!(queue.take(9, 0, 0), [30, 21, 23], "all are awaited, in the order in which they became so");
}

#[test]
fn a_worker_takes_its_part_of_the_queue() {
    let queue = Queued::new(2);
    (0..5).for_each(|n| queue.push(OpKind::Read, Awaited, n, 0));
    assert_eq!(queue.take(9, 0, 0), [0, 1, 2]);
    assert_eq!(queue.take(9, 0, 0), [3]);
}
