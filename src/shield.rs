//! Isolates panics of users' code that kvhoist calls: wakers, the recorder of metrics, and subscribers of the log. A
//! waker runs on the reactor or on another caller's thread, whichever answers a future, frees a slot or makes room in a
//! channel; a recorder runs on any thread. A panic there must not affect those threads. None of them runs under the
//! index lock: they may call the cache.
//!
//! So a panic that ends a task of the reactor is a defect of this library, and ends the cache
//! ([`Mover::run`](crate::mover)).

use std::{
    future::{Future, poll_fn},
    panic::AssertUnwindSafe,
    pin::pin,
    sync::Arc,
    task::{Context, Wake, Waker},
};

use futures_util::FutureExt;
pub(crate) use kvhoist_base::panics::{caught, log};

/// Polls `future` with a waker that catches panics of the caller's waker. Costs one allocation per poll: for futures
/// that usually wait.
pub async fn shield<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|context| {
        let waker = Waker::from(Arc::new(Shield { waker: Some(context.waker().clone()) }));
        future.as_mut().poll(&mut Context::from_waker(&waker))
    })
    .await
}

/// Wraps a caller's waker.
struct Shield {
    /// `None` once dropped.
    waker: Option<Waker>,
}

impl Wake for Shield {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(waker) = &self.waker {
            _ = caught(|| waker.wake_by_ref());
        }
    }
}

impl Drop for Shield {
    fn drop(&mut self) {
        let waker = self.waker.take();
        _ = caught(|| drop(waker));
    }
}

/// As [`caught`], of a future in which a user's code runs.
pub(crate) async fn caught_future<T>(future: impl Future<Output = T>) -> Option<T> {
    AssertUnwindSafe(future).catch_unwind().await.map_err(std::mem::forget).ok()
}

#[cfg(test)]
mod tests {
    use std::{future::pending, task::RawWaker, task::RawWakerVTable};

    use super::*;

    /// A waker that panics when it is woken and when it is dropped.
    fn panicking() -> Waker {
        const VTABLE: RawWakerVTable = RawWakerVTable::new(
            |data| RawWaker::new(data, &VTABLE),
            |_| panic!("woken, on purpose"),
            |_| panic!("woken, on purpose"),
            |_| panic!("dropped, on purpose"),
        );
        // SAFETY: no function of the table uses the data pointer.
        unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &VTABLE)) }
    }

    #[test]
    fn what_a_waker_throws_goes_nowhere() {
        let theirs = std::mem::ManuallyDrop::new(panicking());
        let mut seen = None;
        {
            let mut shielded = pin!(shield(poll_fn(|context| {
                seen = Some(context.waker().clone());
                std::task::Poll::<()>::Pending
            })));
            assert!(shielded.as_mut().poll(&mut Context::from_waker(&theirs)).is_pending());
        }
        let seen = seen.expect("polled");
        seen.wake_by_ref();
        seen.wake();
        let mut waits = pin!(shield(pending::<()>()));
        assert!(waits.as_mut().poll(&mut Context::from_waker(&theirs)).is_pending());
    }
}
