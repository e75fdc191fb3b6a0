//! How a client learns that a service uses its memory no longer, before it tells its callers.
//!
//! The hang-up says so, of host memory: a service that lives unmaps it before. So a client that cannot read what comes
//! hangs up for its own part only, and waits for the service.

use tokio::time::sleep_until;

use super::worker::{Dial, Worker};
use crate::error::Error;

impl<D: Dial> Worker<D> {
    /// Waits until the service uses memory of this process no longer, which `free` tells. Nothing is asked for any
    /// more. Calls end at their deadlines meanwhile, as those of a service that hangs do.
    pub(super) async fn memory_is_free(&self, free: impl Future<Output = ()>, why: &Error) {
        self.line.hung_up(why.clone());
        let mut free = std::pin::pin!(free);
        loop {
            let until = self.line.wait().until;
            let deadline = async {
                match until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! { biased;
                () = &mut free => return,
                () = self.line.woken.notified() => {}
                () = deadline => {
                    if self.line.late() {
                        return;
                    }
                }
            }
        }
    }
}
