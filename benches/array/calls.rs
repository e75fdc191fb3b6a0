//! The system calls of the cache, over all threads.

use std::{
    io,
    sync::atomic::{AtomicU64, Ordering},
};

use kvhoist_bench_kit::{
    drive::{each, fetch_stamped, measured, run_local},
    measure::{Entrant, Sample, Series, interleave},
    pattern::shuffled,
    syscalls::Counter,
};

use super::Array;

impl Array {
    /// Counts system calls. Nothing runs beside the cache.
    pub fn count_calls(&self, rounds: u64) -> io::Result<Vec<Series>> {
        let next = &AtomicU64::new(self.blocks);
        let fetch = |depth: usize| {
            counted(format!("fetch, 1 thread, QD{depth}"), move |round| {
                let (cache, order) = (self.cache.clone(), shuffled(!round, self.blocks).collect::<Vec<_>>());
                let one = move |n| fetch_stamped(cache.clone(), n, n);
                self.measured_with_calls(|| run_local(each(order.into_iter(), depth, one)))
            })
        };
        let load = |callers: usize| {
            counted(format!("load_into, {callers} callers"), move |round| {
                let order: Vec<u64> = shuffled(!round, self.blocks).collect();
                self.measured_with_calls(|| self.call(order, callers, 0, false, self.in_pool()))
            })
        };
        let store = counted("store_from, 1 callers".into(), move |_| {
            let first = next.fetch_add(self.blocks, Ordering::Relaxed);
            self.measured_with_calls(|| self.call(0..self.blocks, 1, first, true, self.in_pool()))
        });
        // The stores come last: they replace what the others read.
        let mut all = interleave(rounds, &mut [fetch(1), fetch(32), load(1), load(4)])?;
        all.extend(interleave(rounds, &mut [store])?);
        Ok(all)
    }

    /// Moves every block, and counts the system calls of that.
    fn measured_with_calls(&self, run: impl FnOnce() -> io::Result<()>) -> io::Result<(Sample, String)> {
        let counter = Counter::start()?;
        let sample = measured(self.bytes(), run)?;
        let calls = counter.stop()?;
        let a_block = |calls: u64| calls as f64 / self.blocks as f64;
        let named = calls.by_name.iter().filter(|(_, calls)| *calls > 0);
        let named: Vec<_> = named.map(|(name, calls)| format!("{name} {:.2}", a_block(*calls))).collect();
        Ok((sample, format!("{:.2} system calls a block: {}", a_block(calls.all), named.join(", "))))
    }
}

/// A contender of the cache's own, which prints the system calls of each round.
fn counted<'a>(name: String, mut run: impl FnMut(u64) -> io::Result<(Sample, String)> + 'a) -> Entrant<'a> {
    let name = format!("kvhoist {name}");
    let title = name.clone();
    Entrant::new(name, move |round| {
        let (sample, calls) = run(round)?;
        if round > 0 {
            println!("{title}, round {round}: {calls}");
        }
        Ok(sample)
    })
}
