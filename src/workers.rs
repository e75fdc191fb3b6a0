//! Worker threads: reads of the disk tier, checksums, and copies of host memory.
//!
//! Checksums and copies run at a few GB/s a core, and an operation of the reactor's ring costs it some microseconds. On
//! the reactor they would bound the whole cache by one core, however many drives there are, so a movement hands them
//! to a worker. A worker that reads has a ring of its own ([`Lane`]), takes the checksum right after, while the block
//! is in its processor's cache, and hands over both. Handing over costs two wake-ups, 20 to 400 us on virtual machines:
//! a block that is alone stays on the reactor, and so does every block where there are no workers.

use std::{
    cell::Cell,
    collections::VecDeque,
    fs::File,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard, mpsc},
    thread::{self, JoinHandle, Thread},
};

use tokio::{
    sync::{Notify, oneshot},
    task::AbortHandle,
};

use crate::{
    block::{FileId, OpKind},
    checksum::checksum,
    io::uring::{Bell, Ended, Lane, TRANSFERS_MAX, Transfer},
    memory::Lent,
    metrics::Count,
};

/// Handing over less costs more than it saves: this is about 8 us of work.
const WORK_BYTES_MIN: u64 = 64 << 10;

/// Queued bytes for each awake worker past which another one is woken: about 30 us of work. Waking a thread costs the
/// reactor some microseconds, so blocks that are small wait for a worker that is awake already.
const WAKE_BYTES: u64 = 256 << 10;

/// Bytes that a worker has the drives read at once, two blocks at least: what a few drives need to be busy, and little
/// enough to be in the processor's cache when it is summed up.
const READING_BYTES_MAX: usize = 16 << 20;

/// A piece of work. It returns what the reactor is to do when it has ended.
type Work = Box<dyn FnOnce() -> Answer + Send>;

/// Sends a result on the reactor.
type Answer = Box<dyn FnOnce() + Send>;

/// A block that a worker has read.
pub(crate) struct Summed {
    pub(crate) buf: Lent,
    /// The checksum of as many bytes as were asked for.
    pub(crate) result: io::Result<u64>,
}

/// Who wants a block that is being read, and how many of its bytes the checksum is of.
struct Reader {
    sum_bytes: usize,
    answer: oneshot::Sender<Summed>,
}

/// The reactor's side of the workers. Idle workers sleep; the threads end with it, after what is queued.
pub(crate) struct Workers {
    kind: Kind,
    /// Pieces of work under way, on workers and on the reactor.
    busy: Cell<u32>,
    /// Pieces of work that workers have done.
    done: Arc<Count>,
}

enum Kind {
    /// All work is done on the reactor.
    None,
    Threads {
        pool: Arc<Pool>,
        threads: Vec<JoinHandle<()>>,
        /// The reactor's task that takes the answers.
        answers: AbortHandle,
        /// Some of them have a ring.
        read: bool,
    },
    /// Work takes the virtual time that this draws, so that its order is the seed's; without a time it is lost, as by
    /// a panic.
    #[cfg(feature = "sim")]
    Simulated(Box<dyn Fn() -> Option<std::time::Duration>>),
}

/// What the reactor and the threads share.
struct Pool {
    queue: Mutex<Queue>,
    /// Answers that the reactor has not taken yet.
    answers: Mutex<Vec<Answer>>,
    /// Wakes the reactor for the first of them: it takes all that there are by then.
    answered: Notify,
}

struct Queue {
    work: VecDeque<(u64, Work)>,
    reads: VecDeque<(Transfer, Reader)>,
    /// Bytes of all that is queued.
    bytes: u64,
    threads: u32,
    /// Workers that sleep, the last to fall asleep last, and have not been woken.
    asleep: Vec<Sleeper>,
    /// No more work will come.
    closed: bool,
}

/// A worker that sleeps.
struct Sleeper {
    thread: Thread,
    /// It sleeps in its ring.
    bell: Option<Bell>,
    /// It could start another read.
    has_room: bool,
}

impl Sleeper {
    fn wake(&self) {
        match &self.bell {
            Some(bell) => bell.ring(),
            None => self.thread.unpark(),
        }
    }
}

/// What a worker has taken from the queue.
#[derive(Default)]
struct Taken {
    reads: Vec<(Transfer, Reader)>,
    work: Option<Work>,
}

impl Queue {
    /// Takes reads, up to the worker's room and to its part of what is queued, and a piece of work if that is wanted.
    fn take(&mut self, room: usize, wants_work: bool) -> Taken {
        let part = self.reads.len().div_ceil(self.threads as usize);
        let reads: Vec<_> = self.reads.drain(..part.min(room)).collect();
        self.bytes -= reads.iter().map(|(read, _)| read.buf.len() as u64).sum::<u64>();
        let work = if wants_work && reads.is_empty() { self.work.pop_front() } else { None };
        let work = work.map(|(bytes, work)| {
            self.bytes -= bytes;
            work
        });
        Taken { reads, work }
    }

    /// The worker to be woken, if those awake have enough to do.
    fn sleeper(&mut self, for_read: bool) -> Option<Sleeper> {
        let awake = u64::from(self.threads) - self.asleep.len() as u64;
        if awake > 0 && self.bytes <= WAKE_BYTES * awake {
            return None;
        }
        let at = self.asleep.iter().rposition(|sleeper| sleeper.has_room || !for_read)?;
        Some(self.asleep.remove(at))
    }
}

impl Pool {
    fn new(threads: u32) -> Self {
        let (work, reads, asleep) = Default::default();
        let queue = Mutex::new(Queue { work, reads, bytes: 0, threads, asleep, closed: false });
        Pool { queue, answers: Mutex::default(), answered: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics under it")
    }

    fn push_work(&self, bytes: u64, work: Work) {
        let mut queue = self.lock();
        queue.work.push_back((bytes, work));
        queue.bytes += bytes;
        let sleeper = queue.sleeper(false);
        drop(queue);
        sleeper.iter().for_each(Sleeper::wake);
    }

    fn push_read(&self, read: Transfer, reader: Reader) {
        let mut queue = self.lock();
        queue.bytes += read.buf.len() as u64;
        queue.reads.push_back((read, reader));
        let sleeper = queue.sleeper(true);
        drop(queue);
        sleeper.iter().for_each(Sleeper::wake);
    }

    /// The life of a worker. Without a lane it leaves the reads to the others.
    fn run(&self, mut lane: Option<Lane<Reader>>) {
        loop {
            let (has_ended, room) = lane.as_ref().map_or((false, 0), |lane| (lane.has_ended(), room(lane)));
            let Taken { reads, work } = self.lock().take(room, !has_ended);
            // What was read is summed up when the drives have something to do again.
            if let Some(lane) = &mut lane
                && !reads.is_empty()
            {
                reads.into_iter().for_each(|(read, reader)| lane.start(read, reader));
                lane.poll();
            }
            if let Some(ended) = lane.as_mut().and_then(Lane::take_ended) {
                self.answer(sum_up(ended));
            } else if let Some(work) = work {
                self.answer(work());
            } else if !self.sleep(&mut lane) {
                return;
            }
        }
    }

    /// Sleeps until there is something to do; false where there will be nothing any more.
    fn sleep(&self, lane: &mut Option<Lane<Reader>>) -> bool {
        let (reading, room) = lane.as_ref().map_or((0, 0), |lane| (lane.under_way().0, room(lane)));
        let thread = thread::current();
        {
            let mut queue = self.lock();
            if !queue.work.is_empty() || (room > 0 && !queue.reads.is_empty()) {
                return true;
            }
            if queue.closed && reading == 0 {
                return false;
            }
            let bell = lane.as_ref().map(Lane::bell);
            queue.asleep.push(Sleeper { thread: thread.clone(), bell, has_room: room > 0 });
        }
        match lane {
            Some(lane) => lane.wait(),
            None => thread::park(),
        }
        // Whoever woke it has taken it off the list; the end of a read has not.
        self.lock().asleep.retain(|sleeper| sleeper.thread.id() != thread.id());
        true
    }

    fn answer(&self, answer: Answer) {
        let mut answers = self.answers.lock().expect("nothing panics under it");
        answers.push(answer);
        let is_first = answers.len() == 1;
        drop(answers);
        if is_first {
            self.answered.notify_one();
        }
    }

    /// Takes the answers, on the reactor.
    async fn take_answers(self: Arc<Self>) {
        loop {
            self.answered.notified().await;
            let answers = std::mem::take(&mut *self.answers.lock().expect("nothing panics under it"));
            answers.into_iter().for_each(|answer| answer());
        }
    }

    /// No more work will come: workers end when they have done what is queued.
    fn close(&self) {
        let asleep = {
            let mut queue = self.lock();
            queue.closed = true;
            std::mem::take(&mut queue.asleep)
        };
        asleep.iter().for_each(Sleeper::wake);
    }
}

/// A ring for this thread, if the kernel gives one.
fn lane() -> Option<Lane<Reader>> {
    let refused = |error: &io::Error| tracing::warn!(%error, "a worker has no ring, and does not read");
    Lane::new().inspect_err(refused).ok()
}

/// How many more reads a lane takes.
fn room(lane: &Lane<Reader>) -> usize {
    let (reads, bytes) = lane.under_way();
    let more = if reads < 2 { 2 - reads } else { READING_BYTES_MAX.saturating_sub(bytes) * reads / bytes.max(1) };
    more.min(TRANSFERS_MAX - reads)
}

/// Takes the checksum of what was read; the answer sends both.
fn sum_up(ended: Ended<Reader>) -> Answer {
    let Ended { buf, result, tag: Reader { sum_bytes, answer } } = ended;
    let result = result.map(|()| {
        // SAFETY: the kernel has filled the range, which is ours until the buffer is dropped.
        checksum(unsafe { std::slice::from_raw_parts(buf.as_ptr().cast_const(), sum_bytes.min(buf.len())) })
    });
    let summed = Summed { buf, result };
    // A movement that is gone does not want it.
    Box::new(move || drop(answer.send(summed)))
}

impl Workers {
    /// No workers: all work is done on the reactor.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn none() -> Rc<Self> {
        Rc::new(Workers { kind: Kind::None, busy: Cell::new(0), done: Arc::new(Count::unexported()) })
    }

    /// Starts `count` threads, each with a ring of its own where `rings` says so and the kernel gives it. `done` counts
    /// what they do. Call on the reactor.
    ///
    /// # Errors
    /// What the system said, where it gives no more threads.
    pub(crate) fn start(count: u32, rings: bool, done: Arc<Count>) -> io::Result<Rc<Self>> {
        let mut workers = Workers { kind: Kind::None, busy: Cell::new(0), done };
        if count == 0 {
            return Ok(Rc::new(workers));
        }
        let pool = Arc::new(Pool::new(count));
        let answers = tokio::task::spawn_local(Arc::clone(&pool).take_answers()).abort_handle();
        // Before the threads: those that were started end with it where the system gives no more.
        workers.kind = Kind::Threads { pool: Arc::clone(&pool), threads: Vec::new(), answers, read: false };
        let (tell, told) = mpsc::channel();
        for n in 0..count {
            let (pool, tell) = (Arc::clone(&pool), tell.clone());
            let run = move || {
                let mut lane = if rings { lane() } else { None };
                // Whoever started it waits until all have said so.
                let _ = tell.send(lane.is_some());
                drop(tell);
                // What it had in hand is lost when the kernel is done with it, and its waiters get to know.
                while catch_unwind(AssertUnwindSafe(|| pool.run(lane.take()))).is_err() {
                    tracing::error!("a worker thread panicked, and starts anew");
                    lane = if rings { self::lane() } else { None };
                }
            };
            let thread = thread::Builder::new().name(format!("kvhoist-work-{n}")).spawn(run)?;
            if let Kind::Threads { threads, .. } = &mut workers.kind {
                threads.push(thread);
            }
        }
        drop(tell);
        if let Kind::Threads { read, .. } = &mut workers.kind {
            *read = told.iter().fold(false, |any, has_lane| any | has_lane);
        }
        Ok(Rc::new(workers))
    }

    /// Work takes the virtual time that `draw` gives, and is lost where that gives none.
    #[cfg(feature = "sim")]
    pub(crate) fn simulated(done: Arc<Count>, draw: impl Fn() -> Option<std::time::Duration> + 'static) -> Rc<Self> {
        Rc::new(Workers { kind: Kind::Simulated(Box::new(draw)), busy: Cell::new(0), done })
    }

    /// Counts a piece of work as under way until the guard is dropped.
    pub(crate) fn enter(self: &Rc<Self>) -> Busy {
        self.busy.set(self.busy.get() + 1);
        Busy(Rc::clone(self))
    }

    /// True where work is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.get() > 0
    }

    /// True where there are workers, and work on so many bytes is worth handing over to them.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        match &self.kind {
            Kind::None => false,
            Kind::Threads { .. } => bytes >= WORK_BYTES_MIN,
            #[cfg(feature = "sim")]
            Kind::Simulated(_) => bytes > 0,
        }
    }

    /// Runs `work` on so many bytes on a worker. `None` where there is none, and where it panicked: `work` is gone
    /// then, with what it owned, and nothing of it runs any longer.
    ///
    /// Dropping the future does not stop the work: `work` owns what it touches.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: u64,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        match &self.kind {
            Kind::None => None,
            Kind::Threads { pool, .. } => {
                let (answer, answered) = oneshot::channel();
                let done = Arc::clone(&self.done);
                let work = move || -> Answer {
                    let result = catch_unwind(AssertUnwindSafe(work)).ok();
                    done.add(u64::from(result.is_some()));
                    // A movement that is gone does not want it.
                    Box::new(move || drop(answer.send(result)))
                };
                pool.push_work(bytes, Box::new(work));
                answered.await.ok().flatten()
            }
            #[cfg(feature = "sim")]
            Kind::Simulated(draw) => {
                tokio::time::sleep(draw()?).await;
                self.done.add(1);
                Some(work())
            }
        }
    }
}

impl Workers {
    /// True where workers read.
    pub(crate) fn read(&self) -> bool {
        matches!(self.kind, Kind::Threads { read: true, .. })
    }

    /// True where a simulated worker dies while it reads.
    #[cfg(feature = "sim")]
    pub(crate) fn loses_read(&self) -> bool {
        matches!(&self.kind, Kind::Simulated(draw) if draw().is_none())
    }

    /// Reads all of `buf` on a worker, which then takes the checksum of its first `sum_bytes` bytes. `None` where no
    /// worker reads, and where it was lost with its worker: the kernel is done with the memory, which is given back.
    ///
    /// Dropping the future does not stop the read, which keeps its memory.
    pub(crate) async fn read_and_sum(
        &self,
        file: Arc<File>,
        id: FileId,
        offset: u64,
        buf: Lent,
        sum_bytes: usize,
    ) -> Option<Summed> {
        let Kind::Threads { pool, read: true, .. } = &self.kind else { return None };
        let (answer, answered) = oneshot::channel();
        pool.push_read(Transfer { kind: OpKind::Read, file, id, offset, buf }, Reader { sum_bytes, answer });
        let summed = answered.await.ok()?;
        self.done.add(1);
        Some(summed)
    }
}

impl Drop for Workers {
    /// Waits for the work that is queued: it may touch memory that is unmapped after this.
    fn drop(&mut self) {
        if let Kind::Threads { pool, threads, answers, .. } = &mut self.kind {
            answers.abort();
            pool.close();
            for thread in threads.drain(..) {
                // No thread panics: `run` catches what the work does.
                drop(thread.join());
            }
        }
    }
}

/// A piece of work under way.
pub(crate) struct Busy(Rc<Workers>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.set(self.0.busy.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::mpsc,
        task::{Context, Waker},
    };

    use tokio::task::LocalSet;

    use super::*;

    /// Runs a test as the reactor would.
    fn on_reactor(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        LocalSet::new().block_on(&runtime, test);
    }

    fn workers(count: u32) -> Rc<Workers> {
        Workers::start(count, false, Arc::new(Count::unexported())).expect("threads")
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
    fn all_of_many_pieces_are_done_whoever_is_asleep() {
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
            while pool.lock().asleep.is_empty() {
                thread::yield_now();
            }
            assert_eq!(workers.run(0, || 7).await, Some(7));
        });
    }

    #[test]
    fn without_workers_nothing_is_run() {
        on_reactor(async {
            let run = workers(0).run(1, || unreachable!("there is nobody to run it")).await;
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

    #[test]
    fn a_worker_that_dies_loses_what_it_reads_and_another_takes_its_place() {
        on_reactor(async {
            let workers = Workers::start(1, true, Arc::new(Count::unexported())).expect("threads");
            assert!(workers.read());
            let (from, to) = io::pipe().expect("a pipe");
            let file = Arc::new(File::from(std::os::fd::OwnedFd::from(from)));
            let read = |file: &Arc<File>| {
                workers.read_and_sum(
                    Arc::clone(file),
                    FileId(0),
                    1,
                    crate::memory::AlignedBuf::zeroed(4096).lend(),
                    4096,
                )
            };
            let mut lost = std::pin::pin!(read(&file));
            assert!(lost.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            let Kind::Threads { pool, .. } = &workers.kind else { unreachable!("there is a thread") };
            pool.push_work(0, Box::new(|| std::panic::resume_unwind(Box::new("on purpose"))));
            // The kernel has the memory until then.
            drop(to);
            assert!(lost.await.is_none_or(|summed| summed.result.is_err()));
            let mut file = tempfile::tempfile().expect("a file");
            io::Write::write_all(&mut file, &[7; 8192]).expect("written");
            let summed = read(&Arc::new(file)).await.expect("there is a worker");
            assert_eq!(summed.result.expect("read"), checksum(&[7; 4096]));
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
                    // Until the test lets go of it.
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
}
