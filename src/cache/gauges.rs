//! The gauges of the `metrics` crate.

use super::{Cache, open::export_wear};
use crate::{block::Tier, metrics::Of};

impl Cache {
    /// Sets this cache's gauges of the `metrics` crate to its figures now: resident blocks, slots, dirty blocks, tiers
    /// out of service, threads, use of an RDMA device, the wear of its drives. Call it before each scrape. Counters
    /// need no call. Gauges do, because setting them at each change would cost time on the path of a hit.
    ///
    /// Takes one short lock, and asks each NVMe drive for its wear, which may take a millisecond.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// // In the handler of /metrics, before the recorder renders its page:
    /// cache.export_gauges();
    /// # Ok(()) });
    /// ```
    pub fn export_gauges(&self) {
        let (config, stats) = (self.config(), self.stats());
        let of = Of(&config.namespace);
        for tier in Tier::ALL {
            let figures = stats.tier(tier);
            let set = |name: &'static str, value: u64| of.gauge(name, Some(tier)).set(value as f64);
            set("kvhoist_resident_blocks", figures.resident);
            set("kvhoist_slots", figures.slots);
            set("kvhoist_free_slots", figures.free);
        }
        let set = |name: &'static str, tier: Option<Tier>, is: bool| of.gauge(name, tier).set(f64::from(u8::from(is)));
        set("kvhoist_retired", Some(Tier::Device), stats.device_retired.is_some());
        set("kvhoist_retired", Some(Tier::Disk), stats.disk_retired.is_some());
        set("kvhoist_read_only", Some(Tier::Disk), stats.disk_read_only.is_some());
        set("kvhoist_direct_io", None, stats.direct_io);
        set("kvhoist_registered", None, stats.registered);
        of.info(stats.storage);
        let set = |name: &'static str, value: f64| of.gauge(name, None).set(value);
        set("kvhoist_dirty_blocks", stats.dirty as f64);
        set("kvhoist_gdr_in_use", self.inner.gdr.get().in_use());
        set("kvhoist_workers", config.worker_threads().into());
        let io_threads = if stats.storage == "blocking" { config.disk.blocking_threads } else { 0 };
        set("kvhoist_io_threads", io_threads as f64);
        if let Some(bytes) = config.write_budget_bytes() {
            set("kvhoist_write_budget_bytes", bytes as f64);
        }
        export_wear(config);
    }
}
