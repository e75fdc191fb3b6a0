//! Pages out and in, and hits of the host tier.

use std::thread;

use kvhoist::{BlockKey, Cache, Tier, block_on};
use kvhoist_service::Client;

use crate::{
    options::{Options, Outcome},
    pool::{PAGES, Pool, all_done, key, median, timed},
};

/// Pages out and in, in-process and through the service in turns.
pub fn pages(options: &Options, cache: &Cache, client: &Client) -> Outcome<()> {
    let (pool, lent) = (Pool::new(options.block_bytes)?, Pool::new(options.block_bytes)?);
    // SAFETY: the pool lives until it is unregistered below.
    let memory = unsafe { kvhoist::Memory::host(pool.memory.as_ptr(), pool.memory.len()) };
    let region = block_on(cache.register(memory.pinned(true)))?;
    let pinned = region.is_pinned();
    // SAFETY: nobody touches a block of it while the block is on its way.
    let shared = unsafe { kvhoist::Memory::shared(lent.memory.clone()) };
    let theirs = block_on(client.register(shared.pinned(true)))?;
    println!("pools pinned: in-process {pinned}, by the service {}", theirs.is_pinned());
    let (mut sets, mut gets) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..=options.rounds as u64 {
        let keys: Vec<BlockKey> = (0..PAGES as u64).map(|at| key(round << 32 | at)).collect();
        [&pool, &lent].into_iter().for_each(|pool| pool.fill(round));
        let own = [
            timed(|| all_done(&block_on(cache.store_from(&keys, None, &pool.places))?))?,
            timed(|| all_done(&block_on(cache.load_into(&keys, &pool.places))?))?,
        ];
        let through = [
            timed(|| all_done(&block_on(client.store_from(&keys, None, &lent.places))?))?,
            timed(|| all_done(&block_on(client.load_into(&keys, &lent.places))?))?,
        ];
        // The first round touches what has not been touched before.
        if round > 0 {
            [own[0], through[0]].into_iter().zip(&mut sets).for_each(|(time, times)| times.push(time));
            [own[1], through[1]].into_iter().zip(&mut gets).for_each(|(time, times)| times.push(time));
        }
    }
    let bytes = (PAGES * options.block_bytes) as f64 / 1e9;
    for (name, [own, through]) in [("set", &mut sets), ("get", &mut gets)] {
        let (own, through) = (bytes / median(own), bytes / median(through));
        println!("{name}: in-process {own:.2} GB/s, service {through:.2} GB/s, ratio {:.3}", through / own);
    }
    block_on(client.unregister(&theirs))?;
    block_on(cache.unregister(&region))?;
    Ok(())
}

/// Pages from the service's host memory, beside copies of as many bytes by as many threads.
pub fn host_hits(options: &Options, client: &Client, threads: usize) -> Outcome<()> {
    let (from, to) = (Pool::new(options.block_bytes)?, Pool::new(options.block_bytes)?);
    from.fill(0);
    let keys: Vec<BlockKey> = (0..PAGES as u64).map(key).collect();
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(to.memory.clone()) };
    let region = block_on(client.register(lent.pinned(true)))?;
    block_on(client.prefetch(&keys))?;
    // It joins the movements of the prefetch.
    all_done(&block_on(client.load_into(&keys, &to.places))?)?;
    let tiers = block_on(client.match_prefix(&keys))?;
    let hits = tiers.iter().filter(|tier| **tier == Tier::Host).count();
    if hits != PAGES {
        return Err(format!("{hits} of {PAGES} pages are in host memory").into());
    }
    let (mut copies, mut loads) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds.max(3) {
        copies.push(timed(|| copy(&from, &to, threads))?);
        loads.push(timed(|| all_done(&block_on(client.load_into(&keys, &to.places))?))?);
    }
    let bytes = (PAGES * options.block_bytes) as f64 / 1e9;
    let (copied, loaded) = (bytes / median(&mut copies), bytes / median(&mut loads));
    println!(
        "host hits: memcpy by {threads} threads {copied:.2} GB/s, service {loaded:.2} GB/s, ratio {:.3}",
        loaded / copied
    );
    Ok(block_on(client.unregister(&region))?)
}

fn copy(from: &Pool, to: &Pool, threads: usize) -> Outcome<()> {
    let share = PAGES.div_ceil(threads);
    thread::scope(|scope| {
        for (from, to) in from.places.chunks(share).zip(to.places.chunks(share)) {
            let pairs: Vec<_> = from.iter().flatten().zip(to.iter().flatten()).collect();
            let pairs: Vec<(usize, usize, usize)> =
                pairs.into_iter().map(|(from, to)| (from.ptr as usize, to.ptr as usize, from.len)).collect();
            scope.spawn(move || {
                for (from, to, len) in pairs {
                    // SAFETY: both are mapped with this length and lie in different pools, which outlive the scope.
                    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
                }
            });
        }
    });
    Ok(())
}
