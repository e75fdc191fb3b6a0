//! What the tests of parts of a cache share.

use std::sync::Arc;

use super::Shared;
use crate::{
    config::Config,
    disk::{DiskSlots, format::stripe::Stripe},
    index::Index,
    memory::Arena,
    metrics::Metrics,
};

impl Shared {
    /// Of an empty cache with these settings. The memory of its device tier is nobody's.
    pub(crate) fn of_test(config: Config) -> Arc<Self> {
        let arena = Arc::new(Arena::new(config.host_slots(), config.slot_bytes()).expect("a little memory"));
        let slots = || DiskSlots::new(Stripe::new(&config), [7; 16], true).expect("memory for a few slots");
        let slots = (!config.disk.paths.is_empty()).then(slots);
        let metrics = Metrics::new("", config.block_bytes);
        Arc::new(Shared::new(config, arena, None, Index::new(1), slots, 1, metrics))
    }
}
