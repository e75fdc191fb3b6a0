//! The bare ring loop as a servant: one round a line of its input, for benches in other languages to interleave.
//!
//!     cargo bench -p kvhoist --bench ring -- --dir DIR --block-bytes N --blocks N [--depth 16] [--places N]
//!                                          [--plain]
//!     cargo bench -p kvhoist --bench ring -- --file FILE --offset N --block-bytes N --blocks N ..
//!
//! On a file of its own in DIR, or on the blocks from an offset of FILE on: where a file lies on its disk can decide
//! more than who reads it. What FILE holds there is lost by `write`.
//!
//! `--places`: the buffers that operations use in turn, by default one for each operation in flight. A few stay in the
//! processor's cache; blocks that a caller keeps have a place each. `--plain`: the buffers are not registered with the
//! ring.
//!
//! `read N` or `write N` does a round of N operations on blocks in random order and answers with its seconds and its
//! processor's seconds. The end of its input is its own.

use std::{
    env,
    fs::{File, OpenOptions},
    io::{self, BufRead, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    process::ExitCode,
};

use kvhoist_bench_kit::{
    pattern::shuffled,
    ring::{BareRing, Op, Setup},
    scratch::Scratch,
};

struct Options {
    dir: PathBuf,
    file: Option<PathBuf>,
    offset: u64,
    block_bytes: usize,
    blocks: u64,
    depth: usize,
    places: usize,
    plain: bool,
}

fn main() -> ExitCode {
    match parse(env::args().skip(1)).and_then(|options| serve(&options).map_err(|error| error.to_string())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("{what}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let (dir, file) = (PathBuf::new(), None);
    let mut options = Options { dir, file, offset: 0, block_bytes: 0, blocks: 0, depth: 16, places: 0, plain: false };
    while let Some(flag) = args.next() {
        let value =
            if flag == "--bench" || flag == "--plain" { String::new() } else { args.next().unwrap_or_default() };
        let number = || value.parse().map_err(|_| format!("{flag}: found {value:?}, expected a number"));
        match flag.as_str() {
            "--bench" => {}
            "--plain" => options.plain = true,
            "--dir" => options.dir = value.into(),
            "--file" => options.file = Some(value.into()),
            "--offset" => options.offset = number()?,
            "--block-bytes" => options.block_bytes = number()? as usize,
            "--blocks" => options.blocks = number()?,
            "--depth" => options.depth = number()? as usize,
            "--places" => options.places = number()? as usize,
            _ => {
                return Err(format!(
                    "found {flag}, expected --dir, --file, --offset, --block-bytes, --blocks, --depth, --places or \
                     --plain"
                ));
            }
        }
    }
    let no_place = options.dir.as_os_str().is_empty() && options.file.is_none();
    if no_place || options.block_bytes == 0 || options.blocks == 0 {
        return Err("expected --dir or --file, --block-bytes and --blocks".into());
    }
    options.places = options.places.max(options.depth);
    options.block_bytes = options.block_bytes.next_multiple_of(4096);
    Ok(options)
}

fn serve(options: &Options) -> io::Result<()> {
    let Options { block_bytes, blocks, depth, places, offset, .. } = *options;
    let scratch;
    let named: File;
    let file = match &options.file {
        Some(path) => {
            named = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
            &named
        }
        None => {
            scratch = Scratch::filled(&options.dir, block_bytes, blocks)?;
            scratch.file()
        }
    };
    let mut ring = match options.plain {
        true => BareRing::open_plain(block_bytes, depth, places, Setup::Coop)?,
        false => BareRing::open_over(block_bytes, depth, places, Setup::Coop)?,
    };
    let mut out = io::stdout().lock();
    writeln!(out, "ready")?;
    out.flush()?;
    for (round, line) in (0..).zip(io::stdin().lock().lines()) {
        let line = line?;
        let (op, count) = match line.split_once(' ') {
            Some(("read", count)) => (Op::Read, count),
            Some(("write", count)) => (Op::Write, count),
            _ => return Err(io::Error::other(format!("found {line:?}, expected `read N` or `write N`"))),
        };
        let count: u64 = count.parse().map_err(io::Error::other)?;
        let order: Vec<u64> = shuffled(round, blocks).map(|index| offset + index * block_bytes as u64).collect();
        let offsets = order.into_iter().cycle().take(count as usize);
        let sample = ring.run(file, op, offsets, |_, _| Ok(()))?;
        writeln!(out, "{} {}", sample.seconds, sample.cpu_seconds)?;
        out.flush()?;
    }
    Ok(())
}
