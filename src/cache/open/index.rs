//! The index of a cache that is opened: its memory, its policies, and what recovery enters.

use crate::{
    block::Tier,
    config::Config,
    disk::{DiskSlots, RecoveredRecord, format::record::Record},
    error::{Error, Result},
    index::{Index, Policy, Used},
    memory::huge,
};

/// An index without blocks, and with memory for the entries of all tiers: one that grows moves them under the lock.
pub(super) fn empty(seed: u64, config: &Config) -> Result<Index> {
    // Beside blocks in slots there are parents that are resident nowhere, of which there are no more; and one that is
    // about to be stored. What no block takes is address space. Where that is scarce, there is room for the usual.
    let slots = usize::try_from(config.slots_of_all_tiers()).unwrap_or(usize::MAX);
    let [most, usual] = [slots, slots / 16].map(|parents| slots.saturating_add(parents).saturating_add(1024));
    let reserved = |entries| {
        let mut index = Index::with_policies(seed, |tier| policy(config, tier));
        index.try_reserve(entries).map(|()| index)
    };
    let mut index = reserved(most).or_else(|_| reserved(usual)).map_err(|bytes| refused(config, bytes))?;
    for (start, len) in index.reserved() {
        huge::prefer(start, len);
    }
    Ok(index)
}

/// The error of memory for the index that the system refused.
pub(super) fn refused(config: &Config, bytes: usize) -> Error {
    Error::config(
        if config.disk.paths.is_empty() { "host_blocks" } else { "disks.blocks" },
        format!(
            "{} slots in all tiers, whose index takes {bytes} bytes of memory that the system refused",
            config.slots_of_all_tiers()
        ),
        "fewer slots, or a system with more memory",
    )
}

/// What a tier gives up first.
fn policy(config: &Config, tier: Tier) -> Policy {
    let slots = match tier {
        Tier::Device => config.device_slots(),
        Tier::Host => config.host_slots(),
        Tier::Disk => u32::try_from(config.disk_slots()).unwrap_or(u32::MAX),
        Tier::Remote => 0,
    };
    Policy::new(config.eviction_policy, tier == config.last_tier(), slots)
}

/// Enters a record that recovery found in the index and in the books of the slots.
pub(super) fn restore(index: &mut Index, slots: &mut DiskSlots, record: &RecoveredRecord) {
    let RecoveredRecord { slot, record: Record { key, parent, last_use, uses, .. } } = *record;
    let used = Used { last: last_use, uses };
    let id = match index.restore(key, parent, Tier::Disk, slot, used) {
        Ok(id) => id,
        // Of two records of one key the newer counts; the slot of the other is free, and its record is to be cleared.
        Err(known) => {
            let other = index.slot(known, Tier::Disk).expect("that copy is why it was refused");
            if slots.meta(other).is_none_or(|meta| meta.generation >= record.generation) {
                return slots.mark_leftover(slots.page_of(slot), Some(&key));
            }
            let replaced = index.restore_instead(known, Tier::Disk, slot, used);
            assert_eq!(replaced, Some(other), "nothing is pinned before the cache is open");
            slots.clear(other, &key);
            slots.release(other);
            known
        }
    };
    slots.restore(slot, id.as_u32(), record.checksum, record.generation);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockKey;

    #[test]
    fn the_index_does_not_move_before_every_slot_of_every_tier_has_a_block() {
        let disks = vec![crate::DiskPath::with_blocks("/nowhere", 7000)];
        for config in [Config::default().host_blocks(3000).disks(disks).device_blocks(500), Config::default()] {
            let mut index = empty(1, &config).expect("there is memory");
            let reserved = index.reserved();
            let key = |n: usize| {
                let mut key = [0; 32];
                key[..8].copy_from_slice(&n.to_le_bytes());
                BlockKey::new(key)
            };
            // Each with a parent of its own, which is nowhere.
            for n in 0..config.slots_of_all_tiers() as usize {
                let id = index.insert(key(2 * n), Some(key(2 * n + 1)));
                assert!(index.begin_fill(id, Tier::Host));
            }
            assert_eq!(index.reserved(), reserved);
        }
    }
}
