//! Local hits beside a store that is away: the time of a hit in host memory while other calls ask for blocks that only
//! the store has, before and during each trouble.

use std::{
    io::{self, Write},
    process::ChildStdin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use kvhoist::{BlockKey, Cache, Config, RemotePolicy, remote::RemoteStore};
use kvhoist_bench_kit::drive::{key, other};

/// What the store does, as the link's process is told.
const TROUBLES: [&str; 4] = ["cut", "silence", "503", "slow"];
const HOST_BLOCKS: u64 = 64;
/// How long hits are timed, and how long the cache has to notice a change before.
const TIMED_FOR: Duration = Duration::from_secs(3);
const SETTLES_FOR: Duration = Duration::from_secs(2);
/// Calls that ask for blocks of the store, and the pause of each before the next.
const ASKERS: usize = 4;
const PAUSE: Duration = Duration::from_millis(5);

/// Times hits with the store there and with each trouble, in turns, and prints the 99th percentiles.
pub async fn measure(
    config: Config,
    store: Arc<dyn RemoteStore>,
    keys: &[BlockKey],
    rounds: u64,
    control: &mut ChildStdin,
) -> io::Result<()> {
    let config = config.host_blocks(4 * HOST_BLOCKS as u32).remote_deadline_ms(1000);
    let payload = vec![7; config.block_bytes];
    let cache = Cache::open(config.remote_store(store).remote_policy(RemotePolicy::Never)).await.map_err(other)?;
    super::known(&cache, keys.len()).await?;
    let local: Vec<_> = (0..HOST_BLOCKS).map(|n| key(2 << 32 | n)).collect();
    for key in &local {
        cache.store(key, None, &payload).await.map_err(other)?;
    }
    cache.keep(&local, Duration::from_secs(86_400));
    let ends = Arc::new(AtomicBool::new(false));
    let askers: Vec<_> =
        (0..ASKERS).map(|first| tokio::spawn(ask(cache.clone(), keys.to_vec(), first, Arc::clone(&ends)))).collect();
    println!(
        "p99 of local hits, us: with the store there, with the trouble, and their ratio (medians of {rounds} rounds)"
    );
    for trouble in TROUBLES {
        let mut found: [Vec<f64>; 3] = Default::default();
        for _ in 0..rounds {
            let mut p99 = [0.0; 2];
            for (what, p99) in ["there", trouble].into_iter().zip(&mut p99) {
                writeln!(control, "{what}")?;
                tokio::time::sleep(SETTLES_FOR).await;
                *p99 = hits(&cache, &local).await?;
            }
            let [there, away] = p99;
            [there, away, away / there].into_iter().zip(&mut found).for_each(|(value, all)| all.push(value));
        }
        let [there, away, ratio] = found.map(|all| kvhoist_bench_kit::measure::Spread::of(all).median);
        println!("  {trouble:<8}  {there:>8.1}  {away:>8.1}  {ratio:>5.2}");
    }
    ends.store(true, Ordering::Relaxed);
    writeln!(control, "there")?;
    for asker in askers {
        asker.await.map_err(other)?;
    }
    cache.close().await.map_err(other)?;
    Ok(())
}

/// Asks for one block after the other, wherever it is; a miss is an answer too.
async fn ask(cache: Cache, keys: Vec<BlockKey>, first: usize, ends: Arc<AtomicBool>) {
    for key in keys.iter().cycle().skip(first * 97) {
        if ends.load(Ordering::Relaxed) {
            return;
        }
        drop(cache.fetch(key).await);
        tokio::time::sleep(PAUSE).await;
    }
}

/// The 99th percentile of hits, in microseconds.
async fn hits(cache: &Cache, keys: &[BlockKey]) -> io::Result<f64> {
    let (mut times, until) = (Vec::new(), Instant::now() + TIMED_FOR);
    while Instant::now() < until {
        for key in keys {
            let began = Instant::now();
            let found = cache.fetch(key).await.map_err(other)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
            drop(found.ok_or_else(|| other("a kept block was evicted"))?);
        }
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() * 99 / 100])
}
