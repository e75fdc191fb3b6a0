//! Worker threads: reads of the disk tier, checksums, and copies of host memory.
//!
//! Checksums and copies run at a few GB/s per core, and an operation on the reactor's ring costs some microseconds. On
//! the reactor they would limit the whole cache to one core, however many drives there are, so movements hand them to
//! workers. A worker that reads has a ring of its own ([`Lane`]), computes the checksum while the block is still in its
//! processor's cache, and returns both. Handing work over costs two wake-ups, 20 to 400 us on virtual machines, so a
//! lone block stays on the reactor, as do all blocks if there are no workers.

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
    io::uring::{Bell, Completed, Lane, TRANSFERS_MAX, Transfer},
    memory::Lent,
    metrics::Count,
};

/// Least work worth handing over: about 8 us.
const WORK_BYTES_MIN: u64 = 64 << 10;

/// Queued bytes per awake worker above which another worker is woken: about 30 us of work. Waking a thread costs the
/// reactor some microseconds, so small blocks wait for a worker that is already awake.
const WAKE_BYTES: u64 = 256 << 10;

/// Bytes that a worker reads at once, but at least two blocks: enough to keep a few drives busy, and little enough to
/// stay in the processor's cache until the checksum is computed.
const READING_BYTES_MAX: usize = 16 << 20;

/// A unit of work. Returns what the reactor runs afterwards.
type Work = Box<dyn FnOnce() -> Answer + Send>;

/// Sends a result, on the reactor.
type Answer = Box<dyn FnOnce() + Send>;

/// A block that a worker has read.
pub(crate) struct Summed {
    pub(crate) buf: Lent,
    /// The checksum of the requested number of bytes.
    pub(crate) result: io::Result<u64>,
}

/// Receiver of a block that is being read, and the number of bytes to checksum.
struct Reader {
    sum_bytes: usize,
    answer: oneshot::Sender<Summed>,
}

/// The reactor's handle to the workers. Idle workers sleep. Dropping the handle ends the threads after the queued work.
pub(crate) struct Workers {
    kind: Kind,
    /// Units of work in flight, on workers and on the reactor.
    busy: Cell<u32>,
    /// Units of work done by workers.
    done: Arc<Count>,
}

enum Kind {
    /// All work is done on the reactor.
    None,
    Threads {
        pool: Arc<Pool>,
        threads: Vec<JoinHandle<()>>,
        /// The reactor's task that runs answers.
        answers: AbortHandle,
        /// Whether some of the threads have a ring.
        read: bool,
    },
    /// Work takes the virtual time that this draws, so that its order depends on the seed; without a time it is lost,
    /// as after a panic.
    #[cfg(feature = "sim")]
    Simulated(Box<dyn Fn() -> Option<std::time::Duration>>),
}

/// State shared by the reactor and the threads.
struct Pool {
    queue: Mutex<Queue>,
    /// Answers that the reactor has not taken yet.
    answers: Mutex<Vec<Answer>>,
    /// Wakes the reactor for the first answer; it then takes all of them.
    answered: Notify,
}

struct Queue {
    work: VecDeque<(u64, Work)>,
    reads: VecDeque<(Transfer, Reader)>,
    /// Bytes of all queued work.
    bytes: u64,
    threads: u32,
    /// Sleeping workers that have not been woken, the latest last.
    asleep: Vec<Sleeper>,
    /// Set when no more work will come.
    closed: bool,
}

/// A sleeping worker.
struct Sleeper {
    thread: Thread,
    /// Set if the worker sleeps in its ring.
    bell: Option<Bell>,
    /// Whether it could start another read.
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

/// Work that a worker takes from the queue.
#[derive(Default)]
struct Taken {
    reads: Vec<(Transfer, Reader)>,
    work: Option<Work>,
}

impl Queue {
    /// Takes reads, limited by the worker's room and its share of the queue, and one unit of work if wanted.
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

    /// Returns a worker to wake, unless the awake ones suffice for the queue.
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

    /// Main loop of a worker. A worker without a lane leaves reads to the others.
    fn run(&self, mut lane: Option<Lane<Reader>>) {
        loop {
            let (has_completed, room) = lane.as_ref().map_or((false, 0), |lane| (lane.has_completed(), room(lane)));
            let Taken { reads, work } = self.lock().take(room, !has_completed);
            // New reads start first, so that the drives stay busy during the checksum.
            if let Some(lane) = &mut lane
                && !reads.is_empty()
            {
                reads.into_iter().for_each(|(read, reader)| lane.start(read, reader));
                lane.poll();
            }
            if let Some(ended) = lane.as_mut().and_then(Lane::take_completed) {
                self.answer(sum_up(ended));
            } else if let Some(work) = work {
                self.answer(work());
            } else if !self.sleep(&mut lane) {
                return;
            }
        }
    }

    /// Sleeps until there is work; false once no more work will come.
    fn sleep(&self, lane: &mut Option<Lane<Reader>>) -> bool {
        let (reading, room) = lane.as_ref().map_or((0, 0), |lane| (lane.in_flight().0, room(lane)));
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
        // A waking thread removes it from the list, but the completion of a read does not.
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

    /// Runs the answers, on the reactor.
    async fn take_answers(self: Arc<Self>) {
        loop {
            self.answered.notified().await;
            let answers = std::mem::take(&mut *self.answers.lock().expect("nothing panics under it"));
            answers.into_iter().for_each(|answer| answer());
        }
    }

    /// Closes the queue: workers end after the queued work.
    fn close(&self) {
        let asleep = {
            let mut queue = self.lock();
            queue.closed = true;
            std::mem::take(&mut queue.asleep)
        };
        asleep.iter().for_each(Sleeper::wake);
    }
}

/// A ring for this thread, if the kernel allows one.
fn lane() -> Option<Lane<Reader>> {
    let refused = |error: &io::Error| tracing::warn!(%error, "a worker has no ring and does not read");
    Lane::new().inspect_err(refused).ok()
}

/// Number of further reads that a lane takes.
fn room(lane: &Lane<Reader>) -> usize {
    let (reads, bytes) = lane.in_flight();
    let more = if reads < 2 { 2 - reads } else { READING_BYTES_MAX.saturating_sub(bytes) * reads / bytes.max(1) };
    more.min(TRANSFERS_MAX - reads)
}

/// Checksums a block that was read, and returns an answer that sends both.
fn sum_up(ended: Completed<Reader>) -> Answer {
    let Completed { buf, result, tag: Reader { sum_bytes, answer } } = ended;
    let result = result.map(|()| {
        // SAFETY: the kernel has filled the range, which is ours until the buffer is dropped.
        checksum(unsafe { std::slice::from_raw_parts(buf.as_ptr().cast_const(), sum_bytes.min(buf.len())) })
    });
    let summed = Summed { buf, result };
    // The movement may be gone.
    Box::new(move || drop(answer.send(summed)))
}

impl Workers {
    /// No workers: all work is done on the reactor.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn none() -> Rc<Self> {
        Rc::new(Workers { kind: Kind::None, busy: Cell::new(0), done: Arc::new(Count::unexported()) })
    }

    /// Starts `count` threads, each with a ring of its own if `rings` is set and the kernel allows it. `done` counts
    /// their work. Call on the reactor.
    ///
    /// # Errors
    /// The system's error, if it cannot start a thread.
    pub(crate) fn start(count: u32, rings: bool, done: Arc<Count>) -> io::Result<Rc<Self>> {
        let mut workers = Workers { kind: Kind::None, busy: Cell::new(0), done };
        if count == 0 {
            return Ok(Rc::new(workers));
        }
        let pool = Arc::new(Pool::new(count));
        let answers = tokio::task::spawn_local(Arc::clone(&pool).take_answers()).abort_handle();
        // Set before the threads start: if a later one cannot start, dropping this ends the earlier ones.
        workers.kind = Kind::Threads { pool: Arc::clone(&pool), threads: Vec::new(), answers, read: false };
        let (tell, told) = mpsc::channel();
        for n in 0..count {
            let (pool, tell) = (Arc::clone(&pool), tell.clone());
            let run = move || {
                let mut lane = if rings { lane() } else { None };
                // The starting thread waits for all of these messages.
                let _ = tell.send(lane.is_some());
                drop(tell);
                // After a panic, reads in flight are dropped once the kernel is done with them, and their waiters are
                // notified.
                while catch_unwind(AssertUnwindSafe(|| pool.run(lane.take()))).is_err() {
                    tracing::error!("a worker thread panicked and restarts");
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

    /// Work takes the virtual time that `draw` returns, and is lost if it returns none.
    #[cfg(feature = "sim")]
    pub(crate) fn simulated(done: Arc<Count>, draw: impl Fn() -> Option<std::time::Duration> + 'static) -> Rc<Self> {
        Rc::new(Workers { kind: Kind::Simulated(Box::new(draw)), busy: Cell::new(0), done })
    }

    /// Counts a unit of work as in flight until the guard is dropped.
    pub(crate) fn enter(self: &Rc<Self>) -> Busy {
        self.busy.set(self.busy.get() + 1);
        Busy(Rc::clone(self))
    }

    /// True while work is in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.get() > 0
    }

    /// True if there are workers and this many bytes are worth handing over.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        match &self.kind {
            Kind::None => false,
            Kind::Threads { .. } => bytes >= WORK_BYTES_MIN,
            #[cfg(feature = "sim")]
            Kind::Simulated(_) => bytes > 0,
        }
    }

    /// Runs `work` on a worker; `bytes` is its size. `None` if there is no worker, or if `work` panicked: it then has
    /// been dropped with all it owned, and no part of it still runs.
    ///
    /// Dropping the future does not stop the work: `work` owns the memory it touches.
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
                    // The movement may be gone.
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
    /// True if workers read.
    pub(crate) fn read(&self) -> bool {
        matches!(self.kind, Kind::Threads { read: true, .. })
    }

    /// True if a simulated worker dies during a read.
    #[cfg(feature = "sim")]
    pub(crate) fn loses_read(&self) -> bool {
        matches!(&self.kind, Kind::Simulated(draw) if draw().is_none())
    }

    /// Reads all of `buf` on a worker, which then checksums its first `sum_bytes` bytes. `None` if no worker reads, or
    /// if the worker died: the kernel is then done with the memory, which is freed.
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
    /// Waits for the queued work: it may touch memory that is unmapped afterwards.
    fn drop(&mut self) {
        if let Kind::Threads { pool, threads, answers, .. } = &mut self.kind {
            answers.abort();
            pool.close();
            for thread in threads.drain(..) {
                // The threads do not panic: `run` catches panics of the work.
                drop(thread.join());
            }
        }
    }
}

/// A guard for a unit of work in flight.
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

    /// Runs a test inside a reactor.
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
            // The kernel owns the memory until then.
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
}
