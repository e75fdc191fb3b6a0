//! Worker threads for checksums and copies of host memory.
//!
//! Both run at a few GB/s a core. On the reactor they would bound the whole cache by one core, however many drives
//! there are, so a movement hands them to a worker and the reactor serves the ring meanwhile. Handing over costs two
//! wake-ups, 20 to 400 us on virtual machines: a block that is alone stays on the reactor, and so does every block
//! where there are no workers.

use std::{
    cell::Cell,
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::{Arc, Condvar, Mutex, MutexGuard},
    thread::{self, JoinHandle},
};

use tokio::{
    sync::{Notify, oneshot},
    task::AbortHandle,
};

use crate::metrics::Count;

/// Handing over less costs more than it saves: this is about 8 us of work.
const WORK_BYTES_MIN: u64 = 64 << 10;

/// Queued bytes for each awake worker past which another one is woken: about 30 us of work. Waking a thread costs the
/// reactor some microseconds, so blocks that are small wait for a worker that is awake already.
const WAKE_BYTES: u64 = 256 << 10;

/// A piece of work. It returns what the reactor is to do when it has ended.
type Work = Box<dyn FnOnce() -> Answer + Send>;
type Answer = Box<dyn FnOnce() + Send>;

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
    },
    /// Work takes the virtual time that this draws, so that its order is the seed's; without a time it is lost, as by
    /// a panic.
    #[cfg(feature = "sim")]
    Simulated(Box<dyn Fn() -> Option<std::time::Duration>>),
}

/// What the reactor and the threads share.
#[derive(Default)]
struct Pool {
    queue: Mutex<Queue>,
    queued: Condvar,
    /// Answers that the reactor has not taken yet.
    answers: Mutex<Vec<Answer>>,
    /// Wakes the reactor for the first of them: it takes all that there are by then.
    answered: Notify,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<(u64, Work)>,
    /// Bytes of all that is queued.
    bytes: u64,
    /// Workers that are not asleep, that are, and those of the latter that have been woken.
    awake: u32,
    asleep: u32,
    waking: u32,
    /// No more work will come.
    closed: bool,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics under it")
    }

    /// Queues work, and wakes a worker if those awake have enough to do.
    fn push(&self, bytes: u64, work: Work) {
        let mut queue = self.lock();
        queue.work.push_back((bytes, work));
        queue.bytes += bytes;
        let awake = queue.awake + queue.waking;
        let wake = queue.asleep > queue.waking && (awake == 0 || queue.bytes > WAKE_BYTES * u64::from(awake));
        queue.waking += u32::from(wake);
        drop(queue);
        if wake {
            self.queued.notify_one();
        }
    }

    /// The life of a worker.
    fn run(&self) {
        let mut queue = self.lock();
        queue.awake += 1;
        loop {
            if let Some((bytes, work)) = queue.work.pop_front() {
                queue.bytes -= bytes;
                drop(queue);
                self.answer(work());
                queue = self.lock();
            } else if queue.closed {
                return;
            } else {
                queue.awake -= 1;
                queue.asleep += 1;
                queue = self.queued.wait(queue).expect("nothing panics under it");
                queue.asleep -= 1;
                queue.waking = queue.waking.saturating_sub(1);
                queue.awake += 1;
            }
        }
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
}

impl Workers {
    /// No workers: all work is done on the reactor.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn none() -> Rc<Self> {
        Rc::new(Workers { kind: Kind::None, busy: Cell::new(0), done: Arc::new(Count::unexported()) })
    }

    /// Starts `count` threads. `done` counts what they do. Call on the reactor.
    ///
    /// # Errors
    /// What the system said, where it gives no more threads.
    pub(crate) fn start(count: u32, done: Arc<Count>) -> io::Result<Rc<Self>> {
        let mut workers = Workers { kind: Kind::None, busy: Cell::new(0), done };
        if count > 0 {
            let pool = Arc::new(Pool::default());
            let answers = tokio::task::spawn_local(Arc::clone(&pool).take_answers()).abort_handle();
            // Before the threads: those that were started end with it where the system gives no more.
            workers.kind = Kind::Threads { pool: Arc::clone(&pool), threads: Vec::new(), answers };
            for n in 0..count {
                let pool = Arc::clone(&pool);
                let thread = thread::Builder::new().name(format!("kvhoist-work-{n}")).spawn(move || pool.run())?;
                if let Kind::Threads { threads, .. } = &mut workers.kind {
                    threads.push(thread);
                }
            }
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
                pool.push(bytes, Box::new(work));
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

impl Drop for Workers {
    /// Waits for the work that is queued: it may touch memory that is unmapped after this.
    fn drop(&mut self) {
        if let Kind::Threads { pool, threads, answers } = &mut self.kind {
            answers.abort();
            pool.lock().closed = true;
            pool.queued.notify_all();
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
        Workers::start(count, Arc::new(Count::unexported())).expect("threads")
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
            while pool.lock().asleep == 0 {
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
