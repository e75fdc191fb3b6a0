//! The way that each call takes, for every place of its block, every shape of its memory and the health of the tiers,
//! beside the recorded answers in `routes/answers.txt`.
//!
//! `KVHOIST_RECORD=1` writes them anew. A line is a call, the settings, where the block is, and what happened: the
//! result, what was counted as found, and the routes in the order of their names.

mod scene;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use kvhoist::{
    Cache, DiskPath, Eviction, Route, Segment, Stats, Tier, WritePolicy,
    internals::io::{AlignedBuf, OpKind},
};
use kvhoist_simulation::sim::{self, Fault, World};
use scene::*;

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/routes/answers.txt");

#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    Fetch,
    FetchToDevice,
    LoadAligned,
    LoadOdd,
    LoadShared,
    LoadToDevice,
    LayersToHost,
    LayersToDevice,
    Store,
    StoreAligned,
    StoreOdd,
    StoreFromDevice,
}

const CALLS: [Call; 12] = {
    use Call::*;
    [
        Fetch,
        FetchToDevice,
        LoadAligned,
        LoadOdd,
        LoadShared,
        LoadToDevice,
        LayersToHost,
        LayersToDevice,
        Store,
        StoreAligned,
        StoreOdd,
        StoreFromDevice,
    ]
};

/// Where the block is when the call begins.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    Nowhere,
    Host,
    Disk,
    HostDisk,
    Device,
    DeviceHost,
    DeviceDisk,
    All,
    /// A fetch of it is in flight.
    Arriving,
    /// A fetch of it to the device is in flight.
    ArrivingOnDevice,
}

const PLACES: [Place; 10] = {
    use Place::*;
    [Nowhere, Host, Disk, HostDisk, Device, DeviceHost, DeviceDisk, All, Arriving, ArrivingOnDevice]
};

/// What is out of order.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trouble {
    Nothing,
    /// The first operation of the disk fails.
    Fails,
    /// The first read of the disk is wrong.
    Wrong,
    DiskRetired,
    DeviceRetired,
    /// The memory is not there for the kernel.
    NoMemory,
}

const TROUBLES: [Trouble; 6] = {
    use Trouble::*;
    [Nothing, Fails, Wrong, DiskRetired, DeviceRetired, NoMemory]
};

#[derive(Debug, Clone, Copy)]
struct Case {
    call: Call,
    place: Place,
    trouble: Trouble,
    bypass: bool,
    policy: Option<WritePolicy>,
    sums: bool,
}

type Outcome<T> = Result<T, kvhoist::Error>;

/// The block in question.
const N: u8 = 50;

fn pool() -> AlignedBuf {
    AlignedBuf::zeroed(4 * BLOCK_BYTES)
}

async fn place_block(cache: &Cache, place: Place, has_disk: bool) -> bool {
    if place == Place::Nowhere {
        return true;
    }
    store(cache, N).await.expect("a sound disk");
    if matches!(place, Place::Device | Place::DeviceHost | Place::DeviceDisk | Place::All) {
        drop(cache.fetch_to_device(&key(N)).await.expect("served").expect("stored"));
    }
    if !matches!(place, Place::Host | Place::HostDisk | Place::DeviceHost | Place::All) {
        // The host tier has four slots.
        for n in 0..4 {
            store(cache, n).await.expect("a sound disk");
        }
        for n in 0..4 {
            drop(cache.fetch(&key(n)).await.expect("served"));
        }
    }
    cache.sync().await.expect("a sound disk");
    // Without a disk tier a block is evicted for good; with one it is written before.
    match place {
        Place::Host | Place::Device | Place::DeviceHost => !has_disk,
        _ => has_disk,
    }
}

async fn run_case(case: Case) -> Option<String> {
    let Case { call, place, trouble, bypass, policy, sums } = case;
    let mut config = config()
        .device_blocks(2)
        .device(kvhoist::DeviceKind::Simulated)
        .bypass_host(bypass)
        .eviction_policy(Eviction::Lru);
    config = match policy {
        Some(policy) => config.write_policy(policy),
        None => config.disks(Vec::<DiskPath>::new()),
    };
    let (cache, reactor, world) = open_world(config, 1, 1).await;
    world.copy.set_checksums(sums);
    if !place_block(&cache, place, policy.is_some()).await {
        return None;
    }
    let mut buf = pool();
    let mut device = pool();
    // SAFETY: both live until the cache is closed, and nobody looks at them before.
    let memory = unsafe { kvhoist::Memory::host(buf.as_mut_ptr(), 2 * BLOCK_BYTES) };
    // SAFETY: as above.
    let on_device = unsafe { kvhoist::Memory::device(device.as_mut_ptr(), 2 * BLOCK_BYTES) };
    let regions = [cache.register(memory).await.expect("free"), cache.register(on_device).await.expect("free")];
    let arriving = match place {
        Place::Arriving => Some(spawn(&cache, async |cache| drop(cache.fetch(&key(N)).await))),
        Place::ArrivingOnDevice => Some(spawn(&cache, async |cache| drop(cache.fetch_to_device(&key(N)).await))),
        _ => None,
    };
    begin_trouble(&cache, &world, trouble, policy.is_some()).await?;
    let before = cache.stats();
    if arriving.is_some() {
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    }
    let result = make(&cache, call, &mut buf, &mut device).await;
    if let Some(arriving) = arriving {
        arriving.await.expect("no panic");
    }
    a_while().await;
    let line = result + &counted(&before, &cache.stats());
    for region in &regions {
        cache.unregister(region).await.expect("its own");
    }
    finish(cache, reactor).await;
    Some(line)
}

/// What was counted between the two.
fn counted(before: &Stats, after: &Stats) -> String {
    let mut line = String::new();
    for tier in [Tier::Device, Tier::Host, Tier::Disk] {
        let hits = after.tier(tier).hits - before.tier(tier).hits;
        if hits > 0 {
            write!(line, ", {hits} found on {tier}").expect("a string");
        }
    }
    if after.misses > before.misses {
        write!(line, ", {} missed", after.misses - before.misses).expect("a string");
    }
    for route in Route::ALL {
        let blocks = after.route_blocks(route) - before.route_blocks(route);
        if blocks > 0 {
            write!(line, ", {route} {blocks}").expect("a string");
        }
    }
    line
}

async fn begin_trouble(cache: &Cache, world: &World, trouble: Trouble, has_disk: bool) -> Option<()> {
    let next = |kind: OpKind| world.storage.counts().started[kind as usize];
    match trouble {
        Trouble::Nothing => {}
        Trouble::Fails if has_disk => {
            world.storage.script(OpKind::Read, next(OpKind::Read), Fault::Error(libc::EIO));
            world.storage.script(OpKind::Write, next(OpKind::Write), Fault::Error(libc::EIO));
        }
        Trouble::Wrong if has_disk => world.storage.script(OpKind::Read, next(OpKind::Read), Fault::BitFlip),
        Trouble::NoMemory if has_disk => {
            world.storage.script(OpKind::Read, next(OpKind::Read), Fault::Error(libc::EFAULT));
        }
        Trouble::DiskRetired if has_disk => kvhoist::internals::seams::retire(cache, Tier::Disk),
        Trouble::DeviceRetired => kvhoist::internals::seams::retire(cache, Tier::Device),
        _ => return None,
    }
    Some(())
}

fn halves(buf: &mut AlignedBuf, at: usize) -> Vec<Segment> {
    let start = buf.as_mut_ptr().wrapping_add(at);
    [0, BLOCK_BYTES / 2].map(|at| Segment { ptr: start.wrapping_add(at), len: BLOCK_BYTES / 2 }).to_vec()
}

fn whole(buf: &mut AlignedBuf, at: usize) -> Vec<Segment> {
    vec![Segment { ptr: buf.as_mut_ptr().wrapping_add(at), len: BLOCK_BYTES }]
}

/// Makes the call; its result in words.
async fn make(cache: &Cache, call: Call, host: &mut AlignedBuf, device: &mut AlignedBuf) -> String {
    let loaded = |result: Outcome<bool>| match result {
        Ok(true) => "done".into(),
        Ok(false) => "missing".into(),
        Err(error) => format!("{error:?}").split([' ', '{']).next().expect("a name").to_lowercase(),
    };
    let keys = [key(N)];
    let one = |results: Outcome<Vec<Outcome<bool>>>| {
        results.map(|mut results| results.pop().expect("one")).unwrap_or_else(Err)
    };
    let layers = async |places: Vec<Segment>| {
        let load = cache.load_layers(&keys, &[places], &[0, 1]).await?;
        load.blocks().await.pop().expect("one")
    };
    match call {
        Call::Fetch => match cache.fetch(&key(N)).await {
            Ok(Some(lease)) => format!("lease by {}", lease.route()),
            other => loaded(other.map(|_| false)),
        },
        Call::FetchToDevice => match cache.fetch_to_device(&key(N)).await {
            Ok(Some(lease)) => format!("lease by {}", lease.route()),
            other => loaded(other.map(|_| false)),
        },
        Call::LoadAligned => loaded(one(cache.load_into(&keys, &[whole(host, 0)]).await)),
        Call::LoadOdd => loaded(one(cache.load_into(&keys, &[whole(host, 8)]).await)),
        Call::LoadShared => loaded(one(cache.load_shared(&keys, &[whole(host, 0)]).await)),
        Call::LoadToDevice => loaded(one(cache.load_into(&keys, &[whole(device, 0)]).await)),
        Call::LayersToHost => loaded(layers(halves(host, 0)).await),
        Call::LayersToDevice => loaded(layers(halves(device, 0)).await),
        Call::Store => loaded(store(cache, N).await.map(|()| true)),
        Call::StoreAligned => loaded(one(cache.store_from(&keys, None, &[whole(host, 0)]).await)),
        Call::StoreOdd => loaded(one(cache.store_from(&keys, None, &[whole(host, 8)]).await)),
        Call::StoreFromDevice => loaded(one(cache.store_from(&keys, None, &[whole(device, 0)]).await)),
    }
}

/// The settings of a case: what the call may meet, and what is said of it.
fn settings(call: Call) -> Vec<(bool, Option<WritePolicy>, bool, String)> {
    let mut all = Vec::new();
    let is_for_device =
        matches!(call, Call::FetchToDevice | Call::LoadToDevice | Call::LayersToDevice | Call::StoreFromDevice);
    for (policy, name) in [
        (None, "no disk"),
        (Some(WritePolicy::WriteThrough), "write-through"),
        (Some(WritePolicy::WriteBack), "write-back"),
    ] {
        for (bypass, name) in [(false, name.to_owned()), (true, format!("{name} bypass"))] {
            all.push((bypass, policy, false, name.clone()));
            if is_for_device && !bypass {
                all.push((bypass, policy, true, format!("{name} sums")));
            }
        }
    }
    all
}

#[test]
fn every_call_takes_the_recorded_way() {
    let (mut found, mut kinds) = (String::new(), BTreeSet::new());
    for (call, place, trouble) in cases() {
        let mut answers: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (bypass, policy, sums, name) in settings(call) {
            let case = Case { call, place, trouble, bypass, policy, sums };
            if let Some(answer) = sim::block_on(run_case(case)) {
                answers.entry(answer).or_default().push(name);
            }
        }
        let is_one = answers.len() == 1;
        for (answer, names) in answers {
            let names = if is_one { "any".into() } else { names.join(", ") };
            let line = writeln!(found, "{call:?} {place:?} {trouble:?} ({names}): {answer}");
            line.expect("a string");
            kinds.insert(answer);
        }
    }
    if std::env::var_os("KVHOIST_RECORD").is_some() {
        std::fs::write(RECORDED, &found).expect("a file of this test");
    }
    let recorded = std::fs::read_to_string(RECORDED).expect("recorded");
    for (found, recorded) in found.lines().zip(recorded.lines()) {
        assert_eq!(found, recorded, "found, and as it was recorded");
    }
    assert_eq!(found.lines().count(), recorded.lines().count());
    assert!(kinds.len() > 30, "{} kinds of answers", kinds.len());
}

fn cases() -> impl Iterator<Item = (Call, Place, Trouble)> {
    let places = |call| PLACES.into_iter().map(move |place| (call, place));
    let troubles = |(call, place)| TROUBLES.into_iter().map(move |trouble| (call, place, trouble));
    CALLS.into_iter().flat_map(places).flat_map(troubles)
}

/// A load waits for bytes in flight to be read in place. Meanwhile its block is wanted in host memory: the load waits
/// for that movement, and must not keep the bytes that the movement waits for.
#[test]
fn a_load_that_goes_another_way_keeps_nothing_that_the_other_needs() {
    sim::block_on(async {
        let config = config().bypass_host(true).read_bytes_in_flight_max(BLOCK_BYTES as u64);
        let (cache, reactor, _world) = open_world(config, 1, 1).await;
        fill(&cache).await;
        let mut buf = pool();
        // SAFETY: it lives until the region is unregistered, and nobody looks at it before.
        let memory = unsafe { kvhoist::Memory::host(buf.as_mut_ptr(), BLOCK_BYTES) };
        let region = cache.register(memory).await.expect("free");
        let reading = spawn(&cache, async |cache| fetch(&cache, 0).await);
        tokio::task::yield_now().await;
        let (keys, places) = ([key(1)], [whole(&mut buf, 0)]);
        let load = cache.load_into(&keys, &places);
        let (loaded, fetched) = tokio::join!(load, async {
            tokio::task::yield_now().await;
            fetch(&cache, 1).await
        });
        assert!(matches!(loaded.expect("asked")[..], [Ok(true)]) && fetched.expect("served"));
        assert!(reading.await.expect("no panic").expect("served"));
        cache.unregister(&region).await.expect("its own");
        finish(cache, reactor).await;
    });
}
