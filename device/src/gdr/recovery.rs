//! After a failed copy: all work is flushed, the connection is reset, and the self-test decides whether the engine is
//! used again.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use kvhoist_base::panics::log;

use super::{
    super::{GdrState, Offered},
    DRAIN, Inner, Phase,
    self_test::Place,
};

/// Two failures within this time retire the engine.
const SECOND_FAILURE: Duration = Duration::from_secs(60);

impl Inner {
    /// Enters the draining state after a failure.
    pub(super) fn failed(&self, reason: String) {
        let mut phase = self.phase.borrow_mut();
        if matches!(*phase, Phase::Draining { .. }) {
            return;
        }
        self.status.set(GdrState::Recovering(reason.clone()));
        *phase = Phase::Draining { since: Instant::now(), reason: reason.clone(), refused: false };
        drop(phase);
        log(|| tracing::warn!(reason, device = self.device, "copies through the RDMA device failed"));
    }

    /// While draining: resets the connection once all work is flushed or the time is over. Returns the failure's reason
    /// when the NIC no longer holds memory, `None` before.
    pub(super) fn ended(&self) -> Option<String> {
        let (since, reason, refused) = match &*self.phase.borrow() {
            Phase::Draining { since, reason, refused } => (*since, reason.clone(), *refused),
            _ => return None,
        };
        let mut finished = self.finished.take();
        let mut queue = self.queue.borrow_mut();
        let mut ended = None;
        if queue.drained() && !refused || since.elapsed() > DRAIN {
            // Only a reset or a destroyed queue pair guarantees that the device no longer touches the memory.
            let gone = match queue.reset(&mut finished) {
                Ok(()) => Ok(()),
                Err(fault) => queue.destroy(&mut finished).map_err(|other| format!("{fault}; {other}")),
            };
            match gone {
                Ok(()) => ended = Some(reason),
                Err(fault) => {
                    *self.phase.borrow_mut() = Phase::Draining { since: Instant::now(), reason, refused: true };
                    log(|| tracing::error!(fault, "the RDMA device does not release memory; it stays reserved"));
                }
            }
        }
        drop(queue);
        if ended.is_some() {
            *self.phase.borrow_mut() = Phase::Testing;
        }
        self.answer(&mut finished);
        self.finished.set(finished);
        ended
    }

    /// Reconnects and repeats the self-test, or retires the engine.
    pub(super) async fn recover(self: Rc<Self>, reason: String) {
        if self.retired.get() {
            *self.phase.borrow_mut() = Phase::Retired;
            return;
        }
        let now = Instant::now();
        let before = self.failed_at.replace(Some(now));
        if before.is_some_and(|before| now.duration_since(before) < SECOND_FAILURE) {
            return self.retire(format!("it failed twice within {SECOND_FAILURE:?}, the second time with: {reason}"));
        }
        let connected = self.queue.borrow_mut().connect();
        let tested = match connected {
            Ok(()) => self.self_test(&self.scratch.own_place()).await,
            Err(fault) => Err(fault),
        };
        match tested {
            Ok(()) => {
                *self.phase.borrow_mut() = Phase::Up;
                self.status.set(GdrState::On(self.detail.clone()));
                log(|| tracing::info!(device = self.device, "the RDMA device copies again"));
            }
            Err(fault) => self.retire(format!("it failed ({reason}), and then failed its self-test: {fault}")),
        }
    }

    pub(super) fn retire(&self, reason: String) {
        self.retired.set(true);
        if !matches!(*self.phase.borrow(), Phase::Draining { .. }) {
            *self.phase.borrow_mut() = Phase::Retired;
        }
        self.status.set(GdrState::Retired(reason.clone()));
        log(|| tracing::warn!(reason, device = self.device, "the RDMA device is retired"));
    }

    pub(super) async fn self_test(self: &Rc<Self>, place: &Place) -> std::result::Result<(), String> {
        let this = self;
        let copy = async move |batch| match Rc::clone(this).submit(batch, Phase::is_testing).await {
            Offered::Copied(result, _) => result.map_err(|error| error.to_string()),
            Offered::Refused(_) => Err("the connection has failed".to_owned()),
        };
        self.scratch.self_test(place, copy).await
    }
}
