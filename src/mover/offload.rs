//! Transfers between disk slots and host memory, and checksums, on a worker or here.

use std::{io, ptr::NonNull, rc::Rc, sync::Arc};

use super::Mover;
use crate::{
    block::{FileId, OpKind, Segment},
    checksum::Digest,
    device::CopyEngine,
    io::{Storage, Transfer, read_into, write_from},
    memory::{Guard, IoBuf, Readable},
    state::{Kind, Permit},
    urgency::Urgency,
};

/// Bytes that the reactor checksums before other tasks get a turn: about 15 us.
const CHECKSUM_CHUNK_BYTES: usize = 256 << 10;

/// Bytes of small blocks that the reactor checksums before other tasks get a turn: a turn costs about as much as the
/// checksum of 16 KiB.
const TURN_BYTES: usize = 64 << 10;

/// Least bytes of a write without a checksum that are worth handing over: pinning or copying them then takes the kernel
/// longer than waking a thread. One drive took writes of 128 KiB at 0.86 of the bare ring from the reactor and at 0.81
/// from workers, which also took 1.3 times the CPU.
const PLAIN_WRITE_BYTES_MIN: u64 = 256 << 10;

/// The bytes in flight, as a multiple of the least work worth handing over, with which smaller blocks are handed over
/// too.
const SMALL_PART: u64 = 4;

/// A range of host memory, the number of the registered buffer around it, and the guard of memory that may be taken
/// away.
pub(super) type Place = (Segment, Option<u16>, Option<Guard>);

fn start_of(segment: &Segment) -> NonNull<u8> {
    NonNull::new(segment.ptr).expect("no memory begins at 0")
}

/// # Safety
/// As [`Readable`] promises, for as long as the borrow lasts.
unsafe fn read<'a>(segment: &Segment) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(segment.ptr.cast_const(), segment.len) }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// A host slot, which has the length of a disk slot.
    pub(super) fn place_of(&self, slot: u32) -> Place {
        let segment = Segment { ptr: self.shared.host_ptr(slot).as_ptr(), len: self.shared.config.slot_bytes() };
        (segment, self.shared.fixed_buffer(slot), None)
    }

    /// Reads a disk slot into host memory, or writes it from there, all places at once; the `guard` that keeps them
    /// is returned. With the checksum of the first `sum_bytes` bytes, if a worker made the transfer: of what it has
    /// read, or of what it wrote. Which of the two it is, and how urgent, its `permit` of the bytes in flight tells.
    ///
    /// # Safety
    /// While `guard` lives the places must stay mapped, nobody else may write to them, and if they are read into nobody
    /// may read them either.
    pub(super) async unsafe fn transfer<G: Send + Sync + 'static>(
        self: &Rc<Self>,
        permit: &Permit,
        file: FileId,
        offset: u64,
        places: &[Place],
        sum_bytes: usize,
        guard: G,
    ) -> (io::Result<Option<u64>>, G) {
        let kind = match permit.kind() {
            Kind::Read => OpKind::Read,
            Kind::Write => OpKind::Write,
        };
        // Most blocks are one segment, which needs no task of its own.
        if let [(segment, fixed, source)] = places {
            // SAFETY: the caller's promise.
            let buf = unsafe { IoBuf::new(start_of(segment), segment.len, *fixed, guard) }.guarded(source.clone());
            return match self.transfer_on_worker((kind, permit.urgency()), file, offset, &buf, sum_bytes).await {
                Some(result) => (result, buf.into_owner()),
                // Boxed: every movement would have room for it.
                None => Box::pin(self.transfer_here(kind, file, offset, buf)).await,
            };
        }
        // SAFETY: the caller's promise.
        Box::pin(unsafe { self.transfer_parts(kind, file, offset, places, guard) }).await
    }

    /// As [`transfer`](Self::transfer), here, for a block in several places.
    ///
    /// # Safety
    /// As of [`transfer`](Self::transfer).
    async unsafe fn transfer_parts<G: Send + Sync + 'static>(
        self: &Rc<Self>,
        kind: OpKind,
        file: FileId,
        offset: u64,
        places: &[Place],
        guard: G,
    ) -> (io::Result<Option<u64>>, G) {
        let guard = Arc::new(guard);
        let mut at = offset;
        let operation = |(segment, fixed, _): &Place| {
            // SAFETY: the caller's promise.
            let buf = unsafe { IoBuf::new(start_of(segment), segment.len, *fixed, Arc::clone(&guard)) };
            let (this, from) = (Rc::clone(self), at);
            at += segment.len as u64;
            tokio::task::spawn_local(async move { this.transfer_here(kind, file, from, buf).await.0 })
        };
        let operations: Vec<_> = places.iter().map(operation).collect();
        let mut result = Ok(None);
        for operation in operations {
            let ended = operation.await.unwrap_or_else(|_| Err(io::Error::other("the operation was lost")));
            result = result.and(ended);
        }
        (result, Arc::into_inner(guard).expect("every operation has given its permit back"))
    }

    async fn transfer_here<O: Send + Sync + 'static>(
        &self,
        kind: OpKind,
        file: FileId,
        offset: u64,
        buf: IoBuf<O>,
    ) -> (io::Result<Option<u64>>, O) {
        let (result, owner) = match kind {
            OpKind::Read => read_into(&self.storage, file, offset, buf).await,
            _ => write_from(&self.storage, file, offset, buf).await,
        };
        (result.map(|()| None), owner)
    }

    /// Reads or writes on a worker, with the checksum of the first `sum_bytes` bytes. `None` if the reactor is to do
    /// it: there is no worker, the block is alone and handing it over would only take time, or its worker died. A block
    /// whose worker died during a write is written again, the same bytes to the same place.
    async fn transfer_on_worker<O: Send + Sync + 'static>(
        &self,
        (kind, urgency): (OpKind, Urgency),
        file: FileId,
        offset: u64,
        buf: &IoBuf<O>,
        sum_bytes: usize,
    ) -> Option<io::Result<Option<u64>>> {
        let file = self.storage.file(file).filter(|_| self.workers.transfers())?;
        let bytes = buf.len() as u64;
        let is_small = kind == OpKind::Write && sum_bytes == 0 && bytes < PLAIN_WRITE_BYTES_MIN;
        // Without a ring for it, a thread makes the transfer in any case.
        if !file.by_calls && (is_small || !self.is_worth_a_transfer(bytes, self.bytes_in_flight())) {
            return None;
        }
        let _busy = self.workers.enter();
        // SAFETY: its only `Lent`: where the worker loses it, it has been dropped when that is known.
        let transfer = Transfer { kind, file, offset, buf: unsafe { buf.lend() } };
        let urgency = match urgency {
            Urgency::Awaited => Urgency::Awaited,
            // A caller may have joined the movement since: from here on its transfer is raised in the queue.
            background @ Urgency::Background(_) => self.shared.lock().urgency_by_now(background),
        };
        self.workers.transfer(urgency, transfer, sum_bytes).await
    }

    /// The checksum of a block in memory that `guard` keeps, which is returned.
    ///
    /// On a worker, so that the reactor continues to serve the ring; here if there is no worker, and for a lone block:
    /// nothing waits for the reactor then, and handing the block over would only take time.
    pub(super) async fn checksum_of<G: Readable>(&self, guard: G) -> (u64, G) {
        let segments = guard.segments();
        let guard = Arc::new(guard);
        let bytes = segments.iter().map(|segment| segment.len as u64).sum();
        let from_worker = match self.is_worth_a_worker(bytes) {
            true => {
                let keep = Arc::clone(&guard);
                let _busy = self.workers.enter();
                let work = move || {
                    let mut digest = Digest::new();
                    for segment in keep.segments() {
                        // SAFETY: `keep` lives as long as this work.
                        digest.update(unsafe { read(&segment) });
                    }
                    drop(keep);
                    digest.finish()
                };
                self.workers.run(bytes, work).await
            }
            false => None,
        };
        let sum = match from_worker {
            Some(sum) => sum,
            None => self.checksum_here(&segments).await,
        };
        (sum, Arc::into_inner(guard).expect("a worker drops its permit before it answers"))
    }

    fn is_worth_a_worker(&self, bytes: u64) -> bool {
        let is_alone = !self.workers.is_busy() && self.bytes_in_flight() == 0;
        self.workers.take(bytes) && !is_alone
    }

    /// Whether a worker is to read or write a block, with which so many bytes are `in_flight`: not a lone one, and
    /// small ones only if there are many, which a worker that was woken then takes together.
    pub(super) fn is_worth_a_transfer(&self, bytes: u64, in_flight: u64) -> bool {
        let is_alone = !self.workers.is_busy() && in_flight <= bytes;
        !is_alone && self.workers.take(bytes.max(in_flight / SMALL_PART))
    }

    /// Bytes of the operations in flight.
    pub(super) fn bytes_in_flight(&self) -> u64 {
        self.shared.in_flight.bytes(Kind::Read) + self.shared.in_flight.bytes(Kind::Write)
    }

    /// The checksum of a block, on the reactor, with turns for other tasks between chunks.
    ///
    /// One block at a time, in the order of the requests, and a turn of the I/O after each, or after some small ones:
    /// blocks that arrive together leave one by one, and the first of them makes room for its successor on the disk
    /// while the others wait. In turns, they would all be late, and the disk would idle meanwhile. All segments of a
    /// block take one turn together for the same reason.
    async fn checksum_here(&self, segments: &[Segment]) -> u64 {
        let _busy = self.workers.enter();
        let _turn = self.checksums.acquire().await.expect("never closed");
        let mut digest = Digest::new();
        for segment in segments {
            // SAFETY: the caller holds the guard until this has returned.
            for chunk in unsafe { read(segment) }.chunks(CHECKSUM_CHUNK_BYTES) {
                digest.update(chunk);
                self.checksummed.update(|bytes| bytes + chunk.len());
                if self.checksummed.get() >= TURN_BYTES {
                    self.checksummed.set(0);
                    crate::io::yield_now().await;
                }
            }
        }
        digest.finish()
    }
}
