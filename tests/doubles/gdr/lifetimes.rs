//! Memory, regions and queues go in an order in which the device never has what is gone, whatever ends first. The
//! double ends the process where one does not.

use std::{pin::pin, rc::Rc, sync::Arc, task::Context, time::Duration};

use kvhoist::internals::{device::CopyEngine, memory::Arena};

use super::{
    common::{Rng, seed},
    double::{get, is_forgotten, set, with_double},
    engine::is_cuda,
    rig::{Rig, SIDE_BYTES, Way, on_reactor, scattered},
};

#[test]
fn futures_that_are_dropped_leave_their_batches_to_the_engine() {
    let cases = ["late", "late,depth=16", "now", "late DOUBLE_ORDERING=0"];
    with_double("lifetimes::futures_that_are_dropped_leave_their_batches_to_the_engine", &cases, |case| {
        on_reactor(async {
            let rig = Rig::open(is_cuda(case)).await.expect("the double is a device");
            let mut rng = Rng(seed());
            let mut context = Context::from_waker(std::task::Waker::noop());
            for round in 0..100 {
                let count = 1 + rng.below(100) as usize;
                let places = scattered(&mut rng, count, 2000, 0..SIDE_BYTES);
                let mut copy = pin!(rig.engine.copy(rig.batch(Way::ToHost, &places)));
                for _ in 0..round % 3 {
                    let _ = copy.as_mut().poll(&mut context);
                }
            }
            // Copies in flight complete, and so do later ones.
            let places = scattered(&mut rng, 100, 1000, 0..SIDE_BYTES);
            while get("posted") > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            rig.copy(Way::ToDevice, &places, 1).await.expect("copied");
        });
        assert!(is_forgotten(), "all is given back");
    });
}

#[test]
fn an_engine_that_goes_takes_its_work_out_of_the_device_first() {
    let cases = [
        "late",
        "late,depth=16,delay=5000",
        "late,delay=100000 DOUBLE_ORDERING=0",
        "late FAULT=never=5",
        "late FAULT=dead",
        "late FAULT=fail=20:12",
        "late FAULT=modify=6",
        "now FAULT=fail=20:12",
    ];
    with_double("lifetimes::an_engine_that_goes_takes_its_work_out_of_the_device_first", &cases, |case| {
        for moment in 0..4 {
            let watched = on_reactor(async {
                let rig = Rc::new(Rig::open(is_cuda(case)).await.expect("the double is a device"));
                if let Ok(fault) = std::env::var("FAULT") {
                    set(&fault);
                }
                let mut rng = Rng(moment);
                let places = scattered(&mut rng, 900, 3000, 0..SIDE_BYTES);
                for places in places.chunks(3) {
                    let (rig, places) = (Rc::clone(&rig), places.to_vec());
                    tokio::task::spawn_local(async move {
                        let (_, batch) = rig.engine.copy(rig.batch(Way::ToHost, &places)).await;
                        drop(batch);
                    });
                }
                for _ in 0..moment * moment {
                    tokio::task::yield_now().await;
                }
                Arc::downgrade(&rig.arena)
            });
            // The tasks went with their runtime, and with them the engine.
            assert!(is_forgotten(), "all is given back");
            assert!(watched.upgrade().is_none(), "nothing holds the memory any more");
            set("go");
        }
    });
}

#[test]
fn what_was_registered_is_kept_by_the_engine() {
    with_double("lifetimes::what_was_registered_is_kept_by_the_engine", &["late"], |_| {
        on_reactor(async {
            let rig = Rig::open(false).await.expect("the double is a device");
            let watched: std::sync::Weak<Arena> = Arc::downgrade(&rig.arena);
            let Rig { engine, arena, pool } = rig;
            drop((arena, pool));
            assert!(watched.upgrade().is_some(), "the device may still be told to use it");
            drop(engine);
            // It ends with the task that still looks for completions.
            while watched.upgrade().is_some() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        assert!(is_forgotten(), "all is given back");
    });
}
