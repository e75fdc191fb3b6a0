//! Spaces that are not served, and the end of a space's cache: at its removal, or by a defect.

use std::rc::Rc;

use kvhoist::{Error, Stats};

use super::{Entry, Spaces, State, manifest::SpaceManifest};
use crate::{protocol::Failure, shares::Ledger};

impl Entry {
    /// Whether its cache has ended while the space is open, which is by a defect.
    pub(super) fn has_ended(&self) -> bool {
        self.space().is_some_and(|space| space.cache.has_ended())
    }

    pub(super) fn is_served(&self) -> bool {
        self.space().is_some() && !self.has_ended()
    }

    /// Whether a client is attached, or will be.
    pub(super) fn is_attached(&self) -> bool {
        match &self.state {
            // The entry has one, each session another.
            State::Open(space) => Rc::strong_count(space) > 1,
            State::Opening(_) => true,
            State::Closed | State::Removing(_) | State::Refused(_) => false,
        }
    }

    /// The figures of its cache; of one that is not served, why.
    pub(super) fn stats(&self) -> Option<Stats> {
        let why = match (&self.state, &self.trouble) {
            (State::Refused(failure), _) | (_, Some(failure)) => failure.text.clone(),
            _ if self.has_ended() => Failure::from(&Error::Closed).text,
            _ => return Some(self.space()?.cache.stats()),
        };
        let mut stats = Stats::default();
        stats.disk_retired = Some(why);
        Some(stats)
    }
}

/// Sets disk aside for a space that is not served: what its stores take is nobody else's.
pub(super) fn keep_disk(disk: &Ledger, manifest: &mut SpaceManifest, store_bytes: u64) {
    let bytes = store_bytes.min(disk.available(manifest.of()));
    manifest.capacity_bytes = if bytes > 0 { disk.take(manifest.of(), bytes).unwrap_or(0) } else { 0 };
}

impl Spaces {
    /// Looks at the stores of all spaces, so that the operator need not wait for a client to be told what is wrong with
    /// them. It waits for the drives.
    pub(crate) async fn look(&self) {
        let closed: Vec<SpaceManifest> = {
            let entries = self.entries.borrow();
            let closed = entries.values().filter(|entry| matches!(entry.state, State::Closed));
            closed.map(|entry| entry.manifest.clone()).collect()
        };
        for manifest in closed {
            let config = self.store_config(&manifest).map(|config| config.host_blocks(1));
            let looked = match config.and_then(|config| config.validate().map(|()| config)) {
                Ok(config) => self.system.look(config).await,
                Err(error) => Err(error),
            };
            let Err(error) = looked else { continue };
            // A client that has come meanwhile has found more.
            let is_news = |entry: &Entry| matches!(entry.state, State::Closed) && entry.trouble.is_none();
            if !self.entries.borrow().get(&manifest.folder()).is_some_and(is_news) {
                continue;
            }
            let Failure { text: reason, .. } = self.refused(&manifest, error);
            // Else some client may have other settings.
            if self.entries.borrow().get(&manifest.folder()).is_some_and(|entry| entry.trouble.is_some()) {
                tracing::error!(space = manifest.namespace, reason, "a space cannot be opened; the others are served");
            }
        }
    }

    /// Closes the cache of a space that was open and has no client, and gives its host memory back.
    pub(super) async fn close_cache(&self, state: State) {
        let State::Open(space) = state else { return };
        if let Err(error) = space.cache.close().await {
            tracing::warn!(%error, space = space.namespace, "the cache of a space that is removed or opened anew");
        }
        self.host.give_back(space.of(), space.host.bytes());
    }
}
