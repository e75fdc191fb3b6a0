//! The hand-over between the reactor and its workers, under a model checker that chooses every interleaving.
//!
//! What runs is the queue and the loop of a worker. Only the ring is the model's: its transfers complete at any time,
//! in any order. A lost wake-up is a deadlock to the checker.

use std::{collections::VecDeque, fs::File, sync::Arc};

use tokio::sync::oneshot;

use super::{
    driver::{Driver, Wake},
    pool::Pool,
    transfer::{Completed, OpenFile, Transfer},
    waiter::Waiter,
};
use crate::{
    block::{FileId, OpKind},
    checksum::checksum,
    memory::AlignedBuf,
    urgency::Urgency,
};

/// Whether a worker has been woken.
type Woken = Arc<(shuttle::sync::Mutex<bool>, shuttle::sync::Condvar)>;

/// A file of a model: nothing but memory.
pub(crate) type Bytes = Arc<std::sync::Mutex<Vec<u8>>>;

/// A ring whose transfers complete while its worker sleeps, or when the checker likes.
struct Modelled {
    woken: Woken,
    /// Reads that it takes at once, and writes.
    transfers_max: usize,
    /// What it reads and writes, if its transfers are to move bytes.
    bytes: Option<Bytes>,
    in_flight: Vec<(OpKind, Completed<Waiter>)>,
    completed: VecDeque<Completed<Waiter>>,
}

/// Runs the only I/O thread of a pool, over a file of a model. It dies now and then, as by a panic, and another takes
/// its place; what it had in flight is dropped then.
#[cfg(feature = "sim")]
pub(crate) fn run_io_thread(pool: &Pool, bytes: &Bytes) {
    use super::pool::Step;

    loop {
        let mut driver = Modelled { bytes: Some(Arc::clone(bytes)), ..Modelled::new(2) };
        pool.awake(0);
        let mut unsubmitted = false;
        while below(16) > 0 {
            match pool.step(0, &mut driver, &mut unsubmitted) {
                Step::Next => shuttle::thread::yield_now(),
                Step::Sleep => {
                    driver.sleep();
                    unsubmitted = false;
                    pool.awake(0);
                }
                Step::End => return,
            }
        }
    }
}

impl Modelled {
    fn new(transfers_max: usize) -> Self {
        let (in_flight, completed) = (Vec::new(), VecDeque::new());
        Modelled { woken: Arc::default(), transfers_max, bytes: None, in_flight, completed }
    }

    /// Moves the bytes of a transfer.
    fn make(&self, Transfer { kind, offset, buf, .. }: &Transfer) {
        let Some(bytes) = &self.bytes else { return };
        let mut bytes = bytes.lock().expect("nothing panics under it");
        let in_file = &mut bytes[*offset as usize..][..buf.len()];
        // SAFETY: by the contract of `Lent` the range is mapped, and the transfer's alone to write.
        let in_memory = unsafe { std::slice::from_raw_parts_mut(buf.as_ptr(), buf.len()) };
        match kind {
            OpKind::Read => in_memory.copy_from_slice(in_file),
            OpKind::Write => in_file.copy_from_slice(in_memory),
            OpKind::Sync => {}
        }
    }

    fn complete_one(&mut self) {
        if !self.in_flight.is_empty() {
            let at = below(self.in_flight.len());
            self.completed.push_back(self.in_flight.swap_remove(at).1);
        }
    }
}

impl Driver for Modelled {
    fn room(&self, kind: OpKind) -> usize {
        self.transfers_max - Driver::in_flight(self, kind)
    }

    fn in_flight(&self, kind: OpKind) -> usize {
        self.in_flight.iter().filter(|(other, _)| *other == kind).count()
    }

    fn start(&mut self, transfer: Transfer, tag: Waiter) {
        self.make(&transfer);
        self.in_flight.push((transfer.kind, Completed { buf: transfer.buf, result: Ok(()), tag }));
    }

    fn poll(&mut self) {
        if below(2) == 0 {
            self.complete_one();
        }
    }

    fn has_completed(&self) -> bool {
        !self.completed.is_empty()
    }

    fn take_completed(&mut self) -> Option<Completed<Waiter>> {
        self.completed.pop_front()
    }

    fn wake(&self) -> Wake {
        let woken = Arc::clone(&self.woken);
        Wake::by(move || {
            *woken.0.lock().expect("nothing panics under it") = true;
            woken.1.notify_one();
        })
    }

    fn sleep(&mut self) {
        if !self.in_flight.is_empty() {
            shuttle::thread::yield_now();
            return self.complete_one();
        }
        let mut woken = self.woken.0.lock().expect("nothing panics under it");
        while !*woken {
            woken = self.woken.1.wait(woken).expect("nothing panics under it");
        }
        *woken = false;
    }
}

fn below(limit: usize) -> usize {
    use shuttle::rand::Rng;
    shuttle::rand::thread_rng().gen_range(0..limit)
}

/// Workers over modelled rings that take so many transfers at once, and the reactor's side of `blocks` transfers, some
/// with work between them.
fn hand_over<const N: usize>(transfers_max: [usize; N], blocks: u8) {
    let rings = transfers_max.iter().rposition(|&max| max > 0).map_or(0, |last| last + 1);
    let pool = Arc::new(Pool::new(N as u32, rings as u32, super::pool::WAKE_BYTES));
    let threads: Vec<_> = (0..)
        .zip(transfers_max)
        .map(|(worker, transfers_max)| {
            let pool = Arc::clone(&pool);
            shuttle::thread::spawn(move || pool.run(worker, &mut Modelled::new(transfers_max)))
        })
        .collect();
    let reactor = {
        let pool = Arc::clone(&pool);
        shuttle::thread::spawn(move || shuttle::future::block_on(transfers(&pool, blocks)))
    };
    reactor.join().expect("no panic");
    pool.close();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
}

async fn transfers(pool: &Arc<Pool>, blocks: u8) {
    let file = Arc::new(File::open("/dev/null").expect("a file"));
    let mut answered = Vec::new();
    for n in 0..blocks {
        let mut buf = AlignedBuf::zeroed(4096);
        buf.fill(n);
        let kind = if n % 2 == 0 { OpKind::Read } else { OpKind::Write };
        let file = OpenFile { file: Arc::clone(&file), id: FileId(0), by_calls: false };
        let transfer = Transfer { kind, file, offset: 0, buf: buf.lend() };
        let (waiter, transferred) = Waiter::new(4096);
        // Some are raised while they wait.
        let urgency = if n % 3 == 0 { Urgency::Awaited } else { Urgency::Background(u64::from(n)) };
        pool.push_transfer(urgency, transfer, waiter).wake();
        pool.raise(&[u64::from(n / 2)], n == 5);
        let (answer, worked) = oneshot::channel();
        pool.push_work(0, Box::new(move || answer.send(n).expect("it is awaited")));
        answered.push((n, transferred, worked));
    }
    for (n, transferred, worked) in answered {
        let transferred = transferred.await.expect("no worker died");
        assert_eq!(transferred.expect("transferred"), Some(checksum(&[n; 4096])));
        assert_eq!(worked.await, Ok(n));
    }
}

/// Checks a model under a random scheduler, and under one that prefers long runs of a thread.
fn check(model: fn()) {
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 20;
    shuttle::Runner::new(shuttle::scheduler::RandomScheduler::new(1500), config.clone()).run(model);
    shuttle::Runner::new(shuttle::scheduler::PctScheduler::new(3, 500), config).run(model);
}

#[test]
fn every_transfer_is_answered_however_workers_fall_asleep() {
    check(|| hand_over([2, 2], 3));
}

#[test]
fn a_transfer_waits_for_no_worker_without_room() {
    check(|| hand_over([2, 0], 3));
    check(|| hand_over([1, 1, 0], 2));
    check(|| hand_over([0, 1, 0], 2));
}

#[test]
fn a_close_ends_workers_wherever_they_are() {
    check(|| hand_over([2, 2, 2], 1));
}
