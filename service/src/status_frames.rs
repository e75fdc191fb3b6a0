//! Frames with the service's figures, which all clients that ask at a time share.
//!
//! A status has a row for each space and each client, and is collected and encoded on the service's thread. So frames
//! are made one after another, with pauses, and so are reports for the program that runs the service: together they
//! take a tenth of that thread at most, however many ask.

use std::{cell::Cell, rc::Rc, time::Duration};

use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};

use super::protocol::{Reply, ServiceStatus};

/// The pause after a frame, in times that it took.
const PAUSE_TIMES: u32 = 9;
/// The shortest pause.
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// The longest: a frame takes long by the clock where the thread does not run.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The last frame that was made, and when the next one may be.
pub(super) struct StatusFrames {
    made: Cell<u64>,
    last: Mutex<(Rc<[u8]>, Instant)>,
}

impl StatusFrames {
    pub(super) fn new() -> Self {
        StatusFrames { made: Cell::new(0), last: Mutex::new((Rc::new([]), Instant::now())) }
    }

    /// How many frames were made.
    pub(super) fn made(&self) -> u64 {
        self.made.get()
    }

    /// A frame that is made after the first `seen` ones, so that its figures are those after the request.
    ///
    /// # Cancel safety
    /// The next one who waits makes the frame.
    pub(super) async fn after(&self, seen: u64, status: impl FnOnce() -> ServiceStatus) -> Rc<[u8]> {
        let mut last = self.last.lock().await;
        if self.made.get() == seen {
            last.0 = at_its_turn(&mut last.1, || Reply::Status(Box::new(status())).encode(0).into()).await;
            self.made.set(seen + 1);
        }
        Rc::clone(&last.0)
    }

    /// What `collect` collects, which is no frame, as one of them.
    ///
    /// # Cancel safety
    /// Nothing is collected.
    pub(super) async fn instead<T>(&self, collect: impl FnOnce() -> T) -> T {
        let mut last = self.last.lock().await;
        at_its_turn(&mut last.1, collect).await
    }
}

/// Collects figures after the pause, and sets the next one.
async fn at_its_turn<T>(next: &mut Instant, collect: impl FnOnce() -> T) -> T {
    sleep_until(*next).await;
    let begin = Instant::now();
    let collected = collect();
    let end = Instant::now();
    *next = end + pause(end - begin);
    collected
}

/// The pause after a frame that took so long.
fn pause(took: Duration) -> Duration {
    took.saturating_mul(PAUSE_TIMES).clamp(PAUSE_MIN, PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_is_short_also_where_the_thread_did_not_run() {
        let of_ms = |ms| pause(Duration::from_millis(ms)).as_millis();
        assert_eq!([0, 1, 100, 60_000].map(of_ms), [1, 9, 900, 1000]);
    }
}
