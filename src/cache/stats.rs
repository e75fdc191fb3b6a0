//! Figures of a cache since it was opened.

#[cfg(test)]
mod tests;

use std::{borrow::Cow, collections::BTreeMap, sync::atomic::Ordering};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{
    Cache,
    exported::{Metric, Sample, Value},
};
use crate::{
    block::{Route, Tier},
    device::{COPY_ENGINES, GdrState},
    metrics::{Durations, Metrics, RouteMetrics, counters, tier_counters},
    remote::Figures,
    state::Locked,
};

/// What the figures of a cache are read from.
struct Now<'a> {
    cache: &'a Cache,
    metrics: &'a Metrics,
    state: &'a Locked<'a>,
    gdr: &'a GdrState,
    remote: &'a Figures,
}

/// Makes [`TierStats`]. `figures` are read under the lock, and exported as the metrics that they name.
macro_rules! tier_stats {
    (
        counters { $($counter:ident: $counted:literal;)* }
        derived { $($derived:ident: $summed:literal = $end:expr;)* }
        figures { $($figure:ident: $metric:literal = $read:expr, $what:literal;)* }
        others { $($(#[$more:meta])* $other:ident = $find:expr;)* }
    ) => {
        /// One tier's figures.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        #[non_exhaustive]
        pub struct TierStats {
            $(#[doc = concat!($counted, ".")] pub $counter: u64,)*
            $(#[doc = concat!($summed, ".")] pub $derived: u64,)*
            $(#[doc = concat!($what, ".")] pub $figure: u64,)*
            $($(#[$more])* pub $other: u64,)*
        }

        impl TierStats {
            fn read(now: &Now<'_>, tier: Tier) -> Self {
                let read = |figure: fn(&Now<'_>, Tier) -> u64| figure(now, tier);
                TierStats {
                    $($counter: now.metrics.tier(tier).$counter.get(),)*
                    $($derived: now.metrics.tier_bytes(tier, $end),)*
                    $($figure: read($read),)*
                    $($other: read($find),)*
                }
            }
        }

        /// The metrics of each tier's figures.
        pub(super) const PLAIN_BY_TIER: &[Metric] = &[
            $(Metric {
                name: concat!("kvhoist_", stringify!($counter), "_total"),
                help: $counted,
                samples: |stats| by_tier(stats, |tier| tier.$counter),
            },)*
            $(Metric {
                name: concat!("kvhoist_", stringify!($derived), "_total"),
                help: $summed,
                samples: |stats| by_tier(stats, |tier| tier.$derived),
            },)*
            $(Metric { name: $metric, help: $what, samples: |stats| by_tier(stats, |tier| tier.$figure) },)*
        ];
    };
}

tier_counters! { tier_stats
    figures {
        resident: "kvhoist_resident_blocks" = resident,
            "Blocks in a tier, by tier";
        slots: "kvhoist_slots" = slots, "Slots of a tier, by tier";
        free: "kvhoist_free_slots" = free, "Slots that hold nothing, by tier";
    }
    others {
        /// Resident blocks that are [kept](Cache::keep).
        kept = |now, tier| if tier == Tier::Remote { 0 } else { now.state.index.kept(tier) as u64 };
    }
}

/// One route's figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct RouteFigures {
    blocks: u64,
    bytes: u64,
    seconds: Durations,
}

impl RouteFigures {
    fn of(metrics: &Metrics, route: Route) -> Self {
        let RouteMetrics { blocks, durations, .. } = &metrics.routes[route as usize];
        RouteFigures { blocks: blocks.get(), bytes: metrics.route_bytes(route), seconds: durations.get() }
    }
}

/// One copy engine's figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct CopyFigures {
    batches: u64,
    bytes: u64,
}

/// Makes [`Stats`]. `figures` are read under the lock, and exported as the metrics that they name; `others` are read
/// there too, and exported by hand or not at all.
macro_rules! stats {
    (
        counters { $($(#[$doc:meta])* $counter:ident: $counted:literal;)* }
        figures { $($figure:ident: $metric:literal, $type:ty = $read:expr, $what:literal;)* }
        others { $($(#[$more:meta])* $other:ident: $kind:ty = $find:expr;)* }
    ) => {
        /// Figures of a cache since it was opened.
        ///
        /// Figures of tiers, routes and copy engines are read by method. Serialized, they are maps named `tiers`,
        /// `routes` and `copies`, with the names of tiers, routes and engines for keys; all other figures have the
        /// names of their fields. Figures that a map lacks are 0, and it may have others: a version may add some.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        #[non_exhaustive]
        pub struct Stats {
            #[serde(with = "tiers")]
            tiers: [TierStats; Tier::WITH_REMOTE.len()],
            #[serde(with = "routes")]
            routes: [RouteFigures; Route::COUNT],
            #[serde(with = "copies")]
            copies: [CopyFigures; COPY_ENGINES.len()],
            $(#[doc = concat!($counted, ".")] $(#[$doc])* pub $counter: u64,)*
            $(#[doc = concat!($what, ".")] pub $figure: $type,)*
            $($(#[$more])* pub $other: $kind,)*
        }

        impl Stats {
            fn read(now: &Now<'_>) -> Self {
                fn found<T>(now: &Now<'_>, figure: fn(&Now<'_>) -> T) -> T {
                    figure(now)
                }
                Stats {
                    tiers: Tier::WITH_REMOTE.map(|tier| TierStats::read(now, tier)),
                    routes: Route::ALL.map(|route| RouteFigures::of(now.metrics, route)),
                    copies: std::array::from_fn(|at| {
                        let (batches, bytes) = now.metrics.copies.of(at);
                        CopyFigures { batches, bytes }
                    }),
                    $($counter: now.metrics.$counter.get(),)*
                    $($figure: found(now, $read),)*
                    $($other: found(now, $find),)*
                }
            }

            /// Each counter that has no label, with the name of its field.
            pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($counter), self.$counter)),*].into_iter()
            }
        }

        /// The metrics of figures without a label.
        pub(super) const PLAIN: &[Metric] = &[
            $(Metric {
                name: concat!("kvhoist_", stringify!($counter), "_total"),
                help: $counted,
                samples: |stats| vec![Sample::new(stats.$counter.value(), [])],
            },)*
            $(Metric {
                name: $metric,
                help: $what,
                samples: |stats| vec![Sample::new(stats.$figure.value(), [])],
            },)*
        ];
    };
}

counters! { stats
    figures {
        work_done: "kvhoist_work_done_total", u64 = |now| now.metrics.work_done.get(),
            "Checksums and copies done by worker threads";
        gdr_failovers: "kvhoist_gdr_failovers_total", u64 = |now| now.metrics.copies.failovers.get(),
            "Batches of copies that the RDMA device failed; another engine copied them";
        dirty: "kvhoist_dirty_blocks", u64 = |now| now.state.dirty.len() as u64,
            "Blocks of the host tier that are not on disk yet";
        direct_io: "kvhoist_direct_io", bool = |now| now.cache.inner.facts.direct_io,
            "1 if the disk is read and written directly";
        registered: "kvhoist_registered", bool = |now| {
            now.cache.inner.facts.registered && now.cache.shared().registered.load(Ordering::Acquire)
        }, "1 if host memory is registered with the ring";
        remote_objects: "kvhoist_remote_objects", u64 = |now| now.remote.objects,
            "Objects of the remote store that are known";
        remote_index_bytes: "kvhoist_remote_index_bytes", u64 = |now| now.remote.index_bytes,
            "Memory that knowing the remote store's blocks takes";
        remote_offers: "kvhoist_remote_offers", bool = |now| now.remote.offers,
            "1 while the remote tier offers its blocks, 0 while it stands down";
        workers: "kvhoist_workers", u64 = |now| now.cache.config().worker_threads().into(),
            "Threads that take checksums and copies";
        io_threads: "kvhoist_io_threads", u64 = |now| match now.cache.inner.storage_name {
            "blocking" => now.cache.config().disk.blocking_threads as u64,
            _ => 0,
        }, "Threads that read and write; 0 with io_uring";
    }
    others {
        /// Blocks that were dropped because they were not worth a write to the disk tier
        /// ([`WritePolicy::ByValue`](crate::WritePolicy::ByValue)).
        writes_declined: u64 = |now| now.metrics.writes_declined[0].get();
        /// Blocks that were worth a write, and dropped because the budget had no room for it
        /// ([`Config::write_budget`](crate::Config::write_budget)).
        writes_over_budget: u64 = |now| now.metrics.writes_declined[1].get();
        /// Bytes a day that may be written to disk, where that is limited: `write_budget`, or `drive_writes_per_day`
        /// times `drive_bytes`.
        write_budget: Option<u64> = |now| now.cache.config().write_budget_bytes();
        /// The storage engine: `uring`, `blocking`, or `none`.
        storage: Cow<'static, str> = |now| now.cache.inner.storage_name.into();
        /// Alignment, in bytes, of memory that is transferred directly to and from the disk tier
        /// ([`Config::bypass_host`](crate::Config::bypass_host)): what the drives require, 4096 if the kernel does not
        /// report it, 1 without direct I/O.
        memory_align_bytes: usize = |now| now.cache.shared().memory_align_bytes;
        /// Whether libcufile transfers blocks between disk and device, without host memory.
        cufile: bool = |now| now.state.cufile.reads();
        /// The evidence for that, or the reason why it does not.
        cufile_reason: String = |now| now.state.cufile.detail().to_owned();
        /// Requests that libcufile has not returned. Their slots and files stay reserved until it does.
        cufile_stuck: u64 = |now| now.cache.shared().cufile_stuck();
        /// Whether copies go through an RDMA device now.
        gdr: bool = |now| now.gdr.is_on();
        /// State of that route (off, on, recovering, retired), with the evidence or the reason.
        gdr_reason: String = |now| now.gdr.to_string();
        /// Why the remote tier offers nothing, if it stands down: its store does not answer, or brings blocks more
        /// slowly than they are computed ([`Config::recompute_us`](crate::Config::recompute_us)).
        remote_standing_down: Option<String> = |now| now.remote.standing_down.clone();
        /// Why nothing is written to the remote tier, if its store refuses that (permissions, memory) or does not
        /// answer. It is tried again once a minute at least.
        remote_read_only: Option<String> = |now| now.remote.read_only.clone();
        /// Why the device tier is out of service, if it is.
        device_retired: Option<String> = |now| now.state.device_service.retired().map(str::to_owned);
        /// Why the disk tier is out of service, if it is.
        disk_retired: Option<String> = |now| now.state.disk_service.retired().map(str::to_owned);
        /// Why the disk tier accepts no more blocks, if it does not: its writes failed, or it is out of service.
        disk_read_only: Option<String> = |now| now.state.disk_service.reason().map(str::to_owned);
    }
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

    /// Bytes that went directly between the disk tier and callers' memory.
    pub fn straight_bytes(&self) -> u64 {
        self.route_bytes(Route::DiskToRegion) + self.route_bytes(Route::RegionToDisk)
    }

    /// Why the disk tier is out of service or takes no blocks, if either is so.
    pub fn disk_trouble(&self) -> Option<&str> {
        self.disk_retired.as_deref().or(self.disk_read_only.as_deref())
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

    /// Batches of copies between memories, by engine.
    pub fn copied_batches(&self) -> BTreeMap<&'static str, u64> {
        COPY_ENGINES.into_iter().zip(self.copies.map(|figures| figures.batches)).collect()
    }

    /// Bytes of copies between memories, by engine.
    pub fn copied_bytes(&self) -> BTreeMap<&'static str, u64> {
        COPY_ENGINES.into_iter().zip(self.copies.map(|figures| figures.bytes)).collect()
    }
}

/// Writes and reads an array as a map by the names of its entries.
macro_rules! by_name {
    ($($module:ident: [$type:ty; $count:expr] = $names:expr;)*) => {
        $(mod $module {
            use super::*;

            pub(super) fn serialize<S: Serializer>(all: &[$type; $count], serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map($names.into_iter().zip(all))
            }

            pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<[$type; $count], D::Error> {
                let mut named = BTreeMap::<String, $type>::deserialize(from)?;
                Ok($names.map(|name| named.remove(name).unwrap_or_default()))
            }
        })*
    };
}

by_name! {
    tiers: [TierStats; Tier::WITH_REMOTE.len()] = Tier::WITH_REMOTE.map(Tier::name);
    routes: [RouteFigures; Route::COUNT] = Route::ALL.map(Route::name);
    copies: [CopyFigures; COPY_ENGINES.len()] = COPY_ENGINES;
}

/// The slots that a tier has now.
fn slots(now: &Now<'_>, tier: Tier) -> u64 {
    let config = now.cache.config();
    match tier {
        Tier::Device => config.device_slots().into(),
        Tier::Host => now.cache.shared().host_slots().into(),
        Tier::Disk => config.disk_slots(),
        Tier::Remote => 0,
    }
}

fn free(now: &Now<'_>, tier: Tier) -> u64 {
    if tier == Tier::Remote { 0 } else { now.state.free_slots(tier) as u64 }
}

fn resident(now: &Now<'_>, tier: Tier) -> u64 {
    match tier {
        Tier::Remote => now.remote.blocks,
        tier => now.state.index.resident(tier) as u64,
    }
}

fn by_tier(stats: &Stats, figure: fn(&TierStats) -> u64) -> Vec<Sample> {
    let sample = |tier: Tier| Sample::new(figure(stats.tier(tier)).value(), [("tier", tier.name())]);
    Tier::WITH_REMOTE.map(sample).into()
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
        let (shared, gdr): (_, GdrState) = (self.shared(), self.inner.facts.gdr.get());
        // Its error is among the figures.
        drop(self.inner.facts.names.check(shared));
        let remote = shared.remote.as_ref().map(|remote| remote.figures()).unwrap_or_default();
        let state = shared.lock();
        Stats::read(&Now { cache: self, metrics: &shared.metrics, state: &state, gdr: &gdr, remote: &remote })
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
