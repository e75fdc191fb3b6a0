//! Memory that is not the cache's own: registered by the first copy in it, given back when there are too many, or when
//! it is forgotten, and never under a copy.

use std::{any::Any, rc::Rc, sync::Arc};

use kvhoist::internals::device::{CopyBatch, CopyEngine, CopyOp, CopyRegion, Direction, gdr::GdrOptions};

use super::{
    common::payload,
    double::{get, is_forgotten, with_double},
    rig::{Rig, on_reactor},
};

const REGION_BYTES: usize = 256 << 10;
const REGIONS_MAX: usize = 2;

/// A caller's pool, full of bytes of its own.
struct Pool {
    region: CopyRegion,
    bytes: Arc<Vec<u8>>,
}

fn pool(n: u64) -> Pool {
    let bytes = Arc::new(payload(n, REGION_BYTES));
    let start = bytes.as_ptr().cast_mut();
    Pool { region: CopyRegion::new(start, REGION_BYTES, false), bytes }
}

/// Copies of a whole pool to the device's side, to a place of its own.
fn batch(rig: &Rig, pool: &Pool, place: usize) -> CopyBatch {
    const PIECE_BYTES: usize = 4096;
    let op = |at: usize| CopyOp {
        src: pool.bytes.as_ptr().wrapping_add(at),
        dst: rig.device(place * REGION_BYTES + at),
        len: PIECE_BYTES,
    };
    let owners: Vec<Arc<dyn Any + Send + Sync>> = vec![Arc::clone(&pool.bytes) as _, Arc::new(Arc::clone(&rig.pool))];
    let ops = (0..REGION_BYTES).step_by(PIECE_BYTES).map(op).collect();
    // SAFETY: the owners keep both sides; nothing writes to the pools, and each batch has a place of its own.
    let batch = unsafe { CopyBatch::new(ops, Direction::HostToHost, owners) };
    // SAFETY: every test keeps its pools for longer than its engine.
    unsafe { batch.within(vec![pool.region]) }
}

fn arrived(rig: &Rig, pool: &Pool, place: usize) -> bool {
    // SAFETY: a place on the device's side, which is host memory here, and which nothing writes to any more.
    let found = unsafe { std::slice::from_raw_parts(rig.device(place * REGION_BYTES), REGION_BYTES) };
    found == pool.bytes.as_slice()
}

#[test]
fn no_region_is_given_back_under_a_copy_however_few_are_kept() {
    let cases = ["late,delay=20000", "now"];
    with_double("foreign::no_region_is_given_back_under_a_copy_however_few_are_kept", &cases, |_| {
        on_reactor(async {
            let options = GdrOptions { registered_max: REGIONS_MAX, ..GdrOptions::default() };
            let rig = Rc::new(Rig::with(false, options).await.expect("the double is a device"));
            let own = get("regions");
            let pools: Vec<Rc<Pool>> = (0..8).map(|n| Rc::new(pool(n))).collect();
            // All at once: more regions are in use than are kept.
            let copy = |(place, pool): (usize, &Rc<Pool>)| {
                let (rig, pool) = (Rc::clone(&rig), Rc::clone(pool));
                tokio::task::spawn_local(async move {
                    let (result, _) = rig.engine.copy(batch(&rig, &pool, place)).await;
                    result.map(|()| arrived(&rig, &pool, place))
                })
            };
            let tasks: Vec<_> = pools.iter().enumerate().map(copy).collect();
            for task in tasks {
                assert!(task.await.expect("no panic").expect("copied"), "every byte");
            }
            assert!(get("regions") >= own + REGIONS_MAX as u64, "what is in use stays");
            // The next one makes room, also for those that were too many.
            let next = pool(8);
            rig.engine.copy(batch(&rig, &next, 8)).await.0.expect("copied");
            assert_eq!(get("regions"), own + REGIONS_MAX as u64);
            let registered = get("registered");
            rig.engine.copy(batch(&rig, &next, 8)).await.0.expect("copied");
            assert_eq!(get("registered"), registered, "it is still known");
            rig.engine.copy(batch(&rig, &pools[0], 0)).await.0.expect("copied");
            assert_eq!(get("registered"), registered + 1, "it was unused for longest, and is registered anew");
            // What is forgotten is given back, and what comes there later is something else.
            let known = get("regions");
            rig.engine.forget(&next.region).await;
            assert_eq!(get("regions"), known - 1);
            for pool in &pools {
                rig.engine.forget(&pool.region).await;
            }
            assert_eq!(get("regions"), own, "nothing of others is left");
        });
        assert!(is_forgotten(), "all is given back");
    });
}
