//! Polling before sleeping. A thread that sleeps must be woken, which takes some microseconds on bare metal and many
//! more where an idle virtual processor has to be brought back; for as long as
//! [`Config::spin_us`](crate::Config::spin_us) says the reactor looks for work instead, and while a movement is under
//! way it does not sleep at all. The one place on the reactor that looks at the machine's clock: in virtual time, which
//! stands still meanwhile, nothing spins.

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use super::Mover;
use crate::{device::CopyEngine, io::Storage};

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Keeps the reactor awake while anything is under way, and for a while after. Ends at once where that is not
    /// wanted.
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
