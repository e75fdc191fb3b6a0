//! The copy engine: every method, both directions, sizes and alignments as they come.

use std::sync::Arc;

use kvhoist::{
    CopyMethod,
    internals::{
        device::{
            CopyBatch, CopyEngine, CopyOp, Direction,
            cuda::copy::{CudaCopy, CudaCopyOptions},
        },
        memory::Arena,
    },
};
use tokio::task::LocalSet;

use super::*;
use crate::common::{Rng, payload};

const HOST_BYTES: usize = 64 << 20;

/// Two halves of pinned memory: what is copied from, what is copied to.
struct Host(Arc<Arena>);

impl Host {
    fn new() -> Host {
        let mut arena = Arena::new(2, HOST_BYTES / 2).expect("memory");
        arena.populate().expect("memory");
        Host(Arc::new(arena))
    }

    fn at(&self, half: usize, offset: usize) -> *mut u8 {
        self.0.slot_ptr(0).as_ptr().wrapping_add(half * HOST_BYTES / 2 + offset)
    }

    #[allow(clippy::mut_from_ref, reason = "the test's own memory, nothing in flight")]
    fn half(&self, half: usize) -> &mut [u8] {
        // SAFETY: one half of the arena, on which nothing is in flight when a test looks at it.
        unsafe { std::slice::from_raw_parts_mut(self.at(half, 0), HOST_BYTES / 2) }
    }
}

/// Every size at several alignments of both sides, which need not agree.
fn shapes() -> Vec<(usize, usize, usize)> {
    let near = |bytes: usize| [bytes - 1, bytes, bytes + 1];
    let mut sizes = vec![1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 31, 33, 100, 1000];
    sizes.extend([64, 512, 4096, 65_536, 1 << 20].into_iter().flat_map(near));
    sizes.push(16 << 20);
    let aligned = [(0, 0), (16, 16), (4, 4), (1, 1), (3, 13), (0, 1), (8, 4), (15, 0)];
    sizes.into_iter().flat_map(|bytes| aligned.map(|(from, to)| (bytes, from, to))).collect()
}

fn copy(engine: &CudaCopy, tasks: &LocalSet, ops: Vec<CopyOp>, direction: Direction) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    // SAFETY: ranges of memory that outlives the copy, which is waited for; none overlaps another.
    let batch = unsafe { CopyBatch::new(ops, direction, Vec::new()) };
    tasks.block_on(&runtime, engine.copy(batch)).0.expect("copied");
}

fn engines(gpu: &Arc<Gpu>, host: &Host) -> Vec<(String, CudaCopy)> {
    let open = |method: Option<CopyMethod>| CudaCopy::new(gpu, &host.0, CudaCopyOptions { method, blocks_max: 16 });
    let mut engines = vec![("auto".to_owned(), open(None).expect("an engine"))];
    for method in CopyMethod::ALL {
        match open(Some(method)) {
            Ok(engine) => engines.push((method.to_string(), engine)),
            Err(error) => common::skip::skipped(format_args!("{method}: {error}")),
        }
    }
    engines
}

#[test]
fn every_size_and_alignment_arrives_and_nothing_beside_it() {
    let Some(gpu) = device() else { return };
    let (host, tasks) = (Host::new(), LocalSet::new());
    let pool = Pool::new(&gpu, HOST_BYTES / 2);
    let data = payload(1, HOST_BYTES / 2);
    // All of them live to the end: the first has pinned the memory for the others.
    for (name, engine) in &engines(&gpu, &host) {
        for (bytes, from, to) in shapes() {
            let what = format!("{name}: {bytes} bytes from {from} to {to}");
            let mut expected = vec![UNTOUCHED; to + bytes + 64];
            expected[to..to + bytes].copy_from_slice(&data[from..from + bytes]);
            host.half(0)[..from + bytes].copy_from_slice(&data[..from + bytes]);
            pool.write(&vec![UNTOUCHED; to + bytes + 64]);
            let (src, dst) = (host.at(0, from), pool.base().wrapping_add(to));
            copy(engine, &tasks, vec![CopyOp { src, dst, len: bytes }], Direction::HostToDevice);
            assert_same(&pool.read()[..expected.len()], &expected, &format!("{what}, to the device"));
            // And back: from an odd place on the device to another one in host memory.
            pool.write(&data[..from + bytes]);
            host.half(1)[..expected.len()].fill(UNTOUCHED);
            let (src, dst) = (pool.base().wrapping_add(from), host.at(1, to));
            copy(engine, &tasks, vec![CopyOp { src, dst, len: bytes }], Direction::DeviceToHost);
            assert_same(&host.half(1)[..expected.len()], &expected, &format!("{what}, from the device"));
        }
    }
}

/// Thousands of copies in one batch, scattered on the device, and back again.
#[test]
fn scattered_copies_all_arrive() {
    let Some(gpu) = device() else { return };
    let (host, tasks) = (Host::new(), LocalSet::new());
    let pool = Pool::new(&gpu, HOST_BYTES / 2);
    let mut rng = Rng(common::seed());
    // All of them live to the end: the first has pinned the memory for the others.
    for (name, engine) in &engines(&gpu, &host) {
        for bytes in [1, 17, 100, 4096, 16_384] {
            let count = ((16 << 20_usize) / (bytes + 8)).min(20_000);
            let data = payload(rng.next(), HOST_BYTES / 2);
            let mut places: Vec<usize> = (0..count).collect();
            (1..count).for_each(|at| places.swap(at, rng.below(at as u64 + 1) as usize));
            let (gap, shift) = (rng.below(8) as usize, rng.below(8) as usize);
            // Copy `at`: where it comes from in host memory, where it goes on the device.
            let from = |at: usize| at * (bytes + gap);
            let to = |at: usize| places[at] * (bytes + 8) + shift;
            let (mut expected, mut returned) = (vec![UNTOUCHED; pool.bytes()], vec![UNTOUCHED; data.len()]);
            for at in 0..count {
                let copied = &data[from(at)..from(at) + bytes];
                expected[to(at)..to(at) + bytes].copy_from_slice(copied);
                returned[from(at)..from(at) + bytes].copy_from_slice(copied);
            }
            host.half(0).copy_from_slice(&data);
            host.half(1).fill(UNTOUCHED);
            pool.clear();
            let there =
                |at: usize| CopyOp { src: host.at(0, from(at)), dst: pool.base().wrapping_add(to(at)), len: bytes };
            let back =
                |at: usize| CopyOp { src: pool.base().wrapping_add(to(at)), dst: host.at(1, from(at)), len: bytes };
            let what = format!("{name}: {count} copies of {bytes} bytes");
            copy(engine, &tasks, (0..count).map(there).collect(), Direction::HostToDevice);
            assert_same(&pool.read(), &expected, &what);
            copy(engine, &tasks, (0..count).map(back).collect(), Direction::DeviceToHost);
            assert_same(host.half(1), &returned, &format!("{what}, back"));
        }
    }
}
