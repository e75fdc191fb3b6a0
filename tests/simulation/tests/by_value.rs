//! Blocks are written when host memory lets them go, if they are worth it, and no more than the budget allows.

mod scene;

use std::time::Duration;

use kvhoist::{
    BlockKey, Cache, Config, DiskPath, Memory, Segment, Tier, WritePolicy,
    internals::io::{FileId, OpKind},
};
use kvhoist_simulation::sim::{self, Fault, Sim, Simulated, World};
use scene::{BLOCK_BYTES, config, finish, open, spawn};

fn by_value() -> Config {
    config().write_policy(WritePolicy::ByValue)
}

/// Bytes that a write of a block comes to: with the page of its record.
const WRITTEN_BYTES: u64 = BLOCK_BYTES as u64 + 4096;

fn key(n: u32) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&n.to_be_bytes());
    BlockKey::new(bytes)
}

fn payload(n: u32) -> Vec<u8> {
    vec![n as u8 ^ (n >> 8) as u8; BLOCK_BYTES]
}

async fn store(cache: &Cache, n: u32, parent: Option<u32>) {
    cache.store(&key(n), parent.map(key).as_ref(), &payload(n)).await.expect("a store by value is no write");
}

async fn fetch(cache: &Cache, n: u32) -> bool {
    let found = cache.fetch(&key(n)).await.expect("served");
    assert!(found.iter().all(|lease| **lease == payload(n)), "block {n} shows wrong bytes");
    found.is_some()
}

/// Lets the disk do what it has to do.
async fn a_while() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

/// Which of the blocks a process finds that opens the store where this one is killed now.
async fn found_after_kill(disk: &Sim, blocks: impl Iterator<Item = u32>) -> Vec<u32> {
    found_in(disk.contents(FileId(0)), blocks).await
}

/// Likewise where the file was like this.
async fn found_in(image: Vec<u8>, blocks: impl Iterator<Item = u32>) -> Vec<u32> {
    let world = World::new(2, vec![image]);
    let Simulated { cache, reactor } = sim::open(by_value(), &world).await.expect("a killed store opens");
    let mut found = Vec::new();
    for n in blocks {
        if fetch(&cache, n).await {
            found.push(n);
        }
    }
    finish(cache, reactor).await;
    found
}

/// Stores so many blocks that nobody ever asks for again that their like is not worth a write.
async fn learn_that_nobody_comes_back(cache: &Cache) {
    for n in 10_000..10_200 {
        store(cache, n, None).await;
        a_while().await;
    }
    let stats = cache.stats();
    assert!(stats.writes_declined > 50, "{} of 200 blocks were not worth a write", stats.writes_declined);
    assert_eq!(stats.writes_over_budget, 0);
}

#[test]
fn a_call_gets_a_slot_though_what_was_to_be_written_was_written_by_a_sync() {
    sim::block_on(async {
        let (cache, reactor, _disk) = open(by_value().host_blocks(1)).await;
        for n in 0..4 {
            store(&cache, n, None).await;
            // Finds the block worth a write, and writes it.
            cache.sync().await.expect("the disk takes it");
            // Takes the slot of a block that is on disk; the caller after it that of one on which nothing was decided.
            store(&cache, 100 + n, None).await;
            drop(cache.reserve().await.expect("a slot"));
        }
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_is_written_when_host_memory_lets_it_go_after_those_above_it() {
    sim::block_on(async {
        // One write after the other. The chain's keys are in no order of theirs.
        let chain = [7, 3, 9, 1, 5];
        let settings = by_value().host_blocks(8).write_bytes_in_flight_max(BLOCK_BYTES as u64);
        let (cache, reactor, disk) = open(settings).await;
        let at_first = disk.counts().started[OpKind::Write as usize];
        for (at, &n) in chain.iter().enumerate() {
            store(&cache, n, at.checked_sub(1).map(|above| chain[above])).await;
            a_while().await;
        }
        assert_eq!(disk.counts().started[OpKind::Write as usize], at_first, "host memory has room");
        // From the end, as loads touch chains.
        cache.touch(&chain.map(key));
        for n in 100..103 {
            store(&cache, n, None).await;
        }
        let mut images = Vec::new();
        for _ in 0..100 {
            images.push(disk.contents(FileId(0)));
            tokio::time::sleep(Duration::from_micros(300)).await;
        }
        let mut seen = Vec::new();
        for image in images {
            let found = found_in(image, chain.into_iter()).await;
            assert_eq!(found, chain[..found.len()], "what is on disk is the beginning of the chain");
            seen.push(found.len());
        }
        seen.dedup();
        assert!(seen.len() > 2 && seen.last() == Some(&chain.len()), "so much of it was on disk, in turn: {seen:?}");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_sync_and_a_close_write_and_flush_what_is_worth_it_and_count_the_rest() {
    sim::block_on(async {
        for closes in [false, true] {
            let settings = by_value().host_blocks(8);
            let (cache, reactor, disk) = open(settings.clone()).await;
            // Nothing is known: all is worth it.
            for n in 0..6 {
                store(&cache, n, None).await;
            }
            cache.sync().await.expect("a sound disk");
            assert_eq!((cache.stats().dirty, cache.stats().writes_declined), (0, 0));
            assert_eq!(found_after_kill(&disk, 0..6).await, [0, 1, 2, 3, 4, 5]);
            learn_that_nobody_comes_back(&cache).await;
            cache.sync().await.expect("decided, written and flushed");
            let before = cache.stats().writes_declined;
            for n in 20..26 {
                store(&cache, n, None).await;
            }
            let again = cache.clone();
            match closes {
                false => cache.sync().await.expect("what was decided against is no error"),
                true => again.close().await.expect("what was decided against is no error"),
            }
            let stats = cache.stats();
            let declined = stats.writes_declined - before;
            assert!(declined > 0 && stats.dirty == 0, "{declined} blocks were declined, {} are dirty", stats.dirty);
            if !closes {
                for n in 20..26 {
                    assert!(fetch(&cache, n).await, "block {n} is in host memory whatever was decided");
                }
            }
            let kept = found_after_kill(&disk, 20..26).await;
            assert_eq!(kept.len() as u64, 6 - declined, "the rest was written: {kept:?}");
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn a_sync_charges_the_budget_once_for_each_block_of_a_chain() {
    sim::block_on(async {
        // A block a second: the bucket of a new store has 360.
        let settings = by_value()
            .host_blocks(256)
            .disks(vec![DiskPath::with_blocks("simulated", 256)])
            .write_budget(86_400 * WRITTEN_BYTES);
        for closes in [false, true] {
            let (cache, reactor, disk) = open(settings.clone()).await;
            for n in 0..100 {
                store(&cache, n, n.checked_sub(1)).await;
            }
            let at_first = disk.counts().started[OpKind::Write as usize];
            let again = cache.clone();
            match closes {
                false => cache.sync().await.expect("a sound disk"),
                true => again.close().await.expect("a sound disk"),
            }
            let stats = cache.stats();
            assert_eq!((stats.writes_over_budget, stats.writes_declined, stats.dirty), (0, 0, 0));
            assert_eq!(stats.tier(Tier::Disk).resident, 100);
            assert!(disk.counts().started[OpKind::Write as usize] >= at_first + 100, "each block is a write");
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn what_is_used_again_before_it_is_dropped_is_decided_on_anew() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(by_value().host_blocks(8)).await;
        learn_that_nobody_comes_back(&cache).await;
        store(&cache, 1, None).await;
        cache.sync().await.expect("a sound disk");
        assert!(found_after_kill(&disk, 1..2).await.is_empty(), "it was decided against");
        assert_eq!(cache.stats().dirty, 0);
        assert!(fetch(&cache, 1).await);
        assert_eq!(cache.stats().dirty, 1, "it is to be decided on anew");
        cache.sync().await.expect("a sound disk");
        assert_eq!(found_after_kill(&disk, 1..2).await, [1], "of blocks in their second use nothing bad is known");
        finish(cache, reactor).await;
    });
}

#[test]
fn what_is_loaded_by_layers_before_it_is_dropped_is_decided_on_anew() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(by_value().host_blocks(8)).await;
        learn_that_nobody_comes_back(&cache).await;
        store(&cache, 1, None).await;
        cache.sync().await.expect("a sound disk");
        assert!(found_after_kill(&disk, 1..2).await.is_empty(), "it was decided against");
        let mut memory = vec![0; BLOCK_BYTES];
        // SAFETY: the memory lives until `unregister` has resolved, and nothing touches it before.
        let lent = unsafe { Memory::host(memory.as_mut_ptr(), BLOCK_BYTES) };
        let region = cache.register(lent).await.expect("registered");
        let place = Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES };
        let load = cache.load_layers(&[key(1)], &[vec![place]], &[0]).await.expect("taken on");
        assert!(matches!(load.blocks().await[..], [Ok(true)]));
        cache.unregister(&region).await.expect("its own");
        assert_eq!(memory, payload(1));
        assert_eq!(cache.stats().dirty, 1, "it is to be decided on anew");
        cache.sync().await.expect("a sound disk");
        assert_eq!(found_after_kill(&disk, 1..2).await, [1], "of blocks in their second use nothing bad is known");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_that_comes_back_after_it_was_dropped_is_in_its_second_use() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(by_value().host_blocks(8)).await;
        learn_that_nobody_comes_back(&cache).await;
        store(&cache, 1, None).await;
        for n in 300..310 {
            store(&cache, n, None).await;
            a_while().await;
        }
        assert!(!fetch(&cache, 1).await, "it was dropped");
        store(&cache, 1, None).await;
        cache.sync().await.expect("a sound disk");
        assert_eq!(found_after_kill(&disk, 1..2).await, [1]);
        finish(cache, reactor).await;
    });
}

#[test]
fn no_hour_takes_more_than_a_tenth_above_the_budget_and_demand_uses_it_up() {
    sim::block_on(async {
        const A_DAY: u64 = 24 * 600;
        let settings = by_value()
            .host_blocks(16)
            .disks(vec![DiskPath::with_blocks("simulated", 4096)])
            .write_budget(A_DAY * WRITTEN_BYTES);
        let (cache, reactor, disk) = open(settings).await;
        let mut written = Vec::new();
        // Chains of four, one every four seconds: six times the budget. All are used twice, and so worth a write.
        for n in 0..4 * 3600 {
            let first = n / 4 * 4;
            store(&cache, n, n.checked_sub(1).filter(|above| *above >= first)).await;
            assert!(fetch(&cache, n).await);
            tokio::time::sleep(Duration::from_secs(1)).await;
            written.push(cache.stats().tier(Tier::Disk).bytes_in / BLOCK_BYTES as u64);
        }
        let most = written.windows(3600).map(|hour| hour[3599] - hour[0]).max();
        assert!(most <= Some(660), "{most:?} blocks in an hour of a budget of 600");
        let last = written[written.len() - 1] - written[written.len() - 3600];
        assert!(last >= 540, "{last} blocks in the last hour of a budget of 600");
        let stats = cache.stats();
        assert!(stats.writes_over_budget > 5_000, "{} blocks had no room in it", stats.writes_over_budget);
        let counted = disk.counts().started[OpKind::Write as usize];
        assert!(counted <= 2 * written[written.len() - 1] + 64, "a block is two writes: {counted}");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_write_that_fails_is_reported_by_the_next_sync() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(by_value()).await;
        store(&cache, 1, None).await;
        disk.script_next(OpKind::Write, Fault::Error(5));
        cache.sync().await.expect_err("a write that was decided for failed");
        cache.sync().await.expect("it was reported");
        assert!(fetch(&cache, 1).await);
        cache.sync().await.expect("the disk is sound by now");
        assert_eq!(found_after_kill(&disk, 1..2).await, [1], "it was used again, and decided on anew");
        finish(cache, reactor).await;
    });
}

#[test]
fn of_a_chain_that_is_over_nothing_is_written() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(by_value().host_blocks(8)).await;
        store(&cache, 1, None).await;
        store(&cache, 2, Some(1)).await;
        store(&cache, 3, None).await;
        assert_eq!(cache.release(&[key(1), key(2)]), 2);
        cache.sync().await.expect("a sound disk");
        assert_eq!((cache.stats().dirty, cache.stats().writes_declined), (0, 2));
        assert_eq!(found_after_kill(&disk, 1..4).await, [3]);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_sync_decides_on_a_block_whose_key_a_removed_one_had_that_is_being_written() {
    sim::block_on(async {
        // A tenth of an hour has a block.
        let settings = by_value().host_blocks(16).write_budget(WRITTEN_BYTES * 240);
        let (cache, reactor, disk) = open(settings).await;
        let writes = || disk.counts().started[OpKind::Write as usize];
        store(&cache, 0, None).await;
        disk.script(OpKind::Write, writes(), Fault::Stall);
        let first = spawn(&cache, |cache| async move { cache.sync().await });
        a_while().await;
        let removal = spawn(&cache, |cache| async move { cache.remove(&key(0)).await });
        a_while().await;
        store(&cache, 0, None).await;
        let second = spawn(&cache, |cache| async move { cache.sync().await });
        a_while().await;
        assert_eq!(disk.release(), 1);
        for synced in [first, second] {
            synced.await.expect("no panic").expect("a sound disk");
        }
        removal.await.expect("no panic").expect("removed");
        let stats = cache.stats();
        assert_eq!((stats.writes_over_budget, stats.tier(Tier::Disk).resident), (1, 0), "no more than the budget");
        finish(cache, reactor).await;
    });
}
