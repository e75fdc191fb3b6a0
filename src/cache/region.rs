//! Foreign memory, registered once, then read and written in place.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

use tokio::sync::oneshot;

use super::{Cache, Loan};
use crate::{
    block::{BlockKey, Segment},
    device::gdr::GdrState,
    error::{Error, Result},
    memory::huge,
    mover::{Command, Job, RegionInner, RegionMemory, RegionUse, Reply, Urgent},
    shield::shield,
};

/// A registered range of foreign memory. Give it back with [`Cache::unregister`]: until that has
/// resolved the memory must stay mapped.
///
/// Dropping it changes nothing: the range stays registered for the life of the cache.
pub struct Region {
    inner: Arc<RegionInner>,
    /// The number of the cache's [`Regions`].
    registry: u64,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("len", &self.inner.len).field("memory", &self.inner.memory).finish()
    }
}

/// Regions that may be registered at once.
const REGIONS_MAX: usize = 4096;

/// The regions of one cache.
pub(super) struct Regions {
    /// Tells them from those of every other cache of this process.
    number: u64,
    entries: Mutex<Vec<Arc<RegionInner>>>,
}

impl Regions {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Regions { number: NEXT.fetch_add(1, Ordering::Relaxed), entries: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<RegionInner>>> {
        self.entries.lock().expect("nothing panics under it")
    }

    fn add(&self, start: *mut u8, len: usize, memory: RegionMemory) -> Result<Region> {
        let address = start;
        let start = start as usize;
        if start == 0 || len == 0 || start.checked_add(len).is_none() {
            return Err(Error::Argument {
                what: "region",
                found: format!("{len} bytes at {start:#x}"),
                expected: "a range of memory".into(),
            });
        }
        let mut regions = self.lock();
        if regions.len() >= REGIONS_MAX {
            return Err(Error::Busy { what: "registered regions", limit: REGIONS_MAX as u64, setting: "none" });
        }
        let shares = |region: &Arc<RegionInner>| start < region.start + region.len && region.start < start + len;
        if regions.iter().any(shares) {
            return Err(Error::Argument {
                what: "region",
                found: format!("{len} bytes at {start:#x}, part of which is registered"),
                expected: "each range registered once".into(),
            });
        }
        let inner = RegionInner::new(address, len, memory);
        regions.push(Arc::clone(&inner));
        Ok(Region { inner, registry: self.number })
    }

    /// Refuses a region of another cache.
    fn check(&self, region: &Region) -> Result<()> {
        if region.registry == self.number {
            return Ok(());
        }
        Err(Error::Argument {
            what: "region",
            found: "a region of another cache".into(),
            expected: "a region that this cache has registered".into(),
        })
    }

    /// Holds a region, wherever its movements go.
    fn hold_one(&self, region: &Region) -> Result<RegionUse> {
        self.check(region)?;
        let regions = self.lock();
        if regions.iter().any(|other| Arc::ptr_eq(other, &region.inner)) {
            // Under the lock: who forgets a region counts its users after that.
            return Ok(region.inner.hold());
        }
        Err(Error::Argument {
            what: "region",
            found: "a region that was unregistered".into(),
            expected: "a region that is registered".into(),
        })
    }

    /// Forgets a region, if it is not forgotten already: nothing begins to use it after that.
    fn remove(&self, region: &Region) -> Result<()> {
        self.check(region)?;
        self.lock().retain(|other| !Arc::ptr_eq(other, &region.inner));
        Ok(())
    }

    /// Holds the memory that `segments` lie in: lent for the call, or registered.
    fn hold(&self, segments: &[Segment], block_bytes: usize, lent: Option<&Loan>) -> Result<Vec<RegionUse>> {
        let bytes = segments.iter().try_fold(0usize, |sum, segment| sum.checked_add(segment.len));
        if bytes != Some(block_bytes) {
            return Err(Error::Argument {
                what: "segments",
                found: format!("{bytes:?} bytes in {} segments", segments.len()),
                expected: format!("one block of {block_bytes} bytes"),
            });
        }
        let regions = self.lock();
        let mut held: Vec<RegionUse> = Vec::new();
        for segment in segments {
            let lent = lent.and_then(|loan| loan.region_of(segment));
            let Some(region) = lent.or_else(|| regions.iter().find(|region| region.contains(segment))) else {
                return Err(Error::Argument {
                    what: "segments",
                    found: format!("{} bytes at {:p}, in no registered region", segment.len, segment.ptr),
                    expected: "memory registered by register_host or register_device".into(),
                });
            };
            if held.first().is_some_and(|first| first.memory() != region.memory) {
                return Err(Error::Argument {
                    what: "segments",
                    found: "host and device memory in one block".into(),
                    expected: "one kind of memory".into(),
                });
            }
            if !held.iter().any(|other| other.is_of(region)) {
                held.push(region.hold());
            }
        }
        Ok(held)
    }
}

impl Cache {
    /// Registers host memory, to be the source and target of [`load_into`](Cache::load_into) and
    /// [`store_from`](Cache::store_from).
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty range or one that overlaps another region.
    ///
    /// # Safety
    /// Until [`unregister`](Cache::unregister) has resolved, or the cache is closed and every call
    /// on it has returned, the range must stay mapped, readable and writable. While a segment is
    /// loaded nobody else may touch it; while it is stored from, nobody may write to it. That a
    /// future was dropped does not end its load: only its result or `unregister` does.
    pub unsafe fn register_host(&self, start: *mut u8, len: usize) -> Result<Region> {
        self.inner.regions.add(start, len, RegionMemory::Host)
    }

    /// Registers device memory; without a GPU, host memory that plays it.
    ///
    /// # Errors
    /// As [`register_host`](Cache::register_host); [`Error::Unavailable`] without a device tier.
    ///
    /// # Safety
    /// As [`register_host`](Cache::register_host), for device addresses.
    pub unsafe fn register_device(&self, start: *mut u8, len: usize) -> Result<Region> {
        self.need_device()?;
        self.inner.regions.add(start, len, RegionMemory::Device)
    }

    /// Has the kernel keep a region of host memory pinned, as a buffer of the ring, until it is
    /// [unregistered](Cache::unregister) or the cache closed: what goes straight between it and disk
    /// ([`Config::bypass_host`](crate::Config::bypass_host)) then costs less CPU, a half to three quarters of what the
    /// kernel takes for a transfer. `false` where there is no ring, or where the kernel refuses it (`RLIMIT_MEMLOCK`),
    /// which is in the log; all else works as before.
    ///
    /// Before that the region is moved into huge pages, as far as the system lets it (Linux 6.1 or later; never what
    /// a device has pinned): in small pages that lie apart a drive gets smaller requests, and more of them. What it
    /// holds stays, and its addresses do.
    ///
    /// Moving takes some 0.2 s a GiB, more where free memory is in pieces, beside everything else. Pinning takes some
    /// 30 ms a GiB, for this region and all that are pinned already, in which the cache moves nothing: do it before
    /// there is traffic.
    ///
    /// # Errors
    /// [`Error::Argument`] for a region of another cache, or one that was unregistered. [`Error::Closed`].
    ///
    /// # Cancel safety
    /// The region may be pinned all the same.
    pub async fn pin_region(&self, region: &Region) -> Result<bool> {
        let held = self.inner.regions.hold_one(region)?;
        let RegionInner { start, len, memory, .. } = *region.inner;
        if memory == RegionMemory::Host
            && let Err(error) = huge::gather(start, len).await
        {
            tracing::debug!(%error, start, len, "not all of a region could be moved into huge pages");
        }
        let (reply, receiver) = oneshot::channel();
        shield(self.inner.commands.send(Command::Register { region: held, reply })).await.map_err(|_| Error::Closed)?;
        shield(receiver).await.map_err(|_| Error::Closed)
    }

    /// Forgets a region: resolves when neither a movement nor a [`pin_region`](Cache::pin_region) uses it any longer
    /// and nothing keeps it pinned. However many callers unregister one region, each of them waits for that; on a
    /// region that is forgotten already it resolves at once.
    ///
    /// # Errors
    /// [`Error::Argument`] for a region of another cache, which is left as it is.
    ///
    /// # Cancel safety
    /// The region is forgotten at the first poll. Movements may still use it when the future is dropped, and it may
    /// still be pinned: call again to wait for them.
    pub async fn unregister(&self, region: &Region) -> Result<()> {
        self.inner.regions.remove(region)?;
        shield(region.inner.wait_unused()).await;
        // Both requests hold the region until they are done, or lost with the reactor. Of two callers whose requests go
        // out at once each waits for both.
        let mut refused = false;
        if region.inner.lasting.is_some() && !matches!(self.inner.gdr.get(), GdrState::Off(_)) {
            refused |= self.send_urgent(Urgent::GiveBack { region: region.inner.hold() }).is_err();
        }
        if region.inner.is_fixed() {
            refused |=
                shield(self.inner.commands.send(Command::Unregister { region: region.inner.hold() })).await.is_err();
        }
        shield(region.inner.wait_unused()).await;
        if refused || region.inner.is_fixed() {
            // A cache that has ended has let go of all regions.
            drop(self.ended().await);
        }
        Ok(())
    }

    /// Copies blocks into registered memory: one result per block, in order. `true`: it is there;
    /// `false`: it is resident nowhere, its segments are as they were. Where they are on the device, or
    /// [`Config::bypass_host`](crate::Config::bypass_host) is on, they may hold anything then: the block was on its way
    /// when it turned out to be damaged, or was removed.
    ///
    /// `segments[i]` are the places of block `i`, in the order of its bytes, one block long in all.
    ///
    /// # Errors
    /// [`Error::Argument`] before anything moved: lengths, or a segment outside every region. A
    /// block's own error is in its result; its segments then hold anything.
    ///
    /// # Cancel safety
    /// The loads go on: their segments stay in use until [`unregister`](Cache::unregister) resolves.
    pub async fn load_into(&self, keys: &[BlockKey], segments: &[Vec<Segment>]) -> Result<Vec<Result<bool>>> {
        self.load_jobs(self.jobs(keys, None, segments, None)?).await
    }

    /// Stores blocks from registered memory: one result per block, in order; `true`: stored, as the
    /// write policy wants it.
    ///
    /// `keys` are one prefix chain: the parent of each is the one before it; `parent` is the first's.
    ///
    /// # Errors
    /// As [`load_into`](Cache::load_into) and [`store`](Cache::store).
    ///
    /// # Cancel safety
    /// The stores go on: their segments stay in use until [`unregister`](Cache::unregister) resolves.
    pub async fn store_from(
        &self,
        keys: &[BlockKey],
        parent: Option<&BlockKey>,
        segments: &[Vec<Segment>],
    ) -> Result<Vec<Result<bool>>> {
        self.store_jobs(self.jobs(keys, Some(parent), segments, None)?).await
    }

    pub(super) async fn load_jobs(&self, jobs: Vec<Job>) -> Result<Vec<Result<bool>>> {
        self.ask_jobs(|reply| Command::Load { jobs, reply }).await
    }

    pub(super) async fn store_jobs(&self, jobs: Vec<Job>) -> Result<Vec<Result<bool>>> {
        let keys: Vec<BlockKey> = jobs.iter().map(|job| job.key).collect();
        let results = self.ask_jobs(|reply| Command::StoreFrom { jobs, reply }).await?;
        self.shared().told_all(&keys, &results);
        Ok(results)
    }

    /// `chain`: the first key's parent, if the keys are a chain to be stored. `lent`: memory that the segments may lie
    /// in beside the registered regions.
    pub(super) fn jobs(
        &self,
        keys: &[BlockKey],
        chain: Option<Option<&BlockKey>>,
        segments: &[Vec<Segment>],
        lent: Option<&Loan>,
    ) -> Result<Vec<Job>> {
        if keys.len() != segments.len() {
            return Err(Error::Argument {
                what: "segments",
                found: format!("{} lists", segments.len()),
                expected: format!("one for each of {} keys", keys.len()),
            });
        }
        let jobs_max = self.config().limits.movements_max;
        if keys.len() > jobs_max as usize {
            return Err(self.shared().busy("blocks of one call", u64::from(jobs_max), "movements_max"));
        }
        let mut parent = chain.flatten().copied();
        let mut jobs = Vec::with_capacity(keys.len());
        for (key, segments) in keys.iter().zip(segments) {
            let regions = self.inner.regions.hold(segments, self.config().block_bytes, lent)?;
            jobs.push(Job { key: *key, parent, segments: segments.clone(), regions });
            if chain.is_some() {
                parent = Some(*key);
            }
        }
        Ok(jobs)
    }

    async fn ask_jobs(&self, command: impl FnOnce(Reply) -> Command) -> Result<Vec<Result<bool>>> {
        let (sender, receiver) = oneshot::channel();
        // A caller that is gone does not want the answer.
        let reply: Reply = Box::new(move |results| drop(sender.send(results)));
        shield(self.inner.commands.send(command(reply))).await.map_err(|_| Error::Closed)?;
        shield(receiver).await.map_err(|_| Error::Closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: RegionMemory = RegionMemory::Host;

    fn at(address: usize) -> *mut u8 {
        std::ptr::without_provenance_mut(address)
    }

    #[test]
    fn no_memory_is_registered_twice() {
        let regions = Regions::new();
        let pool = regions.add(at(4096), 8192, HOST).expect("the first");
        regions.add(at(8192), 4096, HOST).expect_err("part of it is registered");
        regions.add(at(12288), 4096, HOST).expect("beside the pool");
        regions.add(at(0), 10, HOST).expect_err("no memory lies there");

        let segment = [Segment { ptr: at(4096), len: 10 }];
        assert_eq!(regions.hold(&segment, 10, None).expect("registered").len(), 1);
        regions.remove(&pool).expect("its own");
        assert!(regions.hold(&segment, 10, None).is_err(), "the pool is gone");
    }
}
