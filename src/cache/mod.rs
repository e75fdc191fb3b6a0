//! [`Cache`]: what callers hold.

mod blocks;
mod compute;
mod device;
mod hints;
mod layers;
mod lease;
mod loan;
#[cfg(all(test, feature = "sim"))]
mod model;
mod open;
mod park;
mod queue;
mod region;
#[cfg(feature = "sim")]
pub mod seams;
mod stats;
mod turns;

pub use blocks::Keys;
pub use layers::LayerLoad;
pub use lease::{DeviceLease, Lease, Reservation};
pub use loan::Loan;
pub(crate) use park::Parked;
pub use queue::{Completion, CompletionQueue};
pub use region::{Region, pin_region};
pub use stats::{CopyStats, RouteStats, Stats, TierStats, validate};

use std::sync::Arc;

use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::{
    block::{BlockKey, Tier},
    checksum::checksum,
    config::Config,
    error::{Error, Result},
    fork::HomeBound,
    index::PrefixMatch,
    mover::{Command, DeviceRead, Urgent},
    shield::shield,
    state::{BegunStore, Class, Committed, Found, Outcome, Pin, Promotion, Purpose, Removed, Shared, Use},
};

/// Room for a command in the reactor's channel.
type Room<'a> = mpsc::Permit<'a, Command>;

/// Blocks that [`Cache::touch`] counts before it lets others at the index.
const TOUCHED_UNDER_ONE_LOCK: usize = 256;

/// A tiered cache of fixed-size blocks.
///
/// Cheap to clone; usable from any thread and any async runtime. When the last handle is dropped
/// the cache writes what it must and closes in the background; [`close`](Cache::close) waits for
/// that. Leases may outlive the cache.
///
/// A forked child cannot use it: the reactor's thread and the memory stay with the parent. To drop there what was
/// inherited, this and leases, reservations and queues, does nothing.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<HomeBound<Inner>>,
}

struct Inner {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
    urgent: mpsc::UnboundedSender<Urgent>,
    end: watch::Receiver<Option<Result<()>>>,
    /// A permit for each read of a device block that may be under way.
    device_reads: Arc<Semaphore>,
    regions: region::Regions,
    /// Blocks that callers compute.
    turns: turns::Turns,
    storage_name: &'static str,
    registered: bool,
    direct_io: bool,
    memory_align_bytes: usize,
    /// The device, where it is a CUDA one.
    gpu: Option<Arc<crate::device::cuda::Gpu>>,
    /// Whether copies go through an RDMA device.
    gdr: crate::device::gdr::GdrStatus,
}

impl Cache {
    /// The default settings, to change and to [open](Config::open).
    ///
    /// ```
    /// # let folder = tempfile::tempdir()?;
    /// # let folder = folder.path();
    /// # kvhoist::block_on(async {
    /// use kvhoist::Cache;
    ///
    /// let cache = Cache::builder().block_bytes(64 << 10).host_bytes(1 << 20).disk(folder, 4 << 20).open().await?;
    /// # cache.close().await
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn builder() -> Config {
        Config::default()
    }

    /// Opens a cache: takes the memory, opens or creates the store, reads its records.
    ///
    /// # Errors
    /// [`Error::Config`] names the wrong field; [`Error::Store`] says what was found in the store's
    /// place. Nothing that exists on disk is changed by a failed open.
    ///
    /// # Cancel safety
    /// If the future is dropped the cache is opened and closed again in the background.
    pub async fn open(config: Config) -> Result<Cache> {
        open::open(config).await
    }

    /// The configuration it was opened with.
    pub fn config(&self) -> &Config {
        &self.inner.shared.config
    }

    /// The leading blocks of `keys` that are resident, and where; none once the cache is closed. One lock, no I/O, no
    /// use counted.
    ///
    /// A request begins, for eviction policies that count uses by requests ([`Eviction::Rb`](crate::Eviction::Rb)):
    /// until the next match a block counts as used once, however often it is fetched or loaded.
    pub fn match_prefix(&self, keys: &[BlockKey]) -> PrefixMatch {
        let mut state = self.inner.shared.lock();
        if state.check_open().is_err() {
            return PrefixMatch::default();
        }
        state.index.begin_request(keys.len());
        let mut found = state.index.match_prefix(keys);
        if !state.disk_service.reads() {
            found.truncate_at(Tier::Disk);
        }
        found
    }

    /// The number of leading `keys` that are resident in some tier; 0 once the cache is closed. Allocates nothing while
    /// the disk is in service.
    pub fn match_len(&self, keys: &[BlockKey]) -> usize {
        let mut state = self.inner.shared.lock();
        if state.check_open().is_err() {
            return 0;
        }
        state.index.begin_request(keys.len());
        if state.disk_service.reads() {
            return state.index.match_len(keys);
        }
        drop(state);
        self.match_prefix(keys).len()
    }

    /// Counts a use of every resident block of a chain, given in prefix order, as a load of it would. No I/O.
    ///
    /// For engines that keep a copy of their own and so never load what they use most. Blocks that are nowhere are
    /// passed over.
    pub fn touch(&self, keys: &[BlockKey]) {
        // From the end, as within each part: a chain's end is to be evicted before its beginning.
        for part in keys.rchunks(TOUCHED_UNDER_ONE_LOCK) {
            let mut state = self.inner.shared.lock();
            let ids: Vec<_> = part.iter().filter_map(|key| state.index.find(key)).collect();
            state.index.touch_chain(&ids);
            ids.into_iter().for_each(|id| self.inner.shared.reconsider(&mut state, id));
        }
    }

    /// A block in host memory, read from a slower tier where it must be; `None` if it is nowhere.
    ///
    /// A block already in host memory is returned at the first poll, on the caller's thread. One
    /// from disk has been verified against its checksum. However many callers want a block, it is
    /// read once.
    ///
    /// # Errors
    /// [`Error::Busy`] past a limit, [`Error::Io`] if the read failed (the block is then given up, unless the machine
    /// lacked memory or another resource), [`Error::Timeout`] past [`Config::deadline_ms`] (the read goes on),
    /// [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves no trace; a read that began may still finish and make the block
    /// resident.
    pub async fn fetch(&self, key: &BlockKey) -> Result<Option<Lease>> {
        Ok(self.pin(key, Tier::Host).await?.map(Lease::new))
    }

    /// A block in device memory, promoted where it must be; `None` if it is nowhere.
    ///
    /// # Errors
    /// As [`fetch`](Cache::fetch); [`Error::Unavailable`] without a device tier.
    ///
    /// # Cancel safety
    /// As [`fetch`](Cache::fetch).
    pub async fn fetch_to_device(&self, key: &BlockKey) -> Result<Option<DeviceLease>> {
        self.need_device()?;
        Ok(self.pin(key, Tier::Device).await?.map(DeviceLease::new))
    }

    /// Starts to bring blocks into host memory; returns how many movements it started.
    ///
    /// Nobody waits for them: they go after the reads that someone awaits. Past
    /// [`Config::background_max`] or with the queue full, the rest is refused and counted.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn prefetch(&self, keys: &[BlockKey]) -> Result<usize> {
        let shared = &self.inner.shared;
        shared.lock().check_open()?;
        let mut started = 0;
        for (i, key) in keys.iter().enumerate() {
            if shared.lock().flights.len() >= self.config().limits.background_max as usize {
                shared.metrics.background_refused.add((keys.len() - i) as u64);
                break;
            }
            let Ok(permit) = self.inner.commands.try_reserve() else {
                shared.metrics.background_refused.add((keys.len() - i) as u64);
                break;
            };
            if let (Promotion::Started(_nobody), _) =
                shared.promote(key, Tier::Host, Class::Background, Use::Announced)?
            {
                permit.send(Command::Promote { key: *key, to: Tier::Host });
                started += 1;
            }
        }
        Ok(started)
    }

    /// Stores a block: copies `data` into a host slot, then does what the write policy wants.
    ///
    /// `parent` is the key before this one in its prefix chain. With `write_through` it resolves
    /// when the disk has taken the block (written, not flushed), else when the block is visible. A
    /// block that is resident already is not copied again: keys name content.
    ///
    /// # Errors
    /// [`Error::Argument`] if `data` is not one block; [`Error::Busy`] past a limit;
    /// [`Error::Io`], [`Error::Refused`] or [`Error::Unavailable`] if the disk did not take it: the
    /// block is then not on disk, though host memory may still serve it. [`Error::Timeout`] past
    /// [`Config::deadline_ms`], waiting for a slot (nothing was done) or for the disk (which may still
    /// take it).
    ///
    /// # Cancel safety
    /// Dropped before the copy, it leaves no trace; after it, the block is visible and its write
    /// goes on: [`sync`](Cache::sync) waits for it, and reports it if the disk does not take it.
    pub async fn store(&self, key: &BlockKey, parent: Option<&BlockKey>, data: &[u8]) -> Result<()> {
        self.check_length(data)?;
        let shared = &self.inner.shared;
        let mut filling = match shared.begin_store(key, parent)? {
            BegunStore::Known(committed) => return self.finish_store(key, committed).await,
            BegunStore::Slot(filling) => filling,
            BegunStore::NoSlot => shared.acquire(Tier::Host, Purpose::Call).await?,
        };
        filling.bytes_mut().copy_from_slice(data);
        let committed = shared.commit(key, parent, filling, checksum(data))?;
        self.finish_store(key, committed).await
    }

    /// A host slot, all zero, to fill in place and [commit](Reservation::commit). Waits for a slot.
    ///
    /// # Errors
    /// [`Error::Busy`] past [`Config::waiters_max`], [`Error::Timeout`] past [`Config::deadline_ms`],
    /// [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future or the reservation gives the slot back.
    pub async fn reserve(&self) -> Result<Reservation> {
        let mut reservation = self.reserve_for_overwrite().await?;
        reservation.fill(0);
        Ok(reservation)
    }

    /// As [`reserve`](Self::reserve), without the time to clear the slot: for those who write every byte of it.
    ///
    /// Until then its bytes are those of whatever block was evicted from the slot, which may be another tenant's. Show
    /// them to nobody, and do not commit a block that was not filled to its end.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    ///
    /// # Cancel safety
    /// As [`reserve`](Self::reserve).
    pub async fn reserve_for_overwrite(&self) -> Result<Reservation> {
        let filling = self.inner.shared.acquire_for_caller().await?;
        Ok(Reservation::new(self.clone(), filling))
    }

    /// Forgets a block in every tier; true if it was resident. Readers keep their leases.
    ///
    /// Resolves when no record on disk names it any more, also where it was resident no longer: a write of the block
    /// that is under way is waited for, and records that still name it are written anew. The removal then survives the
    /// end of the process. A power cut may undo it until a [`sync`](Cache::sync) has followed; use
    /// [`remove_durably`](Cache::remove_durably) where it must not.
    ///
    /// # Errors
    /// [`Error::Io`] if its record on disk could not be cleared, [`Error::Timeout`] if that takes too long; the block
    /// is forgotten all the same, and may be back at the next start.
    ///
    /// # Cancel safety
    /// The block is forgotten at the first poll. Dropped after that, only its record may come back at the next start.
    pub async fn remove(&self, key: &BlockKey) -> Result<bool> {
        let shared = &self.inner.shared;
        let Removed { resident, writing } = shared.remove(key)?;
        // A write that failed has ended as well, and has left its record to be cleared.
        if let Some(writing) = writing
            && let Err(error) = shield(shared.written(writing)).await
            && (error.is_transient() || matches!(error, Error::Closed))
        {
            return Err(error);
        }
        if shared.may_be_recorded(key) {
            self.ask(|reply| Command::Forget { key: *key, reply }).await?;
        }
        Ok(resident)
    }

    /// As [`remove`](Cache::remove), and flushes: the removal survives a power cut too. It takes as long as the drive's
    /// flush does, one for each path.
    ///
    /// # Errors
    /// As [`remove`](Cache::remove); [`Error::Io`] also after a failed flush, as of [`sync`](Cache::sync).
    ///
    /// # Cancel safety
    /// As [`remove`](Cache::remove).
    pub async fn remove_durably(&self, key: &BlockKey) -> Result<bool> {
        let resident = self.remove(key).await?;
        self.ask(|reply| Command::Flush { reply }).await?;
        Ok(resident)
    }

    /// Resolves when all that was stored before it is written and flushed: it survives a power cut.
    ///
    /// That is every block whose store has returned, or was dropped after the block became visible. With
    /// `write_through_selective` it is only the blocks that were selected. With `by_value` every block that is not on
    /// disk is decided on now, as if host memory let it go, and those that are worth a write, within the budget, are
    /// written and flushed. The rest stays in host memory until its slots are needed, and does not survive the cache:
    /// [`Stats::writes_declined`] and [`Stats::writes_over_budget`] count it, and it is no error.
    ///
    /// # Errors
    /// [`Error::Refused`] if the disk did not take blocks and no store has returned that error: write-backs, and writes
    /// whose store was dropped. They are not tried again, and not reported to syncs that begin later: store them anew.
    ///
    /// [`Error::Io`] if records could not be written (the next sync tries again) or a flush failed. After a failed
    /// flush every later sync, and the close, fails too: the kernel does not try again what it could not write, so
    /// nobody can tell what survives a power cut. Reads go on; open the cache anew to sync again.
    ///
    /// [`Error::Timeout`] past [`Config::deadline_ms`] (what was begun goes on), [`Error::Closed`].
    ///
    /// # Cancel safety
    /// The writes and the flush go on. Refused blocks are left for the next sync to report.
    pub async fn sync(&self) -> Result<()> {
        let refusals = self.inner.shared.begin_report();
        self.ask(|reply| Command::Sync { reply }).await?;
        // Here and not on the reactor: what a caller that is gone was to be told, the next one is.
        refusals.report()
    }

    /// Finishes what is under way, writes what is dirty, flushes, and releases the files. With `by_value` it writes
    /// what a [`sync`](Cache::sync) would, and the rest is gone.
    ///
    /// Calls on other handles fail with [`Error::Closed`] from now on. Leases stay valid. However many callers close
    /// the cache, and whenever they do, each waits until it has ended and gets the same result: registered memory may
    /// be reused after any of them.
    ///
    /// # Errors
    /// As [`sync`](Cache::sync); the cache is closed all the same.
    ///
    /// # Cancel safety
    /// From the first poll on the close goes on.
    pub async fn close(&self) -> Result<()> {
        // Refused where it has ended.
        drop(self.send_urgent(Urgent::Close));
        self.ended().await
    }

    /// Waits for the end of the reactor: the result of every `close`.
    async fn ended(&self) -> Result<()> {
        let mut end = self.inner.end.clone();
        let ended = shield(end.wait_for(Option::is_some)).await.ok();
        ended.and_then(|result| result.clone()).unwrap_or(Err(Error::Closed))
    }

    async fn ask(&self, command: impl FnOnce(oneshot::Sender<Result<()>>) -> Command) -> Result<()> {
        let (reply, receiver) = oneshot::channel();
        shield(self.inner.commands.send(command(reply))).await.map_err(|_| Error::Closed)?;
        shield(receiver).await.unwrap_or(Err(Error::Closed))
    }

    /// Pins a block in `tier` for its caller, promoting it first where it must be.
    async fn pin(&self, key: &BlockKey, tier: Tier) -> Outcome {
        let pin = match self.inner.shared.look_up(key, tier, || self.inner.commands.try_reserve().ok())? {
            Found::Hit(pin) => Some(pin),
            Found::Miss => None,
            Found::Elsewhere(asked) => shield(self.promote(key, tier, asked)).await?,
        };
        if pin.is_some() && self.config().selects_for_disk() {
            self.write_selected(key);
        }
        Ok(pin)
    }

    /// Promotes a block, or waits for its promotion: what was `asked` for, and room for the command, come first.
    async fn promote(&self, key: &BlockKey, tier: Tier, mut asked: Option<(Promotion, Room<'_>)>) -> Outcome {
        let shared = &self.inner.shared;
        let mut usage = if asked.is_some() { Use::Counted } else { Use::Now };
        loop {
            let (promotion, permit) = match asked.take() {
                Some(asked) => asked,
                None => {
                    let permit = self.inner.commands.reserve().await.map_err(|_| Error::Closed)?;
                    let (promotion, source) = shared.promote(key, tier, Class::Awaited, usage)?;
                    if std::mem::replace(&mut usage, Use::Counted) == Use::Now {
                        shared.metrics.looked_up(source);
                    }
                    (promotion, permit)
                }
            };
            let (receiver, joined) = match promotion {
                Promotion::Hit(pin) => return Ok(Some(pin)),
                Promotion::Miss => return Ok(None),
                Promotion::Joined(receiver) => {
                    drop(permit);
                    (receiver, true)
                }
                Promotion::Started(receiver) => {
                    permit.send(Command::Promote { key: *key, to: tier });
                    (receiver, false)
                }
            };
            match shared.settle(receiver).await {
                // The movement may have begun before the block was removed and stored anew: its miss is not ours.
                Some(Ok(None)) if joined => {}
                Some(outcome) => return outcome,
                None => {}
            }
        }
    }

    /// Refuses what is not one block.
    fn check_length(&self, data: &[u8]) -> Result<()> {
        let block_bytes = self.config().block_bytes;
        if data.len() == block_bytes {
            return Ok(());
        }
        Err(Error::Argument {
            what: "data",
            found: format!("{} bytes", data.len()),
            expected: format!("one block of {block_bytes} bytes"),
        })
    }

    /// Does what the write policy wants for a committed block.
    async fn finish_store(&self, key: &BlockKey, committed: Committed) -> Result<()> {
        let receiver = match committed {
            Committed::Done => return Ok(()),
            Committed::Wait(receiver) => receiver,
            Committed::Write(write, receiver) => {
                self.send_urgent(Urgent::Write(write))?;
                receiver
            }
        };
        shield(self.inner.shared.written(receiver)).await.inspect_err(|error| {
            self.inner.shared.metrics.stores_failed.add(1);
            self.inner.shared.told(key, error);
        })
    }

    fn write_selected(&self, key: &BlockKey) {
        if let Some(write) = self.inner.shared.selected_for_disk(key) {
            // Closing: the flight ends with the reactor.
            drop(self.send_urgent(Urgent::Write(write)));
        }
    }

    fn send_urgent(&self, request: Urgent) -> Result<()> {
        self.inner.urgent.send(request).map_err(|_| Error::Closed)
    }

    fn need_device(&self) -> Result<()> {
        if self.inner.shared.device.is_some() {
            return Ok(());
        }
        let reason = "the cache was opened with device_blocks = 0".to_owned();
        Err(Error::Unavailable { tier: "device", reason })
    }

    /// Copies a device block to the host: `buf` comes back with its bytes, resized to fit. Also a block that was
    /// removed since it was leased.
    ///
    /// As many copies as [`Config::movements_max`] may be under way at once; who asks for more waits.
    ///
    /// # Errors
    /// [`Error::Argument`] for a lease of another cache, [`Error::Copy`] if the copy failed, [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future drops `buf`, once a copy that has begun has ended.
    pub async fn read_device(&self, lease: &DeviceLease, buf: Vec<u8>) -> Result<Vec<u8>> {
        let pin = lease.pin_of(self.shared())?;
        // Not through the bounded channel, where those may be who wait for the leased slot; bounded all the same.
        let permit = shield(Arc::clone(&self.inner.device_reads).acquire_owned()).await.map_err(|_| Error::Closed)?;
        let (reply, receiver) = oneshot::channel();
        self.send_urgent(Urgent::ReadDevice(DeviceRead { pin, buf, permit, reply }))?;
        shield(receiver).await.unwrap_or(Err(Error::Closed))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("config", self.config()).finish_non_exhaustive()
    }
}

/// A pin is all that keeps a slot from being reused: it may be dropped on any thread.
const _: fn() = || {
    fn sendable<T: Send + Sync + 'static>() {}
    sendable::<Cache>();
    sendable::<Pin>();
};
