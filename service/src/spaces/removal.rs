//! The removal of a space.

use std::rc::Rc;

use tokio::sync::oneshot;

use super::{Entry, Spaces, State, Wanted, ending, manifest::SpaceManifest};
use crate::{error::ServiceFault, peers::own_uid, protocol::Failure};

impl Spaces {
    /// Removes a space without clients: its cache, its stores, its share of disk and memory. A call during the removal
    /// waits for its end too.
    ///
    /// # Cancel safety
    /// A removal that has begun continues to its end. Clients that attach meanwhile are refused.
    pub(crate) async fn remove(self: &Rc<Self>, wanted: Wanted) -> Result<(), Failure> {
        self.moves_end().await;
        let ended = self.begin_removal(wanted)?;
        ended.await.unwrap_or_else(|_| Err(ending()))
    }

    /// Begins to remove a space, in a task of its own: the caller may go.
    fn begin_removal(self: &Rc<Self>, wanted: Wanted) -> Result<oneshot::Receiver<Result<(), Failure>>, Failure> {
        let Wanted { namespace, uid, shared, block_bytes, .. } = wanted;
        let manifest = SpaceManifest::new(namespace, uid, shared, block_bytes);
        let mut entries = self.entries.borrow_mut();
        // One whose file is damaged is known by the name of its folder only, which says nothing about its user.
        let is_unknown = |entry: &Entry| entry.manifest.block_bytes == 0 && block_bytes == 0;
        let by_folder = entries.get(&manifest.namespace).is_some_and(is_unknown);
        let folder = if by_folder { manifest.namespace.clone() } else { manifest.folder() };
        if !entries.contains_key(&folder) {
            return Err(Failure::new(
                ServiceFault::Argument,
                none_such(&manifest, entries.values().map(|entry| &entry.manifest)),
            ));
        }
        let entry = entries.get_mut(&folder).expect("it was found above, and the entries are borrowed since");
        // The folder of a space that is not shared is named after its user.
        let is_its = uid == entry.manifest.uid || entry.manifest.block_bytes == 0 && !shared && !by_folder;
        if !is_its && uid != own_uid() {
            let maker = match by_folder {
                true => String::new(),
                false => format!("{}, who made it, or ", entry.manifest.uid),
            };
            let text = format!("space: found user {uid}, expected {maker}the service's user, {}", own_uid());
            return Err(Failure::new(ServiceFault::Permission, text));
        }
        if entry.is_attached() {
            let text = "busy: clients are attached to the space; end them first, then remove it";
            return Err(Failure::new(ServiceFault::Busy, text));
        }
        if let Some(ended) = entry.removal() {
            return Ok(ended);
        }
        let (sender, receiver) = oneshot::channel();
        let before = std::mem::replace(&mut entry.state, State::Removing(vec![sender]));
        tokio::task::spawn_local(Rc::clone(self).finish_removal(folder, before));
        Ok(receiver)
    }

    /// Removes a space, and answers the waiters.
    async fn finish_removal(self: Rc<Self>, folder: String, before: State) {
        let refused = match &before {
            State::Refused(failure) => Some(failure.clone()),
            _ => None,
        };
        self.close_cache(before).await;
        let removed = self.remove_folders(&folder).await.map_err(|error| Failure::from(&error));
        let mut entries = self.entries.borrow_mut();
        let entry = entries.get_mut(&folder).expect("entries that are being removed stay");
        let State::Removing(waiters) =
            std::mem::replace(&mut entry.state, refused.map_or(State::Closed, State::Refused))
        else {
            unreachable!("only this call ends the removal");
        };
        if removed.is_ok()
            && let Some(entry) = entries.remove(&folder)
        {
            self.disk.give_back(entry.manifest.of(), entry.manifest.capacity_bytes);
        }
        for waiter in waiters {
            drop(waiter.send(removed.clone()));
        }
    }

    /// Waits until no space is being removed.
    pub(super) async fn removals_end(&self) {
        let begun: Vec<_> = self.entries.borrow_mut().values_mut().filter_map(Entry::removal).collect();
        for ended in begun {
            // The client that asked for the removal has the result.
            drop(ended.await);
        }
    }
}

/// Why there is no such space to remove, with the spaces of that name that the caller may have meant.
fn none_such<'a>(wanted: &SpaceManifest, manifests: impl Iterator<Item = &'a SpaceManifest>) -> String {
    let of = |manifest: &SpaceManifest| {
        let whose = if manifest.shared { "that users share".into() } else { format!("of user {}", manifest.uid) };
        format!("{whose} with {}-byte blocks", manifest.block_bytes)
    };
    let named = manifests.filter(|manifest| manifest.namespace == wanted.namespace);
    let named: Vec<String> = named.map(|manifest| format!("one {}", of(manifest))).collect();
    let found = format!("space: found none of this name {}", of(wanted));
    if named.is_empty() {
        return found + "; `kvhoist status` lists them";
    }
    format!(
        "{found}, but {}, expected one of these: a user removes only its own, so ask as that user",
        named.join(" and ")
    )
}
