//! The figures of a space.

use crate::{
    block::Route,
    cache::Cache,
    service::protocol::{SpaceStats, TierFigures},
};

/// The figures of a space's cache.
pub(in crate::service) fn stats(cache: &Cache) -> SpaceStats {
    let stats = cache.stats();
    let reads = [Route::DiskToHost, Route::DiskToRegion].map(|route| stats.route(route).bytes);
    let straight = [Route::DiskToRegion, Route::RegionToDisk].map(|route| stats.route(route).bytes);
    SpaceStats {
        tiers: stats.tiers.map(|tier| TierFigures {
            hits: tier.hits,
            resident: tier.resident,
            slots: tier.slots,
            evictions: tier.evictions,
        }),
        misses: stats.misses,
        stores: stats.stores,
        stores_known: stats.stores_known,
        writes_refused: stats.writes_refused,
        checksum_failures: stats.checksum_failures,
        read_errors: stats.read_errors,
        write_errors: stats.write_errors,
        quarantined: stats.quarantined,
        straight_bytes: straight.iter().sum(),
        read_bytes: reads.iter().sum(),
        disk_trouble: stats.disk_retired.or(stats.disk_read_only).unwrap_or_default(),
    }
}
