//! A second look at stores that could not be opened.
//!
//! The client that was refused may never come again, and what kept the store from being opened passes (the lock of a
//! process that was killed) or is mended (a drive that was not mounted). So whoever asks how the service is begins a
//! look: the files are opened for a moment, as by an attach. That decides about a store that was refused
//! ([`Error::Store`](kvhoist::Error::Store)), but not about a drive that fails where only an attach reads.

use std::{rc::Rc, time::Duration};

use kvhoist::Capacity;

use super::{Entry, Spaces, State, manifest::SpaceManifest};
use crate::error::{Result, ServiceFault};

/// The pause after a look.
const PAUSE: Duration = Duration::from_secs(1);

impl Spaces {
    /// Looks in the background whether stores that were refused can be opened by now. One look at a time: a drive that
    /// hangs takes one thread.
    pub(crate) fn look_again(self: &Rc<Self>) {
        if !self.looking.get() && self.entries.borrow().values().any(Entry::is_refused) {
            self.looking.set(true);
            let spaces = Rc::clone(self);
            tokio::task::spawn_local(async move {
                spaces.look().await;
                tokio::time::sleep(PAUSE).await;
                spaces.looking.set(false);
            });
        }
    }

    /// Forgets why stores were refused that can be opened.
    pub(super) async fn look(&self) {
        let of_refused = |entry: &Entry| entry.is_refused().then(|| entry.manifest.clone());
        let refused: Vec<_> = self.entries.borrow().values().filter_map(of_refused).collect();
        for manifest in refused {
            if self.opens(&manifest).await.is_ok()
                && let Some(entry) = self.entries.borrow_mut().get_mut(&manifest.folder())
                && entry.is_refused()
            {
                entry.trouble = None;
            }
        }
    }

    async fn opens(&self, manifest: &SpaceManifest) -> Result<()> {
        let mut config = self.disk_config(manifest)?;
        config.host.capacity = Capacity::Blocks(1);
        config.disk.lock_wait = Duration::ZERO;
        self.system.try_files(config).await
    }
}

impl Entry {
    /// Whether its store was refused the last time, and nobody opens it now.
    fn is_refused(&self) -> bool {
        let fault = self.trouble.as_ref().map(|failure| failure.fault);
        matches!(self.state, State::Closed) && fault == Some(ServiceFault::Unavailable)
    }
}
