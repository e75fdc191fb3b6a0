//! Blocks that were stored, that the disk tier did not take, and whose callers were not told.
//!
//! Writes that nobody awaits fail like any other: write-backs, and writes whose store was dropped. Such a block is
//! noted here until it is written after all, is removed, or a `sync` or the `close` has reported it.

use std::collections::BTreeSet;

use crate::{
    block::BlockKey,
    error::{Error, Result},
};

/// Keys that are kept; refusals beyond them are only counted, and reported even where the block is written later.
const KEYS_MAX: usize = 1 << 14;

/// Refused writes that nobody was told of.
#[derive(Default)]
pub(crate) struct Refusals {
    keys: BTreeSet<BlockKey>,
    /// Refusals whose keys are not kept.
    more: u64,
    last: Option<Error>,
}

impl Refusals {
    /// The disk tier did not take the block, because of `error`.
    pub(crate) fn add(&mut self, key: BlockKey, error: Error) {
        if self.keys.len() < KEYS_MAX || self.keys.contains(&key) {
            self.keys.insert(key);
        } else {
            self.more += 1;
        }
        self.last = Some(error);
    }

    /// The block is on disk, is gone, or its caller was told.
    pub(crate) fn forget(&mut self, key: &BlockKey) {
        self.keys.remove(key);
    }

    /// An error for all of them.
    pub(super) fn into_result(self) -> Result<()> {
        let count = self.keys.len() as u64 + self.more;
        let Some(last) = self.last.filter(|_| count > 0) else { return Ok(()) };
        let blocks = if count == 1 { "block is" } else { "blocks are" };
        Err(Error::Refused {
            reason: format!(
                "{count} {blocks} stored and not on disk, which this reports once; the last because: {last}"
            ),
        })
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

    #[test]
    fn refusals_past_the_limit_are_counted() {
        let mut refusals = Refusals::default();
        let limit = KEYS_MAX as u32;
        (0..limit + 2).for_each(|n| refusals.add(key(n), Error::Closed));
        refusals.add(key(0), Error::Closed);
        refusals.forget(&key(1));
        let report = refusals.into_result().expect_err("refused").to_string();
        assert!(report.contains(&format!("{} blocks are", limit + 1)), "{report}");
    }

    #[test]
    fn what_was_told_is_not_reported() {
        let mut refusals = Refusals::default();
        refusals.add(key(1), Error::Closed);
        refusals.forget(&key(1));
        refusals.into_result().expect("nothing is left to report");
    }
}
