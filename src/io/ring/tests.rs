//! The ring of one I/O thread: its transfers, its wake-ups and its end.

use std::{fs::File, io::Write, os::fd::OwnedFd, ptr::NonNull, thread};

use super::*;
use crate::{
    block::FileId,
    io::transfer::{OpenFile, Transfer},
    memory::{AlignedBuf, Lent},
};

/// A file of `count` pages, each filled with its number.
fn pages(count: u8) -> Arc<File> {
    let mut file = tempfile::tempfile().expect("a file");
    (0..count).for_each(|page| file.write_all(&[page; 4096]).expect("written"));
    Arc::new(file)
}

fn read<T>(file: &Arc<File>, offset: u64, buf: Lent, tag: T) -> InFlight<T> {
    let file = OpenFile { file: Arc::clone(file), id: FileId(0), by_calls: false };
    InFlight::new(Transfer { kind: OpKind::Read, file, offset, buf }, tag)
}

/// Waits for `count` transfers, and returns them by tag.
fn ended<T: Ord + Copy>(ring: &mut Ring<T>, count: usize) -> Vec<Completed<T>> {
    let mut all = Vec::new();
    while all.len() < count {
        all.extend(std::iter::from_fn(|| ring.take_completed()));
        if all.len() < count {
            ring.wait();
        }
    }
    all.sort_by_key(|ended| ended.tag);
    all
}

#[test]
fn each_of_many_transfers_gets_its_own_bytes() {
    let file = pages(64);
    let mut ring = Ring::new(None).expect("a ring");
    for round in 0..2_u64 {
        for page in 0..TRANSFERS_MAX as u64 {
            ring.start(read(&file, (round * 32 + page) << 12, AlignedBuf::zeroed(4096).lend(), page));
        }
        ring.poll();
        for Completed { buf, result, tag } in ended(&mut ring, TRANSFERS_MAX) {
            result.expect("read");
            assert_eq!(*AlignedBuf::from_lent(buf), [(round * 32 + tag) as u8; 4096]);
        }
        assert_eq!(ring.in_flight(OpKind::Read), (0, 0));
    }
}

#[test]
fn the_end_of_the_file_is_an_error_that_gives_the_memory_back() {
    let file = pages(1);
    let mut ring = Ring::new(None).expect("a ring");
    ring.start(read(&file, 0, AlignedBuf::zeroed(8192).lend(), 0));
    let [short] = ended(&mut ring, 1).try_into().map_err(|_| ()).expect("one");
    assert_eq!(short.result.expect_err("too long").kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(AlignedBuf::from_lent(short.buf)[..4096], [0; 4096]);
}

#[test]
fn a_transfer_that_arrives_in_parts_is_completed() {
    let (from, mut to) = io::pipe().expect("a pipe");
    let file = Arc::new(File::from(OwnedFd::from(from)));
    let mut ring = Ring::new(None).expect("a ring");
    // Not a multiple of a page: the transfer is resumed where it ended.
    ring.start(read(&file, 1, AlignedBuf::zeroed(8192).lend(), ()));
    ring.poll();
    for part in 0..4_u8 {
        to.write_all(&[part; 2048]).expect("written");
        ring.wait();
    }
    let Completed { buf, result, .. } = ring.take_completed().expect("four parts are all of it");
    result.expect("read");
    let bytes = AlignedBuf::from_lent(buf);
    assert!((0..8192).all(|at| usize::from(bytes[at]) == at / 2048));
}

#[test]
fn a_wake_up_ends_the_current_wait_or_the_next_one() {
    let mut ring = Ring::<()>::new(None).expect("a ring");
    let wake_fd = ring.wake_fd();
    wake_fd.wake();
    ring.wait();
    let waker = thread::spawn(move || wake_fd.wake());
    ring.wait();
    waker.join().expect("no panic");
}

#[test]
fn dropping_a_ring_waits_for_the_kernel() {
    let (from, mut to) = io::pipe().expect("a pipe");
    let file = Arc::new(File::from(OwnedFd::from(from)));
    let memory = Arc::new([0_u8; 4096]);
    let start = NonNull::new(memory.as_ptr().cast_mut()).expect("not null");
    // SAFETY: the array lives as long as its owner, and is read after the ring is gone.
    let lent = unsafe { Lent::new(start, 4096, None, Arc::clone(&memory) as _) };
    let mut ring = Ring::new(None).expect("a ring");
    ring.start(read(&file, 1, lent, ()));
    ring.poll();
    assert_eq!(Arc::strong_count(&memory), 2, "the ring keeps the memory");
    let writer = thread::spawn(move || to.write_all(&[7; 4096]));
    drop(ring);
    assert_eq!(Arc::strong_count(&memory), 1, "the ring dropped the memory");
    assert_eq!(*memory, [7; 4096], "only after the kernel was done");
    writer.join().expect("no panic").expect("written");
}

#[test]
fn a_ring_that_the_kernel_refuses_for_good_is_given_up_with_the_memory_of_its_transfers() {
    let (from, _to) = io::pipe().expect("a pipe");
    let file = Arc::new(File::from(OwnedFd::from(from)));
    let memory = Arc::new([0_u8; 4096]);
    let start = NonNull::new(memory.as_ptr().cast_mut()).expect("not null");
    // SAFETY: the array lives as long as its owner, and nothing reads it.
    let lent = unsafe { Lent::new(start, 4096, None, Arc::clone(&memory) as _) };
    let mut ring = Ring::new(None).expect("a ring");
    ring.start(read(&file, 1, lent, ()));
    ring.poll();
    let no_ring = File::open("/dev/null").expect("a file");
    // SAFETY: both descriptors are open. The ring stays as it is, by its mappings, and its descriptor names the file.
    let replaced = unsafe { libc::dup2(no_ring.as_raw_fd(), ring.ring.as_raw_fd()) };
    assert_eq!(replaced, ring.ring.as_raw_fd());
    drop(ring);
    assert_eq!(Arc::strong_count(&memory), 2, "the kernel never said that it was done");
}
