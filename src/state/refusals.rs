//! Stored blocks that the disk tier refused without an error to their callers.
//!
//! Writes without a waiter can fail too: write-backs, and writes whose store was dropped. Such a block is noted here
//! until it is written after all, is removed, or has been reported by a `sync` or the `close`. Each of these that is in
//! flight then reports it as well.

use std::collections::{BTreeMap, BTreeSet};

use crate::{block::BlockKey, error::Error};

/// Number of keys that are kept; further refusals are only counted, and reported even if the block is written later.
const KEYS_MAX: usize = 1 << 14;

/// A point in time: the number of the sync that began, or reported, then.
type Moment = u64;

/// Refused writes that a sync has still to report.
///
/// A refusal stays here after its first report, or the write of its block, while syncs are in flight that began before:
/// they cover the block as well.
#[derive(Default)]
pub(crate) struct Refusals {
    /// When a sync first reported the refusal of the block, or it was written, if either has happened.
    keys: BTreeMap<BlockKey, Option<Moment>>,
    /// When a sync first reported refusals whose keys are not kept.
    more: BTreeMap<Option<Moment>, u64>,
    last: Option<Error>,
    /// The beginnings of the syncs in flight.
    syncs: BTreeSet<Moment>,
    /// One of them has begun to flush.
    is_flushing: bool,
    now: Moment,
}

impl Refusals {
    /// Notes that the disk tier refused the block, because of `error`.
    pub(crate) fn add(&mut self, key: BlockKey, error: Error) {
        if self.keys.len() < KEYS_MAX || self.keys.contains_key(&key) {
            self.keys.insert(key, None);
        } else {
            *self.more.entry(None).or_default() += 1;
        }
        self.last = Some(error);
    }

    /// Forgets a block that is gone, or whose caller has the error.
    pub(crate) fn forget(&mut self, key: &BlockKey) {
        self.keys.remove(key);
    }

    /// Notes that a block is on disk after all. Once a sync has begun to flush, the syncs in flight report it all the
    /// same: the flush need not cover this write.
    pub(super) fn written(&mut self, key: &BlockKey) {
        if !self.is_flushing {
            self.keys.remove(key);
        } else if let Some(reported) = self.keys.get_mut(key) {
            self.now += 1;
            reported.get_or_insert(self.now);
        }
    }

    /// True while a sync is in flight, or the close.
    pub(super) fn is_sync_in_flight(&self) -> bool {
        !self.syncs.is_empty()
    }

    /// A sync has written what it covers, and flushes.
    pub(crate) fn flush_begins(&mut self) {
        self.is_flushing = !self.syncs.is_empty();
    }

    /// Begins a sync, or the close.
    pub(super) fn begin(&mut self) -> Moment {
        self.now += 1;
        self.syncs.insert(self.now);
        self.now
    }

    /// Ends the sync that began then.
    pub(super) fn end(&mut self, began: Moment) {
        self.syncs.remove(&began);
        self.is_flushing &= !self.syncs.is_empty();
        let first = self.syncs.first().copied();
        let is_owed = |reported: &Option<Moment>| reported.is_none_or(|at| first.is_some_and(|first| first < at));
        self.keys.retain(|_, reported| is_owed(reported));
        self.more.retain(|reported, _| is_owed(reported));
    }

    /// The report of the sync that began then: the number of refusals, and the reason of the last one.
    pub(super) fn report(&mut self, began: Moment) -> Option<(u64, Error)> {
        self.now += 1;
        let now = self.now;
        let is_mine = |reported: &Option<Moment>| reported.is_none_or(|at| began < at);
        let keys = self.keys.values_mut().filter(|reported| is_mine(reported));
        let keys = keys.map(|reported| *reported = reported.or(Some(now))).count() as u64;
        if let Some(count) = self.more.remove(&None) {
            self.more.insert(Some(now), count);
        }
        let more: u64 = self.more.iter().filter(|(reported, _)| is_mine(reported)).map(|(_, count)| count).sum();
        self.end(began);
        self.last.clone().filter(|_| keys + more > 0).map(|last| (keys + more, last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&n.to_le_bytes());
        BlockKey::new(bytes)
    }

    fn refused(refusals: &mut Refusals) -> u64 {
        let began = refusals.begin();
        refusals.report(began).map_or(0, |(count, _)| count)
    }

    #[test]
    fn refusals_past_the_limit_are_counted() {
        let mut refusals = Refusals::default();
        let limit = KEYS_MAX as u32;
        (0..limit + 2).for_each(|n| refusals.add(key(n), Error::Closed));
        refusals.add(key(0), Error::Closed);
        refusals.forget(&key(1));
        assert_eq!(refused(&mut refusals), u64::from(limit) + 1);
        assert_eq!(refused(&mut refusals), 0, "they were reported");
        assert!(refusals.keys.is_empty() && refusals.more.is_empty(), "nobody is owed a report");
    }

    #[test]
    fn what_was_told_is_not_reported() {
        let mut refusals = Refusals::default();
        refusals.add(key(1), Error::Closed);
        refusals.forget(&key(1));
        assert_eq!(refused(&mut refusals), 0);
    }

    #[test]
    fn a_sync_reports_what_was_written_during_its_flush() {
        let mut refusals = Refusals::default();
        refusals.add(key(1), Error::Closed);
        refusals.add(key(2), Error::Closed);
        let [first, second] = [refusals.begin(), refusals.begin()];
        refusals.written(&key(2));
        refusals.flush_begins();
        refusals.written(&key(1));
        assert_eq!(refused(&mut refusals), 0, "it began after the write, and flushes it");
        assert_eq!(refusals.report(first).map(|(count, _)| count), Some(1));
        assert_eq!(refusals.report(second).map(|(count, _)| count), Some(1));
        refusals.add(key(2), Error::Closed);
        refusals.written(&key(2));
        assert!(refusals.keys.is_empty(), "nobody is owed a report");
    }

    #[test]
    fn every_sync_that_was_under_way_at_the_first_report_reports_too() {
        let mut refusals = Refusals::default();
        (0..=KEYS_MAX as u32).for_each(|n| refusals.add(key(n), Error::Closed));
        let all = KEYS_MAX as u64 + 1;
        let [first, second, dropped] = [refusals.begin(), refusals.begin(), refusals.begin()];
        assert_eq!(refusals.report(second).map(|(count, _)| count), Some(all));
        assert_eq!(refused(&mut refusals), 0, "it began after the report");
        refusals.end(dropped);
        refusals.add(key(0), Error::Closed);
        refusals.forget(&key(1));
        assert_eq!(refusals.report(first).map(|(count, _)| count), Some(all - 1));
        assert!(refusals.keys.is_empty() && refusals.more.is_empty(), "nobody is owed a report");
    }
}
