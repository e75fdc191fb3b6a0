//! Threads for work that takes long: unmapping, parking, the making and the removal of folders.
//!
//! The runtime's own (`spawn_blocking`) panic where the system starts no thread, which a container's limit of processes
//! is enough for. Here one thread is there from the start of the service on, and others are started while work
//! waits, as far as the system starts any.

use std::{
    collections::VecDeque,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

type Work = Box<dyn FnOnce() + Send>;

/// Threads at a time.
const THREADS_MAX: usize = 64;

/// Threads of this process, and the work that waits for them.
struct Helpers {
    state: Mutex<State>,
    /// Wakes the first thread.
    comes: Condvar,
}

struct State {
    waiting: VecDeque<Work>,
    threads: usize,
    /// The first thread was started.
    started: bool,
    /// The first thread waits for work.
    idle: bool,
}

static HELPERS: Helpers = Helpers::new();

/// Starts the first thread, once in a process. It stays.
///
/// # Errors
/// Where the system starts no thread.
pub(super) fn start() -> io::Result<()> {
    HELPERS.start()
}

/// Runs work on a thread of its own, or after other work on one that there is.
pub(super) fn run(work: Work) {
    HELPERS.run(work, |work| thread::Builder::new().name("kvhoist-helper".into()).spawn(work).map(drop));
}

impl Helpers {
    const fn new() -> Self {
        let state = State { waiting: VecDeque::new(), threads: 0, started: false, idle: false };
        Helpers { state: Mutex::new(state), comes: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&'static self) -> io::Result<()> {
        let mut state = self.lock();
        if !state.started {
            thread::Builder::new().name("kvhoist-helper".into()).spawn(|| self.stay())?;
            state.started = true;
            state.threads += 1;
        }
        Ok(())
    }

    /// `spawn` starts a thread.
    fn run(&'static self, work: Work, spawn: impl FnOnce(Work) -> io::Result<()>) {
        let mut state = self.lock();
        state.waiting.push_back(work);
        if std::mem::take(&mut state.idle) {
            self.comes.notify_one();
            return;
        }
        if state.threads >= THREADS_MAX {
            return;
        }
        state.threads += 1;
        drop(state);
        if let Err(error) = spawn(Box::new(|| self.help())) {
            tracing::warn!(%error, "a thread could not be started: the work waits for another one");
            let mut state = self.lock();
            state.threads -= 1;
            if state.threads == 0 {
                drop(state);
                // Nobody else would do it.
                self.work();
            }
        }
    }

    /// Works until no work waits.
    fn work(&self) {
        loop {
            let work = self.lock().waiting.pop_front();
            let Some(work) = work else { return };
            run_one(work);
        }
    }

    /// A thread's work, until there is none.
    fn help(&self) {
        loop {
            let mut state = self.lock();
            let Some(work) = state.waiting.pop_front() else {
                state.threads -= 1;
                return;
            };
            drop(state);
            run_one(work);
        }
    }

    /// The first thread's.
    fn stay(&self) {
        loop {
            self.work();
            let mut state = self.lock();
            while state.waiting.is_empty() {
                state.idle = true;
                state = self.comes.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.idle = false;
        }
    }
}

/// Whoever waits for work that panicked sees that it is gone.
fn run_one(work: Work) {
    drop(catch_unwind(AssertUnwindSafe(work)));
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn helpers() -> &'static Helpers {
        Box::leak(Box::new(Helpers::new()))
    }

    fn no_thread(_: Work) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    #[test]
    fn work_is_done_where_no_thread_can_be_had() {
        let (done, told) = mpsc::channel();
        let says = |what: u32| {
            let done = done.clone();
            Box::new(move || done.send(what).expect("the test waits")) as Work
        };
        let alone = helpers();
        alone.run(says(1), no_thread);
        assert_eq!(told.try_recv(), Ok(1), "by the caller, where there is no thread at all");
        let staffed = helpers();
        staffed.start().expect("a thread");
        // The first thread is busy until the second work is there.
        let (begin, begins) = mpsc::channel::<()>();
        staffed.run(Box::new(move || begins.recv().expect("it begins")), no_thread);
        staffed.run(says(2), no_thread);
        staffed.run(Box::new(|| panic!("on purpose")), no_thread);
        staffed.run(says(3), no_thread);
        begin.send(()).expect("it waits");
        assert_eq!((told.recv(), told.recv()), (Ok(2), Ok(3)), "by the thread that there is");
    }

    #[test]
    fn work_that_hangs_holds_up_no_other() {
        let staffed = helpers();
        staffed.start().expect("a thread");
        let spawn = |work| thread::Builder::new().spawn(work).map(drop);
        let (end, ends) = mpsc::channel::<()>();
        staffed.run(Box::new(move || ends.recv().expect("it ends")), spawn);
        let (done, told) = mpsc::channel();
        staffed.run(Box::new(move || done.send(()).expect("the test waits")), spawn);
        told.recv().expect("done");
        end.send(()).expect("it waits");
    }
}
