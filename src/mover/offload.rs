//! Transfers between disk slots and host memory, and checksums, on a worker or here.

use std::{io, ptr::NonNull, rc::Rc, sync::Arc};

use super::{Mover, budget::Kind};
#[cfg(feature = "sim")]
use crate::io::read_full;
use crate::{
    block::{FileId, OpKind, Segment},
    checksum::Digest,
    device::CopyEngine,
    io::{Storage, read_into, write_from},
    memory::{IoBuf, Readable},
    workers::Summed,
};

/// Bytes that the reactor checksums before other tasks get a turn: about 15 us.
const CHECKSUM_CHUNK_BYTES: usize = 256 << 10;

/// A range of host memory, and the number of the registered buffer around it.
pub(super) type Place = (Segment, Option<u16>);

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
        (segment, self.shared.fixed_buffer(slot))
    }

    /// Reads a disk slot into host memory, or writes it from there, all places at once; the `guard` that keeps them
    /// comes back. With the checksum of what was read, if a worker has it.
    ///
    /// # Safety
    /// While `guard` lives the places must stay mapped, nobody else may write to them, and if they are read into nobody
    /// may read them either.
    pub(super) async unsafe fn transfer<G: Send + Sync + 'static>(
        self: &Rc<Self>,
        kind: OpKind,
        file: FileId,
        offset: u64,
        places: &[Place],
        guard: G,
    ) -> (io::Result<Option<u64>>, G) {
        let start = |segment: &Segment| NonNull::new(segment.ptr).expect("no memory begins at 0");
        // Most blocks are one segment, which needs no task of its own.
        if let [(segment, fixed)] = places {
            // SAFETY: the caller's promise.
            let buf = unsafe { IoBuf::new(start(segment), segment.len, *fixed, guard) };
            return match kind {
                OpKind::Read => self.read(file, offset, buf).await,
                _ => self.write_here(file, offset, buf).await,
            };
        }
        let guard = Arc::new(guard);
        let mut at = offset;
        let operation = |(segment, fixed): &Place| {
            // SAFETY: the caller's promise.
            let buf = unsafe { IoBuf::new(start(segment), segment.len, *fixed, Arc::clone(&guard)) };
            let (this, from) = (Rc::clone(self), at);
            at += segment.len as u64;
            tokio::task::spawn_local(async move {
                match kind {
                    OpKind::Read => this.read_here(file, from, buf).await.0,
                    _ => this.write_here(file, from, buf).await.0,
                }
            })
        };
        let operations: Vec<_> = places.iter().map(operation).collect();
        let mut result = Ok(None);
        for operation in operations {
            let ended = operation.await.unwrap_or_else(|_| Err(io::Error::other("the operation was lost")));
            result = result.and(ended);
        }
        (result, Arc::into_inner(guard).expect("every operation has given its share back"))
    }

    async fn write_here<O: Send + Sync + 'static>(
        &self,
        file: FileId,
        offset: u64,
        buf: IoBuf<O>,
    ) -> (io::Result<Option<u64>>, O) {
        let (result, owner) = write_from(&self.storage, file, offset, buf).await;
        (result.map(|()| None), owner)
    }

    /// Reads a range of a file; the owner of the memory comes back. With the checksum of the first block, if a worker
    /// read it and has it.
    ///
    /// A block that is alone is read here: handing over would only take time. So is one that was lost with its worker.
    async fn read<O: Send + Sync + 'static>(
        &self,
        file: FileId,
        offset: u64,
        buf: IoBuf<O>,
    ) -> (io::Result<Option<u64>>, O) {
        let bytes = buf.len() as u64;
        let is_alone = !self.workers.is_busy()
            && self.budget.in_flight(Kind::Read) <= bytes
            && self.budget.in_flight(Kind::Write) == 0;
        if is_alone || !self.workers.take(bytes) {
            return self.read_here(file, offset, buf).await;
        }
        #[cfg(feature = "sim")]
        if self.workers.loses_read() {
            // SAFETY: its only `Lent`, which is dropped with the result of the read.
            drop(read_full(&self.storage, file, offset, unsafe { buf.lend() }).await);
            return self.read_here(file, offset, buf).await;
        }
        let Some(handle) = self.storage.file(file).filter(|_| self.workers.read()) else {
            return self.read_here(file, offset, buf).await;
        };
        let _busy = self.workers.enter();
        // SAFETY: its only `Lent`: where the worker loses it, it has been dropped when that is known.
        let lent = unsafe { buf.lend() };
        match self.workers.read_and_sum(handle, file, offset, lent, self.shared.config.block_bytes).await {
            Some(Summed { buf: lent, result }) => {
                drop(lent);
                (result.map(Some), buf.into_owner())
            }
            None => self.read_here(file, offset, buf).await,
        }
    }

    async fn read_here<O: Send + Sync + 'static>(
        &self,
        file: FileId,
        offset: u64,
        buf: IoBuf<O>,
    ) -> (io::Result<Option<u64>>, O) {
        let (result, owner) = read_into(&self.storage, file, offset, buf).await;
        (result.map(|()| None), owner)
    }

    /// The checksum of a block in memory that `guard` keeps, which comes back.
    ///
    /// On a worker, so that the reactor goes on to serve the ring; here where there is none, and for a block that is
    /// alone: nothing waits for the reactor then, and handing over would only take time.
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
        (sum, Arc::into_inner(guard).expect("a worker drops its share before it answers"))
    }

    fn is_worth_a_worker(&self, bytes: u64) -> bool {
        let is_alone = !self.workers.is_busy()
            && self.budget.in_flight(Kind::Read) == 0
            && self.budget.in_flight(Kind::Write) == 0;
        self.workers.take(bytes) && !is_alone
    }

    /// The checksum of a block, on the reactor, with turns for other tasks between chunks.
    ///
    /// One block at a time, in the order in which they were asked for, and a turn of the I/O after each: blocks that
    /// arrive together leave one by one, and the first of them makes room for its successor on the disk while the
    /// others wait. All at once, they would all be late, and the disk idle meanwhile. All segments of a block take one
    /// turn together for the same reason.
    async fn checksum_here(&self, segments: &[Segment]) -> u64 {
        let _busy = self.workers.enter();
        let _turn = self.checksums.acquire().await.expect("never closed");
        let mut digest = Digest::new();
        for segment in segments {
            // SAFETY: the caller holds the guard until this has returned.
            for chunk in unsafe { read(segment) }.chunks(CHECKSUM_CHUNK_BYTES) {
                digest.update(chunk);
                crate::io::yield_now().await;
            }
        }
        digest.finish()
    }
}
