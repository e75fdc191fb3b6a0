//! What drives the cache in a bench: keys, stamped blocks, so many calls at a time.

use std::{cell::RefCell, env, io, path::PathBuf, process::ExitCode, rc::Rc};

use kvhoist::{BlockKey, Cache};

use crate::{
    measure::{Sample, Stopwatch},
    pattern::{Rng, stamp, verify},
};

/// The key of block `n`.
pub fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    let mut rng = Rng::new(n);
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
    BlockKey::new(bytes)
}

/// Any error as one of I/O.
pub fn other(error: impl ToString) -> io::Error {
    io::Error::other(error.to_string())
}

/// Runs a future, and what it spawns locally, on this thread.
pub fn run_local<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime without I/O");
    tokio::task::LocalSet::new().block_on(&runtime, future)
}

/// Times what moves `bytes`.
pub fn measured(bytes: u64, run: impl FnOnce() -> io::Result<()>) -> io::Result<Sample> {
    let watch = Stopwatch::start();
    run()?;
    Ok(watch.stop(bytes))
}

/// Runs `task` with every number of `order`, `depth` at a time. Call inside [`run_local`].
pub async fn each<F: Future<Output = io::Result<()>> + 'static>(
    order: impl Iterator<Item = u64> + 'static,
    depth: usize,
    task: impl Fn(u64) -> F + 'static,
) -> io::Result<()> {
    let (order, task) = (Rc::new(RefCell::new(order)), Rc::new(task));
    let one = || {
        let (order, task) = (Rc::clone(&order), Rc::clone(&task));
        tokio::task::spawn_local(async move {
            loop {
                let next = order.borrow_mut().next();
                let Some(n) = next else { return Ok::<(), io::Error>(()) };
                task(n).await?;
            }
        })
    };
    let tasks: Vec<_> = (0..depth).map(|_| one()).collect();
    for task in tasks {
        task.await.map_err(other)??;
    }
    Ok(())
}

/// Stores block `n`, stamped.
pub async fn store_stamped(cache: Cache, n: u64) -> io::Result<()> {
    let mut block = cache.reserve_for_overwrite().await.map_err(other)?;
    stamp(&mut block, n);
    block.commit(&key(n), None).await.map_err(other)
}

/// Fetches block `n` to host memory and checks its stamps: those of block `stamped`.
pub async fn fetch_stamped(cache: Cache, n: u64, stamped: u64) -> io::Result<()> {
    let lease = cache.fetch(&key(n)).await.map_err(other)?;
    verify(&lease.ok_or_else(|| missing(n))?, stamped)
}

/// Fetches block `n` to the device.
pub async fn to_device(cache: Cache, n: u64) -> io::Result<()> {
    let lease = cache.fetch_to_device(&key(n)).await.map_err(other)?;
    lease.map(drop).ok_or_else(|| missing(n))
}

/// Fetches block `n` to the device, reads it back from there and checks its stamps.
pub async fn check_on_device(cache: Cache, n: u64) -> io::Result<()> {
    let lease = cache.fetch_to_device(&key(n)).await.map_err(other)?;
    let lease = lease.ok_or_else(|| missing(n))?;
    verify(&cache.read_device(&lease, Vec::new()).await.map_err(other)?, n)
}

fn missing(n: u64) -> io::Error {
    other(format!("block {n} is missing"))
}

/// Options of the library's benches.
pub struct Options {
    /// Which of them, in order; all where none was named.
    pub names: Vec<String>,
    /// Measured rounds.
    pub rounds: u64,
    /// `Config::spin_us` of every cache.
    pub spin_us: u32,
    /// Where stores and files are put.
    pub dir: PathBuf,
}

impl Options {
    /// Reads the process's arguments: some of `names`, `--rounds N`, `--spin-us N`, `--dir DIR`.
    ///
    /// # Errors
    /// What was found instead.
    pub fn parse(names: &[&str], dir: impl Into<PathBuf>) -> Result<Options, String> {
        Self::of(env::args().skip(1), names, dir)
    }

    /// As [`parse`](Self::parse), of these arguments.
    ///
    /// # Errors
    /// What was found instead.
    pub fn of(args: impl Iterator<Item = String>, names: &[&str], dir: impl Into<PathBuf>) -> Result<Options, String> {
        let mut options = Options { names: Vec::new(), rounds: 7, spin_us: 0, dir: dir.into() };
        let mut args = args.filter(|arg| arg != "--bench"); // Cargo adds it.
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg}: found no value, expected one after it"));
            match arg.as_str() {
                "--rounds" => options.rounds = number(&arg, &value()?, 1)?,
                "--spin-us" => options.spin_us = number(&arg, &value()?, 0)? as u32,
                "--dir" => options.dir = value()?.into(),
                name if names.contains(&name) => options.names.push(arg),
                _ => return Err(format!("found {arg}, expected {names:?}, --rounds N, --spin-us N or --dir DIR")),
            }
        }
        if options.names.is_empty() {
            options.names = names.iter().copied().map(String::from).collect();
        }
        Ok(options)
    }
}

/// The `main` of a bench: runs those of `names` that the arguments want, in order, up to the first that fails.
pub fn main(names: &[&str], dir: impl Into<PathBuf>, run: impl Fn(&str, &Options) -> io::Result<()>) -> ExitCode {
    let ended = Options::parse(names, dir).and_then(|options| {
        let run = |name: &String| run(name, &options).map_err(|error| format!("{name}: {error}"));
        options.names.iter().try_for_each(run)
    });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("{what}");
            ExitCode::FAILURE
        }
    }
}

fn number(name: &str, text: &str, least: u64) -> Result<u64, String> {
    let wrong = || format!("{name}: found {text}, expected a number from {least} to 1000000");
    text.parse().ok().filter(|number| (least..=1_000_000).contains(number)).ok_or_else(wrong)
}
