//! libcufile, and the checksum kernel that verifies what it brings.

use std::time::Instant;

use kvhoist::{
    EngineMode, Error, Layout, Route, Segment,
    internals::{
        checksum::checksum,
        device::{
            CopyEngine,
            cuda::copy::{CudaCopy, CudaCopyOptions},
        },
        memory::Arena,
    },
};
use tokio::task::LocalSet;

use super::*;
use crate::common::{key, payload};

/// Checksums of each of these blocks, all asked for at once.
fn checksums(engine: &CudaCopy, blocks: &[Vec<Segment>]) -> Vec<u64> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    LocalSet::new().block_on(&runtime, async {
        let mut asked = Vec::new();
        for segments in blocks {
            // SAFETY: every test keeps the memory of its blocks until this has returned, and writes to none meanwhile.
            asked.push(Some(Box::pin(unsafe { engine.checksum(segments, Arc::new(())) })));
        }
        let mut found = vec![None; blocks.len()];
        std::future::poll_fn(|context| {
            for (future, found) in asked.iter_mut().zip(&mut found) {
                if let Some(std::task::Poll::Ready(result)) =
                    future.as_mut().map(|future| future.as_mut().poll(context))
                {
                    *found = Some(result.expect("the kernel takes it").expect("no fault"));
                    *future = None;
                }
            }
            if asked.iter().all(Option::is_none) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
        found.into_iter().map(|found| found.expect("all have ended")).collect()
    })
}

fn engine(gpu: &Arc<Gpu>) -> CudaCopy {
    let arena = Arc::new(Arena::new(1, 4096).expect("memory"));
    CudaCopy::new(gpu, &arena, CudaCopyOptions { method: None, blocks_max: 16 }).expect("an engine")
}

#[test]
fn checksums_by_the_device_are_those_of_the_disk_format() {
    let Some(gpu) = device() else { return };
    let engine = engine(&gpu);
    let bytes = payload(7, 65 << 20);
    let pool = Pool::new(&gpu, bytes.len());
    pool.write(&bytes);
    let whole = |lengths: &[usize]| (16, lengths.to_vec());
    let mut shapes: Vec<(usize, Vec<usize>)> =
        [512, 1024, 2048, 15_872, 16_384, 16_896, 1 << 20, 64 << 20].map(|len| whole(&[len])).into();
    shapes.extend([whole(&[512; 3]), whole(&[4096, 8192, 512]), whole(&[65_536; 64]), (0, vec![36_864; 122])]);
    let mut blocks = Vec::new();
    for (start, lengths) in &shapes {
        let mut at = *start;
        let segments = lengths.iter().map(|&len| {
            at += len;
            Segment { ptr: pool.base().wrapping_add(at - len), len }
        });
        blocks.push(segments.collect::<Vec<_>>());
    }
    for (found, (start, lengths)) in checksums(&engine, &blocks).into_iter().zip(&shapes) {
        let len: usize = lengths.iter().sum();
        assert_eq!(found, checksum(&bytes[*start..start + len]), "{} segments, {len} bytes", lengths.len());
    }
}

#[test]
fn how_fast_the_device_takes_checksums() {
    let Some(gpu) = device() else { return };
    let engine = engine(&gpu);
    let pool = Pool::new(&gpu, 1 << 30);
    for (block_bytes, count) in [(128 << 10, 1), (128 << 10, 32), (1 << 20, 32), (1 << 20, 1024), (1 << 30, 1)] {
        let block = |n| vec![Segment { ptr: pool.base().wrapping_add(n * block_bytes), len: block_bytes }];
        let blocks: Vec<_> = (0..count).map(block).collect();
        checksums(&engine, &blocks);
        let mut seconds: Vec<f64> = (0..9)
            .map(|_| {
                let started = Instant::now();
                checksums(&engine, &blocks);
                started.elapsed().as_secs_f64()
            })
            .collect();
        seconds.sort_by(f64::total_cmp);
        let speed = (block_bytes * count) as f64 / seconds[4] / 1e9;
        println!("checksum: {count:4} x {:7} KiB: {speed:6.0} GB/s, {:.0} us", block_bytes >> 10, seconds[4] * 1e6);
    }
}

#[test]
fn libcufile_brings_the_right_bytes_and_says_how() {
    let Some(_gpu) = device() else { return };
    let directory = directory();
    let block_bytes = 128 << 10;
    let layout = Layout::new(vec![block_bytes / 4; 4]).expect("a layout");
    let settings = config(&directory, block_bytes, 16, 64).direct_io(DirectIo::Require).device_layout(layout);
    let cache = open(settings.clone().cufile(EngineMode::Off));
    (0..64).for_each(|n| block_on(common::store(&cache, n)));
    block_on(cache.close()).expect("close");
    drop(cache);
    for mode in [EngineMode::Auto, EngineMode::On] {
        let cache = match block_on(Cache::open(settings.clone().cufile(mode))) {
            Ok(cache) => cache,
            Err(Error::Unavailable { reason, .. }) if mode == EngineMode::On => {
                common::skip::skipped(reason);
                return;
            }
            Err(error) => panic!("{error}"),
        };
        println!("{mode:?}: {}", cache.stats().cufile_reason);
        for n in (0..64).chain((0..64).rev()) {
            let lease = block_on(cache.fetch_to_device(&key(n))).expect("fetch").expect("stored");
            let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
            assert_same(&bytes, &payload(n, block_bytes), &format!("block {n} by {}", lease.route()));
        }
        let stats = cache.stats();
        let direct = stats.route_blocks(Route::DiskToDevice);
        let (errors, stuck) = (stats.cufile_errors, stats.cufile_stuck);
        println!("{mode:?}: {direct} blocks straight to the device, {errors} failed, {stuck} stuck");
        assert_eq!(direct > 0, stats.cufile, "{stats:?}");
        assert_eq!((errors, stuck, stats.checksum_failures), (0, 0, 0), "{stats:?}");
        block_on(cache.close()).expect("close");
    }
}
