//! The processor as a copy engine: host memory to host memory, on the reactor's thread or its workers.

use std::{rc::Rc, sync::Arc, time::Duration};

use super::{CopyBatch, CopyEngine};
use crate::{
    block::{CopyOp, Direction},
    error::{Error, Result},
    io::Workers,
};

/// Bytes copied between two yields: about 25 us at [`BYTES_PER_SECOND`], so that cache misses and page faults still
/// leave it under 50 us.
const QUANTUM_BYTES: usize = 256 << 10;

/// Smallest number of bytes that a copy counts as: the cost of a small copy is a cache miss, not its length.
const OP_BYTES_MIN: usize = 512;

/// Assumed copy rate of one server core with neither side in its caches, for [`CopyEngine::cost`]. Not measured on this
/// machine.
const BYTES_PER_SECOND: u64 = 10_000_000_000;

/// Copies between ranges of host memory, for machines and tests without a device.
///
/// On the reactor it yields after every 256 KiB, and dropping the future stops the copy at the next yield. With
/// workers, copies that arrive while the reactor is busy run on a worker: such a copy continues when its future is
/// dropped, and the batch lives until the copy has ended.
///
/// Accepts only batches of [`Direction::HostToHost`] and refuses others with [`Error::Copy`], because their addresses
/// may not be host addresses.
#[derive(Clone, Default)]
pub struct Memcpy {
    workers: Option<Rc<Workers>>,
}

impl Memcpy {
    /// An engine that copies on the calling thread.
    pub const fn new() -> Self {
        Memcpy { workers: None }
    }

    /// An engine that hands copies to `workers` where that is faster.
    pub(crate) fn with_workers(workers: Rc<Workers>) -> Self {
        Memcpy { workers: Some(workers) }
    }

    /// Copies on a worker if there is one and the reactor is busy with another copy or checksum; handing over a lone
    /// copy only adds latency. Returns false if nothing was copied.
    async fn copy_on_worker(&self, batch: &Arc<CopyBatch>) -> bool {
        let Some(workers) = &self.workers else { return false };
        if !workers.take(batch.bytes()) || !workers.is_busy() {
            return false;
        }
        let _busy = workers.enter();
        let (bytes, batch) = (batch.bytes(), Arc::clone(batch));
        let work = move || {
            batch.ops().iter().for_each(|op| copy_part(op, 0, op.len));
            drop(batch);
        };
        workers.run(bytes, work).await.is_some()
    }

    async fn copy_ops(&self, ops: &[CopyOp]) {
        let _busy = self.workers.as_ref().map(Workers::enter);
        let mut left = QUANTUM_BYTES;
        for op in ops {
            let mut done = 0;
            loop {
                let len = (op.len - done).min(left);
                copy_part(op, done, len);
                done += len;
                left = left.saturating_sub(len.max(OP_BYTES_MIN));
                if left == 0 {
                    crate::io::yield_now().await;
                    left = QUANTUM_BYTES;
                }
                if done == op.len {
                    break;
                }
            }
        }
    }
}

fn copy_part(op: &CopyOp, start: usize, len: usize) {
    assert!(start + len <= op.len, "{len} bytes from {start} of {}", op.len);
    if len == 0 {
        return; // an empty range may have an invalid address
    }
    // SAFETY: `start + len` is within the range. By the contract of `CopyBatch::new` the source is
    // readable, the destination writable and both untouched by others while the batch lives, and
    // they do not overlap; the batch is borrowed by the caller, and is host to host.
    unsafe { std::ptr::copy_nonoverlapping(op.src.add(start), op.dst.add(start), len) }
}

impl CopyEngine for Memcpy {
    fn name(&self) -> &'static str {
        "memcpy"
    }

    async fn copy(&self, batch: CopyBatch) -> (Result<()>, CopyBatch) {
        if batch.direction() != Direction::HostToHost {
            let reason =
                format!("found a batch {:?}, expected HostToHost; use an engine of that device", batch.direction());
            return (Err(Error::copy(self.name(), reason)), batch);
        }
        let batch = Arc::new(batch);
        if !self.copy_on_worker(&batch).await {
            self.copy_ops(batch.ops()).await;
        }
        (Ok(()), Arc::into_inner(batch).expect("the worker drops its clone before it replies"))
    }

    fn cost(&self, batch: &CopyBatch) -> Duration {
        let bytes = batch.ops().iter().map(|op| op.len.max(OP_BYTES_MIN) as u128).sum::<u128>();
        let nanos = bytes * 1_000_000_000 / u128::from(BYTES_PER_SECOND);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::pin,
        sync::Arc,
        task::{Context, Poll, Waker},
    };

    use super::*;
    use crate::device::OwnedBatch;

    /// A batch over memory that the test keeps.
    fn batch(ops: Vec<CopyOp>, direction: Direction) -> CopyBatch {
        // SAFETY: every test drops the batch before the memory, and leaves the memory alone.
        unsafe { CopyBatch::new(ops, direction, vec![Arc::new(())]) }
    }

    fn op(src: &[u8], dst: &mut [u8]) -> CopyOp {
        assert_eq!(src.len(), dst.len());
        CopyOp { src: src.as_ptr(), dst: dst.as_mut_ptr(), len: src.len() }
    }

    /// Runs a copy to its end; counts how often it yielded.
    fn run(batch: CopyBatch) -> (Result<()>, CopyBatch, usize) {
        let engine = Memcpy::new();
        let mut future = pin!(engine.copy(batch));
        let mut context = Context::from_waker(Waker::noop());
        for yields in 0.. {
            if let Poll::Ready((result, batch)) = future.as_mut().poll(&mut context) {
                return (result, batch, yields);
            }
        }
        unreachable!("the loop ends by returning");
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + (i >> 8)) as u8).collect()
    }

    #[test]
    fn every_byte_arrives_and_the_owner_comes_back() {
        for len in [1, 511, QUANTUM_BYTES - 1, QUANTUM_BYTES, QUANTUM_BYTES + 1, 3 * QUANTUM_BYTES + 7] {
            let (src, mut dst) = (pattern(len), vec![0; len]);
            let (head, tail) = src.split_at(len / 3);
            let (dst_head, dst_tail) = dst.split_at_mut(len / 3);
            let ops = vec![op(head, dst_head), op(tail, dst_tail)];
            let owner = Arc::new(());
            // SAFETY: the batch is dropped before the memory, which is left alone meanwhile.
            let batch = unsafe { OwnedBatch::new(ops, Direction::HostToHost, Arc::clone(&owner)) };
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let (result, back) = runtime.block_on(batch.copy(&Memcpy::new()));
            result.expect("host to host");
            assert!(Arc::ptr_eq(&owner, &back) && Arc::strong_count(&owner) == 2, "no other owner is left");
            assert_eq!(src, dst, "{len} bytes");
        }
    }

    #[test]
    fn empty_copies_touch_nothing() {
        let nowhere = CopyOp { src: std::ptr::null(), dst: std::ptr::null_mut(), len: 0 };
        let (result, _, yields) = run(batch(vec![nowhere; 3], Direction::HostToHost));
        result.expect("nothing to copy");
        assert_eq!(yields, 0);
        run(batch(vec![], Direction::HostToHost)).0.expect("no copy");
    }

    #[test]
    fn it_yields_by_bytes_and_by_copies() {
        let (src, mut dst) = (pattern(8 * QUANTUM_BYTES), vec![0; 8 * QUANTUM_BYTES]);
        let (_, _, yields) = run(batch(vec![op(&src, &mut dst)], Direction::HostToHost));
        assert_eq!(yields, 8);
        let ops = src.chunks(64).zip(dst.chunks_mut(64)).map(|(src, dst)| op(src, dst)).take(2048).collect();
        let (_, _, yields) = run(batch(ops, Direction::HostToHost));
        assert_eq!(yields, 2048 * OP_BYTES_MIN / QUANTUM_BYTES);
        let nowhere = CopyOp { src: std::ptr::null(), dst: std::ptr::null_mut(), len: 0 };
        let (_, _, yields) = run(batch(vec![nowhere; 2048], Direction::HostToHost));
        assert_eq!(yields, 2048 * OP_BYTES_MIN / QUANTUM_BYTES);
    }

    #[test]
    fn no_piece_is_longer_than_a_quantum() {
        let (src, mut dst) = (pattern(4 * QUANTUM_BYTES), vec![0; 4 * QUANTUM_BYTES]);
        let copied = dst.as_ptr();
        // Cut so that a copy begins in the middle of a quantum.
        let (head, tail) = dst.split_at_mut(1000);
        let ops = vec![op(&src[..1000], head), op(&src[1000..], tail)];
        let engine = Memcpy::new();
        let mut future = pin!(engine.copy(batch(ops, Direction::HostToHost)));
        let mut context = Context::from_waker(Waker::noop());
        for polls in 1..=4 {
            assert!(future.as_mut().poll(&mut context).is_pending());
            let (end, len) = (polls * QUANTUM_BYTES, src.len());
            // SAFETY: `dst` lives; the copy is at rest between two polls on this thread.
            let seen = unsafe { std::slice::from_raw_parts(copied, len) };
            assert_eq!(seen[..end], src[..end]);
            assert!(seen[end..].iter().all(|&byte| byte == 0));
        }
        assert!(future.as_mut().poll(&mut context).is_ready());
    }

    #[test]
    fn addresses_of_a_device_are_refused() {
        let (src, mut dst) = (pattern(10), vec![0; 10]);
        for direction in [Direction::HostToDevice, Direction::DeviceToHost] {
            let (result, _, _) = run(batch(vec![op(&src, &mut dst)], direction));
            let error = result.expect_err("not host to host").to_string();
            assert!(error.starts_with(&format!("copy by memcpy: found a batch {direction:?}")), "{error}");
        }
        assert_eq!(dst, [0; 10]);
    }

    #[test]
    fn cost_grows_with_bytes_and_never_overflows() {
        let sized =
            |len| batch(vec![CopyOp { src: std::ptr::null(), dst: std::ptr::null_mut(), len }], Direction::HostToHost);
        assert_eq!(Memcpy::new().cost(&sized(10_000_000)), Duration::from_millis(1));
        assert!(Memcpy::new().cost(&sized(0)) > Duration::ZERO);
        assert!(Memcpy::new().cost(&sized(usize::MAX)) > Duration::from_secs(1_000_000_000));
        assert_eq!(Memcpy::new().cost(&batch(vec![], Direction::HostToHost)), Duration::ZERO);
    }
}
