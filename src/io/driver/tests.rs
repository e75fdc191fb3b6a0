//! What an I/O thread transfers by system calls, with a ring beside them and without.

use std::{fs::File, io, io::Write, ptr::NonNull, sync::Arc};

use super::*;
use crate::{
    block::FileId,
    io::transfer::OpenFile,
    memory::{AlignedBuf, Lent},
};

fn read(file: &Arc<File>, offset: u64, buf: Lent) -> Transfer {
    let file = OpenFile { file: Arc::clone(file), id: FileId(0), by_calls: true };
    Transfer { kind: OpKind::Read, file, offset, buf }
}

fn waiter() -> Waiter {
    Waiter::new(0).0
}

/// With a ring, if the kernel allows one, and without.
fn drivers() -> impl Iterator<Item = ThreadDriver> {
    let with_ring = Ring::new(None).ok().map(ThreadDriver::with);
    with_ring.into_iter().chain([ThreadDriver::without_ring(Takes::All)])
}

#[test]
fn a_transfer_of_a_blocking_file_is_made_when_it_is_taken() {
    let mut file = tempfile::tempfile().expect("a file");
    (0..3_u8).for_each(|page| file.write_all(&[page; 4096]).expect("written"));
    let file = Arc::new(file);
    for mut driver in drivers() {
        for page in [2_u64, 0, 3] {
            driver.start(read(&file, page << 12, AlignedBuf::zeroed(4096).lend()), waiter());
        }
        assert_eq!((driver.in_flight(OpKind::Read), driver.room(OpKind::Write)), (3, 0), "it is busy");
        assert!(driver.ring.as_ref().is_none_or(|ring| ring.in_flight(OpKind::Read) == (0, 0)), "none is the ring's");
        for page in [2, 0] {
            let Completed { buf, result, .. } = driver.take_completed().expect("three transfers");
            result.expect("read");
            assert_eq!(*AlignedBuf::from_lent(buf), [page; 4096]);
        }
        let past_the_end = driver.take_completed().expect("three transfers").result.expect_err("no such page");
        assert_eq!(past_the_end.kind(), io::ErrorKind::UnexpectedEof);
        assert!(driver.in_flight(OpKind::Read) == 0 && !driver.has_completed());
    }
}

#[test]
fn what_is_in_flight_keeps_its_memory_and_dropping_the_driver_gives_it_up() {
    let file = Arc::new(tempfile::tempfile().expect("a file"));
    for mut driver in drivers() {
        let memory = Arc::new([0_u8; 4096]);
        // SAFETY: the array lives as long as its owner, and nothing reads it.
        let lent = unsafe { Lent::new(NonNull::from(&*memory).cast(), 4096, None, Arc::clone(&memory) as _) };
        driver.start(read(&file, 0, lent), waiter());
        assert_eq!(Arc::strong_count(&memory), 2);
        drop(driver);
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}

#[test]
fn flushes_are_system_calls_and_impossible_offsets_errors_that_give_the_memory_back() {
    let file = Arc::new(tempfile::tempfile().expect("a file"));
    for mut driver in drivers() {
        let flush = Transfer { kind: OpKind::Sync, ..read(&file, 0, Lent::empty()) };
        driver.start(flush, waiter());
        assert_eq!((driver.in_flight(OpKind::Write), driver.in_flight(OpKind::Read)), (1, 0));
        driver.take_completed().expect("the flush").result.expect("flushed");
        driver.start(read(&file, u64::MAX, AlignedBuf::zeroed(4096).lend()), waiter());
        let Completed { buf, result, .. } = driver.take_completed().expect("refused");
        assert_eq!(result.expect_err("past all files").kind(), io::ErrorKind::InvalidInput);
        assert_eq!(AlignedBuf::from_lent(buf).len(), 4096);
    }
}
