//! [`Cache`]: what callers hold.

// The first, and apart from the others: the page of `Cache` has the methods in the order of its modules.
mod calls;

mod blocks;
mod compute;
mod device;
mod durable;
mod gauges;
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
    error::{Error, Result},
    fork::HomeBound,
    mover::{Command, Urgent},
    shield::shield,
    state::{Class, Committed, Found, Outcome, Pin, Promotion, Shared, Use},
};

/// Room for a command in the reactor's channel.
type Room<'a> = mpsc::Permit<'a, Command>;

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
        Err(Error::argument("data", format!("{} bytes", data.len()), format!("one block of {block_bytes} bytes")))
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
        Err(Error::unavailable("device", reason))
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
