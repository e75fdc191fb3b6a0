//! Calls for many blocks in a caller's memory: what their blocks share, and what a failed one does to the others.

mod scene;

use kvhoist::{BlockKey, Cache, Config, Error, Memory, Region, Segment, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault, Simulated, World};
use scene::{BLOCK_BYTES, DEADLINE, config, open_killed};

const BLOCKS: usize = 24;

/// A caller's memory, one block after the other.
#[repr(C, align(4096))]
struct Pages([[u8; BLOCK_BYTES]; BLOCKS]);

impl Pages {
    fn filled() -> Box<Self> {
        Box::new(Pages(std::array::from_fn(|n| [n as u8; BLOCK_BYTES])))
    }

    async fn register(&mut self, cache: &Cache) -> Region {
        // SAFETY: in each test the pages live for longer than the cache, and are looked at where no call is in flight.
        let memory = unsafe { Memory::host(self.0.as_mut_ptr().cast(), size_of::<Pages>()) };
        cache.register(memory).await.expect("registered")
    }

    fn places(&mut self) -> Vec<Vec<Segment>> {
        let start = self.0.as_mut_ptr().cast::<u8>();
        let place = |n: usize| Segment { ptr: start.wrapping_add(n * BLOCK_BYTES), len: BLOCK_BYTES };
        (0..BLOCKS).map(|n| vec![place(n)]).collect()
    }
}

fn keys() -> Vec<BlockKey> {
    (0..BLOCKS as u8).map(scene::key).collect()
}

/// Two pages of records.
fn two_pages() -> Config {
    config().disks(vec![kvhoist::DiskPath::with_blocks("simulated", 64)]).bypass_host(true)
}

/// A world over blank files whose I/O threads do not die.
fn without_deaths(seed: u64) -> World {
    let mut world = World::new(seed, sim::blank_files(&two_pages()));
    world.deaths = 0.0;
    world
}

/// Opens a cache there, and registers the pages.
async fn open(world: &World, pages: &mut Pages) -> (Simulated, Region) {
    let opened = sim::open(two_pages(), world).await.expect("blank files open");
    let region = pages.register(&opened.cache).await;
    (opened, region)
}

/// Stores all blocks in one call, whose first write fails if `fails` is set. Returns which blocks were stored, and are
/// there after a kill, the record pages that were written, and the pieces of work that workers did.
fn store_all(seed: u64, fails: bool) -> (Vec<bool>, u64, u64) {
    let (world, mut pages) = (without_deaths(seed), Pages::filled());
    sim::block_on(async {
        let (Simulated { cache, reactor }, _region) = open(&world, &mut pages).await;
        let places = pages.places();
        let before = cache.stats().record_writes;
        if fails {
            world.storage.script_next(OpKind::Write, Fault::Error(5));
        }
        let stored = cache.store_from(&keys(), None, &places).await.expect("asked");
        let stored: Vec<bool> = stored.iter().map(|result| matches!(result, Ok(true))).collect();
        let stats = cache.stats();
        let (killed, its_reactor, _) = open_killed(two_pages(), &world.storage).await;
        for (n, key) in keys().iter().enumerate() {
            let lease = killed.fetch(key).await.expect("a sound disk");
            assert!(lease.is_some() || !stored[n], "seed {seed}: block {n} is not there after a kill");
            assert!(lease.iter().all(|lease| **lease == [n as u8; BLOCK_BYTES]), "seed {seed}: wrong bytes");
        }
        scene::finish(killed, its_reactor).await;
        scene::finish(cache, reactor).await;
        (stored, stats.record_writes - before, stats.work_done)
    })
}

#[test]
fn blocks_that_one_call_stores_share_the_writes_of_their_records() {
    let mut by_workers = 0;
    for seed in 0..32 {
        let (stored, pages, work_done) = store_all(seed, false);
        assert_eq!(stored, [true; BLOCKS], "seed {seed}");
        if work_done > 0 {
            by_workers += 1;
            assert_eq!(pages, 2, "seed {seed}: the blocks lie on two pages of records, {work_done} of them by workers");
        }
    }
    assert!(by_workers > 8, "{by_workers} runs with workers");
}

/// With I/O threads, whoever stores blocks begins eight under a lock, and those of a page of records end together.
#[test]
fn blocks_that_one_call_stores_begin_and_end_under_one_lock() {
    let mut by_callers = 0;
    for seed in 0..32 {
        let (world, mut pages) = (without_deaths(seed), Pages::filled());
        sim::block_on(async {
            let (Simulated { cache, reactor }, _region) = open(&world, &mut pages).await;
            let places = pages.places();
            let work_done = cache.stats().work_done;
            let before = kvhoist::internals::seams::locks_taken();
            let stored = cache.store_from(&keys(), None, &places).await.expect("asked");
            let locks = kvhoist::internals::seams::locks_taken() - before;
            assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
            if cache.stats().work_done - work_done == BLOCKS as u64 {
                by_callers += 1;
                // Of each of two pages: its blocks enter the table, its records are encoded, and its blocks end.
                assert_eq!(locks, (BLOCKS / 8 + 2 * 3) as u64, "seed {seed}");
            }
            scene::finish(cache, reactor).await;
        });
    }
    assert!(by_callers > 8, "{by_callers} runs whose writes callers submitted");
}

#[test]
fn a_block_that_is_not_written_keeps_no_other_of_its_call_from_its_record() {
    let mut by_workers = 0;
    for seed in 0..32 {
        let (stored, _, work_done) = store_all(seed, true);
        let failed = stored.iter().filter(|stored| !**stored).count();
        // Without workers the first write may be that of a page of records, for several blocks.
        assert!(failed > 0 && (work_done == 0 || failed == 1), "seed {seed}: {stored:?}");
        by_workers += u32::from(work_done > 0);
    }
    assert!(by_workers > 8, "{by_workers} runs with workers");
}

#[test]
fn blocks_that_one_call_loads_begin_eight_under_one_lock() {
    sim::block_on(async {
        let (cache, reactor, _disk) = scene::open(two_pages()).await;
        let mut pages = Pages::filled();
        let _region = pages.register(&cache).await;
        let places = pages.places();
        let stored = cache.store_from(&keys(), None, &places).await.expect("asked");
        assert!(stored.iter().all(|result| matches!(result, Ok(true))), "{stored:?}");
        // What the store began has ended by then, the look at the clock as well.
        tokio::time::sleep(10 * DEADLINE).await;
        let before = kvhoist::internals::seams::locks_taken();
        let loaded = cache.load_into(&keys(), &places).await.expect("asked");
        let locks = kvhoist::internals::seams::locks_taken() - before;
        assert!(loaded.iter().all(|result| matches!(result, Ok(true))), "{loaded:?}");
        assert_eq!(locks, (BLOCKS / 8 + BLOCKS) as u64, "one for the begin of eight, and one for the end of each");
        scene::finish(cache, reactor).await;
    });
}

/// As many as one after the other are taken on until the queue of the reactor, which has no turn meanwhile, is full.
#[test]
fn a_submission_past_the_queue_of_the_reactor_says_how_many_there_may_be() {
    for (movements_max, full, said) in [(40, 40, "movements_max"), (4096, 1024, "none")] {
        let world = without_deaths(3);
        sim::block_on(async {
            let config = two_pages().movements_max(movements_max);
            let Simulated { cache, reactor } = sim::open(config, &world).await.expect("blank files open");
            let mut pages = Pages::filled();
            let region = pages.register(&cache).await;
            let (place, queue) = (vec![pages.places().remove(0)], cache.completion_queue(4096).expect("a queue"));
            let refused = (0..4096_u16).find_map(|n| {
                let key = BlockKey::new(std::array::from_fn(|at| n.to_le_bytes()[at % 2]));
                queue.submit_store(&[key], None, &place).err()
            });
            let Some(Error::Busy { limit, setting, .. }) = refused else { panic!("expected a limit: {refused:?}") };
            assert_eq!((limit, setting), (full, said));
            let begun_at_once = queue.outstanding() as u64 - full;
            assert!(begun_at_once < 64, "{begun_at_once} took no room");
            while queue.drain().is_empty() || queue.outstanding() > 0 {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            cache.unregister(&region).await.expect("its own region");
            scene::finish(cache, reactor).await;
        });
    }
}
