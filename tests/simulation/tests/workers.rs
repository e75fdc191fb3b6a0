//! Worker threads in simulation: work takes virtual time, ends in any order, and is lost now and then.

use kvhoist::{BlockKey, Config, DiskPath, Tier};
use kvhoist_simulation::sim;

const BLOCKS: u8 = 24;

fn key(n: u8) -> BlockKey {
    BlockKey::new([n + 1; 32])
}

/// Pieces of work that workers did while blocks were prefetched from disk and fetched, where each step kills its
/// worker with the probability `deaths`.
fn run(seed: u64, deaths: f64) -> u64 {
    let config = Config::default()
        .block_bytes(4096)
        .host_blocks(u32::from(BLOCKS))
        .disks(vec![DiskPath::with_blocks("simulated", u32::from(BLOCKS))]);
    let mut world = sim::World::new(seed, sim::blank_files(&config));
    world.deaths = deaths;
    sim::block_on(async {
        let sim::Simulated { cache, reactor } = sim::open(config.clone(), &world).await.expect("open");
        for n in 0..BLOCKS {
            cache.store(&key(n), None, &[n; 4096]).await.expect("store");
        }
        cache.close().await.expect("close");
        reactor.ended().await;

        let sim::Simulated { cache, reactor } = sim::open(config, &world).await.expect("open again");
        let keys: Vec<_> = (0..BLOCKS).map(key).collect();
        assert_eq!(cache.prefetch(&keys).expect("asked"), usize::from(BLOCKS));
        for n in 0..BLOCKS {
            let lease = cache.fetch(&key(n)).await.expect("fetch").expect("stored");
            assert_eq!(*lease, [n; 4096]);
        }
        let stats = cache.stats();
        assert_eq!(stats.tier(Tier::Host).resident, u64::from(BLOCKS));
        cache.close().await.expect("close");
        reactor.ended().await;
        reactor.check_balance().expect("every slot is accounted for");
        stats.work_done
    })
}

#[test]
fn seeds_decide_whether_there_are_workers_and_their_order() {
    let done: Vec<u64> = (0..32).map(|seed| run(seed, 0.0)).collect();
    assert!(done.contains(&0), "worlds without workers: {done:?}");
    assert!(
        done.iter().any(|&done| done >= u64::from(BLOCKS) - 4),
        "workers verify blocks that come together: {done:?}"
    );
    assert_eq!(done, (0..32).map(|seed| run(seed, 0.0)).collect::<Vec<_>>(), "a seed repeats its run");
}

#[test]
fn what_a_dying_worker_has_in_hand_is_done_again() {
    let steady: u64 = (0..32).map(|seed| run(seed, 0.0)).sum();
    let dying: u64 = (0..32).map(|seed| run(seed, 0.4)).sum();
    assert!(0 < dying && dying < steady, "{dying} pieces of work done by dying workers, {steady} by others");
}
