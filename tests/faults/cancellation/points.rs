//! Futures that are dropped at a chosen point of their life.

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use tokio::{sync::Notify, time::timeout};

/// Nothing here takes this long: what does is a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Polls after which a call must have come to its end.
const POLLS_MAX: u32 = 64;

/// Rounds after which a call must have been caught in flight.
const ROUNDS_MAX: u32 = 50;

/// Where a future is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// After so many polls, each after a wake-up.
    pub polls: u32,
    /// Not at once, but when it has been woken again: its result is there, but not taken.
    pub woken: bool,
}

/// Fails where `future` takes longer than anything should.
pub async fn bounded<F: Future>(what: &str, future: F) -> F::Output {
    match timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: a hang"),
    }
}

#[derive(Default)]
struct Woken(Notify);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

/// Polls `future` and drops it at `point`; its output, if it came to one before.
pub async fn drop_at<F: Future>(point: Point, future: F) -> Option<F::Output> {
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut future = pin!(future);
    for poll in 0..point.polls {
        if poll > 0 {
            bounded("a wake-up", woken.0.notified()).await;
        }
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Some(output);
        }
    }
    if point.woken && point.polls > 0 {
        bounded("a wake-up", woken.0.notified()).await;
    }
    None
}

/// Makes `attempt` drop its call at every point there is: after so many polls, until the call completes. `attempt` says
/// whether it did.
///
/// A call that is over sooner than it can be dropped is tried again: with `there_and_back` it is one that goes to the
/// reactor, and must have been dropped in flight at least once.
pub async fn at_every_point(what: &str, there_and_back: bool, mut attempt: impl AsyncFnMut(Point) -> bool) {
    let mut under_way = 0;
    for _ in 0..ROUNDS_MAX {
        for polls in 0.. {
            assert!(polls < POLLS_MAX, "{what}: not done after {polls} polls");
            let done = bounded(what, attempt(Point { polls, woken: false })).await;
            if done {
                break;
            }
            if polls > 0 {
                under_way += 1;
                bounded(what, attempt(Point { polls, woken: true })).await;
            }
        }
        if under_way > 0 || !there_and_back {
            return;
        }
    }
    panic!("{what}: it was never dropped in flight");
}
