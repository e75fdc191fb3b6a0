//! The removal of a space.

use std::{path::PathBuf, rc::Rc};

use super::{Spaces, State, Wanted, deed::Deed};
use crate::{
    error::ServiceFault,
    service::{peers::own_uid, protocol::Failure},
};

impl Spaces {
    /// Removes a space without clients: its cache, its stores, its share of disk and memory.
    ///
    /// # Cancel safety
    /// Clients that attach to it are refused until it is removed; call again.
    pub(in crate::service) async fn remove(&self, wanted: Wanted) -> Result<(), Failure> {
        self.moves_end().await;
        let Wanted { namespace, uid, shared, block_bytes, .. } = wanted;
        let deed = Deed { namespace, uid, shared, block_bytes, capacity_bytes: 0 };
        let folder = deed.folder();
        let space = {
            let mut entries = self.entries.borrow_mut();
            let Some(entry) = entries.get_mut(&folder) else {
                let whose = if shared { "that users share" } else { "of this user" };
                let text = format!("space: found none {whose} with this name and {block_bytes} bytes a block");
                return Err(Failure::new(ServiceFault::Argument, text + "; `kvhoist status` lists them"));
            };
            if uid != entry.deed.uid && uid != own_uid() {
                let maker = entry.deed.uid;
                let text = format!("space: found user {uid}, expected {maker}, who made it, or the service's user");
                return Err(Failure::new(ServiceFault::Permission, text));
            }
            let attached = match &entry.state {
                // The entry has one, each session another.
                State::Open(space) => Rc::strong_count(space) > 1,
                State::Opening(waiters) => !waiters.is_empty(),
                State::Closed => false,
            };
            if attached {
                let text = "busy: clients are attached to the space; end them first, then remove it";
                return Err(Failure::new(ServiceFault::Busy, text));
            }
            match std::mem::replace(&mut entry.state, State::Opening(Vec::new())) {
                State::Open(space) => Some(space),
                _ => None,
            }
        };
        if let Some(space) = space {
            if let Err(error) = space.cache.close().await {
                tracing::warn!(%error, "the cache of a space that is removed");
            }
            self.host.give_back(&space.namespace, space.host.bytes());
        }
        // The first path has the file that makes it a space: last.
        let folders: Vec<PathBuf> = self.config.paths.iter().rev().map(|path| path.join(&folder)).collect();
        let removed = self.system.remove_space(folders).await.map_err(|error| Failure::from(&error));
        let mut entries = self.entries.borrow_mut();
        let Some(entry) = entries.get_mut(&folder) else { return removed };
        if let State::Opening(waiters) = std::mem::replace(&mut entry.state, State::Closed) {
            let again = Failure::new(ServiceFault::Busy, "the space was just removed; attach again to make it anew");
            waiters.into_iter().for_each(|waiter| drop(waiter.send(Err(again.clone()))));
        }
        if removed.is_ok()
            && let Some(entry) = entries.remove(&folder)
        {
            self.disk.give_back(&entry.deed.namespace, entry.deed.capacity_bytes);
        }
        removed
    }
}
