//! The time of the reactor's thread for each block: what bounds the number of blocks that one cache moves.

use std::{
    fs, io,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

use kvhoist_bench_kit::{
    drive::{measured, other},
    measure::{Entrant, Sample, Series, Spread, interleave},
    pattern::shuffled,
};

use super::Array;

/// The scheduler's figures of the reactor's thread, of which there is one.
struct Thread(PathBuf);

impl Thread {
    fn find() -> io::Result<Thread> {
        for task in fs::read_dir("/proc/self/task")? {
            let path = task?.path();
            if fs::read_to_string(path.join("comm"))?.trim() == "kvhoist-reactor" {
                return Ok(Thread(path.join("schedstat")));
            }
        }
        Err(other("found no thread of the name kvhoist-reactor"))
    }

    /// Time on a processor so far, kernel time included.
    fn nanoseconds(&self) -> io::Result<u64> {
        let figures = fs::read_to_string(&self.0)?;
        figures.split(' ').next().unwrap_or_default().parse().map_err(other)
    }
}

impl Array {
    /// Loads and stores, of which it prints the reactor's time for each block. Nothing runs beside the cache.
    pub fn time_reactor(&self, rounds: u64) -> io::Result<Vec<Series>> {
        let (thread, next) = (&Thread::find()?, &AtomicU64::new(self.blocks));
        let store = |callers: usize| {
            self.timed(thread, format!("store_from, {callers} callers"), move |_| {
                let first = next.fetch_add(self.blocks, Ordering::Relaxed);
                self.call(0..self.blocks, callers, first, true, self.in_pool())
            })
        };
        // The loads come last: their random order is that of later evictions.
        let mut all = interleave(rounds, &mut [store(1), store(4)])?;
        let last = next.load(Ordering::Relaxed) - self.blocks;
        let load = |callers: usize| {
            self.timed(thread, format!("load_into, {callers} callers"), move |round| {
                let order: Vec<u64> = shuffled(!round, self.blocks).collect();
                self.call(order, callers, last, false, self.in_pool())
            })
        };
        all.extend(interleave(rounds, &mut [load(1), load(4)])?);
        Ok(all)
    }

    /// A contender that moves every block, and prints the reactor's time when it is dropped.
    fn timed<'a>(
        &'a self,
        thread: &'a Thread,
        name: String,
        mut run: impl FnMut(u64) -> io::Result<()> + 'a,
    ) -> Entrant<'a> {
        let mut report = Report { name: format!("kvhoist {name}"), us: Vec::new(), pages: Vec::new() };
        Entrant::new(report.name.clone(), move |round| {
            let pages = || self.cache.stats().record_writes;
            let (began, pages_before) = (thread.nanoseconds()?, pages());
            let sample: Sample = measured(self.bytes(), || run(round))?;
            if round > 0 {
                report.us.push((thread.nanoseconds()? - began) as f64 / 1e3 / self.blocks as f64);
                report.pages.push((pages() - pages_before) as f64 / self.blocks as f64);
            }
            Ok(sample)
        })
    }
}

/// Figures of the rounds of a contender.
struct Report {
    name: String,
    us: Vec<f64>,
    pages: Vec<f64>,
}

impl Drop for Report {
    fn drop(&mut self) {
        if self.us.is_empty() {
            return;
        }
        let [us, pages] = [&self.us, &self.pages].map(|values| Spread::of(values.iter().copied()));
        println!(
            "{}: {:.2} us of the reactor a block ({:.2} to {:.2}), {:.2} record pages",
            self.name, us.median, us.min, us.max, pages.median
        );
    }
}
