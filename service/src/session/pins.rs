//! Blocks that a client pins in host memory.

use std::collections::HashSet;

use kvhoist::{BlockKey, Lease};
use tokio::task::yield_now;

use super::Session;
use crate::{
    error::ServiceFault,
    protocol::{Failure, Reply},
    spaces::Space,
};

/// Blocks that are let go in one turn, but for those of one request.
pub(super) const UNPINNED_PER_TURN: usize = 256;

impl Session {
    /// Pins blocks in host memory for the client, each once, as far as they are there and the space has room for pins.
    pub(super) fn pin(&mut self, id: u64, most: u32, keys: &[BlockKey]) -> Result<Reply, Failure> {
        let (Some((space, transfers)), false) = (&self.attached, self.pinned.contains_key(&id)) else {
            let text = format!("request id: found {id}, which pins blocks, expected another one");
            return Err(Failure::new(ServiceFault::Argument, text));
        };
        let room = space.room_for_pins().min(most as usize);
        let mut seen = HashSet::new();
        let keys = keys.iter().filter(|key| seen.insert(*key));
        let leases = keys.filter_map(|key| transfers.cache().lease(key).transpose()).take(room);
        let leases = leases.collect::<Result<Vec<Lease>, _>>().map_err(|error| Failure::from(&error))?;
        let count = leases.len();
        if count > 0 {
            space.pinned(count);
            self.pinned.insert(id, leases);
        }
        Ok(Reply::Count(count as u32))
    }

    /// Lets go of what a request has pinned; returns how many blocks that are.
    pub(super) fn unpin(&mut self, id: u64) -> usize {
        let Some((space, _)) = &self.attached else { return 0 };
        let count = self.pinned.remove(&id).map_or(0, |leases| leases.len());
        space.unpinned(count);
        count
    }

    /// Lets go of all that the client has pinned. Other sessions have their turns in between.
    pub(super) async fn unpin_all(&mut self, space: &Space) {
        let mut leases = std::mem::take(&mut self.pinned).into_values().flatten();
        loop {
            let count = leases.by_ref().take(UNPINNED_PER_TURN).map(drop).count();
            space.unpinned(count);
            if count < UNPINNED_PER_TURN {
                return;
            }
            yield_now().await;
        }
    }
}
