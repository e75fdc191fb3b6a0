//! Threads whose waits are short, for descriptors of clients.
//!
//! The last close of a descriptor runs in the thread that closes it, and may wait there for as long as its maker likes:
//! a socket with `SO_LINGER` waits for its peer. Descriptors are closed by `close`, by the close of a socket that they
//! were sent to and not received from, and by a `recvmsg` without room for them. A signal ends such a wait, so a timer
//! sends one to the thread every millisecond while it is at work.

use std::{
    io,
    mem::zeroed,
    ptr::{null, null_mut},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use tokio::sync::Notify;

/// Jobs that may wait before no more connections are accepted.
const JOBS_MAX: usize = 64;
const TICK_NS: libc::c_long = 1_000_000;
/// Ends waits. By default it is ignored, and few programs use it (the Go runtime preempts its threads by it).
const SIGNAL: libc::c_int = libc::SIGURG;

type Job = Box<dyn FnOnce() + Send>;

/// A thread that runs jobs in order.
pub(super) struct Brief {
    jobs: mpsc::Sender<Job>,
    waiting: Arc<(AtomicUsize, Notify)>,
}

impl Brief {
    /// Starts it. It ends when this is dropped and all jobs are done.
    pub(super) fn start(name: &str) -> io::Result<Self> {
        install()?;
        let (jobs, given) = mpsc::channel::<Job>();
        let (started, starts) = mpsc::channel();
        let waiting = Arc::new((AtomicUsize::new(0), Notify::new()));
        let done = Arc::clone(&waiting);
        let run = move || {
            let ticks = match Ticks::new() {
                Ok(ticks) => ticks,
                Err(error) => return drop(started.send(Err(error))),
            };
            drop(started.send(Ok(())));
            for job in given {
                ticks.set(TICK_NS);
                job();
                done.0.fetch_sub(1, Ordering::AcqRel);
                done.1.notify_one();
                ticks.set(0);
            }
        };
        thread::Builder::new().name(name.into()).spawn(run)?;
        starts.recv().unwrap_or(Err(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Brief { jobs, waiting })
    }

    /// Runs a job after those before it.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.waiting.0.fetch_add(1, Ordering::AcqRel);
        let _ends_after_its_senders = self.jobs.send(Box::new(job));
    }

    /// Jobs that are not done.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.0.load(Ordering::Acquire)
    }

    /// Waits until few jobs wait.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(super) async fn room(&self) {
        while self.waiting() > JOBS_MAX {
            self.waiting.1.notified().await;
        }
    }
}

/// A timer that signals the thread that made it.
struct Ticks(libc::timer_t);

impl Ticks {
    fn new() -> io::Result<Self> {
        // SAFETY: all zero is an empty set and a valid event; both outlive the calls that read them.
        unsafe {
            let mut signals: libc::sigset_t = zeroed();
            libc::sigaddset(&raw mut signals, SIGNAL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const signals, null_mut());
            let mut event: libc::sigevent = zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = SIGNAL;
            event.sigev_notify_thread_id = libc::gettid();
            let mut timer = null_mut();
            if libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Ticks(timer))
        }
    }

    /// Signals after every interval; 0: no more.
    fn set(&self, interval_ns: libc::c_long) {
        let interval = libc::timespec { tv_sec: 0, tv_nsec: interval_ns };
        let times = libc::itimerspec { it_interval: interval, it_value: interval };
        // SAFETY: the timer lives as long as this, and `times` outlives the call.
        unsafe { libc::timer_settime(self.0, 0, &raw const times, null_mut()) };
    }
}

impl Drop for Ticks {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and deleted here only.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Gives the signal a handler that does nothing, once in a process: a signal that is ignored ends no wait. A handler
/// that the program has stays.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    extern "C" fn nothing(_: libc::c_int) {}
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: all zero is a valid value; the first call fills it in, the second one installs a handler that does
        // nothing. Without SA_RESTART: the waits are to end.
        let refused = unsafe {
            let mut action: libc::sigaction = zeroed();
            let asked = libc::sigaction(SIGNAL, null(), &raw mut action);
            if asked == 0 && ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction) {
                return Ok(());
            }
            action = zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            asked != 0 || libc::sigaction(SIGNAL, &raw const action, null_mut()) != 0
        };
        if refused { Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)) } else { Ok(()) }
    });
    installed.map_err(io::Error::from_raw_os_error)
}
