//! A ring for one worker thread: its transfers, its bell and its end.

use std::{io::Write, os::fd::OwnedFd, ptr::NonNull, thread};

use super::*;
use crate::memory::AlignedBuf;

/// A file of `count` pages, each filled with its number.
fn pages(count: u8) -> Arc<File> {
    let mut file = tempfile::tempfile().expect("a file");
    (0..count).for_each(|page| file.write_all(&[page; 4096]).expect("written"));
    Arc::new(file)
}

fn read(file: &Arc<File>, offset: u64, buf: Lent) -> Transfer {
    Transfer { kind: OpKind::Read, file: Arc::clone(file), id: FileId(0), is_in_memory: false, offset, buf }
}

/// Waits for `count` transfers, and returns them by tag.
fn ended<T: Ord + Copy>(lane: &mut Lane<T>, count: usize) -> Vec<Completed<T>> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(std::iter::from_fn(|| lane.take_completed()));
        if all.len() < count {
            lane.wait();
        }
    }
    all.sort_by_key(|ended| ended.tag);
    all
}

#[test]
fn each_of_many_transfers_gets_its_own_bytes() {
    let file = pages(64);
    let mut lane = Lane::new(None).expect("a ring");
    for round in 0..2_u64 {
        for page in 0..TRANSFERS_MAX as u64 {
            lane.start(read(&file, (round * 32 + page) << 12, AlignedBuf::zeroed(4096).lend()), page);
        }
        lane.poll();
        for Completed { buf, result, tag } in ended(&mut lane, TRANSFERS_MAX) {
            result.expect("read");
            assert_eq!(*AlignedBuf::from_lent(buf), [(round * 32 + tag) as u8; 4096]);
        }
        assert_eq!(lane.in_flight(OpKind::Read), (0, 0));
    }
}

#[test]
fn the_end_of_the_file_and_an_impossible_offset_are_errors_and_give_the_memory_back() {
    let file = pages(1);
    let mut lane = Lane::new(None).expect("a ring");
    lane.start(read(&file, 0, AlignedBuf::zeroed(8192).lend()), 0);
    lane.start(read(&file, u64::MAX, AlignedBuf::zeroed(4096).lend()), 1);
    let [short, nowhere] = ended(&mut lane, 2).try_into().map_err(|_| ()).expect("two");
    assert_eq!(short.result.expect_err("too long").kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(AlignedBuf::from_lent(short.buf)[..4096], [0; 4096]);
    assert_eq!(nowhere.result.expect_err("past all files").kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn a_transfer_that_arrives_in_parts_is_completed() {
    let (from, mut to) = io::pipe().expect("a pipe");
    let file = Arc::new(File::from(OwnedFd::from(from)));
    let mut lane = Lane::new(None).expect("a ring");
    // Not a multiple of a page: the transfer is resumed where it ended.
    lane.start(read(&file, 1, AlignedBuf::zeroed(8192).lend()), ());
    lane.poll();
    for part in 0..4_u8 {
        to.write_all(&[part; 2048]).expect("written");
        lane.wait();
    }
    let Completed { buf, result, .. } = lane.take_completed().expect("four parts are all of it");
    result.expect("read");
    let bytes = AlignedBuf::from_lent(buf);
    assert!((0..8192).all(|at| usize::from(bytes[at]) == at / 2048));
}

#[test]
fn a_transfer_of_a_blocking_file_is_made_when_it_is_taken_and_never_reaches_the_ring() {
    let file = pages(3);
    let mut lane = Lane::new(None).expect("a ring");
    for page in [2_u64, 0, 3] {
        let transfer = read(&file, page << 12, AlignedBuf::zeroed(4096).lend());
        lane.start(Transfer { is_in_memory: true, ..transfer }, page);
    }
    assert_eq!(lane.in_flight(OpKind::Read), (3, 3 << 12));
    assert_eq!(lane.ring.submission().len(), 0);
    for page in [2_u8, 0] {
        let Completed { buf, result, tag } = lane.take_completed().expect("three transfers");
        result.expect("read");
        assert_eq!(tag, u64::from(page));
        assert_eq!(*AlignedBuf::from_lent(buf), [page; 4096]);
    }
    let past_the_end = lane.take_completed().expect("three transfers").result.expect_err("no such page");
    assert_eq!(past_the_end.kind(), io::ErrorKind::UnexpectedEof);
    assert!(lane.in_flight(OpKind::Read) == (0, 0) && !lane.has_completed());
    lane.start(Transfer { is_in_memory: true, ..read(&file, 0, AlignedBuf::zeroed(4096).lend()) }, 9);
    let memory = Arc::new([0_u8; 4096]);
    // SAFETY: the array lives as long as its owner, and nothing reads it.
    let lent = unsafe { Lent::new(NonNull::from(&*memory).cast(), 4096, None, Arc::clone(&memory) as _) };
    lane.start(Transfer { is_in_memory: true, ..read(&file, 0, lent) }, 10);
    drop(lane);
    assert_eq!(Arc::strong_count(&memory), 1, "the lane dropped the memory");
}

#[test]
fn the_bell_ends_the_current_wait_or_the_next_one() {
    let mut lane = Lane::<()>::new(None).expect("a ring");
    let bell = lane.bell();
    bell.ring();
    lane.wait();
    let ringer = thread::spawn(move || bell.ring());
    lane.wait();
    ringer.join().expect("no panic");
}

#[test]
fn dropping_a_lane_waits_for_the_kernel() {
    let (from, mut to) = io::pipe().expect("a pipe");
    let file = Arc::new(File::from(OwnedFd::from(from)));
    let memory = Arc::new([0_u8; 4096]);
    let start = NonNull::new(memory.as_ptr().cast_mut()).expect("not null");
    // SAFETY: the array lives as long as its owner, and is read after the lane is gone.
    let lent = unsafe { Lent::new(start, 4096, None, Arc::clone(&memory) as _) };
    let mut lane = Lane::new(None).expect("a ring");
    lane.start(read(&file, 1, lent), ());
    lane.poll();
    assert_eq!(Arc::strong_count(&memory), 2, "the lane keeps the memory");
    let writer = thread::spawn(move || to.write_all(&[7; 4096]));
    drop(lane);
    assert_eq!(Arc::strong_count(&memory), 1, "the lane dropped the memory");
    assert_eq!(*memory, [7; 4096], "only after the kernel was done");
    writer.join().expect("no panic").expect("written");
}

#[test]
fn a_lane_that_the_kernel_refuses_for_good_is_given_up_with_the_memory_of_its_transfers() {
    let (from, _to) = io::pipe().expect("a pipe");
    let file = Arc::new(File::from(OwnedFd::from(from)));
    let memory = Arc::new([0_u8; 4096]);
    let start = NonNull::new(memory.as_ptr().cast_mut()).expect("not null");
    // SAFETY: the array lives as long as its owner, and nothing reads it.
    let lent = unsafe { Lent::new(start, 4096, None, Arc::clone(&memory) as _) };
    let mut lane = Lane::new(None).expect("a ring");
    lane.start(read(&file, 1, lent), ());
    lane.poll();
    let no_ring = File::open("/dev/null").expect("a file");
    // SAFETY: both descriptors are open. The ring stays as it is, by its mappings, and its descriptor names the file.
    let replaced = unsafe { libc::dup2(no_ring.as_raw_fd(), lane.ring.as_raw_fd()) };
    assert_eq!(replaced, lane.ring.as_raw_fd());
    drop(lane);
    assert_eq!(Arc::strong_count(&memory), 2, "the kernel never said that it was done");
}
