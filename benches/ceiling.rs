//! What this machine gives at best: the bare ring loop on a file in `target/` and on tmpfs.
//!
//!     cargo bench -p kvhoist --bench ceiling -- [--dir DIR]... [--file-mib 512] [--rounds 5] [--write]
//!     cargo bench -p kvhoist --bench ceiling -- --file FILE [--rounds 5]
//!
//! Every run reads blocks at random offsets and checks their stamps. `--file` reads a file that is there, from front
//! to back, in longer blocks, and checks nothing: what a loader of weights has of its drive. `coop` is the
//! baseline of each table because the cache's own ring has the same flags.

use std::{
    env,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    process::ExitCode,
};

use kvhoist_bench_kit::{
    measure::{Entrant, interleave, table},
    pattern::{random, stamp, verify},
    ring::{BareRing, Op, Setup},
    scratch::Scratch,
};

/// Block size and queue depth of each table.
const SHAPES: [(usize, usize); 3] = [(128 << 10, 8), (128 << 10, 32), (1 << 20, 8)];

/// The same for a file that is read from front to back.
const FILE_SHAPES: [(usize, usize); 3] = [(512 << 10, 32), (1 << 20, 16), (4 << 20, 32)];

struct Options {
    dirs: Vec<PathBuf>,
    file: Option<PathBuf>,
    file_bytes: u64,
    rounds: u64,
    op: Op,
}

fn main() -> ExitCode {
    let options = match parse(env::args().skip(1)) {
        Ok(options) => options,
        Err(what) => {
            eprintln!("{what}");
            return ExitCode::FAILURE;
        }
    };
    let mut failed = false;
    if let Some(path) = &options.file {
        for (block_bytes, depth) in FILE_SHAPES {
            match whole(path, block_bytes, depth, options.rounds) {
                Ok(text) => println!("{text}"),
                Err(error) => {
                    eprintln!("{}, {} KiB, QD{depth}: {error}", path.display(), block_bytes >> 10);
                    failed = true;
                }
            }
        }
    }
    for dir in &options.dirs {
        for (block_bytes, depth) in SHAPES {
            match shape(dir, block_bytes, depth, &options) {
                Ok(text) => println!("{text}"),
                Err(error) => {
                    eprintln!("{}, {} KiB, QD{depth}: {error}", dir.display(), block_bytes >> 10);
                    failed = true;
                }
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Measures both ring set-ups on a file that is there; what follows its last whole block is left out.
fn whole(path: &Path, block_bytes: usize, depth: usize, rounds: u64) -> io::Result<String> {
    let file: File = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let blocks = file.metadata()?.len() / block_bytes as u64;
    let mut entrants = Vec::new();
    for setup in Setup::ALL {
        let mut ring = BareRing::open(block_bytes, depth, setup)?;
        let file = &file;
        entrants.push(Entrant::new(format!("bare {}", setup.name()), move |_| {
            ring.run(file, Op::Read, (0..blocks).map(|block| block * block_bytes as u64), |_, _| Ok(()))
        }));
    }
    let series = interleave(rounds, &mut entrants)?;
    Ok(table(&format!("{}: from front to back, {} KiB, QD{depth}", path.display(), block_bytes >> 10), &series))
}

/// Measures both ring set-ups on one fresh file.
fn shape(dir: &Path, block_bytes: usize, depth: usize, options: &Options) -> io::Result<String> {
    let blocks = options.file_bytes / block_bytes as u64;
    let scratch = Scratch::filled(dir, block_bytes, blocks)?;
    let mut entrants = Vec::new();
    for setup in Setup::ALL {
        let mut ring = BareRing::open(block_bytes, depth, setup)?;
        let (file, op) = (scratch.file(), options.op);
        entrants.push(Entrant::new(format!("bare {}", setup.name()), move |round| {
            let offsets = random(round, blocks, blocks).map(|index| index * block_bytes as u64);
            ring.run(file, op, offsets, |offset, block| {
                let key = offset / block_bytes as u64;
                match op {
                    Op::Read => verify(block, key),
                    Op::Write => {
                        stamp(block, key);
                        Ok(())
                    }
                }
            })
        }));
    }
    let series = interleave(options.rounds, &mut entrants)?;
    let title = format!("{}: random {:?}, {} KiB, QD{depth}", dir.display(), options.op, block_bytes >> 10);
    Ok(table(&title, &series))
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options { dirs: Vec::new(), file: None, file_bytes: 512 << 20, rounds: 5, op: Op::Read };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg}: found no value, expected one after it"));
        match arg.as_str() {
            "--dir" => options.dirs.push(value()?.into()),
            "--file" => options.file = Some(value()?.into()),
            "--file-mib" => options.file_bytes = number(&arg, &value()?, 4..=1 << 20)? << 20,
            "--rounds" => options.rounds = number(&arg, &value()?, 1..=1000)?,
            "--write" => options.op = Op::Write,
            "--bench" => {} // Cargo adds it.
            other => {
                return Err(format!("found argument {other}, expected --dir, --file, --file-mib, --rounds or --write"));
            }
        }
    }
    if options.dirs.is_empty() && options.file.is_none() {
        options.dirs = vec![concat!(env!("CARGO_MANIFEST_DIR"), "/target").into(), "/dev/shm".into()];
    }
    Ok(options)
}

fn number(name: &str, text: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    let wrong = || format!("{name}: found {text}, expected a number from {} to {}", range.start(), range.end());
    text.parse().ok().filter(|number| range.contains(number)).ok_or_else(wrong)
}
