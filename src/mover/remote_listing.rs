//! What the remote store has: listed when the cache is opened, and at an interval for what other nodes do.

use std::{rc::Rc, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use tokio::time::{sleep, timeout};

use super::{
    Mover,
    remote::{of_store, repeated},
};
use crate::{
    device::CopyEngine,
    io::Storage,
    remote::{Object, Remote, RemoteError},
    shield::caught,
};

/// Objects that one request deletes: what S3 takes.
const DELETED_PER_REQUEST: usize = 1000;

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Lists the store now and at the interval, until it is dropped.
    pub(super) async fn remote_listing_loop(self: Rc<Self>, remote: Arc<Remote>) {
        let interval = Duration::from_secs(self.shared.config.remote.interval_s);
        loop {
            if let Err(error) = of_store(self.list_remote(&remote)).await {
                self.shared.metrics.remote_errors.add(1);
                // A subscriber that panics must not end this task.
                _ = caught(|| tracing::warn!(%error, "the remote store was not listed: new blocks stay unknown"));
            }
            sleep(remote.jittered(interval)).await;
        }
    }

    /// Enters the objects that are new, and forgets those that are gone.
    async fn list_remote(&self, remote: &Remote) -> Result<(), RemoteError> {
        let (listing, prefix) = (remote.begin_listing(), remote.space.prefix());
        let in_flight = remote.capabilities().requests_in_flight.max(1) as usize;
        let bytes_max = self.shared.config.remote.bytes;
        let (mut after, mut listed): (Option<String>, Vec<Object>) = (None, Vec::new());
        loop {
            let list = repeated(remote, || remote.store().list(&prefix, after.as_deref()));
            let page = self.in_time(list).await?;
            let new = page.objects.iter().filter(|object| !remote.see(&object.name, listing));
            stream::iter(new).for_each_concurrent(in_flight, |object| self.enter_object(remote, object)).await;
            if bytes_max.is_some() {
                listed.extend(page.objects);
            }
            // A store that does not go on would be listed for ever.
            match page.next.filter(|next| after.as_ref().is_none_or(|after| next > after)) {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        remote.forget_unseen(listing);
        match bytes_max {
            Some(bytes_max) => self.delete_oldest(remote, listed, bytes_max).await,
            None => Ok(()),
        }
    }

    /// Deletes the oldest objects of a listing until the others have `bytes_max`. A reader of one finds nothing, which
    /// is a miss; of several nodes that delete, each may delete what another has deleted.
    async fn delete_oldest(&self, remote: &Remote, mut listed: Vec<Object>, bytes_max: u64) -> Result<(), RemoteError> {
        let mut bytes: u64 = listed.iter().map(|object| object.bytes).sum();
        listed.sort_unstable_by(|one, other| (one.modified, &one.name).cmp(&(other.modified, &other.name)));
        let mut names = Vec::new();
        for object in listed {
            if bytes <= bytes_max {
                break;
            }
            bytes -= object.bytes;
            names.push(object.name);
        }
        for names in names.chunks(DELETED_PER_REQUEST) {
            names.iter().for_each(|name| remote.forget_object(name));
            self.in_time(repeated(remote, || remote.store().delete(names))).await?;
            self.shared.metrics.remote_deleted.add(names.len() as u64);
        }
        Ok(())
    }

    /// Reads the table of an object, and enters it. One that is not what it should be is passed over.
    pub(super) async fn enter_object(&self, remote: &Remote, object: &Object) {
        if remote.is_full() {
            return self.shared.metrics.remote_unlisted.add(1);
        }
        match self.in_time(read_table(remote, object)).await {
            Ok(true) | Err(RemoteError::NotFound) => {}
            Ok(false) => self.shared.metrics.remote_unlisted.add(1),
            Err(error @ RemoteError::Invalid { .. }) => {
                self.shared.metrics.remote_invalid.add(1);
                tracing::warn!(%error, object = object.name, "an object of the remote store is passed over");
            }
            Err(_) => self.shared.metrics.remote_errors.add(1),
        }
    }

    /// A request with its repetitions, within the deadline.
    pub(super) async fn in_time<T>(
        &self,
        request: impl Future<Output = Result<T, RemoteError>>,
    ) -> Result<T, RemoteError> {
        let deadline = Duration::from_millis(self.shared.config.remote.deadline_ms);
        let late = |_| RemoteError::Unavailable(format!("no answer within {deadline:?} (`remote_deadline_ms`)"));
        timeout(deadline, request).await.map_err(late)?
    }
}

/// Reads the table of an object, and enters it; false if there is no room.
async fn read_table(remote: &Remote, object: &Object) -> Result<bool, RemoteError> {
    let Some(bytes) = remote.space.table_bytes(object.bytes) else {
        let expected = format!("whole blocks of {} bytes behind their table", remote.space.block_bytes);
        return Err(RemoteError::Invalid { found: format!("an object of {} bytes", object.bytes), expected });
    };
    let parts = repeated(remote, || remote.store().read(&object.name, 0..bytes)).await?;
    let table = remote.space.decode(&object.name, &parts.concat(), object.bytes)?;
    Ok(remote.enter(&object.name, table))
}
