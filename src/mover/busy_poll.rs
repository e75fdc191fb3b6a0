//! Polling before sleeping. Waking a sleeping thread takes some microseconds on bare metal, and many more on an idle
//! virtual processor. For [`Config::spin_us`](crate::Config::spin_us) microseconds the reactor polls for work instead,
//! and while a movement is in flight it does not sleep at all. This is the only place on the reactor that reads the
//! machine's clock. Virtual time stands still during a poll, so nothing spins there.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use super::Mover;
use crate::{device::CopyEngine, io::Storage};

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
