//! Faults of the machine, each made for real: a clear error or a warning and right bytes, never an abort.

use crate::common;

#[path = "../../common/apart.rs"]
mod apart;
mod device;
mod kernel;
mod memory;
mod space;
mod warnings;

use std::path::Path;

use kvhoist::{Cache, Config, DiskPath, StorageKind, block_on};

/// Says why a test shows nothing here.
macro_rules! skip {
    ($($why:tt)*) => {{
        $crate::common::skip::skipped(format_args!($($why)*));
        return;
    }};
}
pub(crate) use skip;

/// The settings of a store of `blocks` slots at a path.
fn config_at(path: &Path, storage: StorageKind, blocks: u32) -> Config {
    common::config(&common::directory(), storage, 8, blocks).disks(vec![DiskPath::with_blocks(path, blocks)])
}

/// Stores and fetches through an open cache, and closes it.
fn serves(cache: &Cache) {
    for n in 0..40 {
        block_on(common::store(cache, n));
    }
    for n in 0..40 {
        assert!(block_on(common::fetch_verified(cache, n)), "block {n}");
    }
    block_on(cache.sync()).expect("sync");
    block_on(cache.close()).expect("close");
}
