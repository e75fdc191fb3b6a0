//! Takes a tier out of service, or the cache.

use std::{io, sync::Arc};

use super::{Failures, Health, Shared, requests::Request};
use crate::{
    block::{FileId, OpKind, Tier},
    error::Error,
    shield::log,
};

/// Copies that are dropped under one lock: some tens of microseconds.
const DROPPED_PER_LOCK: usize = 256;

impl Shared {
    /// Refuses every call from now on, and the requests for slots that may never become free. Those of movements that a
    /// write follows wait on, up to their deadline.
    pub(crate) fn close(self: &Arc<Self>) {
        self.close_rooms();
        let mut state = self.lock();
        state.closed = true;
        let files = std::mem::take(&mut state.files);
        let mut requests = std::mem::take(&mut state.slot_requests);
        let is_refused = |request: &Request| request.movement.is_none_or(|(key, to)| !state.leads_to_write(&key, to));
        let refused = [Tier::Device, Tier::Host].map(|tier| requests[tier as usize].take(is_refused));
        state.slot_requests = requests;
        drop(state);
        drop(files);
        refused.into_iter().for_each(|requests| requests.refuse(&Error::Closed));
    }

    /// Whether every call is refused, or an invariant is broken.
    pub(crate) fn has_ended(self: &Arc<Self>) -> bool {
        self.lock_unless_broken().is_none_or(|state| state.closed)
    }

    /// Takes the disk tier out of service. Host and device keep serving.
    pub(crate) fn retire_disk(self: &Arc<Self>, reason: String) {
        self.lower_service(Health::Retired(reason));
    }

    /// Lets the disk tier take no more blocks. It serves those that it has.
    pub(crate) fn refuse_writes(self: &Arc<Self>, reason: String) {
        self.lower_service(Health::ReadOnly(reason));
    }

    /// Takes the device tier out of service: its blocks cannot be read any more. Host and disk keep serving. True if
    /// its [copies](Self::drop_device_copies) are to be dropped.
    #[must_use = "the copies keep their entries in the index"]
    pub(crate) fn retire_device(self: &Arc<Self>, reason: String) -> bool {
        let mut state = self.lock();
        if !state.device_service.lower(Health::Retired(reason.clone())) {
            return false;
        }
        let refused = state.slot_requests[Tier::Device as usize].take_all();
        let error = state.check_service(Tier::Device);
        drop(state);
        refused.refuse(&error.expect_err("the device tier was just taken out of service"));
        log(|| tracing::error!(reason, "the device tier is out of service"));
        true
    }

    /// Drops every copy in the device tier that has no reader, a few in each step of the iterator: the index may be
    /// large. The last unpin drops each of the others, also of those that are published later.
    pub(crate) fn drop_device_copies(self: &Arc<Self>) -> impl Iterator<Item = ()> {
        let (mut next, mut keys) = (Some(0), Vec::new());
        std::iter::from_fn(move || {
            if keys.is_empty() {
                // The device is the fastest tier of every block that has a copy there.
                let visit = |key, tier| keys.extend((tier == Tier::Device).then_some(key));
                next = self.lock().index.visit_page(next?, visit);
            }
            let mut state = self.lock();
            for key in keys.drain(..keys.len().min(DROPPED_PER_LOCK)) {
                let id = state.index.find(&key);
                if let Some(slot) = id.and_then(|id| state.index.drop_copy(id, Tier::Device)) {
                    state.push_free(Tier::Device, slot);
                }
            }
            Some(())
        })
    }

    /// Lowers the service of the disk tier; it never rises again.
    fn lower_service(self: &Arc<Self>, to: Health) {
        let mut state = self.lock();
        let lower = state.disk_service.lower(to.clone());
        let refused = state.slot_requests[Tier::Disk as usize].take_all();
        let error = state.check_service(Tier::Disk);
        drop(state);
        refused.refuse(&error.expect_err("the disk tier takes no blocks by now"));
        if lower {
            let reason = to.detail();
            let what =
                if to.reads() { "the disk tier takes no more blocks" } else { "the disk tier is out of service" };
            log(|| tracing::error!(reason, "{what}"));
        }
    }

    /// Counts the end of an operation on a file, and lowers the service after too many failures in a row.
    pub(crate) fn account<T>(
        self: &Arc<Self>,
        failures: &[Failures],
        file: FileId,
        kind: OpKind,
        result: &io::Result<T>,
    ) {
        let Some(count) = failures[usize::from(file.0)].count(kind, result) else { return };
        if count < self.config.disk.failures_max {
            return;
        }
        let path = self.config.disk.paths[usize::from(file.0)].path.display();
        let error = result.as_ref().err().expect("a failure was counted");
        let reason = format!("{count} {}s of {path} failed in a row, the last with: {error}", kind.name());
        match kind {
            OpKind::Read => self.retire_disk(reason),
            OpKind::Write | OpKind::Sync => self.lower_service(Health::ReadOnly(reason)),
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::sync::Arc;

    use super::DROPPED_PER_LOCK;
    use crate::{
        block::{BlockKey, Route, Tier},
        config::{Config, DiskPath, WritePolicy},
        error::Error,
        index::EntryId,
        state::{Class, Committed, DiskWrite, Few, Filling, Known, Pin, Shared, locks_taken, verify::Fault},
    };

    #[test]
    fn a_device_tier_that_goes_out_of_service_is_emptied_in_steps() {
        const BLOCKS: usize = 3 * DROPPED_PER_LOCK;
        let config = Config::default().block_bytes(4096).host_blocks(2).device_blocks(BLOCKS as u32);
        let shared = Shared::of_test(config);
        let mut state = shared.lock();
        for n in 0..BLOCKS as u64 {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&n.to_le_bytes());
            let id = state.index.insert(BlockKey::new(key), None);
            let slot = state.pop_free(Tier::Device).expect("a slot for each block");
            assert!(state.index.begin_fill(id, Tier::Device) && state.index.complete_fill(id, Tier::Device, slot));
        }
        drop(state);
        let before = locks_taken();
        assert!(shared.retire_device("a test retires it".into()), "it was in service");
        assert_eq!(locks_taken() - before, 1, "no copy is dropped yet");
        let (mut steps, mut dropped) = (0, 0);
        for () in shared.drop_device_copies() {
            let free = shared.lock().free_slots(Tier::Device);
            assert!(free - dropped <= DROPPED_PER_LOCK, "{} in one step", free - dropped);
            (steps, dropped) = (steps + 1, free);
        }
        assert!(dropped == BLOCKS && steps >= 3, "{dropped} in {steps} steps");
        assert!(!shared.retire_device("again".into()), "once");
    }

    #[test]
    fn a_movement_gives_no_waiter_a_block_that_was_removed_before_it_ended() {
        let shared = Shared::of_test(Config::default().block_bytes(4096).host_blocks(2).device_blocks(2));
        let key = BlockKey::new([7; 32]);
        let mut state = shared.lock();
        let id = state.index.insert(key, None);
        let slot = state.pop_free(Tier::Device).expect("a slot");
        assert!(state.index.begin_fill(id, Tier::Device) && state.index.complete_fill(id, Tier::Device, slot));
        state.flights.begin((&key, Tier::Device), id, Class::Awaited, Few::default(), true);
        let pin = state.pin(id, Tier::Device, Route::HostToDevice).expect("it has arrived");
        state.index.remove(id);
        // Who waits from here on wants what is stored after that.
        assert!(state.flights.join(&key, Tier::Device, 1).is_ok());
        let (answers, _) = state.end_flight(&key, Tier::Device, Ok(Some(pin)));
        let outcomes: Vec<_> = answers.into_iter().map(|(_, outcome)| outcome).collect();
        assert!(matches!(outcomes[..], [Ok(None)]));
        drop(state);
        assert_eq!(shared.lock().free_slots(Tier::Device), 2);
    }

    fn with_disk(write_policy: WritePolicy) -> Arc<Shared> {
        let disks = vec![DiskPath::with_blocks("nowhere", 8)];
        Shared::of_test(Config::default().block_bytes(4096).host_blocks(4).disks(disks).write_policy(write_policy))
    }

    /// A block that is on disk.
    fn on_disk(shared: &Arc<Shared>, key: &BlockKey) -> EntryId {
        let mut state = shared.lock();
        let id = state.index.insert(*key, None);
        let filling = state.acquire(Tier::Disk).expect("a slot");
        assert!(state.begin_disk_write(id, &filling, Some(1)).is_some());
        assert!(state.end_disk_write(DiskWrite { id, filling }, None));
        id
    }

    /// A fetch of it, whose read hangs.
    fn begin_read(shared: &Arc<Shared>, key: &BlockKey, id: EntryId) -> (Pin, Filling) {
        let mut state = shared.lock();
        let filling = state.acquire(Tier::Host).expect("a slot");
        let pin = state.pin(id, Tier::Disk, Route::DiskToHost).expect("resident");
        assert!(state.index.begin_fill(id, Tier::Host));
        state.flights.begin((key, Tier::Host), id, Class::Awaited, Few::default(), true);
        (pin, filling)
    }

    fn store(shared: &Arc<Shared>, key: &BlockKey) -> Result<Committed, Error> {
        match shared.begin_store(key, None)? {
            (Known::Yes(committed), _) => Ok(committed),
            (Known::No, Some(filling)) => shared.commit(key, None, filling, 2),
            (Known::No | Known::Unproven, _) => panic!("there are four, and there was no earlier run"),
        }
    }

    #[test]
    fn a_store_is_refused_while_a_read_of_its_block_hangs_on_a_disk_that_went_out_of_service() {
        let (shared, key) = (with_disk(WritePolicy::WriteBack), BlockKey::new([7; 32]));
        let id = on_disk(&shared, &key);
        let (pin, filling) = begin_read(&shared, &key, id);
        assert!(store(&shared, &key).is_ok(), "the disk has it");
        shared.retire_disk("other reads failed".into());
        assert!(matches!(store(&shared, &key), Err(Error::Unavailable { tier: "disk", .. })));
        // The drive gives the read up.
        shared.unlink(pin, filling, Fault::Unreadable);
        drop(shared.lock().end_flight(&key, Tier::Host, Ok(None)));
        assert_eq!(shared.lock().free_slots(Tier::Host), 4);
        assert!(matches!(store(&shared, &key), Ok(Committed::Done)), "host memory has it from here on");
        assert_eq!(shared.match_len(&[key]), 1);
    }

    #[test]
    fn a_store_begins_no_write_that_the_disk_would_not_take() {
        let (shared, key) = (with_disk(WritePolicy::WriteThrough), BlockKey::new([7; 32]));
        shared.refuse_writes("a test makes it read-only".into());
        for _ in 0..2 {
            let Ok(Committed::Wait(mut refused)) = store(&shared, &key) else { panic!("its caller gets the error") };
            let stored = refused.try_recv().expect("at once").err().expect("on no disk");
            assert!(matches!(stored, Error::Unavailable { tier: "disk", .. }), "{stored:?}");
            assert!(!shared.lock().flights.any(), "nothing has to be ended");
            shared.forget_reported_one(&key, &stored);
        }
        assert_eq!((shared.match_len(&[key]), shared.metrics.writes_refused.get()), (1, 2), "host memory has it");
        assert!(shared.begin_report().report().is_ok(), "its caller was told");
        drop(store(&shared, &key));
        assert!(shared.begin_report().report().is_err(), "nobody was told");
    }

    #[test]
    fn a_copy_on_a_disk_that_is_out_of_service_is_none() {
        for policy in [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack] {
            let (shared, key) = (with_disk(policy), BlockKey::new([7; 32]));
            on_disk(&shared, &key);
            assert!(matches!(store(&shared, &key), Ok(Committed::Done)));
            shared.retire_disk("a test retires it".into());
            let stored = store(&shared, &key);
            let is_refused = matches!(stored, Err(Error::Unavailable { tier: "disk", .. }));
            assert_eq!(is_refused, policy == WritePolicy::WriteThrough, "{policy:?}");
            assert_eq!(shared.match_len(&[key]), 1, "host memory has it");
            let reported = shared.begin_report().report();
            assert_eq!(reported.is_err(), policy == WritePolicy::WriteBack, "{policy:?}: by a sync: {reported:?}");
        }
    }
}
