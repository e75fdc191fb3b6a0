//! One process per contender, and the few words that parent and child exchange.
//!
//! The child says `ready LOST`; then it answers every `ROUND` with
//! `BYTES SECONDS CPU_SECONDS DISK MEMORY LOST`. It ends when its input does.

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    path::Path,
    process::{self, ChildStdin, ChildStdout, Command, Stdio},
    str::FromStr,
    sync::Arc,
};

use kvhoist_bench_kit::{
    measure::Sample,
    pattern,
    ring::{BareRing, Op, Setup},
    scratch::Scratch,
};
use tokio::runtime::Runtime;

use crate::{
    contender::{Contender, Outcome, Tally, drive},
    foyer_cache::{self, IoKind},
    kvhoist_cache,
    options::Options,
};

/// A contender in a process of its own, stopped while it is not its turn.
pub struct Child {
    name: String,
    process: process::Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
    outcome: Outcome,
}

impl Child {
    /// Starts `name`, waits until it has stored everything, and stops it.
    pub fn start(name: &str, dir: &Path, depth: usize, options: &Options) -> io::Result<Child> {
        let mut process = Command::new(env::current_exe()?)
            .args(options.child_args(name, dir, depth))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (to, from) = (process.stdin.take(), process.stdout.take().expect("piped above"));
        let mut child = Child {
            name: name.into(),
            process,
            to,
            from: BufReader::new(from),
            outcome: Outcome { filled: options.blocks, ..Outcome::default() },
        };
        let line = child.listen()?;
        let lost = line.strip_prefix("ready ").and_then(|lost| lost.trim().parse().ok());
        child.outcome.lost_in_fill = lost.ok_or_else(|| child.misunderstood(&line, "`ready LOST`"))?;
        child.signal(libc::SIGSTOP)?;
        Ok(child)
    }

    /// The contender's name.
    pub fn name(&self) -> String {
        self.name.clone()
    }

    /// Lets it run one round.
    pub fn round(&mut self, round: u64) -> io::Result<Sample> {
        self.signal(libc::SIGCONT)?;
        let to = self.to.as_mut().expect("open until `finish`");
        writeln!(to, "{round}")?;
        let line = self.listen()?;
        self.signal(libc::SIGSTOP)?;
        let (sample, tally) = decode(&line).ok_or_else(|| self.misunderstood(&line, "six numbers"))?;
        self.outcome.found += tally;
        Ok(sample)
    }

    /// What became of its blocks, over all rounds and the fill.
    pub fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Ends the process and says whether it ended well.
    pub fn finish(mut self) -> io::Result<()> {
        self.signal(libc::SIGCONT)?;
        self.to = None;
        let status = self.process.wait()?;
        if status.success() { Ok(()) } else { Err(io::Error::other(format!("{}: {status}", self.name))) }
    }

    fn listen(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        if line.is_empty() {
            return Err(io::Error::other(format!("{}: ended early; its own message is above", self.name)));
        }
        Ok(line)
    }

    fn misunderstood(&self, found: &str, expected: &str) -> io::Error {
        io::Error::other(format!("{}: found {found:?}, expected {expected}", self.name))
    }

    fn signal(&self, signal: libc::c_int) -> io::Result<()> {
        // SAFETY: a plain system call; the child has not been waited for, so its id is still its own.
        let result = unsafe { libc::kill(self.process.id() as libc::pid_t, signal) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Child {
    /// A comparison that failed leaves no stopped process behind: with its input closed it ends by itself.
    fn drop(&mut self) {
        if self.to.take().is_some() {
            let _ = self.signal(libc::SIGCONT);
            let _ = self.process.wait();
        }
    }
}

/// The child's side: prepares, then answers rounds until its input ends.
pub fn serve(name: &str, options: &Options) -> io::Result<()> {
    outlive_no_parent()?;
    if !options.plain_malloc {
        raise_mmap_threshold();
    }
    let (dir, depth) = (&options.dirs[0], options.depths[0]);
    if name.starts_with("bare") {
        return serve_bare(dir, depth, options);
    }
    if name == "kvhoist" {
        let dir = tempfile::tempdir_in(dir)?;
        let runtime = Runtime::new()?;
        let cache = runtime.block_on(kvhoist_cache::open(dir.path(), depth, options.block_bytes, options.blocks))?;
        return serve_contender(&runtime, &cache, depth, options);
    }
    let io = if name == "foyer-psync" { IoKind::Psync } else { IoKind::Uring };
    let dir = tempfile::tempdir_in(dir)?;
    let runtime = Runtime::new()?;
    let cache = runtime.block_on(foyer_cache::open(dir.path(), (io, depth), options.block_bytes, options.blocks))?;
    serve_contender(&runtime, &cache, depth, options)
}

fn serve_contender<C: Contender>(runtime: &Runtime, cache: &Arc<C>, depth: usize, options: &Options) -> io::Result<()> {
    let lost = runtime.block_on(cache.prepare(options.blocks)).map_err(|error| {
        io::Error::new(error.kind(), format!("{}: preparing {} blocks: {error}", cache.name(), options.blocks))
    })?;
    answer(lost, |round| {
        let keys = pattern::random(round, options.blocks, options.blocks).collect();
        runtime.block_on(drive(cache, depth, keys, options.block_bytes))
    })
}

fn serve_bare(dir: &Path, depth: usize, options: &Options) -> io::Result<()> {
    let block_bytes = options.block_bytes as u64;
    let scratch = Scratch::filled(dir, options.block_bytes, options.blocks)?;
    let mut ring = BareRing::open(options.block_bytes, depth, Setup::Coop)?;
    answer(0, |round| {
        let offsets = pattern::random(round, options.blocks, options.blocks).map(|key| key * block_bytes);
        let check = |offset, block: &mut [u8]| pattern::verify(block, offset / block_bytes);
        let sample = ring.run(scratch.file(), Op::Read, offsets, check)?;
        Ok((sample, Tally { disk: options.blocks, ..Tally::default() }))
    })
}

fn answer(lost: u64, mut round: impl FnMut(u64) -> io::Result<(Sample, Tally)>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "ready {lost}")?;
    out.flush()?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        let number =
            line.parse().map_err(|_| io::Error::other(format!("found {line:?}, expected a round's number")))?;
        let (sample, tally) = round(number)?;
        writeln!(out, "{}", encode(&sample, &tally))?;
        out.flush()?;
    }
    Ok(())
}

fn encode(sample: &Sample, tally: &Tally) -> String {
    let Sample { bytes, seconds, cpu_seconds } = sample;
    format!("{bytes} {seconds} {cpu_seconds} {} {} {}", tally.disk, tally.memory, tally.lost)
}

fn decode(line: &str) -> Option<(Sample, Tally)> {
    fn next<'a, T: FromStr>(words: &mut impl Iterator<Item = &'a str>) -> Option<T> {
        words.next()?.parse().ok()
    }
    let words = &mut line.split_whitespace();
    let sample = Sample { bytes: next(words)?, seconds: next(words)?, cpu_seconds: next(words)? };
    let tally = Tally { disk: next(words)?, memory: next(words)?, lost: next(words)? };
    Some((sample, tally)).filter(|_| words.next().is_none())
}

/// A parent that dies, however it does, leaves no stopped process behind: this one then continues, finds its input at
/// its end, and removes its files.
fn outlive_no_parent() -> io::Result<()> {
    // SAFETY: a plain system call on integers.
    let result = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Keeps buffers of up to 1 GiB on glibc's heap, and the heap from being trimmed.
fn raise_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: two integers, documented for any time; a refusal (0) leaves glibc as it was.
        if unsafe { libc::mallopt(parameter, 1 << 30) } == 0 {
            eprintln!("warning: glibc refused mallopt({parameter}); figures are those of --plain-malloc");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_survives_the_pipe() {
        let sample = Sample { bytes: 1 << 40, seconds: 0.125, cpu_seconds: 1e-9 };
        let tally = Tally { disk: 1, memory: 2, lost: 3 };
        assert_eq!(decode(&encode(&sample, &tally)), Some((sample, tally)));
        for line in ["", "1 2 3 4 5", "1 2 3 4 5 6 7", "a 2 3 4 5 6"] {
            assert_eq!(decode(line), None, "{line:?}");
        }
    }
}
