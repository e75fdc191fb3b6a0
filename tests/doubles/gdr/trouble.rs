//! What goes wrong while copies are in flight: each copy is right or an error, no memory is lost, and the engine is
//! tested again, once.

use std::{rc::Rc, time::Duration};

use kvhoist::internals::device::{GdrState, gdr::GdrOptions};

use super::{
    common::{Rng, seed},
    double::{get, is_forgotten, set, with_double, with_double_at_once},
    engine::is_cuda,
    rig::{Rig, on_reactor},
    scenes::failures,
};

/// Batches of a few pieces each, all at once; how many of them failed. Those that did not are right.
async fn volley(rig: &Rc<Rig>, batches: usize, seed: u64) -> usize {
    failures(rig, &mut Rng(seed), batches).await
}

fn is_retired(state: &GdrState) -> bool {
    matches!(state, GdrState::Retired(_))
}

/// A failure, the self-test after it, copies as before; and a second failure, after which nothing is copied any more.
async fn fails_and_recovers_once(rig: &Rc<Rig>, fault: &str, told: &str, seed: u64) {
    assert_eq!(volley(rig, 20, seed).await, 0);
    let (resets, regions) = (get("resets"), get("regions"));
    set(fault);
    let failed = volley(rig, 200, seed + 1).await;
    assert!((1..=200).contains(&failed), "{failed} failed");
    rig.until(|state| !matches!(state, GdrState::Recovering(_))).await;
    set("go");
    assert!(rig.state().is_on(), "{}", rig.state());
    assert_eq!((get("resets"), get("regions"), get("posted")), (resets + 1, regions, 0));
    assert_eq!(volley(rig, 50, seed + 2).await, 0, "as if nothing had been");
    set(fault);
    assert!(volley(rig, 200, seed + 3).await > 0);
    rig.until(|state| !matches!(state, GdrState::Recovering(_))).await;
    set("go");
    let state = rig.state();
    assert!(is_retired(&state), "{state}");
    assert!(state.detail().contains("twice") && state.detail().contains(told), "{state}");
    let writes = get("writes");
    assert_eq!(volley(rig, 20, seed + 4).await, 20, "nothing goes through it any more");
    assert_eq!((get("writes"), get("posted")), (writes, 0));
}

/// What a case wants the double to do later.
fn fault() -> String {
    std::env::var("FAULT").expect("the case has a fault")
}

#[test]
fn a_completion_of_any_kind_of_error_fails_what_was_under_way_and_no_more() {
    // Every status that there is. 5: flushed, without anything that failed before.
    let each: Vec<String> = (1..=23).map(|status| format!("late,burst=64 FAULT=fail=57:{status}")).collect();
    let mut cases: Vec<&str> = each.iter().map(String::as_str).collect();
    cases.extend([
        "late,burst=64 FAULT=fail=1:4",
        "now FAULT=fail=57:10",
        "late,depth=16 FAULT=fail=300:12",
        "late,burst=16 DOUBLE_ORDERING=0 FAULT=fail=57:10",
        "late,burst=16,race FAULT=fail=57:10",
        "late,burst=16 FAULT=fatal=57",
    ]);
    let name = "trouble::a_completion_of_any_kind_of_error_fails_what_was_under_way_and_no_more";
    with_double(name, &cases, |case| {
        let fault = fault();
        let told = fault.split_once(':').map_or("status 5".into(), |(_, status)| format!("status {status}"));
        let seed = seed();
        on_reactor(async {
            let rig = Rc::new(Rig::open(is_cuda(case)).await.expect("the double is a device"));
            fails_and_recovers_once(&rig, &fault, &told, seed).await;
        });
        assert!(is_forgotten(), "all is given back");
    });
}

#[test]
fn a_region_that_was_revoked_retires_the_engine() {
    with_double("trouble::a_region_that_was_revoked_retires_the_engine", &["late", "now DOUBLE_ORDERING=0"], |case| {
        on_reactor(async {
            let rig = Rc::new(Rig::open(is_cuda(case)).await.expect("the double is a device"));
            set("revoke=50");
            assert!(volley(&rig, 100, 1).await > 0);
            rig.until(|state| !matches!(state, GdrState::Recovering(_))).await;
            // The self-test has memory of its own, which was not revoked.
            assert!(rig.state().is_on(), "{}", rig.state());
            assert!(volley(&rig, 100, 2).await > 0);
            rig.until(is_retired).await;
        });
        assert!(is_forgotten(), "all is given back");
    });
}

#[test]
fn what_fails_its_second_self_test_is_retired() {
    let cases =
        ["late FAULT=lose", "late FAULT=modify=1", "late FAULT=modify=2", "now FAULT=modify=3", "late FAULT=wrong"];
    with_double("trouble::what_fails_its_second_self_test_is_retired", &cases, |_| {
        let fault = fault();
        on_reactor(async {
            let rig = Rc::new(Rig::open(false).await.expect("the double is a device"));
            // With the very first request, so that no other is spoiled before the self-test.
            set(&format!("fail=1:12,{fault}"));
            assert!(volley(&rig, 50, 1).await > 0);
            rig.until(is_retired).await;
            let state = rig.state();
            assert!(state.detail().contains("failed its self-test"), "{state}");
        });
        assert!(is_forgotten(), "all is given back");
    });
}

#[test]
fn a_chain_that_is_refused_in_the_middle_is_posted_on() {
    // With work in flight there will be room; a device that takes nothing although it has nothing is broken.
    let cases =
        ["late,delay=2000 FAULT=partial=40", "late,delay=2000 FAULT=partial=64", "late,delay=2000 FAULT=partial=65"];
    with_double("trouble::a_chain_that_is_refused_in_the_middle_is_posted_on", &cases, |_| {
        let fault = fault();
        on_reactor(async {
            let rig = Rc::new(Rig::open(false).await.expect("the double is a device"));
            set(&fault);
            let failed = volley(&rig, 400, seed()).await;
            set("go");
            rig.until(|state| !matches!(state, GdrState::Recovering(_))).await;
            assert!(failed == 0 && rig.state().is_on(), "{failed} failed; {}", rig.state());
            set("partial=1");
            volley(&rig, 10, seed()).await;
            rig.until(|state| !matches!(state, GdrState::Recovering(_))).await;
            set("go");
            assert_eq!(volley(&rig, 100, seed()).await, 0, "{}", rig.state());
        });
        assert!(is_forgotten(), "all is given back");
    });
}

#[test]
fn a_queue_that_cannot_be_armed_is_looked_at() {
    with_double("trouble::a_queue_that_cannot_be_armed_is_looked_at", &["late,delay=1000"], |_| {
        on_reactor(async {
            let rig = Rc::new(Rig::open(false).await.expect("the double is a device"));
            set("arm");
            let failed = tokio::time::timeout(Duration::from_secs(60), volley(&rig, 20, 1)).await.expect("an end");
            set("go");
            rig.until(|state| !matches!(state, GdrState::Recovering(_))).await;
            assert!(failed == 0 || !is_retired(&rig.state()), "{failed} failed; {}", rig.state());
            assert_eq!(volley(&rig, 20, 2).await, 0);
        });
    });
}

#[test]
fn completions_that_never_come_are_given_up_and_their_memory_taken_back() {
    // Dead: it does not even give back what its queue pair was told to flush. Overrun: the completions are lost.
    let cases =
        ["late FAULT=never=20", "late FAULT=dead", "late DOUBLE_ORDERING=0 FAULT=never=20", "late FAULT=overrun=3"];
    with_double_at_once(
        "trouble::completions_that_never_come_are_given_up_and_their_memory_taken_back",
        &cases,
        |case| {
            let fault = fault();
            on_reactor(async {
                // Longer than a completion takes on a busy machine.
                let options = GdrOptions { stuck_after: Duration::from_secs(10), ..GdrOptions::default() };
                let rig = Rc::new(Rig::with(is_cuda(case), options).await.expect("the double is a device"));
                set(&fault);
                let failed =
                    tokio::time::timeout(Duration::from_secs(120), volley(&rig, 50, seed())).await.expect("an end");
                assert!(failed > 0);
                set("go");
                rig.until(|state| !matches!(state, GdrState::Recovering(_))).await;
                if !is_retired(&rig.state()) {
                    assert_eq!(volley(&rig, 50, seed()).await, 0, "{}", rig.state());
                }
            });
            assert!(is_forgotten(), "all is given back");
        },
    );
}
