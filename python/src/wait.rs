//! Waiting for the engine without the interpreter's lock.

use std::{
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use kvhoist::Error;
use pyo3::prelude::*;

use crate::errors;

/// How often a wait looks for signals. Only the main thread does: only there Python runs handlers.
pub const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Runs a future to its end. Python's signal handlers run meanwhile.
///
/// # Errors
/// The exception of a signal handler, as a rule `KeyboardInterrupt`; the future is dropped, without the lock: that may
/// wait for requests under way.
pub fn interruptible<F>(py: Python<'_>, future: F) -> PyResult<F::Output>
where
    F: Future + Send,
    F::Output: Send,
{
    let mut future = pin!(Some(future));
    let main = is_main_thread();
    loop {
        // Other threads take the lock only once, at the end: a daemon thread that takes it while the interpreter ends
        // is killed by it.
        let output = py.detach(|| {
            loop {
                let begun = future.as_mut().as_pin_mut().expect("it is dropped at the end only");
                let output = run_for(begun, SIGNALS_EVERY);
                if output.is_some() || main {
                    return output;
                }
            }
        });
        if let Some(output) = output {
            return Ok(output);
        }
        py.check_signals().inspect_err(|_| py.detach(|| future.set(None)))?;
    }
}

/// As [`interruptible`], of a call of the engine.
///
/// # Errors
/// As [`interruptible`]; the engine's, as Python's exception.
pub fn answer<T: Send>(py: Python<'_>, call: impl Future<Output = Result<T, Error>> + Send) -> PyResult<T> {
    interruptible(py, call)?.map_err(|error| errors::to_python(py, &error))
}

/// As [`interruptible`], for so long at most: `None`, with the future dropped, if it has not ended by then.
///
/// # Errors
/// As [`interruptible`].
pub fn within<F>(py: Python<'_>, limit: Duration, future: F) -> PyResult<Option<F::Output>>
where
    F: Future + Send,
    F::Output: Send,
{
    let mut future = pin!(future);
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let output = py.detach(|| run_for(future.as_mut(), left.min(SIGNALS_EVERY)));
        if output.is_some() || left.is_zero() {
            return Ok(output);
        }
        py.check_signals()?;
    }
}

/// Runs a future to its end in spite of signals: for operations that must end before their memory is released.
pub fn to_the_end<F>(py: Python<'_>, future: F) -> F::Output
where
    F: Future + Send,
    F::Output: Send,
{
    let mut future = pin!(future);
    py.detach(|| {
        loop {
            if let Some(output) = run_for(future.as_mut(), SIGNALS_EVERY) {
                return output;
            }
        }
    })
}

fn is_main_thread() -> bool {
    // SAFETY: plain system calls without arguments.
    unsafe { libc::gettid() == libc::getpid() }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future on the current thread, which sleeps in between, for so long at most.
fn run_for<F: Future>(mut future: Pin<&mut F>, patience: Duration) -> Option<F::Output> {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let until = Instant::now() + patience;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        // Woken between the poll and here, it returns at once.
        thread::park_timeout(left);
    }
}
