//! The guest's side: every kind of copy, and every kind of trouble, over `rxe0`. What it shows is correctness only.

use std::{
    cell::Cell,
    fs,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    rc::Rc,
    time::{Duration, Instant},
};

use kvhoist::{
    Cache, Config, DeviceKind, EngineMode, block_on,
    internals::{
        device::{GdrState, gdr::GdrOptions},
        rdma,
    },
};

use super::{
    common::{Rng, beside, key, payload},
    machine::JOB,
    rig::{Rig, SIDE_BYTES, Way, on_reactor, scattered},
    scenes::{self, Scale},
    uverbs,
};

/// Says to a child of the guest's program that it is to copy until it is killed.
const VICTIM: &str = "GDR_VICTIM";

/// Not a test of its own: what a guest runs.
#[test]
fn inside() {
    let Ok(job) = fs::read_to_string(JOB) else { return };
    if std::env::var(VICTIM).is_ok() {
        return on_reactor(copy_for_ever());
    }
    let seed: u64 = job.lines().find_map(|line| line.strip_prefix("seed=")?.parse().ok()).expect("a seed");
    part("discovery", discovery);
    part("every size", || on_reactor(async { scenes::sizes(&rig().await, Scale::EMULATED).await }));
    part("512 pieces", || on_reactor(async { scenes::scattered_pieces(&rig().await, seed, Scale::EMULATED).await }));
    part("thousands in flight", || {
        on_reactor(async { scenes::many_in_flight(Rc::new(rig().await), seed, Scale::EMULATED).await });
    });
    part("random batches", || {
        on_reactor(async { scenes::random_batches(Rc::new(rig().await), seed, Scale::EMULATED).await });
    });
    part("two engines", || on_reactor(scenes::two_engines(false, seed, Scale { batches: 800, ..Scale::EMULATED })));
    part("a queue pair that fails under load", || on_reactor(queue_pair_fails(seed)));
    part("regions that are revoked under load", || on_reactor(regions_are_revoked(seed)));
    part("a channel full of events", || on_reactor(channel_is_flooded(seed)));
    part("an end in mid-copy", || (0..3).for_each(|moment| end_in_mid_copy(seed, moment)));
    part("a process that is killed", || (0..2).for_each(is_killed));
    part("a replay", || replay(seed));
    println!("all of it: ok");
}

/// Runs a part, says how long it took, and sees that the kernel has nothing left of it.
fn part(name: &str, body: impl FnOnce()) {
    let started = Instant::now();
    body();
    assert_eq!(resources(), "", "{name}: left in the kernel");
    println!("{name}: ok, {:.1} s", started.elapsed().as_secs_f64());
}

/// What the kernel says processes have of verbs, but for its own.
fn resources() -> String {
    let mut left = String::new();
    for kind in ["pd", "cq", "qp", "mr"] {
        let shown = Command::new("rdma").args(["resource", "show", kind]).output().expect("the guest has it");
        assert!(shown.status.success(), "rdma resource show {kind}: {shown:?}");
        let text = String::from_utf8_lossy(&shown.stdout).into_owned();
        left.extend(text.lines().filter(|line| line.contains(" pid ")).map(|line| format!("{line}\n")));
    }
    left
}

async fn rig() -> Rig {
    // An emulator that shares its processors takes long for what lies between two completions.
    let options = GdrOptions { stuck_after: Duration::from_secs(120), ..GdrOptions::default() };
    Rig::with(false, options).await.unwrap_or_else(|error| panic!("soft-RoCE: {error}"))
}

fn discovery() {
    let found = rdma::discover();
    assert_eq!(found.library, Ok(true), "the library knows dma-bufs");
    let device = &found.devices[0];
    assert_eq!((device.name.as_str(), device.obstacle(), device.pci_address.as_ref()), ("rxe0", None, None));
    let gid = device.ports[0].gids.iter().find(|gid| gid.address.to_ipv4_mapped() == Some([10, 9, 9, 1].into()));
    assert!(gid.is_some_and(|gid| gid.kind == rdma::GidKind::RoceV2), "{device:?}");
}

/// Small batches in both directions until `ended`, on the side; every one is right, or the engine's own error. How many
/// there were of each.
async fn load(rig: Rc<Rig>, seed: u64, ended: Rc<Cell<bool>>) -> (usize, usize) {
    let (mut right, mut failed) = (0, 0);
    let mut rng = Rng(seed);
    while !ended.get() {
        let of_these = scenes::failures(&rig, &mut rng, 20).await;
        (right, failed) = (right + 20 - of_these, failed + of_these);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (right, failed)
}

/// Starts a load, does something to it, waits for what is wanted of the engine, and ends the load.
async fn under_load(
    rig: &Rc<Rig>,
    seed: u64,
    trouble: impl FnOnce(),
    wanted: impl Fn(&GdrState) -> bool,
) -> (usize, usize) {
    let ended = Rc::new(Cell::new(false));
    let load = tokio::task::spawn_local(load(Rc::clone(rig), seed, Rc::clone(&ended)));
    tokio::time::sleep(Duration::from_millis(200)).await;
    trouble();
    tokio::time::timeout(Duration::from_secs(60), rig.until(wanted)).await.expect("it is said within a minute");
    ended.set(true);
    load.await.expect("no panic")
}

async fn queue_pair_fails(seed: u64) {
    let rig = Rc::new(rig().await);
    let fail = || assert!(uverbs::HANDLES.filter(|handle| uverbs::fail_queue_pair(*handle)).count() == 1, "one of it");
    let (_, failed) = under_load(&rig, seed, fail, |state| !state.is_on()).await;
    assert!(failed > 0, "a caller got the error");
    rig.until(|state| !matches!(state, GdrState::Recovering(_))).await;
    assert!(rig.state().is_on(), "tested again: {}", rig.state());
    scenes::scattered_pieces(&rig, seed, Scale { rounds: 1, ..Scale::EMULATED }).await;
    let (_, failed) = under_load(&rig, seed + 1, fail, |state| matches!(state, GdrState::Retired(_))).await;
    assert!(failed > 0 && rig.state().detail().contains("twice"), "{}", rig.state());
}

async fn regions_are_revoked(seed: u64) {
    // Each region in turn: what copies name then are keys of nothing.
    let mut revoked = 0;
    for handle in uverbs::HANDLES {
        let rig = Rc::new(rig().await);
        let mut hit = false;
        let ended = Rc::new(Cell::new(false));
        let load = tokio::task::spawn_local(load(Rc::clone(&rig), seed, Rc::clone(&ended)));
        tokio::time::sleep(Duration::from_millis(20)).await;
        hit |= uverbs::revoke(handle);
        if hit {
            revoked += 1;
            // Its own memory of the self-test may have been what went: then nothing fails before the next self-test.
            let failing = rig.until(|state| !state.is_on());
            drop(tokio::time::timeout(Duration::from_millis(1500), failing).await);
        }
        ended.set(true);
        let (_, failed) = load.await.expect("no panic");
        assert!(hit || failed == 0, "nothing was done to it");
        if revoked == 4 {
            return;
        }
    }
    panic!("{revoked} regions, expected two of the self-test, host memory, and the device's");
}

async fn channel_is_flooded(seed: u64) {
    let rig = Rc::new(rig().await);
    let cq = uverbs::HANDLES.filter(|handle| uverbs::arm(*handle)).collect::<Vec<_>>();
    assert_eq!(cq.len(), 1, "one of it");
    // Every completion makes an event, and none is read while the engine polls.
    let ended = Rc::new(Cell::new(false));
    let load = tokio::task::spawn_local(load(Rc::clone(&rig), seed, Rc::clone(&ended)));
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(3) {
        assert!(uverbs::arm(cq[0]));
        tokio::task::yield_now().await;
    }
    ended.set(true);
    let (right, failed) = load.await.expect("no panic");
    assert!(right > 0 && failed == 0 && rig.state().is_on(), "{right} right, {failed} failed; {}", rig.state());
}

fn end_in_mid_copy(seed: u64, moment: u64) {
    on_reactor(async {
        let rig = Rc::new(rig().await);
        let mut rng = Rng(seed);
        for places in scattered(&mut rng, 600, 20_000, 0..SIDE_BYTES).chunks(3) {
            let (rig, places) = (Rc::clone(&rig), places.to_vec());
            tokio::task::spawn_local(async move { drop(rig.copy(Way::ToHost, &places, 1).await) });
        }
        tokio::time::sleep(Duration::from_millis(moment * 20)).await;
    });
    assert_eq!(resources(), "", "moment {moment}");
}

async fn copy_for_ever() {
    let rig = Rc::new(rig().await);
    println!("victim is up");
    load(rig, 1, Rc::new(Cell::new(false))).await;
}

fn is_killed(round: u64) {
    let mut victim = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", &beside(module_path!(), "inside::inside"), "--nocapture", "--test-threads", "1"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts again");
    let said = BufReader::new(victim.stdout.take().expect("a pipe"));
    assert!(said.lines().any(|line| line.is_ok_and(|line| line.contains("victim is up"))), "it came up");
    std::thread::sleep(Duration::from_millis(100 + 70 * round));
    assert_ne!(resources(), "", "it has something");
    victim.kill().expect("our child");
    victim.wait().expect("our child");
    assert_eq!(resources(), "", "the kernel has taken it all back");
    on_reactor(async {
        rig()
            .await
            .copy(Way::ToDevice, &scattered(&mut Rng(round), 20, 1000, 0..SIDE_BYTES), round)
            .await
            .expect("copied");
    });
}

/// Conversations, each of whose turns asks for all blocks of those before and stores some more.
fn replay(seed: u64) {
    const BLOCK_BYTES: usize = 16 << 10;
    let config = Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(48)
        .device_blocks(16)
        .device(DeviceKind::Simulated)
        .gdr(EngineMode::On);
    let cache = block_on(Cache::open(config)).unwrap_or_else(|error| panic!("soft-RoCE: {error}"));
    let mut rng = Rng(seed);
    let mut lengths = [0u64; 6];
    let (mut hits, mut stored) = (0, 0);
    for _ in 0..40 {
        let conversation = rng.below(6) as usize;
        let number = |turn: u64| conversation as u64 * 1000 + turn;
        let keys: Vec<_> = (0..lengths[conversation]).map(|turn| key(number(turn))).collect();
        let found = cache.match_prefix(&keys).len();
        for turn in 0..found as u64 {
            let Some(lease) = block_on(cache.fetch_to_device(&key(number(turn)))).expect("fetch") else { break };
            let bytes = block_on(cache.read_device(&lease, Vec::new())).expect("read");
            assert!(bytes == payload(number(turn), BLOCK_BYTES), "block {} by {}", number(turn), lease.route());
            hits += 1;
        }
        for turn in found as u64..lengths[conversation] + 1 + rng.below(2) {
            let parent = turn.checked_sub(1).map(|turn| key(number(turn)));
            let bytes = payload(number(turn), BLOCK_BYTES);
            block_on(cache.store(&key(number(turn)), parent.as_ref(), &bytes)).expect("store");
            stored += 1;
            lengths[conversation] = lengths[conversation].max(turn + 1);
        }
    }
    let stats = cache.stats();
    assert!(stats.gdr && stats.gdr_failovers == 0 && stats.copied_batches()["gdr"] > 30, "{stats:?}");
    println!("{hits} hits, {stored} stored, {:?}", stats.copied_bytes());
    kvhoist::internals::validate(&cache).expect("valid");
    block_on(cache.close()).expect("close");
}
