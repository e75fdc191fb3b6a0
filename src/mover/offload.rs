//! Transfers between disk slots and host memory, and checksums, on a worker or here.

use std::{ptr::NonNull, rc::Rc, sync::Arc};

use futures_util::future::join_all;

use super::{
    Mover,
    block_memory::{BlockMemory, FilledMemory},
    plan::OnDisk,
};
use crate::{
    block::{FileId, OpKind, Segment},
    checksum::Digest,
    device::CopyEngine,
    io::{Storage, Transfer, Transferred, transfer_owned},
    memory::{Guard, IoBuf},
    state::{DiskPlace, Few, Filling, Permit, Pin},
    urgency::Urgency,
};

/// Bytes that the reactor checksums before other tasks get a turn: about 15 us.
const CHECKSUM_CHUNK_BYTES: usize = 256 << 10;

/// Bytes of small blocks that the reactor checksums before other tasks get a turn: a turn costs about as much as the
/// checksum of 16 KiB.
const TURN_BYTES: usize = 64 << 10;

/// Least bytes of a write, whose checksum is known, that are worth handing over: pinning or copying them then takes the
/// kernel longer than waking a thread. One drive took writes of 128 KiB at 0.86 of the bare ring from the reactor, and
/// at 0.81 from workers, which also took 1.3 times the CPU.
const WRITE_BYTES_MIN: u64 = 256 << 10;

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
/// As [`BlockMemory`] promises, for as long as the borrow lasts.
unsafe fn bytes_of<'a>(segment: &Segment) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(segment.ptr.cast_const(), segment.len) }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Reads a block from its disk slot, with its checksum if a worker makes the transfer and `sum_bytes` is not 0: of
    /// its first `sum_bytes` bytes. How urgent it is, its `permit` of the bytes in flight tells.
    pub(super) async fn read<M: FilledMemory>(
        self: &Rc<Self>,
        OnDisk { pin, file, offset, .. }: OnDisk,
        permit: Permit,
        to: M,
        sum_bytes: usize,
    ) -> (Transferred, Pin, M) {
        assert_eq!(permit.kind(), OpKind::Read, "its bytes count as read");
        // SAFETY: `to` may be filled.
        let (result, to, pin) = unsafe { self.transfer(&permit, file, offset, to, pin, sum_bytes) }.await;
        (result, pin, to)
    }

    /// Writes a block to the disk slot of `filling`. As [`read`](Self::read).
    pub(super) async fn write_payload<M: BlockMemory>(
        self: &Rc<Self>,
        permit: &Permit,
        place: &DiskPlace,
        from: M,
        filling: Filling,
    ) -> (Transferred, M, Filling) {
        assert_eq!(permit.kind(), OpKind::Write, "its bytes count as written");
        // SAFETY: nothing is written to `from`.
        unsafe { self.transfer(permit, place.file, place.offset, from, filling, 0) }.await
    }

    /// Transfers all parts of a block at once. The operations own the memory and what `keeps` the disk slot.
    ///
    /// # Safety
    /// A read is to [`FilledMemory`].
    async unsafe fn transfer<M: BlockMemory, K: Send + Sync + 'static>(
        self: &Rc<Self>,
        permit: &Permit,
        file: FileId,
        offset: u64,
        memory: M,
        keeps: K,
        sum_bytes: usize,
    ) -> (Transferred, M, K) {
        let kind = permit.kind();
        let parts = self.host_parts(&memory.place());
        let owner = (memory, keeps);
        // Most blocks are one segment, which needs no task of its own.
        let (result, (memory, keeps)) = if parts.len() == 1 {
            let (segment, fixed, source) = parts.into_iter().next().expect("it has one");
            // SAFETY: as of `BlockMemory`, and of `FilledMemory` if it is read to.
            let buf = unsafe { IoBuf::new(start_of(&segment), segment.len, fixed, owner) }.guarded(source);
            match self.transfer_on_worker((kind, permit.urgency), file, offset, &buf, sum_bytes).await {
                Some(result) => (result, buf.into_owner()),
                // Boxed: every movement would have room for it.
                None => Box::pin(self.transfer_here(kind, file, offset, buf)).await,
            }
        } else {
            // SAFETY: the same.
            Box::pin(unsafe { self.transfer_parts(kind, file, offset, parts, owner) }).await
        };
        (result, memory, keeps)
    }

    /// As [`transfer`](Self::transfer), here, for a block in several parts.
    ///
    /// # Safety
    /// The parts are of the memory that `owner` keeps, as of [`transfer`](Self::transfer).
    async unsafe fn transfer_parts<O: Send + Sync + 'static>(
        &self,
        kind: OpKind,
        file: FileId,
        offset: u64,
        parts: Few<Place>,
        owner: O,
    ) -> (Transferred, O) {
        let owner = Arc::new(owner);
        let mut at = offset;
        let operation = |(segment, fixed, _): Place| {
            // SAFETY: the caller's promise.
            let buf = unsafe { IoBuf::new(start_of(&segment), segment.len, fixed, Arc::clone(&owner)) };
            let from = at;
            at += segment.len as u64;
            async move { self.transfer_here(kind, file, from, buf).await.0 }
        };
        let ended = join_all(parts.into_iter().map(operation)).await;
        let result = ended.into_iter().fold(Ok(None), Result::and);
        (result, Arc::into_inner(owner).expect("every operation has given it back"))
    }

    async fn transfer_here<O: Send + Sync + 'static>(
        &self,
        kind: OpKind,
        file: FileId,
        offset: u64,
        buf: IoBuf<O>,
    ) -> (Transferred, O) {
        let (result, owner) = transfer_owned(&self.storage, kind, file, offset, buf).await;
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
    ) -> Option<Transferred> {
        let file = self.storage.file(file).filter(|_| self.workers.pool().is_some())?;
        let bytes = buf.len() as u64;
        let is_small = kind == OpKind::Write && bytes < WRITE_BYTES_MIN;
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
            Urgency::Background(number) => self.shared.lock().urgency_by_now(number),
        };
        self.workers.transfer(urgency, transfer, sum_bytes).await
    }

    /// The checksum of a block in host memory.
    ///
    /// On a worker, so that the reactor continues to serve the ring; here if there is no worker, and for a lone block:
    /// nothing waits for the reactor then, and handing the block over would only take time. `own_bytes` of those in
    /// flight are the block's.
    pub(super) async fn checksum_of<M: BlockMemory>(&self, memory: M, own_bytes: u64) -> (u64, M) {
        let place = memory.place();
        assert!(!place.is_device(), "the processor reads host memory");
        let segments = self.segments(&place).into_owned();
        let memory = Arc::new(memory);
        let bytes = segments.iter().map(|segment| segment.len as u64).sum();
        let is_alone = !self.workers.is_busy() && self.bytes_in_flight() <= own_bytes;
        let from_worker = match !is_alone && self.workers.take(bytes) {
            true => {
                let (keep, segments) = (Arc::clone(&memory), segments.clone());
                let _busy = self.workers.enter();
                let work = move || {
                    let mut digest = Digest::new();
                    for segment in &segments {
                        // SAFETY: `keep` lives as long as this work.
                        digest.update(unsafe { bytes_of(segment) });
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
        (sum, Arc::into_inner(memory).expect("a worker drops its owner before it answers"))
    }

    /// Whether a worker is to read or write a block, with which so many bytes are `in_flight`: not a lone one, and
    /// small ones only if there are many, which a worker that was woken then takes together.
    pub(super) fn is_worth_a_transfer(&self, bytes: u64, in_flight: u64) -> bool {
        let is_alone = !self.workers.is_busy() && in_flight <= bytes;
        !is_alone && self.workers.take(bytes.max(in_flight / SMALL_PART))
    }

    /// Bytes of the operations in flight.
    pub(super) fn bytes_in_flight(&self) -> u64 {
        self.shared.in_flight.bytes(OpKind::Read) + self.shared.in_flight.bytes(OpKind::Write)
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
            // SAFETY: the caller keeps the memory until this has returned.
            for chunk in unsafe { bytes_of(segment) }.chunks(CHECKSUM_CHUNK_BYTES) {
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
