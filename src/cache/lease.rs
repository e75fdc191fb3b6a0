//! Guards: a lease on a full slot, a reservation of an empty one.

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, atomic::Ordering},
};

use bytes::Bytes;

use super::Cache;
use crate::{
    block::{BlockKey, Route, Segment},
    checksum::checksum,
    error::{Error, Result},
    state::{Filling, Pin, Shared},
};

/// A block in host memory, pinned: it stays there, unchanged, until the lease is dropped.
///
/// Dereferences to the block's bytes; turns into [`Bytes`] without a copy. Its drop, like any call, may wake other
/// callers on this thread.
///
/// # Slow readers
/// A lease takes a slot of the host tier for as long as it lives. If leases, or the [`Bytes`] made of them, go to
/// clients that read slowly, a few hundred of them may hold every slot: then each call that needs a slot waits, and
/// ends with [`Error::Timeout`](crate::Error::Timeout) after [`Config::deadline_ms`](crate::Config::deadline_ms). Its
/// fields `leases` and `reservations` say how many there were, of how many `slots`. Give
/// [`Config::host_blocks`](crate::Config::host_blocks) more slots than leases that live at once, bound the clients that
/// are served at once, or copy the bytes and drop the lease.
pub struct Lease {
    pin: Pin,
}

impl Lease {
    #[inline]
    pub(super) fn new(mut pin: Pin) -> Self {
        pin.count_as_lease();
        Lease { pin }
    }

    /// The path the bytes took for this fetch.
    pub fn route(&self) -> Route {
        self.pin.route()
    }

    /// The same memory as [`Bytes`]; the slot is pinned until the last clone is dropped. For clients that may read
    /// slowly see [`Lease`], *Slow readers*.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl Deref for Lease {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.pin.bytes()
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Lease> for Bytes {
    fn from(lease: Lease) -> Bytes {
        lease.into_bytes()
    }
}

debug_fields!(Lease, lease => len: lease.len(), route: lease.route());

impl Cache {
    /// A lease on a block that is in host memory already; `None` for every other one. No I/O, and no wait.
    ///
    /// For callers that will load the block soon and need it to stay until then.
    ///
    /// # Errors
    /// [`Error::Closed`].
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_block(async |cache, key| {
    /// let lease = cache.lease(&key)?.expect("stored a moment ago");
    /// assert_eq!(lease.len(), cache.config().block_bytes);
    /// # Ok(()) });
    /// ```
    pub fn lease(&self, key: &BlockKey) -> Result<Option<Lease>> {
        Ok(self.inner.shared.look_up_host(key)?.map(Lease::new))
    }
}

/// A block in device memory, pinned: it stays there, unchanged, until the lease is dropped.
pub struct DeviceLease {
    /// Shared with copies from it that are under way.
    pin: Arc<Pin>,
}

impl DeviceLease {
    pub(super) fn new(mut pin: Pin) -> Self {
        pin.count_as_lease();
        DeviceLease { pin: Arc::new(pin) }
    }

    /// The pin, for the cache that gave it.
    pub(super) fn pin_of(&self, cache: &Arc<Shared>) -> Result<Arc<Pin>> {
        if Arc::ptr_eq(self.pin.shared(), cache) {
            return Ok(Arc::clone(&self.pin));
        }
        Err(Error::argument("lease", "a lease of another cache", "a lease that this cache has given"))
    }

    /// The path the bytes took for this fetch.
    pub fn route(&self) -> Route {
        self.pin.route()
    }

    /// Where the block's segments lie in device memory, in the order of the block's bytes. Valid
    /// while the lease lives; not to be written to.
    pub fn segments(&self) -> Vec<Segment> {
        let device = self.pin.shared().device.as_ref();
        device.expect("device slots exist only with a device").segments(self.pin.slot()).collect()
    }
}

debug_fields!(DeviceLease, lease => route: lease.route());

/// A host slot to be filled in place and committed. Dropping it gives the slot back.
///
/// Its bytes are zero at first, or with [`Cache::reserve_for_overwrite`] whatever was there before.
pub struct Reservation {
    cache: Cache,
    filling: Filling,
    counted: Counted,
}

/// Counts a reservation for as long as it lives.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.reservations.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Cache {
    /// A host slot, all zero, to fill in place and [commit](Reservation::commit). Waits for a slot.
    ///
    /// # Errors
    /// [`Error::Busy`] past [`Config::waiters_max`](crate::Config::waiters_max), [`Error::Timeout`] past
    /// [`Config::deadline_ms`](crate::Config::deadline_ms), [`Error::Closed`].
    ///
    /// # Cancel safety
    /// Dropping the future or the reservation gives the slot back.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// let mut slot = cache.reserve().await?;
    /// slot[..4].copy_from_slice(b"here");
    /// slot.commit(&key, None).await?;
    /// assert!(cache.contains(&key));
    /// # Ok(()) });
    /// ```
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
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_cache(async |cache| {
    /// # let key = kvhoist::BlockKey::new([1; 32]);
    /// let mut slot = cache.reserve_for_overwrite().await?;
    /// slot.copy_from_slice(&[7; 4096]);
    /// slot.commit(&key, None).await?;
    /// # Ok(()) });
    /// ```
    pub async fn reserve_for_overwrite(&self) -> Result<Reservation> {
        let filling = self.inner.shared.acquire_for_caller().await?;
        Ok(Reservation::new(self.clone(), filling))
    }
}

impl Reservation {
    pub(super) fn new(cache: Cache, filling: Filling) -> Self {
        let shared = Arc::clone(cache.shared());
        shared.reservations.fetch_add(1, Ordering::Relaxed);
        Reservation { cache, filling, counted: Counted(shared) }
    }

    /// Makes the block visible under `key`, then does what the write policy wants, as
    /// [`Cache::store`] does.
    ///
    /// # Errors
    /// As [`Cache::store`].
    ///
    /// # Cancel safety
    /// As [`Cache::store`].
    pub async fn commit(self, key: &BlockKey, parent: Option<&BlockKey>) -> Result<()> {
        let Reservation { cache, mut filling, counted } = self;
        if cache.shared().is_unproven(key) {
            // The read takes a slot too, for which nobody waits who has one.
            let bytes = filling.bytes_mut().to_vec();
            drop((filling, counted));
            return cache.store(key, parent, &bytes).await;
        }
        let checksum = checksum(filling.bytes_mut());
        let committed = cache.shared().commit(key, parent, filling, checksum)?;
        drop(counted);
        cache.finish_store(key, committed).await
    }
}

impl Deref for Reservation {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.filling.bytes()
    }
}

impl DerefMut for Reservation {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.filling.bytes_mut()
    }
}

debug_fields!(Reservation, reservation => len: reservation.len());
