//! Figures of a cache since it was opened.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use serde::{Serialize, Serializer};

use super::Cache;
use crate::{
    block::{Route, Tier},
    device::GdrState,
    metrics::{COPY_ENGINES, Durations, RouteMetrics},
};

/// One tier's figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierStats {
    /// Blocks [fetched](Cache::fetch) or [loaded](Cache::load_into) that were found here, each block of each call.
    pub hits: u64,
    /// Blocks evicted.
    pub evictions: u64,
    /// New blocks that the full tier refused ([`Eviction::RbRefuse`](crate::Eviction::RbRefuse)).
    pub refused: u64,
    /// Bytes moved into the tier.
    pub bytes_in: u64,
    /// Bytes moved out of the tier.
    pub bytes_out: u64,
    /// Resident blocks.
    pub resident: u64,
    /// Number of slots.
    pub slots: u64,
    /// Free slots.
    pub free: u64,
    /// Resident blocks that are [kept](Cache::keep).
    pub kept: u64,
}

/// One route's figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct RouteFigures {
    blocks: u64,
    bytes: u64,
    seconds: Durations,
}

impl RouteFigures {
    fn of(metrics: &RouteMetrics) -> Self {
        let RouteMetrics { blocks, bytes, durations } = metrics;
        RouteFigures { blocks: blocks.get(), bytes: bytes.get(), seconds: durations.get() }
    }
}

/// One copy engine's figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct CopyFigures {
    batches: u64,
    bytes: u64,
}

/// Figures of a cache since it was opened.
///
/// Figures of tiers, routes and copy engines are read by method. Serialized, they are maps named `tiers`, `routes` and
/// `copies`, with the names of tiers, routes and engines for keys; all other figures have the names of their fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    #[serde(serialize_with = "by_tier")]
    tiers: [TierStats; Tier::COUNT],
    #[serde(serialize_with = "by_route")]
    routes: [RouteFigures; Route::COUNT],
    #[serde(serialize_with = "by_engine")]
    copies: [CopyFigures; COPY_ENGINES.len()],
    /// Blocks fetched or loaded that no tier had.
    pub misses: u64,
    /// Those of the misses that the computation of another caller answered
    /// ([`get_or_fetch_with`](Cache::get_or_fetch_with)).
    pub joined: u64,
    /// Blocks stored.
    pub stores: u64,
    /// Stores of blocks that were resident already.
    pub stores_known: u64,
    /// Writes that the disk tier refused.
    pub writes_refused: u64,
    /// Blocks that were dropped because they were not worth a write to the disk tier
    /// ([`WritePolicy::ByValue`](crate::WritePolicy::ByValue)).
    pub writes_declined: u64,
    /// Blocks that were worth a write, and dropped because the budget had no room for it
    /// ([`Config::write_budget`](crate::Config::write_budget)).
    pub writes_over_budget: u64,
    /// Blocks read from disk whose checksum did not match.
    pub checksum_failures: u64,
    /// Reads of the disk tier that failed.
    pub read_errors: u64,
    /// Writes to the disk tier that failed.
    pub write_errors: u64,
    /// Disk slots taken out of use.
    pub quarantined: u64,
    /// Blocks that were stored in place from a caller's memory and came back otherwise when they were first read: the
    /// memory was changed while they were stored. Their slots stay in use. After 16 such blocks the stores from that
    /// memory are copied first.
    pub changed_memory: u64,
    /// Prefetches and background writes refused because their queue was full.
    pub background_refused: u64,
    /// Blocks that were [released](Cache::release).
    pub released: u64,
    /// Blocks that left host memory and were not on disk, because they were released.
    pub released_unwritten: u64,
    /// Calls answered with `Error::Busy`.
    pub busy: u64,
    /// Pages of the record table written.
    pub record_writes: u64,
    /// Records that recovery refused: torn or damaged.
    pub records_bad: u64,
    /// Checksums and copies that worker threads have done ([`Config::workers`](crate::Config::workers)).
    pub work_done: u64,
    /// Blocks of the host tier that are not on disk yet and must be.
    pub dirty: u64,
    /// The storage engine: `uring`, `blocking`, or `none`.
    pub storage: &'static str,
    /// True if every path of the disk tier is open for direct I/O.
    pub direct_io: bool,
    /// Alignment, in bytes, of memory that is transferred directly to and from the disk tier
    /// ([`Config::bypass_host`](crate::Config::bypass_host)): what the drives require, 4096 if the kernel does not
    /// report it, 1 without direct I/O.
    pub memory_align_bytes: usize,
    /// True if the memory of the host tier is registered with the ring.
    pub registered: bool,
    /// Calls answered with `Error::Timeout`.
    pub timeouts: u64,
    /// Whether libcufile transfers blocks between disk and device, without host memory.
    pub cufile: bool,
    /// The evidence for that, or the reason why it does not.
    pub cufile_reason: String,
    /// Requests that libcufile failed; their blocks went through host memory.
    pub cufile_errors: u64,
    /// Requests that libcufile has not returned. Their slots and files stay reserved until it does.
    pub cufile_stuck: u64,
    /// Whether copies go through an RDMA device now.
    pub gdr: bool,
    /// State of that route (off, on, recovering, retired), with the evidence or the reason.
    pub gdr_reason: String,
    /// Batches of copies that failed on the RDMA device and were copied by another engine.
    pub gdr_failovers: u64,
    /// Why the device tier is out of service, if it is.
    pub device_retired: Option<String>,
    /// Why the disk tier is out of service, if it is.
    pub disk_retired: Option<String>,
    /// Why the disk tier accepts no more blocks, if it does not: its writes failed, or it is out of service.
    pub disk_read_only: Option<String>,
}

impl Stats {
    /// A tier's figures.
    pub fn tier(&self, tier: Tier) -> &TierStats {
        &self.tiers[tier as usize]
    }

    /// The share of the blocks fetched or loaded that their callers did not have to compute: hits of all tiers, and
    /// misses that another caller's computation answered. 0 before the first.
    pub fn hit_ratio(&self) -> f64 {
        let hits: u64 = self.tiers.iter().map(|tier| tier.hits).sum();
        (hits + self.joined) as f64 / (hits + self.misses).max(1) as f64
    }

    /// Blocks that took a route.
    pub fn route_blocks(&self, route: Route) -> u64 {
        self.routes[route as usize].blocks
    }

    /// Bytes of the blocks that took a route.
    pub fn route_bytes(&self, route: Route) -> u64 {
        self.routes[route as usize].bytes
    }

    /// How long the movements of a route took. Hits, and copies by the caller ([`Route::CallerToHost`]), are not timed.
    pub fn route_durations(&self, route: Route) -> &Durations {
        &self.routes[route as usize].seconds
    }

    /// Batches of copies between memories, by engine: `memcpy`, `cuda`, `gdr`.
    pub fn copied_batches(&self) -> BTreeMap<&'static str, u64> {
        COPY_ENGINES.into_iter().zip(self.copies.map(|figures| figures.batches)).collect()
    }

    /// Bytes of copies between memories, by engine: `memcpy`, `cuda`, `gdr`.
    pub fn copied_bytes(&self) -> BTreeMap<&'static str, u64> {
        COPY_ENGINES.into_iter().zip(self.copies.map(|figures| figures.bytes)).collect()
    }
}

fn by_tier<S: Serializer>(tiers: &[TierStats; Tier::COUNT], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(Tier::ALL.iter().map(|tier| tier.name()).zip(tiers))
}

fn by_route<S: Serializer>(routes: &[RouteFigures; Route::COUNT], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(Route::ALL.iter().map(|route| route.name()).zip(routes))
}

fn by_engine<S: Serializer>(copies: &[CopyFigures; COPY_ENGINES.len()], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(COPY_ENGINES.into_iter().zip(copies))
}

impl Cache {
    /// Figures since the cache was opened. One short lock, and a look at whether the store's files are still there.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// use kvhoist::{Route, Tier};
    ///
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// cache.store(&key, None, &[7; 4096]).await?;
    /// cache.fetch(&key).await?;
    /// let stats = cache.stats();
    /// assert_eq!((stats.tier(Tier::Host).hits, stats.misses), (1, 0));
    /// assert_eq!(stats.route_bytes(Route::HostHit), 4096);
    /// println!("{}", serde_json::to_string(&stats).expect("numbers, words and maps"));
    /// # Ok(()) });
    /// ```
    pub fn stats(&self) -> Stats {
        let (shared, gdr): (_, GdrState) = (self.shared(), self.inner.gdr.get());
        // Its error is among the figures.
        drop(self.inner.names.check(shared));
        let (config, metrics) = (&shared.config, &shared.metrics);
        let slots = [u64::from(config.device_slots()), u64::from(shared.host_slots()), config.disk_slots()];
        let state = shared.lock();
        Stats {
            tiers: Tier::ALL.map(|tier| TierStats {
                hits: metrics.tier(tier).hits.get(),
                evictions: metrics.tier(tier).evictions.get(),
                refused: metrics.tier(tier).refused.get(),
                bytes_in: metrics.tier(tier).bytes_in.get(),
                bytes_out: metrics.tier(tier).bytes_out.get(),
                resident: state.index.resident(tier) as u64,
                slots: slots[tier as usize],
                free: state.free_slots(tier) as u64,
                kept: state.index.kept(tier) as u64,
            }),
            routes: Route::ALL.map(|route| RouteFigures::of(&metrics.routes[route as usize])),
            misses: metrics.misses.get(),
            joined: metrics.joined.get(),
            stores: metrics.stores.get(),
            stores_known: metrics.stores_known.get(),
            writes_refused: metrics.writes_refused.get(),
            writes_declined: metrics.writes_declined[0].get(),
            writes_over_budget: metrics.writes_declined[1].get(),
            checksum_failures: metrics.checksum_failures.get(),
            read_errors: metrics.read_errors.get(),
            write_errors: metrics.write_errors.get(),
            quarantined: metrics.quarantined.get(),
            changed_memory: metrics.changed_memory.get(),
            background_refused: metrics.background_refused.get(),
            released: metrics.released.get(),
            released_unwritten: metrics.released_unwritten.get(),
            busy: metrics.busy.get(),
            timeouts: metrics.timeouts.get(),
            record_writes: metrics.record_writes.get(),
            work_done: metrics.work_done.get(),
            records_bad: metrics.records_bad.get(),
            dirty: state.dirty.len() as u64,
            storage: self.inner.storage_name,
            registered: self.inner.registered && shared.registered.load(Ordering::Acquire),
            direct_io: self.inner.direct_io,
            memory_align_bytes: self.inner.memory_align_bytes,
            cufile: state.cufile.reads(),
            cufile_reason: state.cufile.detail().to_owned(),
            cufile_errors: metrics.cufile_errors.get(),
            cufile_stuck: shared.cufile_stuck(),
            copies: std::array::from_fn(|at| {
                let (batches, bytes) = metrics.copies.of(at);
                CopyFigures { batches, bytes }
            }),
            gdr: gdr.is_on(),
            gdr_reason: gdr.to_string(),
            gdr_failovers: metrics.copies.failovers.get(),
            device_retired: state.device_service.retired().map(str::to_owned),
            disk_retired: state.disk_service.retired().map(str::to_owned),
            disk_read_only: state.disk_service.reason().map(str::to_owned),
        }
    }
}

/// Checks every invariant of the index and of the slots of a cache, from scratch; slow.
///
/// # Errors
/// The first invariant that does not hold, in words.
pub fn validate(cache: &Cache) -> Result<(), String> {
    let state = cache.shared().lock();
    state.index.validate()?;
    match &state.disk {
        Some(slots) => slots.validate(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_serialized_by_name() {
        let mut stats = Stats { stores: 3, storage: "uring", ..Stats::default() };
        stats.tiers[Tier::Disk as usize].hits = 5;
        stats.routes[Route::DiskToHost as usize].bytes = 7;
        stats.copies[1] = CopyFigures { batches: 2, bytes: 9 };
        let json = serde_json::to_value(&stats).expect("numbers, words and maps");
        assert_eq!(json["tiers"]["disk"]["hits"], 5);
        assert_eq!(json["tiers"].as_object().map(serde_json::Map::len), Some(Tier::COUNT));
        assert_eq!(json["routes"]["disk_to_host"]["bytes"], 7);
        assert_eq!(json["routes"].as_object().map(serde_json::Map::len), Some(Route::COUNT));
        assert_eq!(json["copies"]["cuda"], serde_json::json!({ "batches": 2, "bytes": 9 }));
        assert_eq!((&json["stores"], &json["storage"]), (&3.into(), &"uring".into()));
    }
}
