//! The figures of a space.

use kvhoist::{Cache, Route, Tier};

use crate::protocol::{SpaceStats, TierFigures};

/// The figures of a space's cache.
pub(crate) fn stats(cache: &Cache) -> SpaceStats {
    let stats = cache.stats();
    let reads = [Route::DiskToHost, Route::DiskToRegion].map(|route| stats.route_bytes(route));
    let straight = [Route::DiskToRegion, Route::RegionToDisk].map(|route| stats.route_bytes(route));
    SpaceStats {
        tiers: Tier::ALL.map(|tier| {
            let figures = stats.tier(tier);
            TierFigures {
                hits: figures.hits,
                resident: figures.resident,
                slots: figures.slots,
                evictions: figures.evictions,
                refused: figures.refused,
                bytes_in: figures.bytes_in,
            }
        }),
        durations: Route::ALL.map(|route| *stats.route_durations(route)),
        misses: stats.misses,
        stores: stats.stores,
        stores_known: stats.stores_known,
        writes_refused: stats.writes_refused,
        writes_declined: stats.writes_declined,
        writes_over_budget: stats.writes_over_budget,
        checksum_failures: stats.checksum_failures,
        read_errors: stats.read_errors,
        write_errors: stats.write_errors,
        quarantined: stats.quarantined,
        changed_memory: stats.changed_memory,
        straight_bytes: straight.iter().sum(),
        read_bytes: reads.iter().sum(),
        disk_trouble: stats.disk_retired.or(stats.disk_read_only).unwrap_or_default(),
    }
}
