// Over 400 lines: every case of one pool, over the same few helpers.

use std::{
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    ptr::NonNull,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    task::{Context, Waker},
};

use tokio::task::LocalSet;
use tracing::{Event, Metadata, Subscriber, span};

use super::*;
use crate::{
    block::{FileId, OpKind},
    checksum::checksum,
    io::transfer::OpenFile,
    memory::{AlignedBuf, GuardedMemory, IoBuf, Lent},
};

/// Runs a test inside a reactor.
fn on_reactor(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    LocalSet::new().block_on(&runtime, test);
}

fn start(plan: ThreadPlan) -> Rc<Workers> {
    Workers::start(plan, Arc::new(Count::unexported())).expect("threads")
}

fn workers(workers: u32) -> Rc<Workers> {
    start(ThreadPlan { workers, ..ThreadPlan::default() })
}

/// Workers of which the first `rings` transfer.
fn with_rings(workers: u32, rings: u32) -> Rc<Workers> {
    start(ThreadPlan { workers, rings, ..ThreadPlan::default() })
}

#[test]
fn work_runs_on_another_thread_and_its_result_comes_back() {
    on_reactor(async {
        let workers = workers(2);
        let there = workers.run(1, || thread::current().id()).await.expect("done");
        assert_ne!(thread::current().id(), there);
        assert_eq!(workers.done.get(), 1);
    });
}

#[test]
fn all_of_many_pieces_are_done_with_any_workers_asleep() {
    on_reactor(async {
        let workers = workers(3);
        for round in 0..200_u64 {
            let run = |n| {
                let workers = Rc::clone(&workers);
                tokio::task::spawn_local(async move { workers.run(n << 12, move || n).await })
            };
            let all: Vec<_> = (0..round % 40).map(run).collect();
            for (n, one) in (0..).zip(all) {
                assert_eq!(one.await.expect("no panic"), Some(n));
            }
        }
    });
}

#[test]
fn a_worker_that_is_asleep_is_woken_for_the_smallest_work() {
    on_reactor(async {
        let workers = workers(1);
        let Kind::Threads { pool, .. } = &workers.kind else { unreachable!("there is a thread") };
        while pool.asleep() == 0 {
            thread::yield_now();
        }
        assert_eq!(workers.run(0, || 7).await, Some(7));
    });
}

#[test]
fn without_workers_nothing_is_run() {
    on_reactor(async {
        let run = workers(0).run(1, || unreachable!("there is no worker")).await;
        assert_eq!(run, None::<()>);
    });
}

#[test]
fn work_that_panics_is_lost_with_what_it_owned_and_the_worker_goes_on() {
    on_reactor(async {
        let workers = workers(1);
        let owned = Arc::new(());
        let keep = Arc::clone(&owned);
        let panics = move || {
            let _keep = keep;
            std::panic::resume_unwind(Box::new("on purpose"))
        };
        assert_eq!(workers.run(1, panics).await, None::<()>);
        assert_eq!(Arc::strong_count(&owned), 1, "nothing of it runs any longer");
        assert_eq!(workers.run(1, || 7).await, Some(7));
        assert_eq!(workers.done.get(), 1);
    });
}

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
            assert!(workers.transfers());
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
            let Kind::Threads { pool, .. } = &workers.kind else { unreachable!("there is a thread") };
            pool.push_work(0, Box::new(|| std::panic::resume_unwind(Box::new("on purpose"))));
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

/// A log that cannot be written.
struct ClosedPipe;

impl Subscriber for ClosedPipe {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        std::panic::resume_unwind(Box::new("on purpose"));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_worker_that_dies_is_replaced_although_the_log_panics() {
    on_reactor(async {
        let workers = workers(1);
        let Kind::Threads { pool, .. } = &workers.kind else { unreachable!("there is a thread") };
        let dies = || -> Answer {
            std::mem::forget(tracing::subscriber::set_default(ClosedPipe));
            std::panic::resume_unwind(Box::new("on purpose"))
        };
        pool.push_work(0, Box::new(dies));
        let (tell, told) = mpsc::channel();
        pool.push_work(
            0,
            Box::new(move || {
                tell.send(()).expect("the test waits for it");
                Box::new(|| ())
            }),
        );
        // Waits for the thread, and with it for its queued work.
        drop(workers);
        told.try_recv().expect("the thread did the work that was queued behind");
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
        let answers = tokio::task::spawn_local(Arc::clone(&pool).take_answers()).abort_handle();
        let of_thread = Arc::clone(&pool);
        let thread = thread::spawn(move || {
            let ring = ring(None).expect("a ring");
            run(&of_thread, 0, ThreadDriver::with(ring), refused);
        });
        pool.push_work(0, Box::new(|| std::panic::resume_unwind(Box::new("on purpose"))));
        while !REFUSED.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let kind = Kind::Threads { pool, threads: vec![thread], answers, transfers: true };
        let done = Arc::new(Count::unexported());
        let workers = Workers { kind, busy: Cell::new(0), work_bytes_min: WORK_BYTES_MIN, done };
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

#[test]
fn a_worker_that_died_asleep_is_listed_once() {
    let pool = Pool::new(1, 1, WAKE_BYTES);
    for _ in 0..3 {
        let mut dies_asleep = ThreadDriver::that_sleeps(|| std::panic::resume_unwind(Box::new("on purpose")));
        assert!(catch_unwind(AssertUnwindSafe(|| pool.run(0, &mut dies_asleep))).is_err());
        assert_eq!(pool.asleep(), 1, "its successor would not be woken");
    }
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

#[test]
fn the_end_waits_for_writes_under_way() {
    on_reactor(async {
        let workers = with_rings(2, 2);
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        for n in 0..64 {
            let mut abandoned = std::pin::pin!(transfer(&workers, OpKind::Write, &file, n << 12, 7));
            assert!(abandoned.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        drop(workers);
        assert_eq!(Arc::strong_count(&file), 1, "no worker has it any longer");
        let mut bytes = vec![0; 64 << 12];
        file.read_exact_at(&mut bytes, 0).expect("all of it is there");
        assert!(bytes.iter().all(|&byte| byte == 7));
    });
}

#[test]
fn a_dropped_future_leaves_its_work_the_memory_and_the_end_waits_for_it() {
    on_reactor(async {
        let workers = workers(1);
        let (go, wait) = mpsc::channel::<()>();
        let memory = Arc::new([1_u8; 64]);
        let keep = Arc::clone(&memory);
        {
            let mut running = std::pin::pin!(workers.run(1, move || {
                // Blocks until the test releases it.
                let _ = wait.recv();
                keep.iter().map(|&byte| u32::from(byte)).sum::<u32>()
            }));
            assert!(running.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        assert_eq!(Arc::strong_count(&memory), 2, "the work still has it");
        drop(go);
        drop(workers);
        assert_eq!(Arc::strong_count(&memory), 1, "the work has ended");
    });
}

#[test]
fn workers_run_on_the_processors_near_the_drives_and_anywhere_if_none_of_them_is_allowed() {
    /// The processors that this thread may use.
    fn allowed() -> Vec<usize> {
        // SAFETY: a set of processors is plain data, and all zeros is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is writable and has this size; 0 is the calling thread.
        let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        // SAFETY: the number is below the size of the set.
        (0..libc::CPU_SETSIZE as usize).filter(|&processor| unsafe { libc::CPU_ISSET(processor, &set) }).collect()
    }
    on_reactor(async {
        let there = async |near: &[usize]| {
            let workers = start(ThreadPlan { workers: 1, near: near.to_vec(), ..ThreadPlan::default() });
            workers.run(1, allowed).await.expect("ran")
        };
        let all = allowed();
        assert_eq!(there(&[]).await, all);
        let nowhere = (0..libc::CPU_SETSIZE as usize).find(|processor| !all.contains(processor));
        assert_eq!(there(&[1 << 20, nowhere.expect("no machine has as many")]).await, all);
        assert_eq!(there(&[all[0], 1 << 20]).await, all[..1]);
    });
}

#[test]
fn a_block_of_memory_that_was_taken_away_is_not_written() {
    on_reactor(async {
        let workers = with_rings(1, 1);
        for is_taken in [false, true] {
            let (file, memory) = (Arc::new(tempfile::tempfile().expect("a file")), GuardedMemory::new());
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
        let workers = start(ThreadPlan { callers: 2, ..ThreadPlan::default() });
        assert!(workers.transfers() && !workers.take(1 << 30), "they are for the disk alone");
        let Kind::Threads { pool, .. } = &workers.kind else { unreachable!("there are threads") };
        while pool.asleep() < 2 {
            thread::yield_now();
        }
        let (go, wait) = mpsc::channel::<()>();
        pool.push_work(
            0,
            Box::new(move || {
                // Blocks until the test releases it.
                let _ = wait.recv();
                Box::new(|| ())
            }),
        );
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        for kind in [OpKind::Write, OpKind::Read] {
            transfer(&workers, kind, &file, 0, 7).await.expect("no worker died").expect("transferred");
        }
        drop(go);
    });
}

/// An owner of memory that panics when it is dropped.
struct Panics([u8; 4096]);

impl Drop for Panics {
    fn drop(&mut self) {
        std::panic::resume_unwind(Box::new("on purpose"));
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
