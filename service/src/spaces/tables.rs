//! What a space takes beside its blocks: tables with a record for each slot, used or not, and addresses.
//!
//! A client chooses the size of its blocks, and with it how many slots its space has: of 4 KiB each, a terabyte has
//! 268 million, whose tables take 8 GiB. So the tables of all spaces have a limit of their own.

use std::{cell::RefCell, collections::BTreeMap};

use kvhoist::Config;

use crate::{
    budget::{Room, memory_bytes},
    config::ServerConfig,
    error::{Error, Result, ServiceFault},
};

/// What an empty slot takes in the tables of its tier and in the index: 25 bytes, and some for their
/// lengths, which are rounded.
const SLOT_BYTES: u64 = 32;
/// The tables of all spaces may take this in any case.
const TABLE_BYTES_MIN: u64 = 64 << 20;

/// What the spaces have taken, by folder.
pub(super) struct Tables {
    /// The most for tables, and for addresses, bytes.
    most: [u64; 2],
    taken: RefCell<BTreeMap<String, [u64; 2]>>,
}

impl Tables {
    /// For tables as much as for blocks, and an eighth of the machine's memory in any case: a large disk tier has large
    /// tables, however little host memory is for blocks. For addresses a quarter of what the process has left.
    pub(super) fn new(config: &ServerConfig) -> Self {
        let tables = config.host_bytes.max(memory_bytes() / 8).max(TABLE_BYTES_MIN);
        Tables { most: [tables, Room::of_process().address_bytes / 4], taken: RefCell::default() }
    }

    /// Charges the space of this folder for the tables and the addresses that a cache with these settings takes,
    /// instead of what it was charged for before. Spaces that are there no longer give back theirs.
    ///
    /// # Errors
    /// [`ServiceFault::Capacity`] if the others leave too little.
    pub(super) fn take(&self, folder: &str, config: &Config, is_there: impl Fn(&str) -> bool) -> Result<()> {
        let host_slots = u64::from(config.host_slots());
        let slots = host_slots.saturating_add(config.disk_slots());
        let addresses = host_slots.saturating_mul(config.slot_bytes() as u64);
        let wanted = [slots.saturating_mul(SLOT_BYTES), addresses];
        let mut taken = self.taken.borrow_mut();
        taken.retain(|other, _| other != folder && is_there(other));
        let whats =
            ["bytes for the tables of the slots of all spaces", "bytes of addresses for the host memory of all spaces"];
        for (at, what) in whats.into_iter().enumerate() {
            let others: u64 = taken.values().map(|taken| taken[at]).sum();
            if wanted[at] > self.most[at].saturating_sub(others) {
                let text = format!(
                    "space: found {slots} slots, which take {} {what}, of which the others have {others}, expected {} \
                     at most: larger blocks, less disk, or a service with more --host-bytes",
                    wanted[at], self.most[at]
                );
                return Err(Error::service(ServiceFault::Capacity, text));
            }
        }
        taken.insert(folder.to_owned(), wanted);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A cache with so many slots of 4 KiB in host memory.
    fn cache(slots: u64) -> Config {
        Config::default().block_bytes(4096).host_bytes(slots * 4096)
    }

    #[test]
    fn the_tables_of_all_spaces_have_a_limit_and_those_of_a_space_that_is_gone_do_not_count() {
        let tables = Tables { most: [TABLE_BYTES_MIN, u64::MAX], taken: RefCell::default() };
        let half = TABLE_BYTES_MIN / SLOT_BYTES / 2;
        let all = |_: &str| true;
        tables.take("a", &cache(half), all).expect("half of it");
        tables.take("a", &cache(half), all).expect("in the place of what it had");
        tables.take("b", &cache(half), all).expect("the other half");
        let refused = tables.take("c", &cache(1), all).expect_err("there is no more").to_string();
        assert!(refused.contains(&TABLE_BYTES_MIN.to_string()), "{refused}");
        tables.take("c", &cache(half), |folder| folder != "a").expect("what one had that is gone");
    }

    #[test]
    fn a_large_disk_tier_fits_beside_little_host_memory() {
        let most = |host_bytes| Tables::new(&ServerConfig { host_bytes, ..ServerConfig::new("unused") }).most[0];
        assert!(most(MIB) >= TABLE_BYTES_MIN && most(MIB) >= memory_bytes() / 8, "{}", most(MIB));
        assert_eq!(most(1 << 60), 1 << 60);
    }

    #[test]
    fn host_memory_that_spaces_may_ever_have_takes_a_part_of_the_addresses() {
        let tables = Tables { most: [u64::MAX, 10 * MIB], taken: RefCell::default() };
        tables.take("a", &cache(2048), |_| true).expect("8 MiB");
        let refused = tables.take("b", &cache(1024), |_| true).expect_err("4 MiB more").to_string();
        assert!(refused.contains("addresses"), "{refused}");
    }
}
