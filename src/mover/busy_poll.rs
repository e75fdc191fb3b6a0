//! Polling before sleeping. Waking a sleeping thread takes some microseconds on bare metal, and many more on an idle
//! virtual processor. For [`Config::spin_us`](crate::Config::spin_us) microseconds the reactor polls for work instead,
//! and while a movement is in flight it does not sleep at all. This is the only place on the reactor that reads the
//! machine's clock. Virtual time stands still during a poll, so nothing spins there.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use tokio::sync::oneshot::{self, error::TryRecvError};

use super::Mover;
use crate::{device::CopyEngine, io::Storage};

/// Turns of the reactor in which it waits awake for what a caller makes.
const EXPECTED_TURNS: u32 = 200;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Keeps the reactor awake while a movement is in flight, and for a while after. Ends at once if the setting is 0.
    pub(super) async fn spin_loop(self: Rc<Self>) {
        let patience = Duration::from_micros(u64::from(self.shared.config.spin_us));
        while !patience.is_zero() {
            self.begun.notified().await;
            let mut last = Instant::now();
            loop {
                if self.active.get() > 0 {
                    last = Instant::now();
                } else if last.elapsed() > patience {
                    break;
                }
                crate::io::yield_now().await;
            }
        }
    }
}

/// Waits for what a caller makes at this moment, awake for some 100 us. `None` if the caller gives up.
pub(super) async fn expected<T>(mut from_caller: oneshot::Receiver<T>) -> Option<T> {
    for _ in 0..EXPECTED_TURNS {
        match from_caller.try_recv() {
            Err(TryRecvError::Empty) => crate::io::yield_now().await,
            made => return made.ok(),
        }
    }
    from_caller.await.ok()
}
