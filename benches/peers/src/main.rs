//! Reads from disk under kvhoist's peers, beside a bare ring loop.
//!
//!     cd benches/peers && cargo run --release -- [--dir DIR]... [--depth QD]... [--file-mib 512] [--rounds 3]
//!                                                [--fills 3] [--only NAME]... [--plain-malloc]
//!
//! Same file system, block size, number of blocks, keys and order for everyone. Every contender runs in a process of
//! its own, stopped (SIGSTOP) while it is not its turn: foyer's uring engine polls without a pause even when idle, and
//! would otherwise be charged to the contender being measured.
//!
//! Where a file happens to lie on a disk can matter more than who reads it (the same loop on two files of one virtual
//! disk differed by a factor of 1.6 for minutes), and interleaved rounds do not average that out. So every contender
//! fills a new store `--fills` times, in rotating order, and `bare-again` runs the same code as `bare`: what differs
//! between those two is noise.
//!
//! glibc's mmap threshold is raised for all, so that a 128 KiB buffer does not cost an mmap, page faults and a munmap
//! at every read: the fair setting for a cache that allocates as it reads. `--plain-malloc` leaves glibc as it is.

mod child;
mod contender;
mod foyer_cache;
mod kvhoist_cache;
mod options;

use std::{env, io, path::Path, process::ExitCode};

use child::Child;
use contender::Outcome;
use kvhoist_bench_kit::measure::{Entrant, Series, interleave, table};
use options::Options;

/// Everyone who takes part. The first is what ratios relate to, unless it is left out.
pub const NAMES: [&str; 5] = ["bare", "bare-again", "kvhoist", "foyer-psync", "foyer-uring"];

fn main() -> ExitCode {
    let options = match Options::parse(env::args().skip(1)) {
        Ok(options) => options,
        Err(what) => {
            eprintln!("{what}");
            return ExitCode::FAILURE;
        }
    };
    let result = match &options.contender {
        Some(name) => child::serve(name, &options),
        None => compare(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// One table per directory and queue depth.
fn compare(options: &Options) -> io::Result<()> {
    let chosen = |name: &&str| options.only.is_empty() || options.only.iter().any(|only| only == name);
    let names: Vec<&str> = NAMES.into_iter().filter(chosen).collect();
    for dir in &options.dirs {
        for &depth in &options.depths {
            let empty = |&name: &&str| (Series { name: name.into(), samples: Vec::new() }, Outcome::default());
            let (mut all, mut outcomes): (Vec<Series>, Vec<Outcome>) = names.iter().map(empty).unzip();
            let mut order: Vec<usize> = (0..names.len()).collect();
            for _ in 0..options.fills {
                let turn: Vec<&str> = order.iter().map(|&index| names[index]).collect();
                for (&index, (series, outcome)) in order.iter().zip(fill_and_read(&turn, dir, depth, options)?) {
                    all[index].samples.extend(series.samples);
                    outcomes[index] += outcome;
                }
                order.rotate_left(1);
            }
            let title = format!("{}: random reads, {} KiB, QD{depth}", dir.display(), options.block_bytes >> 10);
            print!("{}", table(&title, &all));
            for (name, outcome) in names.iter().zip(outcomes) {
                println!("  {name:12}  {outcome}");
            }
            println!();
        }
    }
    Ok(())
}

/// Everyone's rounds on newly filled stores, each with what became of its blocks.
fn fill_and_read(names: &[&str], dir: &Path, depth: usize, options: &Options) -> io::Result<Vec<(Series, Outcome)>> {
    let mut children = Vec::new();
    for name in names {
        // One at a time: a fill under load would not be the contender's own.
        children.push(Child::start(name, dir, depth, options)?);
    }
    let mut entrants = Vec::new();
    for child in &mut children {
        entrants.push(Entrant::new(child.name(), |round| child.round(round)));
    }
    let series = interleave(options.rounds, &mut entrants)?;
    drop(entrants);
    let mut results = Vec::new();
    for (child, series) in children.into_iter().zip(series) {
        results.push((series, child.outcome()));
        child.finish()?;
    }
    Ok(results)
}
