//! One pool of host memory, which moves between spaces by use.
//!
//! The cache of a space has slots for all host memory that the space may ever have, and parks those that it does not
//! have now: the memory of a parked slot is the system's. To move memory, one cache parks slots, for which it evicts
//! its coldest blocks, and another puts slots back into use. The ledger counts the bytes of both, so the floors and
//! ceilings of tenants hold as they do when a space is made, and all spaces together never have more than the service.
//!
//! A space is given more when it has evicted as many bytes as a step of the pool: what no space has, or a step of the
//! space that makes the least use of its memory, if that is less than half of its own use. The use is the bytes that
//! are served out of host memory, over the bytes that the space has, averaged over the last moves. Evicted bytes count
//! a sixteenth: an idle space gives its memory to one that only scans, but one with hits does not.

use std::{rc::Rc, time::Duration};

use super::{Entry, Space, Spaces, files, host::HostShare};
use crate::{protocol::Failure, shares::SpaceOf};

/// What moves at a time: this part of the service's host memory.
const STEPS: u64 = 16;
/// How many times the use of its memory must be that of the space that gives some.
const MORE_USE: f64 = 2.0;
/// How often a space that is opened asks others for slots that are pinned by movements, and the pause between.
const CLAIMS: u32 = 50;
const CLAIM_PAUSE: Duration = Duration::from_millis(2);

/// Host memory for a space that is being opened, bytes.
pub(super) struct Grant {
    /// Its own already: what no space had.
    pub(super) bytes: u64,
    /// What others are to give up for it.
    pub(super) missing: u64,
    /// It needs one at least.
    slot_bytes: u64,
    /// It can do without a part of what is missing.
    is_lenient: bool,
    /// What is reserved for it.
    pub(super) floor: u64,
}

/// What others give up for a space, bytes.
#[derive(Default)]
struct Gifts {
    /// Those that make the least use of their memory first.
    of_spaces: Vec<(Rc<Space>, u64)>,
    /// Of kept files that no client holds: what the spaces cannot give.
    of_files: u64,
}

impl Gifts {
    fn total(&self) -> u64 {
        self.of_spaces.iter().map(|(_, bytes)| bytes).sum::<u64>() + self.of_files
    }
}

impl Grant {
    /// All that it is to have.
    pub(super) fn total(&self) -> u64 {
        self.bytes + self.missing
    }

    /// Of what was missing so much was had: with that it is the space's for good.
    pub(super) fn keep(&mut self, claimed: u64) {
        self.bytes += claimed;
        (self.missing, self.floor) = (0, self.bytes);
    }
}

impl Spaces {
    /// What moves at a time, bytes.
    fn step(&self, slot_bytes: u64) -> u64 {
        (self.config.host_bytes / STEPS).max(slot_bytes)
    }

    /// After movements of a space: gives it more memory if it has evicted much and others use theirs less.
    pub(crate) fn balance(self: &Rc<Self>, space: &Rc<Space>) {
        let share = &space.host;
        let step = self.step(share.slot_bytes);
        // A cache that parks no slots, as that of a space for a GPU, has no use for more than it was opened with.
        let may_grow = self.config.move_host && space.cache.config().host.parks;
        if !may_grow || self.moving.get() || share.evicted(&space.cache) < step {
            return;
        }
        self.open_spaces().iter().for_each(|space| space.host.note(&space.cache));
        share.asked.set(share.seen.get().1);
        let wanted = step.min(self.host.most(space.of()).saturating_sub(share.bytes()));
        if wanted < share.slot_bytes {
            return;
        }
        let donor = match self.host.available(space.of()) < share.slot_bytes {
            // The space itself is none of them: its use is not twice its own.
            true => match self.donor(space.of(), |donor| donor.used() * MORE_USE < share.used()) {
                None => return,
                donor => donor,
            },
            false => None,
        };
        self.moving.set(true);
        tokio::task::spawn_local(Rc::clone(self).give(donor, Rc::clone(space), wanted));
    }

    /// Gives a space memory: a donor's, or what no space has.
    async fn give(self: Rc<Self>, donor: Option<Rc<Space>>, space: Rc<Space>, wanted: u64) {
        let wanted = match donor {
            Some(donor) => self.shrink(&donor, wanted).await,
            None => wanted,
        };
        let bytes = wanted.min(self.host.available(space.of()));
        if bytes > 0 && self.host.take(space.of(), bytes).is_ok() {
            let wanted = space.host.bytes() + bytes;
            let given = space.host.resize(&space.cache, wanted, &*self.system).await;
            // It may have no slots for all of it.
            self.host.give_back(space.of(), wanted - given);
        }
        drop(space);
        self.moved();
    }

    /// Takes up to `wanted` spare bytes of a space; how many it took.
    async fn shrink(&self, donor: &Space, wanted: u64) -> u64 {
        let before = donor.host.bytes();
        let wanted = before - wanted.min(donor.host.spare());
        let taken = before - donor.host.resize(&donor.cache, wanted, &*self.system).await;
        self.host.give_back(donor.of(), taken);
        taken
    }

    /// The space that uses its memory least, of those whose memory `space` may have.
    fn donor(&self, space: SpaceOf<'_>, may_give: impl Fn(&HostShare) -> bool) -> Option<Rc<Space>> {
        let gives = |donor: &Rc<Space>| {
            let share = &donor.host;
            let step = self.step(share.slot_bytes).min(share.spare());
            step > 0 && may_give(share) && self.host.may_move(donor.of(), space, step)
        };
        let spaces = self.open_spaces().into_iter().filter(gives);
        spaces.min_by(|one, other| one.host.used().total_cmp(&other.host.used()))
    }

    /// Sets host memory aside for a space that is opened: `wanted` bytes, or all that no space has, and a step at
    /// least, where that is 0. Says what is missing of it; no space and no file has given up any yet.
    pub(super) fn reserve_host(&self, space: SpaceOf<'_>, slot_bytes: u64, wanted: u64) -> Result<Grant, Failure> {
        let least = if wanted == 0 { self.step(slot_bytes).min(self.host.most(space)) } else { wanted };
        let available = self.host.available(space);
        let bytes = if wanted == 0 { available } else { available.min(wanted) };
        let missing = self.gifts(space, least.saturating_sub(bytes)).total();
        let total = bytes + missing;
        if total == 0 || total < wanted {
            return Err(self.host.refusal(total, wanted));
        }
        if bytes > 0 {
            self.host.take(space, bytes)?;
        }
        let floor = if wanted == 0 && self.config.move_host { least.min(total) } else { total };
        Ok(Grant { bytes, missing, slot_bytes, is_lenient: wanted == 0, floor })
    }

    /// Takes what is missing of a grant from spaces that have more than they reserved, and from kept files, and gives
    /// it to the space. Less than that where movements pin their slots all the while: it comes later, by use.
    ///
    /// # Errors
    /// [`ServiceFault::Capacity`](kvhoist::ServiceFault::Capacity) if another space was faster. Then no space and no
    /// file has given up any.
    pub(super) async fn claim_host(&self, space: SpaceOf<'_>, grant: &Grant) -> Result<u64, Failure> {
        if grant.missing == 0 {
            return Ok(0);
        }
        self.moves_end().await;
        let available = self.host.available(space).min(grant.missing);
        let gifts = self.gifts(space, grant.missing - available);
        let may_come = available + gifts.total();
        let least = if grant.is_lenient { grant.slot_bytes } else { grant.total() };
        if grant.bytes + may_come < least {
            return Err(self.host.refusal(grant.bytes + may_come, least));
        }
        self.moving.set(true);
        let mut claimed = self.take_up_to(space, grant.missing);
        for _ in 0..CLAIMS {
            let Gifts { of_spaces, of_files } = self.gifts(space, grant.missing - claimed);
            for (donor, bytes) in of_spaces {
                self.shrink(&donor, bytes).await;
                // At once: another attach takes what is free.
                claimed += self.take_up_to(space, grant.missing - claimed);
            }
            self.give_up_files(space, of_files).await;
            claimed += self.take_up_to(space, grant.missing - claimed);
            if claimed == grant.missing {
                break;
            }
            tokio::time::sleep(CLAIM_PAUSE).await;
        }
        self.moved();
        if grant.bytes + claimed < grant.slot_bytes {
            self.host.give_back(space, claimed);
            return Err(self.host.refusal(grant.bytes + claimed, grant.slot_bytes));
        }
        Ok(claimed)
    }

    /// Takes host memory for a space as far as it may have any; how many bytes.
    fn take_up_to(&self, space: SpaceOf<'_>, wanted: u64) -> u64 {
        match wanted.min(self.host.available(space)) {
            0 => 0,
            bytes => self.host.take(space, bytes).unwrap_or(0),
        }
    }

    /// What others give up for `space` to have `wanted` bytes more. As much as can be had, where that is less.
    fn gifts(&self, space: SpaceOf<'_>, wanted: u64) -> Gifts {
        if wanted == 0 {
            return Gifts::default();
        }
        let mut donors = self.open_spaces();
        donors.sort_by(|one, other| one.host.used().total_cmp(&other.host.used()));
        let files = (files::tenant(), self.files.spare_bytes());
        let spare: Vec<_> = donors.iter().map(|donor| (donor.of(), donor.host.spare())).chain([files]).collect();
        let mut gifts = self.host.gifts(&spare, space, wanted);
        drop(spare);
        let of_files = gifts.pop().expect("one for each, the files last");
        Gifts { of_spaces: donors.into_iter().zip(gifts).filter(|(_, bytes)| *bytes > 0).collect(), of_files }
    }

    /// Waits until no memory moves.
    pub(super) async fn moves_end(&self) {
        while self.moving.get() {
            self.move_ended.notified().await;
        }
    }

    fn moved(&self) {
        self.moving.set(false);
        self.move_ended.notify_waiters();
    }

    pub(super) fn open_spaces(&self) -> Vec<Rc<Space>> {
        self.entries.borrow().values().filter_map(Entry::space).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use kvhoist::{Config, DirectIo};
    use tokio::task::LocalSet;

    use super::*;
    use crate::{config::ServerConfig, spaces::Wanted, system::Machine};

    #[tokio::test]
    async fn memory_for_which_a_space_has_no_slots_stays_free() {
        let folder = tempfile::tempdir().expect("a directory");
        let mut config = ServerConfig::new(folder.path().join("socket"));
        (config.host_bytes, config.move_host) = (1 << 20, false);
        config.cache = Config::default().direct_io(DirectIo::Prefer);
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"));
        let run = async {
            let wanted = Wanted { host_bytes: 64 << 10, ..Wanted::of_tests(4096) };
            let space = spaces.attach(wanted).await.expect("opened");
            assert!(!space.cache.config().host.parks, "it has the slots that it asked for");
            let before = spaces.left();
            Rc::clone(&spaces).give(None, Rc::clone(&space), 16 << 10).await;
            assert_eq!((space.host_bytes(), spaces.left()), (64 << 10, before));
            drop(space);
            spaces.close().await.expect("closed");
        };
        LocalSet::new().run_until(run).await;
    }
}
