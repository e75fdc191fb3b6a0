//! The calls that most callers make: open a cache, fetch and store blocks.

use tokio::sync::oneshot;

use super::{Cache, DeviceLease, Lease, open};
use crate::{
    block::{BlockKey, Route, Tier},
    checksum::checksum,
    config::Config,
    error::{Error, Result},
    mover::{DeviceRead, Urgent},
    shield::shield,
    state::{Committed, Known, LookedUp, Purpose},
};

impl Cache {
    /// Opens a cache: takes the memory, opens or creates the store, reads its records.
    ///
    /// # Errors
    /// [`Error::Config`] names the wrong field; [`Error::Store`] says what was found in the store's
    /// place. Nothing that exists on disk is changed by a failed open.
    ///
    /// # Cancel safety
    /// If the future is dropped the cache is opened and closed again in the background.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let folder = tempfile::tempdir().expect("a folder");
    /// # let folder = folder.path();
    /// use kvhoist::{Cache, Config, DirectIo};
    ///
    /// let config = Config::default().block_bytes(64 << 10).host_bytes(1 << 20).disk(folder, 4 << 20);
    /// # let config = config.direct_io(DirectIo::Prefer);
    /// let cache = Cache::open(config).await?;
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn open(config: Config) -> Result<Cache> {
        open::open(config).await
    }

    /// A block in host memory, read from a slower tier where it must be; `None` if it is nowhere.
    ///
    /// A block already in host memory is returned at the first poll, unless other threads use the cache at that very
    /// moment: then one of them may look it up, and wake the caller. One from disk has been verified against its
    /// checksum. However many callers want a block, it is read once. A block of the remote tier that does not arrive
    /// within [`Config::deadline_ms`] is a miss.
    ///
    /// # Errors
    /// [`Error::Busy`] past a limit, [`Error::Io`] if the read failed (the block is then given up, unless the machine
    /// lacked memory or another resource), [`Error::Timeout`] past [`Config::deadline_ms`] (the read goes on),
    /// [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future leaves no trace; a read that began may still finish and make the block
    /// resident.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[7; 4096]).await?;
    /// match cache.fetch(&key).await? {
    ///     Some(block) => assert_eq!(block[..], [7; 4096]),
    ///     None => println!("a miss: compute the block, and store it"),
    /// }
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn fetch(&self, key: &BlockKey) -> Result<Option<Lease>> {
        let Some(guard) = self.inner.shared.guard_if_free() else {
            // Boxed: every fetch would have room for it.
            return Ok(Box::pin(self.fetch_deferred(key)).await?.map(Lease::new));
        };
        let asked = match self.inner.shared.look_up(key, Tier::Host, guard)? {
            LookedUp::Hit(pin) => {
                self.write_if_selected(key);
                return Ok(Some(Lease::new(self.inner.shared.leased(Tier::Host, pin))));
            }
            LookedUp::NoHit((state, id)) => self.promote_missing(state, (key, id), Tier::Host)?,
            LookedUp::Nowhere => return Ok(None),
        };
        Ok(self.pin_promoted(asked, key, Tier::Host).await?.map(Lease::new))
    }

    /// Stores a block: copies `data` into a host slot, then does what the write policy wants.
    ///
    /// `parent` is the key before this one in its prefix chain. With `write_through` it resolves
    /// when the disk has taken the block (written, not flushed), else when the block is visible. A
    /// block that is resident already is not copied again: keys name content. One that is on disk
    /// from an earlier run is read first, once: the end of that run may have cut its write off.
    ///
    /// # Errors
    /// [`Error::Argument`] if `data` is not one block; [`Error::Busy`] past a limit;
    /// [`Error::Io`], [`Error::Refused`] or [`Error::Unavailable`] if the disk did not take it: the
    /// block is then not on disk, though host memory may still serve it. [`Error::Timeout`] past
    /// [`Config::deadline_ms`], waiting for a slot (nothing was done) or for the disk (which may still
    /// take it). [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropped before the copy, it leaves no trace; after it, the block is visible and its write
    /// goes on: [`sync`](Cache::sync) waits for it, and reports it if the disk does not take it.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// let keys = kvhoist::PrefixChain::new("llama-3-8b bf16").extend_tokens(&[7; 128], 64)?;
    /// cache.store(&keys[0], None, &[0; 4096]).await?;
    /// cache.store(&keys[1], Some(&keys[0]), &[1; 4096]).await?;
    /// assert_eq!(cache.match_len(&keys), 2);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn store(&self, key: &BlockKey, parent: Option<&BlockKey>, data: &[u8]) -> Result<()> {
        self.check_length(data)?;
        let placed = self.place(key, parent, data, || true).await;
        let committed = placed.inspect_err(|_| self.inner.shared.metrics.stores_failed.add(1))?;
        self.finish_store(key, committed).await
    }

    /// Makes a block visible in host memory, unless it is resident, or not wanted when that is decided under the lock.
    pub(super) async fn place(
        &self,
        key: &BlockKey,
        parent: Option<&BlockKey>,
        data: &[u8],
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<Committed> {
        let shared = &self.inner.shared;
        let mut failed = None;
        let mut filling = loop {
            match shared.begin_store(key, parent)? {
                (Known::Yes(committed), _) => return Ok(committed),
                (Known::No, Some(filling)) => break filling,
                (Known::No, None) => break shared.acquire(Tier::Host, Purpose::Call).await?,
                // Boxed: every store would have room for it.
                (Known::Unproven, _) if failed.is_none() => failed = Box::pin(self.prove(key)).await.err(),
                (Known::Unproven, _) => return Err(failed.expect("it was tried")),
            }
        };
        filling.bytes_mut().copy_from_slice(data);
        shared.commit_if(key, parent, filling, checksum(data), Route::CallerToHost, is_wanted)
    }

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

    /// The configuration it was opened with.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// assert_eq!(cache.config().block_bytes, 4096);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub fn config(&self) -> &Config {
        &self.inner.shared.config
    }

    /// The leading blocks of `keys` that are resident in a tier in service: the fastest of each, none once the cache is
    /// closed. Blocks of the remote tier count as far as that offers them. No I/O, no use counted; the lock is taken
    /// for 256 keys at a time, so a chain that is evicted meanwhile may match in part.
    ///
    /// A request begins, for eviction policies that count uses by requests ([`Eviction::Rb`](crate::Eviction::Rb)):
    /// until the next match a block counts as used once, however often it is fetched or loaded.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// # let keys = kvhoist::PrefixChain::new("llama-3-8b bf16").extend_tokens(&[7; 128], 64)?;
    /// # cache.store(&keys[0], None, &[0; 4096]).await?;
    /// // Two blocks long; only the first was stored.
    /// assert_eq!(cache.match_prefix(&keys), [kvhoist::Tier::Host]);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub fn match_prefix(&self, keys: &[BlockKey]) -> Vec<Tier> {
        self.inner.shared.match_prefix(keys)
    }

    /// The number of leading `keys` that are resident in some tier in service; 0 once the cache is closed. Allocates
    /// nothing.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
    /// # let keys = kvhoist::PrefixChain::new("llama-3-8b bf16").extend_tokens(&[7; 128], 64)?;
    /// # cache.store(&keys[0], None, &[0; 4096]).await?;
    /// let resident = cache.match_len(&keys);
    /// println!("{resident} of {} blocks need not be computed", keys.len());
    /// # assert_eq!(resident, 1);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub fn match_len(&self, keys: &[BlockKey]) -> usize {
        self.inner.shared.match_len(keys)
    }

    /// A block in device memory, promoted where it must be; `None` if it is nowhere.
    ///
    /// # Errors
    /// As [`fetch`](Cache::fetch); [`Error::Unavailable`] without a device tier.
    ///
    /// # Cancel safety
    /// As [`fetch`](Cache::fetch).
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).device_blocks(4)
    /// #     .device(kvhoist::DeviceKind::Simulated).open().await?;
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[7; 4096]).await?;
    /// if let Some(block) = cache.fetch_to_device(&key).await? {
    ///     for segment in block.segments() {
    ///         println!("{} bytes at {:p}", segment.len, segment.ptr);
    ///     }
    /// }
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn fetch_to_device(&self, key: &BlockKey) -> Result<Option<DeviceLease>> {
        self.need_device()?;
        Ok(self.fetch_waiting(key, Tier::Device).await?.map(DeviceLease::new))
    }

    /// Copies a device block to the host: `buf` comes back with its bytes, resized to fit. Also a block that was
    /// removed since it was leased.
    ///
    /// As many copies as [`Config::movements_max`] may be under way at once; who asks for more waits, up to
    /// [`Config::deadline_ms`].
    ///
    /// # Errors
    /// [`Error::Argument`] for a lease of another cache, [`Error::Copy`] if the copy failed, [`Error::Timeout`] if it
    /// did not begin in time, [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future drops `buf`, once a copy that has begun has ended.
    ///
    /// ```
    /// # kvhoist::block_on(async {
    /// # let cache = kvhoist::Cache::builder().block_bytes(4096).host_bytes(1 << 20).device_blocks(4)
    /// #     .device(kvhoist::DeviceKind::Simulated).open().await?;
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// # cache.store(&key, None, &[7; 4096]).await?;
    /// let block = cache.fetch_to_device(&key).await?.expect("it was stored");
    /// let bytes = cache.read_device(&block, Vec::new()).await?;
    /// assert_eq!(bytes, [7; 4096]);
    /// # cache.close().await }).expect("the example runs");
    /// ```
    pub async fn read_device(&self, lease: &DeviceLease, mut buf: Vec<u8>) -> Result<Vec<u8>> {
        let pin = lease.pin_of(self.shared())?;
        // Not as a command, whose room those may have who wait for the leased slot; bounded all the same.
        let shared = self.shared();
        let room = shared.room(&shared.device_reads, "a turn to read a device block").await?;
        // Here and not on the reactor, which zeroing would take milliseconds of.
        buf.resize(shared.config.block_bytes, 0);
        let (reply, receiver) = oneshot::channel();
        self.send_urgent(Urgent::ReadDevice(DeviceRead { pin, buf, room, reply }))?;
        shield(receiver).await.unwrap_or(Err(Error::Closed))
    }

    /// Does what the write policy wants for a committed block, and tells its caller.
    pub(super) async fn finish_store(&self, key: &BlockKey, committed: Committed) -> Result<()> {
        let written = self.write_placed(committed).await;
        written.inspect_err(|error| self.inner.shared.forget_reported_one(key, error))
    }

    /// Does what the write policy wants for a committed block. A refusal of the disk is left to the next sync.
    pub(super) async fn write_placed(&self, committed: Committed) -> Result<()> {
        let receiver = match committed {
            Committed::Done => return Ok(()),
            Committed::Wait(receiver) => receiver,
            Committed::Write(write, receiver) => {
                self.send_urgent(Urgent::Write(write))?;
                receiver
            }
        };
        let written = shield(self.inner.shared.written(receiver)).await;
        written.inspect_err(|_| self.inner.shared.metrics.stores_failed.add(1))
    }
}
