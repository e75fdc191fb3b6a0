//! Creation and recovery over the simulated disk and over plain memory.

#[path = "recovery/superblocks.rs"]
mod superblocks;

use std::{cell::RefCell, future::Future, time::Instant};

use proptest::prelude::*;

use kvhoist::{
    BlockKey, Config, DiskPath, Error,
    internals::{
        disk::{
            Counts, DiskSlots, Member, PageId, Recovered, RecoveredRecord, Threads,
            format::{
                HEAD_BYTES, PAGE_BYTES, RECORD_BYTES, TABLE_OFFSET,
                pair::SuperblockPair,
                record::{Record, RecordSeal},
                stripe::Stripe,
                superblock::{SEQUENCE_MAX, StoreState, Superblock},
            },
            recovery,
        },
        io::{OpKind, Storage},
    },
};
use kvhoist_simulation::sim::{Fault, Memory, Rng, Sim, SimOptions};

const UUID: [u8; 16] = [5; 16];

fn config(blocks: &[u32]) -> Config {
    let disk = |(at, &blocks): (usize, &u32)| DiskPath::with_blocks(format!("disk{at}"), blocks);
    Config::default().block_bytes(512).disks(blocks.iter().enumerate().map(disk).collect())
}

fn members(config: &Config, zeroed: bool) -> Vec<Member> {
    let stripe = Stripe::new(config);
    let places = config.disk.paths.iter().zip(stripe.members());
    places.map(|(d, m)| Member { path: d.path.clone(), bytes: m.bytes, device: false, zeroed }).collect()
}

/// Files without a store; only the first part of the data, which recovery does not read.
fn blank_files(config: &Config) -> Vec<Vec<u8>> {
    let stripe = Stripe::new(config);
    stripe.members().iter().map(|member| vec![0; (TABLE_OFFSET + member.table_bytes()) as usize]).collect()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let local = tokio::task::LocalSet::new();
    runtime.expect("a runtime").block_on(local.run_until(future))
}

fn record(n: u32) -> Record {
    let mut rng = Rng::new(u64::from(n) + 1);
    let mut key = || BlockKey::new([0; 4].map(|_: u64| rng.next_u64().to_le_bytes()).concat().try_into().expect("32"));
    let (key, parent) = (key(), key());
    let parent = (!n.is_multiple_of(3)).then_some(parent);
    let last_use = rng.next_u64() >> 33;
    Record {
        key,
        parent,
        length: 512,
        generation: u64::from(n) + 1,
        checksum: rng.next_u64(),
        last_use,
        uses: (n % 4) as u8,
    }
}

/// Writes a record directly into the table.
fn put_record(files: &mut [Vec<u8>], stripe: &Stripe, slot: u32, record: &Record) {
    let (file, local) = stripe.place(slot);
    let bytes = RecordSeal::new(&UUID, file.0).encode(local, record);
    files[usize::from(file.0)][TABLE_OFFSET as usize + local as usize * RECORD_BYTES..][..RECORD_BYTES]
        .copy_from_slice(&bytes);
}

fn created(config: &Config) -> Vec<Vec<u8>> {
    let storage = Memory::new(blank_files(config));
    block_on(open(&storage, &members(config, true), config, UUID)).expect("created");
    storage.into_files()
}

/// Enters every record, assuming no duplicate keys.
fn enter(records: &mut Vec<RecoveredRecord>) -> impl FnMut(&mut DiskSlots, &[RecoveredRecord]) {
    |slots, page| {
        page.iter().for_each(|r| slots.restore(r.slot, r.slot, r.checksum, r.generation));
        records.extend(page);
    }
}

/// Opens a store and ignores its records.
async fn open<S: Storage>(
    storage: &S,
    members: &[Member],
    config: &Config,
    uuid: [u8; 16],
) -> Result<Recovered, Error> {
    recovery::open(storage, members, config, uuid, &(), &mut |_, _| ()).await
}

fn recovered(config: &Config, files: Vec<Vec<u8>>) -> (Recovered, Vec<RecoveredRecord>) {
    let (storage, mut records) = (Memory::new(files), Vec::new());
    let opening = async {
        let mut take = enter(&mut records);
        recovery::open(&storage, &members(config, true), config, [0xFF; 16], &(), &mut take).await
    };
    let store = block_on(opening).expect("a store");
    store.slots.validate().expect("valid");
    (store, records)
}

/// The valid superblock.
fn superblock(file: &[u8]) -> Option<Superblock> {
    match SuperblockPair::decode(file.first_chunk().expect("a head")) {
        SuperblockPair::Valid { superblock, .. } => Some(superblock),
        _ => None,
    }
}

fn stale(store: &Recovered) -> Vec<PageId> {
    store.slots.stale_pages(PageId(0)).collect()
}

#[test]
fn a_new_store_is_empty_and_opens_again() {
    let config = config(&[40, 7]);
    let storage = Memory::new(blank_files(&config));
    for uuid in [UUID, [9; 16]] {
        let store = block_on(open(&storage, &members(&config, true), &config, uuid)).expect("opened");
        let counts = Counts { free: 47, ..Default::default() };
        assert_eq!((store.counts, store.next_generation, store.slots.full_count()), (counts, 1, 0));
        store.slots.validate().expect("valid");
        assert_eq!(superblock(&storage.files()[1]).expect("sound").uuid, UUID, "the first id stays");
    }
}

#[test]
fn a_table_that_is_not_known_to_be_zero_is_zeroed() {
    let config = config(&[70_000]);
    let mut files = blank_files(&config);
    files[0][HEAD_BYTES..].fill(0xEE);
    let storage = Memory::new(files);
    block_on(open(&storage, &members(&config, false), &config, UUID)).expect("created");
    assert_eq!(recovered(&config, storage.into_files()).0.counts.free, 70_000);
}

#[test]
fn a_crash_at_any_instant_of_creation_leaves_none_or_a_whole_store() {
    let config = config(&[40, 7]);
    let mut outcomes = [0; 2];
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        // Up to three creations in a row are interrupted, each on what the previous one left.
        let mut files = blank_files(&config);
        for attempt in 0..3 {
            let sim = Sim::new(seed, files, SimOptions::default());
            let (members, uuid) = (members(&config, false), [(seed as u8).wrapping_add(attempt); 16]);
            let polls = rng.below(40);
            block_on(async {
                let store = open(&sim, &members, &config, uuid);
                let cut = tokio::time::sleep(std::time::Duration::from_millis(polls * 7));
                tokio::select! { biased; () = cut => {}, store = store => drop(store.expect("opened")) }
            });
            files = sim.crash();
        }
        let state = |file: &Vec<u8>| superblock(file).map(|superblock| superblock.state);
        let whole = files.iter().any(|file| state(file) == Some(StoreState::Whole));
        outcomes[usize::from(whole)] += 1;
        let sim = Sim::new(seed, files, SimOptions::default());
        let store = block_on(open(&sim, &members(&config, false), &config, [0xFF; 16]));
        let store = store.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(store.counts.free, 47, "seed {seed}");
        let files = sim.crash();
        let is_new = files.iter().all(|file| superblock(file).is_some_and(|s| s.uuid == [0xFF; 16]));
        assert_eq!(is_new, !whole, "seed {seed}");
        for file in &files {
            let head = SuperblockPair::decode(file.first_chunk().expect("a head"));
            assert!(matches!(head, SuperblockPair::Valid { other_is_whole: true, .. }), "seed {seed}: {head:?}");
        }
    }
    assert!(outcomes.iter().all(|&count| count > 20), "both outcomes occur: {outcomes:?}");
}

#[test]
fn bad_records_are_counted_and_cost_nothing_else() {
    let config = config(&[100]);
    let stripe = Stripe::new(&config);
    let mut files = created(&config);
    (0..60).for_each(|slot| put_record(&mut files, &stripe, slot, &record(slot)));
    files[0][TABLE_OFFSET as usize + 40 * RECORD_BYTES + 33] ^= 4; // corruption
    let (head, tail) = files[0].split_at_mut(TABLE_OFFSET as usize + 11 * RECORD_BYTES);
    head[TABLE_OFFSET as usize + 10 * RECORD_BYTES..].swap_with_slice(&mut tail[..RECORD_BYTES]);
    files[0].last_mut().expect("a table").clone_from(&1); // past the last slot
    let (store, records) = recovered(&config, files);
    let counts = Counts { valid: 57, bad: 3, free: 40 };
    assert_eq!(store.counts, counts);
    assert_eq!(stale(&store), [PageId(0), PageId(1), PageId(3)]);
    assert!(records.iter().all(|found| ![10, 11, 40].contains(&found.slot)));
}

/// Threads that take their time, and now and then die with their work.
struct Drawn(RefCell<Rng>);

impl Threads for Drawn {
    fn any(&self) -> bool {
        self.0.borrow_mut().below(8) > 0
    }

    async fn run<T: Send + 'static>(&self, _bytes: u64, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let turns = self.0.borrow_mut().below(20);
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
        (self.0.borrow_mut().below(4) > 0).then(work)
    }
}

#[test]
fn what_is_recovered_does_not_depend_on_threads() {
    let config = config(&[3000, 40, 9000, 1, 500]);
    let stripe = Stripe::new(&config);
    let mut files = created(&config);
    // Every block twice, some slots free, some records in a wrong place.
    for slot in (0..stripe.slots()).filter(|slot| slot % 7 != 0) {
        put_record(&mut files, &stripe, slot, &Record { generation: u64::from(slot), ..record(slot / 2) });
    }
    for page in 3..40 {
        files[2].copy_within(page << 12..(page << 12) + 200, (page << 12) + 1000);
    }
    let (expected, records) = recovered(&config, files.clone());
    assert!(expected.counts.bad > 30 && !stale(&expected).is_empty(), "{:?}", expected.counts);
    for seed in 0..24 {
        let (storage, mut found) = (Memory::new(files.clone()), Vec::new());
        let threads = Drawn(RefCell::new(Rng::new(seed)));
        let opening = async {
            let mut take = enter(&mut found);
            recovery::open(&storage, &members(&config, true), &config, UUID, &threads, &mut take).await
        };
        let store = block_on(opening).expect("a store");
        store.slots.validate().expect("valid");
        assert_eq!((store.counts, store.next_generation), (expected.counts, expected.next_generation), "seed {seed}");
        assert_eq!(stale(&store), stale(&expected), "seed {seed}");
        assert_eq!(found, records, "seed {seed}");
    }
}

#[test]
fn an_unreadable_page_costs_its_own_records_only_and_a_shortage_of_memory_none() {
    let config = config(&[100]);
    let stripe = Stripe::new(&config);
    let mut files = created(&config);
    (0..100).for_each(|slot| put_record(&mut files, &stripe, slot, &record(slot)));
    let sim = Sim::new(1, files, SimOptions::default());
    // Read 0 is the superblocks, 1 the whole table, 2 to 5 its pages; the second open begins with read 4.
    for (read, errno) in [(1, libc::ENOMEM), (3, libc::ENOMEM), (5, libc::EIO), (7, libc::EIO)] {
        sim.script(OpKind::Read, read, Fault::Error(errno));
    }
    let error = block_on(open(&sim, &members(&config, true), &config, UUID)).expect_err("a shortage");
    assert!(error.to_string().starts_with("read the record table of disk0"), "{error}");
    let store = block_on(open(&sim, &members(&config, true), &config, UUID)).expect("a store");
    assert_eq!((store.counts.valid, store.counts.bad), (68, 32));
    assert_eq!(stale(&store), [PageId(1)]);
    assert!(store.next_generation > 1 << 40, "a later open may read that page, and what is stored now is newer");
}

#[test]
fn a_dead_device_is_an_error_after_a_bounded_number_of_reads() {
    let config = config(&[100_000]);
    let sim = Sim::new(1, created(&config), SimOptions::default());
    for read in 1..1000 {
        sim.script(OpKind::Read, read, Fault::Error(libc::EIO));
    }
    let error = block_on(open(&sim, &members(&config, true), &config, UUID)).expect_err("dead");
    assert!(error.to_string().starts_with("read the record table of disk0"), "{error}");
    assert!(sim.counts().started[OpKind::Read as usize] < 100);
}

#[test]
fn failures_of_the_storage_are_errors_that_name_the_path() {
    let config = config(&[40, 7]);
    for (kind, count) in [(OpKind::Read, 2), (OpKind::Write, 10), (OpKind::Sync, 8)] {
        for nth in 0..count {
            let sim = Sim::new(1, blank_files(&config), SimOptions::default());
            sim.script(kind, nth, Fault::Error(libc::EIO));
            let error = block_on(open(&sim, &members(&config, false), &config, UUID)).expect_err("a fault");
            assert!(error.to_string().contains(" disk"), "{error}");
            block_on(open(&sim, &members(&config, false), &config, UUID)).expect("the next attempt succeeds");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn records_come_back_whole(
        blocks in prop::collection::vec(1u32..300, 1..5),
        picks in prop::collection::vec((any::<prop::sample::Index>(), 0u64..50), 0..200),
        far in prop_oneof![Just(1), Just(1u64 << 40)],
    ) {
        let config = config(&blocks);
        let stripe = Stripe::new(&config);
        let mut files = created(&config);
        let mut model = std::collections::BTreeMap::new();
        for (at, (pick, last_use)) in (0..).zip(picks) {
            let slot = pick.index(stripe.slots() as usize) as u32;
            let record = Record { last_use: last_use * far, ..record(at) };
            put_record(&mut files, &stripe, slot, &record);
            model.insert(slot, record);
        }
        let (store, found) = recovered(&config, files);
        let mut expected: Vec<_> = model.into_iter().map(|(slot, record)| RecoveredRecord { slot, record }).collect();
        expected.sort_by_key(|r| stripe.place(r.slot));
        prop_assert_eq!(store.next_generation, expected.iter().map(|r| r.generation + 1).max().unwrap_or(1));
        prop_assert_eq!(store.counts.free + store.counts.valid, u64::from(stripe.slots()));
        prop_assert!(stale(&store).is_empty());
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn random_tables_never_panic(seed: u64, zeros in 0u32..100) {
        let config = config(&[200, 100]);
        let mut rng = Rng::new(seed);
        let mut files = created(&config);
        for file in &mut files {
            for byte in &mut file[HEAD_BYTES..] {
                *byte = if rng.below(100) < u64::from(zeros) { 0 } else { rng.next_u64() as u8 };
            }
        }
        let (store, records) = recovered(&config, files);
        prop_assert_eq!((store.counts.valid, records.len()), (0, 0));
    }
}

/// CPU time of this thread, which is independent of other programs on the machine.
fn cpu_ms() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) }, 0);
    time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 / 1e6
}

/// `cargo test --release -p kvhoist --lib a_million_records -- --ignored --nocapture`
#[test]
#[ignore = "a measurement"]
fn a_million_records() {
    let config = config(&[500_000, 500_000]);
    let stripe = Stripe::new(&config);
    let mut files = created(&config);
    (0..1_000_000).for_each(|slot| put_record(&mut files, &stripe, slot, &record(slot)));
    let (storage, members) = (Memory::new(files), members(&config, true));
    for _ in 0..3 {
        let (start, wall) = (cpu_ms(), Instant::now());
        block_on(open(&storage, &members, &config, UUID)).expect("a store");
        let (cpu, wall) = (cpu_ms() - start, wall.elapsed().as_secs_f64() * 1e3);
        eprintln!("1 M records, 128 MiB copied from memory: {cpu:.1} ms CPU, {wall:.1} ms wall");
    }
}
