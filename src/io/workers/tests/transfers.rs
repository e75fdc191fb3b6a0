//! Reads and writes that workers make.

use std::{
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    ptr::NonNull,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

#[path = "../../../../base/src/memory/guarded.rs"]
mod guarded;

use super::*;
use crate::{
    block::{FileId, OpKind},
    checksum::checksum,
    io::{transfer::OpenFile, waiter::TransferHandler},
    memory::{AlignedBuf, IoBuf, Lent},
};

/// Reads and writes 4 KiB of a file through workers.
async fn transfer(workers: &Workers, kind: OpKind, file: &Arc<File>, offset: u64, fill: u8) -> Option<Transferred> {
    let mut buf = AlignedBuf::zeroed(4096);
    buf.fill(fill);
    let file = OpenFile { file: Arc::clone(file), id: FileId(0), by_calls: false };
    let transfer = Transfer { kind, file, offset, buf: buf.lend() };
    workers.transfer(Urgency::Awaited, transfer, 4096).await
}

#[test]
fn a_worker_that_dies_loses_what_it_transfers_and_another_takes_its_place() {
    on_reactor(async {
        for kind in [OpKind::Read, OpKind::Write] {
            let workers = with_rings(1, 1);
            assert!(workers.pool().is_some());
            let (from, mut to) = io::pipe().expect("a pipe");
            let (mut from, stuck) = match kind {
                OpKind::Read => (None, OwnedFd::from(from)),
                _ => {
                    fill_pipe(&mut to);
                    (Some(from), OwnedFd::from(to.try_clone().expect("a descriptor")))
                }
            };
            let stuck = Arc::new(File::from(stuck));
            let mut lost = std::pin::pin!(transfer(&workers, kind, &stuck, 1, 7));
            assert!(lost.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            pool(&workers).push_work(0, Box::new(|| panics()));
            // The kernel owns the memory until then.
            drop((to, from.take()));
            assert!(lost.await.is_none_or(|transferred| transferred.is_err()), "{kind:?}");

            let mut file = tempfile::tempfile().expect("a file");
            io::Write::write_all(&mut file, &[7; 8192]).expect("written");
            let file = Arc::new(file);
            let transferred = transfer(&workers, kind, &file, 4096, 7).await.expect("there is a worker");
            assert_eq!(transferred.expect("transferred"), Some(checksum(&[7; 4096])), "{kind:?}");
        }
    });
}

#[test]
fn a_worker_that_gets_no_ring_again_transfers_by_system_calls() {
    static REFUSED: AtomicBool = AtomicBool::new(false);
    fn refused() -> Option<Ring<Waiter>> {
        REFUSED.store(true, Ordering::Release);
        None
    }
    on_reactor(async {
        let pool = Arc::new(Pool::new(1, 1, WAKE_BYTES));
        let of_thread = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            let ring = ring(None).expect("a ring");
            run(&of_thread, 0, ThreadDriver::with(ring), refused);
        });
        pool.push_work(0, Box::new(|| panics()));
        while !REFUSED.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let mut workers = Workers::with(Some(pool), WORK_BYTES_MIN, Arc::new(Count::unexported()));
        (workers.threads, workers.transfers) = (vec![thread], true);
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        for kind in [OpKind::Write, OpKind::Read] {
            let all = (0..8).map(|n| transfer(&workers, kind, &file, n << 12, 7));
            for transferred in futures_util::future::join_all(all).await {
                let sum = transferred.expect("no worker died").expect("transferred");
                assert_eq!(sum, Some(checksum(&[7; 4096])), "{kind:?}");
            }
        }
    });
}

/// Fills a pipe, so that the next write to it waits for its reader.
fn fill_pipe(to: &mut io::PipeWriter) {
    // SAFETY: takes no pointers; the descriptor is open.
    let bytes = unsafe { libc::fcntl(to.as_raw_fd(), libc::F_GETPIPE_SZ) };
    io::Write::write_all(to, &vec![0; usize::try_from(bytes).expect("a size")]).expect("it fits");
}

#[test]
fn blocks_are_written_with_the_checksum_of_what_was_written() {
    on_reactor(async {
        let workers = with_rings(3, 2);
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        for round in 0..8_u8 {
            let one = |n: u8| {
                let (workers, file) = (Rc::clone(&workers), Arc::clone(&file));
                let (offset, fill) = (u64::from(n) * 4096, n.wrapping_mul(7).wrapping_add(round));
                tokio::task::spawn_local(async move {
                    let transferred = transfer(&workers, OpKind::Write, &file, offset, fill).await;
                    let sum = transferred.expect("there is a worker").expect("written");
                    assert_eq!(sum, Some(checksum(&[fill; 4096])));
                })
            };
            let all: Vec<_> = (0..64).map(one).collect();
            for one in all {
                one.await.expect("no panic");
            }
            for n in 0..64_u8 {
                let mut block = [0; 4096];
                file.read_exact_at(&mut block, u64::from(n) * 4096).expect("read");
                assert_eq!(block, [n.wrapping_mul(7).wrapping_add(round); 4096], "block {n}");
            }
        }
    });
}

/// Says what the file has when its block is checksummed, and the end.
struct Watching(Arc<File>, mpsc::Sender<(&'static str, u8, u64)>);

impl Watching {
    fn tell(&self, event: &'static str, sum: u64) {
        let mut byte = [0];
        self.0.read_exact_at(&mut byte, 0).expect("it has a byte");
        self.1.send((event, byte[0], sum)).expect("the test waits");
    }
}

impl TransferHandler for Watching {
    fn summed(&mut self, sum: u64) {
        self.tell("summed", sum);
    }

    fn ended(self: Box<Self>, result: Option<Transferred>) {
        let sum = result.expect("it is not lost").expect("written");
        self.tell("ended", sum.expect("it was asked for"));
    }
}

#[test]
fn a_handler_hears_of_the_checksum_before_the_block_is_written() {
    on_reactor(async {
        let workers = with_rings(1, 1);
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&[1; 4096], 0).expect("written");
        let file = Arc::new(file);
        let (events, heard) = mpsc::channel();
        let mut buf = AlignedBuf::zeroed(4096);
        buf.fill(7);
        let open = OpenFile { file: Arc::clone(&file), id: FileId(0), by_calls: false };
        let transfer = Transfer { kind: OpKind::Write, file: open, offset: 0, buf: buf.lend() };
        let waiter = Waiter::calling(4096, Watching(file, events));
        pool(&workers).push_transfer(Urgency::Awaited, transfer, waiter).wake();
        let sum = checksum(&[7; 4096]);
        assert!(heard.iter().eq([("summed", 1, sum), ("ended", 7, sum)]));
    });
}

#[test]
fn the_end_waits_for_writes_under_way() {
    on_reactor(async {
        let workers = with_rings(2, 2);
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        for n in 0..64 {
            let abandoned = std::pin::pin!(transfer(&workers, OpKind::Write, &file, n << 12, 7));
            // Some of them may have ended already.
            drop(abandoned.poll(&mut Context::from_waker(Waker::noop())));
        }
        drop(workers);
        assert_eq!(Arc::strong_count(&file), 1, "no worker has it any longer");
        let mut bytes = vec![0; 64 << 12];
        file.read_exact_at(&mut bytes, 0).expect("all of it is there");
        assert!(bytes.iter().all(|&byte| byte == 7));
    });
}

#[test]
fn a_block_of_memory_that_was_taken_away_is_not_written() {
    on_reactor(async {
        let workers = with_rings(1, 1);
        for is_taken in [false, true] {
            let (file, memory) = (Arc::new(tempfile::tempfile().expect("a file")), guarded::Memory::new());
            // SAFETY: the memory stays mapped, and nobody writes to it.
            let buf = unsafe { IoBuf::new(NonNull::new(memory.page(0)).expect("mapped"), 4096, None, ()) };
            let buf = buf.guarded(Some(memory.guard.clone()));
            // SAFETY: the only one.
            let lent = unsafe { buf.lend() };
            if is_taken {
                // Seen by the checksum, not before.
                memory.file.set_len(0).expect("it takes no seal");
            }
            let of_disk = OpenFile { file: Arc::clone(&file), id: FileId(0), by_calls: false };
            let transfer = Transfer { kind: OpKind::Write, file: of_disk, offset: 0, buf: lent };
            let ended = workers.transfer(Urgency::Awaited, transfer, 4096).await.expect("a worker");
            let fault = ended.err().and_then(|error| error.raw_os_error());
            assert_eq!(fault, is_taken.then_some(libc::EFAULT), "no fault of the disk");
            assert_eq!(file.metadata().expect("open").len(), if is_taken { 0 } else { 4096 });
        }
    });
}

#[test]
fn a_thread_that_blocks_holds_up_no_transfer_by_system_calls() {
    on_reactor(async {
        let workers = start(ThreadPlan { callers: 3, ..ThreadPlan::default() });
        assert!(workers.pool().is_some() && !workers.take(1 << 30), "they are for the disk alone");
        falls_asleep(&workers, 3);
        let (go, wait) = mpsc::channel::<()>();
        // Blocks until the test releases it.
        queue(&workers, move || _ = wait.recv());
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        for kind in [OpKind::Write, OpKind::Read] {
            transfer(&workers, kind, &file, 0, 7).await.expect("no worker died").expect("transferred");
        }
        drop(go);
    });
}

/// A write that hangs until its sender is dropped; for so long that the test has failed, it notes.
struct Hangs(mpsc::Receiver<()>, Arc<AtomicBool>);

impl TransferHandler for Hangs {
    fn summed(&mut self, _sum: u64) {
        let is_over = self.0.recv_timeout(Duration::from_secs(10)) == Err(mpsc::RecvTimeoutError::Timeout);
        self.1.fetch_or(is_over, Ordering::AcqRel);
    }

    fn ended(self: Box<Self>, _result: Option<Transferred>) {}
}

#[test]
fn writes_that_hang_leave_threads_to_reads_by_system_calls() {
    on_reactor(async {
        for callers in [2, 4, 16] {
            let workers = start(ThreadPlan { callers, ..ThreadPlan::default() });
            let file = Arc::new(tempfile::tempfile().expect("a file"));
            transfer(&workers, OpKind::Write, &file, 0, 7).await.expect("no worker died").expect("written");
            let is_over = Arc::new(AtomicBool::new(false));
            let hangs = |_| {
                let is_over = Arc::clone(&is_over);
                let (go, wait) = mpsc::channel();
                let of_disk = OpenFile { file: Arc::clone(&file), id: FileId(0), by_calls: true };
                let buf = AlignedBuf::zeroed(4096).lend();
                let write = Transfer { kind: OpKind::Write, file: of_disk, offset: 4096, buf };
                pool(&workers)
                    .push_transfer(Urgency::Awaited, write, Waiter::calling(4096, Hangs(wait, is_over)))
                    .wake();
                go
            };
            let hanging: Vec<mpsc::Sender<()>> = (0..2 * callers).map(hangs).collect();
            // Time for all threads to take one.
            thread::sleep(Duration::from_millis(50));
            let read = transfer(&workers, OpKind::Read, &file, 0, 0).await.expect("no worker died").expect("read");
            assert_eq!(read, Some(checksum(&[7; 4096])), "of {callers} threads");
            assert!(!is_over.load(Ordering::Acquire), "a read waited for writes, with {callers} threads");
            drop(hanging);
        }
    });
}

/// An owner of memory that panics when it is dropped.
struct Panics([u8; 4096]);

impl Drop for Panics {
    fn drop(&mut self) {
        panics();
    }
}

#[test]
fn an_owner_that_panics_affects_no_transfer() {
    on_reactor(async {
        let workers = start(ThreadPlan { callers: 1, ..ThreadPlan::default() });
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        let owner = Arc::new(Panics([7; 4096]));
        let start = NonNull::from(&owner.0).cast();
        // SAFETY: the array lives as long as its owner, and nothing writes to it.
        let buf = unsafe { Lent::new(start, 4096, None, owner) };
        let of_disk = OpenFile { file: Arc::clone(&file), id: FileId(0), by_calls: true };
        let abandoned = Transfer { kind: OpKind::Write, file: of_disk, offset: 0, buf };
        let written = workers.transfer(Urgency::Awaited, abandoned, 0).await;
        written.expect("the thread has not died").expect("written");
        transfer(&workers, OpKind::Read, &file, 0, 0).await.expect("no worker died").expect("read");
    });
}
