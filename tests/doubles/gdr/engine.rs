//! The engine itself over the double: that copies are right, how many are in flight, in which order they end, and what
//! was asked of the device rather than assumed.

use std::{
    cell::RefCell,
    rc::Rc,
    time::{Duration, Instant},
};

use kvhoist::internals::device::{CopyEngine, gdr::GdrOptions};

use super::{
    common::{Rng, seed},
    double::{WITHOUT_DMA_BUF, get, is_forgotten, set, with_double, with_part},
    rig::{Place, Rig, SIDE_BYTES, Way, on_reactor, scattered},
    scenes::{self, Scale},
};

/// Cases on the double of a CUDA device name how that orders the writes of others.
pub fn is_cuda(case: &str) -> bool {
    case.contains("DOUBLE_ORDERING")
}

/// Places of 4 KiB side by side.
fn side_by_side(count: usize) -> Vec<Place> {
    // Every second one on the device: two neighbours never go as one.
    (0..count).map(|n| Place { host: n * 4096, device: n * 8192, len: 4096 }).collect()
}

#[test]
fn every_byte_of_every_shape_arrives() {
    let cases = [
        "late",
        "now",
        "late,race,delay=5",
        "late,spurious",
        "late,depth=1,cqe=2,sge=1",
        "late,depth=17,cqe=18,sge=2,burst=17",
        "late,msg=4096,burst=64",
        "late,size=4194304,burst=16",
        "late,burst=16 DOUBLE_ORDERING=0",
        "now DOUBLE_ORDERING=0",
        "now,size=2097152 DOUBLE_ORDERING=0",
        "late,burst=16 DOUBLE_ORDERING=100",
        "late,nodmabuf,peermem DOUBLE_ORDERING=0",
    ];
    with_double("engine::every_byte_of_every_shape_arrives", &cases, |case| {
        let scale = match case {
            "now" => Scale::FULL,
            // A few requests at a time, and each of them waits for the thread.
            "late,depth=1,cqe=2,sge=1" => Scale { longest: 70_000, batches: 60, rounds: 1 },
            "late,msg=4096,burst=64" => Scale { longest: 300_000, batches: 200, rounds: 2 },
            _ => Scale { longest: 2 << 20, batches: 200, rounds: 2 },
        };
        let seed = seed();
        on_reactor(async {
            let rig = Rc::new(Rig::open(is_cuda(case)).await.expect("the double is a device"));
            scenes::sizes(&rig, scale).await;
            scenes::scattered_pieces(&rig, seed, scale).await;
            scenes::many_in_flight(Rc::clone(&rig), seed + 1, scale).await;
            scenes::random_batches(rig, seed + 2, scale).await;
        });
        assert!(is_forgotten(), "all is given back");
    });
}

#[test]
fn two_engines_share_a_device() {
    let cases = ["late,burst=32", "now DOUBLE_ORDERING=0"];
    with_double("engine::two_engines_share_a_device", &cases, |case| {
        let scale = Scale { batches: 400, ..Scale::FULL };
        on_reactor(scenes::two_engines(is_cuda(case), seed(), scale));
        assert!(is_forgotten(), "all is given back");
    });
}

#[test]
fn many_writes_are_under_way_at_a_time_both_ways_and_never_too_many() {
    let cases = ["late,depth=200,sge=1", "late,depth=200,sge=1 DOUBLE_ORDERING=0"];
    with_double("engine::many_writes_are_under_way_at_a_time_both_ways_and_never_too_many", &cases, |case| {
        on_reactor(async {
            let rig = Rc::new(Rig::open(is_cuda(case)).await.expect("the double is a device"));
            for way in [Way::ToDevice, Way::ToHost] {
                set("never=1");
                let task = tokio::task::spawn_local({
                    let rig = Rc::clone(&rig);
                    async move { rig.copy(way, &side_by_side(1000), 5).await }
                });
                // None of them ends. The double ends the process where there is one more than it takes.
                for _ in 0..100 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                assert!((100..=200).contains(&get("posted")), "{way:?}: {} of 1000 in flight", get("posted"));
                set("go");
                task.await.expect("no panic").expect("copied");
            }
            assert!(get("signaled") < get("writes") / 4, "{} of {} tell", get("signaled"), get("writes"));
            assert!(get("chains") < get("writes") / 8, "{} posts of {}", get("chains"), get("writes"));
        });
    });
}

#[test]
fn addresses_and_sizes_are_the_ones_that_the_port_has() {
    let cases = ["late,shift=5,mtu=3", "late,shift=0,mtu=1", "late,ib,mtu=5", "late,v1", "late,shift=40"];
    with_double("engine::addresses_and_sizes_are_the_ones_that_the_port_has", &cases, |case| {
        on_reactor(async {
            let rig = Rig::open(false).await.expect("the double is a device");
            rig.copy(Way::ToDevice, &side_by_side(10), 1).await.expect("copied");
            let expected = match case {
                // Of its table the routed name of RoCE v2: the fourth after what is empty.
                "late,shift=5,mtu=3" => (5 + 3, 3, 0, 1),
                "late,shift=0,mtu=1" => (3, 1, 0, 1),
                "late,shift=40" => (43, 4, 0, 1),
                // There is the first version only.
                "late,v1" => (2 + 2, 4, 0, 1),
                _ => (0, 5, 7, 0),
            };
            assert_eq!((get("gid_index"), get("mtu"), get("dlid"), get("is_global")), expected);
        });
    });
}

#[test]
fn batches_end_in_order() {
    with_double("engine::batches_end_in_order", &["late,burst=7", "now", "late,depth=16"], |_| {
        on_reactor(async {
            let rig = Rc::new(Rig::open(false).await.expect("the double is a device"));
            let ended = Rc::new(RefCell::new(Vec::new()));
            let mut rng = Rng(seed());
            let mut places = scattered(&mut rng, 4000, 5000, 0..SIDE_BYTES).into_iter();
            let tasks: Vec<_> = (0..200)
                .map(|n| {
                    let count = 1 + rng.below(19) as usize;
                    let (rig, ended, places) =
                        (Rc::clone(&rig), Rc::clone(&ended), places.by_ref().take(count).collect::<Vec<_>>());
                    tokio::task::spawn_local(async move {
                        rig.copy(Way::ToHost, &places, n).await.expect("copied");
                        ended.borrow_mut().push(n);
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("no panic");
            }
            assert!(ended.borrow().is_sorted(), "{ended:?}");
        });
    });
}

#[test]
fn what_the_device_would_not_see_yet_is_flushed_before_the_end_is_told() {
    let cases = ["late DOUBLE_ORDERING=0", "now DOUBLE_ORDERING=0", "late DOUBLE_ORDERING=100"];
    with_double("engine::what_the_device_would_not_see_yet_is_flushed_before_the_end_is_told", &cases, |case| {
        on_reactor(async {
            let rig = Rig::open(true).await.expect("the double is a device");
            let before = get("flushes");
            for n in 0..20 {
                // Looks at the bytes as the device sees them.
                rig.copy(Way::ToDevice, &side_by_side(30), n).await.expect("copied");
            }
            let flushed = get("flushes") - before;
            assert_eq!(flushed > 0, !case.contains("100"), "{flushed} flushes");
            let before = get("flushes");
            rig.copy(Way::ToHost, &side_by_side(30), 7).await.expect("copied");
            assert_eq!(get("flushes"), before, "what the host reads needs none");
        });
    });
}

#[test]
fn device_memory_is_known_by_dma_buf_or_by_its_addresses() {
    let cases = [
        "late DOUBLE_ORDERING=0",
        "late,peermem DOUBLE_ORDERING=0",
        "late,nodmabuf,peermem DOUBLE_ORDERING=0",
        "late,peermem DOUBLE_ORDERING=0 DOUBLE_FAULT=export",
    ];
    let body = |case: &str| {
        on_reactor(async {
            let rig = Rig::open(true).await.expect("the double is a device");
            let by_address = case.contains("nodmabuf") || case.contains("export") || case.contains("OLD");
            assert_eq!(get("dmabuf") > 0, !by_address);
            let (told, name) = (rig.state(), if by_address { "nvidia-peermem" } else { "dma-buf" });
            assert!(told.is_on() && told.detail().contains(name), "{told}");
            rig.copy(Way::ToDevice, &side_by_side(30), 1).await.expect("copied");
            rig.copy(Way::ToHost, &side_by_side(30), 2).await.expect("copied");
        });
    };
    let name = "engine::device_memory_is_known_by_dma_buf_or_by_its_addresses";
    with_double(name, &cases, body);
    // A library that has no function for it.
    with_part(name, WITHOUT_DMA_BUF, &["late,peermem DOUBLE_ORDERING=0 OLD=1"], body);
}

#[test]
fn an_engine_that_has_nothing_to_do_or_only_waits_uses_no_processor() {
    with_double("engine::an_engine_that_has_nothing_to_do_or_only_waits_uses_no_processor", &["late"], |_| {
        on_reactor(async {
            let rig = Rc::new(Rig::open(false).await.expect("the double is a device"));
            rig.copy(Way::ToDevice, &side_by_side(30), 1).await.expect("copied");
            // What the copy left to do is done when nothing is looked at any longer.
            let look = || (get("polls"), get("armings"));
            let (begun, mut before) = (Instant::now(), look());
            loop {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let now = look();
                if now == before {
                    break;
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "it is never idle: {before:?}, {now:?}");
                before = now;
            }
            set("never=1");
            let task = tokio::task::spawn_local({
                let rig = Rc::clone(&rig);
                async move { rig.copy(Way::ToDevice, &side_by_side(30), 2).await }
            });
            tokio::time::sleep(Duration::from_millis(50)).await;
            let (before, begun) = (get("polls"), Instant::now());
            tokio::time::sleep(Duration::from_millis(300)).await;
            let (polls, ms) = (get("polls") - before, begun.elapsed().as_millis());
            assert!(u128::from(polls) < ms / 30, "{polls} looks in {ms} ms at a device that is not done");
            set("go");
            task.await.expect("no panic").expect("copied");
        });
    });
}

#[test]
fn what_it_does_not_know_it_refuses() {
    with_double("engine::what_it_does_not_know_it_refuses", &["late", "late DOUBLE_ORDERING=0"], |case| {
        on_reactor(async {
            let options = GdrOptions { depth_max: 32, ..GdrOptions::default() };
            let rig = Rig::without_last_page(is_cuda(case), options).await.expect("the double is a device");
            let writes = get("writes");
            // It ends one byte behind what is registered.
            let beyond = rig.batch(Way::ToHost, &[Place { host: 0, device: rig.pool.bytes() - 100, len: 101 }]);
            let (result, _) = rig.engine.copy(beyond).await;
            let error = result.expect_err("not its memory").to_string();
            assert!(error.starts_with("copy by gdr: ") && error.contains("not registered"), "{error}");
            assert_eq!(get("writes"), writes, "nothing was begun");
            assert!(rig.state().is_on(), "which is no failure of the device: {}", rig.state());
            rig.copy(Way::ToDevice, &side_by_side(40), 1).await.expect("copied");
        });
    });
}

#[test]
fn time_without_work_is_no_time_in_which_nothing_completes() {
    let name = "engine::time_without_work_is_no_time_in_which_nothing_completes";
    with_double(name, &["late,delay=20000"], |_| {
        // Longer than a completion takes on a busy machine.
        const STUCK: Duration = Duration::from_secs(20);
        on_reactor(async {
            let options = GdrOptions { stuck_after: STUCK, ..GdrOptions::default() };
            let rig = Rc::new(Rig::with(false, options).await.expect("the double is a device"));
            rig.copy(Way::ToDevice, &side_by_side(3), 1).await.expect("copied");
            // Another task keeps the reactor busy while the engine still polls.
            std::thread::sleep(STUCK + STUCK / 5);
            rig.copy(Way::ToDevice, &side_by_side(3), 1).await.expect("copied");
            assert!(rig.state().is_on() && get("resets") == 0, "{}", rig.state());
        });
    });
}
