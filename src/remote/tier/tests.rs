use super::*;
use crate::remote::presence::Known;

fn tier() -> TierState {
    let (awaited_max, background_max, waiters_max, uploads_max) = (8, 8, 8, 8);
    let limits =
        Limits { index_bytes: 1 << 20, recompute_us: None, awaited_max, background_max, waiters_max, uploads_max };
    TierState::new(limits, KeyHasher::new(7))
}

fn table(keys: &[BlockKey]) -> Table {
    let known = |(n, key): (u64, &BlockKey)| Known { key: *key, offset: n * 4096, checksum: n };
    Table { parent: None, blocks: (0..).zip(keys).map(known).collect() }
}

/// A read of its object was not what it should be. Later another node writes the block in an object of its own.
#[test]
fn a_block_that_is_removed_while_its_object_is_hidden_is_not_offered_from_another() {
    let (mut tier, keys) = (tier(), [1, 2, 3].map(|n| BlockKey::new([n; 32])));
    assert!(tier.enter("a", table(&keys)));
    tier.presence.hide_object("a");
    tier.remove(&keys[1], "b");
    assert!(tier.enter("b", table(&keys[1..])));
    assert_eq!(keys.map(|key| tier.presence.contains(&key)), [false, false, true]);
}
