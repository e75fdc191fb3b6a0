//! Who lends memory that blocks are written from in place, and what came of it.
//!
//! Only the lender keeps its memory unchanged while a block is stored from it. If it does not, the checksum and the
//! bytes on disk differ, and neither the drive nor another lender is to blame. So a block that was never read back
//! since it was written in place counts against its lender, and not against the drive ([`Shared::unlink`]). After
//! [`CHANGED_MAX`] such blocks the lender's stores are copied first: then a difference is the drive's.
//!
//! [`Shared::unlink`]: super::Shared::unlink

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{disk::Origin, sync::Mutex};

/// Blocks of one lender that came back changed, before its stores are copied.
pub(crate) const CHANGED_MAX: u32 = 16;

/// One who lends memory.
pub(crate) struct Lender {
    pub(crate) origin: Origin,
    /// For the log.
    pub(crate) name: String,
    changed: AtomicU32,
}

impl Lender {
    fn new(origin: Origin, name: String) -> Arc<Self> {
        Arc::new(Lender { origin, name, changed: AtomicU32::new(0) })
    }

    /// Whether blocks are stored from its memory in place.
    pub(crate) fn is_trusted(&self) -> bool {
        self.changed.load(Ordering::Relaxed) < CHANGED_MAX
    }
}

/// The lenders of a cache.
pub(crate) struct Lenders {
    /// Stands for all who lend memory for a call.
    pub(crate) of_lent: Arc<Lender>,
    table: Mutex<Table>,
}

struct Table {
    /// By number. Those that are gone stay until the next sweep.
    known: BTreeMap<u32, Weak<Lender>>,
    /// The number of the next one. None has one twice, so that no lender answers for another.
    next: u32,
    /// So many are swept.
    sweep_at: usize,
}

const SWEEP_MIN: usize = 64;

impl Lenders {
    pub(crate) fn new() -> Self {
        let of_lent = Lender::new(Origin::FIRST, "memory that was lent for a call".into());
        let first = Origin::FIRST.number();
        let known = BTreeMap::from([(first, Arc::downgrade(&of_lent))]);
        Lenders { of_lent, table: Mutex::new(Table { known, next: first + 1, sweep_at: SWEEP_MIN }) }
    }

    /// A new lender. After the last number they share one that nobody answers for.
    pub(crate) fn add(&self, name: String) -> Arc<Lender> {
        let mut table = self.table.lock();
        let Some(origin) = Origin::new(table.next) else { return Lender::new(Origin::UNKNOWN, name) };
        let lender = Lender::new(origin, name);
        if table.known.len() >= table.sweep_at {
            table.known.retain(|_, lender| lender.strong_count() > 0);
            table.sweep_at = SWEEP_MIN.max(2 * table.known.len());
        }
        let number = table.next;
        table.known.insert(number, Arc::downgrade(&lender));
        table.next += 1;
        lender
    }

    /// Counts a changed block of a lender. Returns the lender, if it is there yet, and whether that was its last block
    /// in place.
    pub(crate) fn blame(&self, origin: Origin) -> Option<(Arc<Lender>, bool)> {
        let lender = self.table.lock().known.get(&origin.number())?.upgrade()?;
        let before = lender.changed.fetch_add(1, Ordering::Relaxed);
        Some((lender, before + 1 == CHANGED_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lender_answers_for_its_own_blocks() {
        let lenders = Lenders::new();
        let [good, bad] = ["good", "bad"].map(|name| lenders.add(name.into()));
        for count in 1..=CHANGED_MAX {
            let (found, is_last) = lenders.blame(bad.origin).expect("there");
            assert!(Arc::ptr_eq(&found, &bad) && is_last == (count == CHANGED_MAX));
        }
        assert!(good.is_trusted() && !bad.is_trusted() && lenders.of_lent.is_trusted());
        let origin = bad.origin;
        drop(bad);
        assert!(lenders.blame(origin).is_none() && lenders.blame(Origin::UNKNOWN).is_none());
        // No number comes again, and those who are gone take no memory for ever.
        for _ in 0..10 * SWEEP_MIN {
            assert_ne!(lenders.add("passing".into()).origin, origin);
        }
        assert!(lenders.table.lock().known.len() <= SWEEP_MIN && good.is_trusted());
    }

    #[test]
    fn a_lender_past_the_last_number_is_unknown() {
        let lenders = Lenders::new();
        lenders.table.lock().next = Origin::LAST.number();
        assert_eq!(lenders.add("last".into()).origin, Origin::LAST);
        assert_eq!(lenders.add("late".into()).origin, Origin::UNKNOWN);
    }
}
