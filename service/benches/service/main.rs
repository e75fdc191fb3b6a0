//! A node's service beside the cache in one's own process, in turns.
//!
//!     cargo bench --bench service -- [PART]... [--path DIR]... [--block-bytes N] [--rounds N] [--idle-s N]
//!         [--kind TEXT]
//!
//! Parts, all where none is named:
//!
//! - `pages`: 128 pages set and got, in-process and through the service;
//! - `host`: hits of the service's host memory beside copies by as many threads;
//! - `requests`: a look-up of 4,096 keys; the smallest request beside bare round trips of as many bytes over a socket;
//! - `same`: eight processes load the same pages; bytes read from the drive, and memory for them;
//! - `own`: eight processes load pages of their own, beside 32 threads that call `pread`;
//! - `hostile`: the p99 of a client's calls beside hostile ones, those whose names contain TEXT;
//! - `idle`: what 64 idle clients cost the service.
//!
//! DIR is a folder on a drive; `own` stripes over several. Without one a temporary directory of the target folder.

mod hostile;
mod look_ups;
mod node;
mod options;
mod pages;
mod pool;
mod sharing;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use kvhoist::{Cache, Config, DirectIo, DiskPath, block_on};
use kvhoist_service::{Client, ClientOptions};

use node::Service;
use options::{CLIENT, Options, Outcome, SERVE, options};
use pool::PAGES;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let ended = match arguments.first() {
        Some(word) if word == SERVE => node::serve(&arguments[1..]),
        Some(word) if word == CLIENT => sharing::client(&arguments[1..]),
        _ => options(&arguments).and_then(|options| run(&options)),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("service: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Outcome<()> {
    println!("{PAGES} pages of {} bytes, {} rounds\n", options.block_bytes, options.rounds);
    let folders: Vec<tempfile::TempDir> =
        options.paths.iter().map(tempfile::tempdir_in).collect::<std::io::Result<_>>()?;
    let folders: Vec<PathBuf> = folders.iter().map(|folder| folder.path().into()).collect();
    if ["pages", "host", "requests", "hostile", "idle"].iter().any(|part| options.wants(part)) {
        beside(options, &folders[0])?;
    }
    if options.wants("same") {
        sharing::same_pages(options, &folders[0])?;
    }
    if options.wants("own") {
        sharing::own_pages(options, &folders, 8)?;
        sharing::own_pages(options, &folders, 1)?;
    }
    Ok(())
}

/// What is measured with one service beside a cache of this process.
fn beside(options: &Options, folder: &Path) -> Outcome<()> {
    let (own, shared) = (folder.join("own"), folder.join("service"));
    [&own, &shared].into_iter().try_for_each(fs::create_dir)?;
    let blocks = (options.rounds as u32 + 1) * PAGES as u32;
    let (bytes, host) = (options.block_bytes as u64, (3 * PAGES * options.block_bytes) as u64 / 2);
    let capacity = kvhoist::DiskPath::file_bytes(u64::from(blocks), bytes);
    let small = 64u64 << 20;
    let service = Service::start(&[shared], capacity + 3 * small, host + 3 * small)?;
    let config = Config::default()
        .block_bytes(options.block_bytes)
        .host_blocks((host / bytes) as u32)
        .disks(vec![DiskPath::with_blocks(own, blocks)])
        .bypass_host(true)
        .direct_io(DirectIo::Prefer);
    let threads = config.worker_threads().max(1) as usize;
    let cache = block_on(Cache::open(config))?;
    let mut wanted = ClientOptions::new("pages", options.block_bytes);
    (wanted.capacity_bytes, wanted.host_bytes) = (capacity, host);
    let client = block_on(Client::connect(&service.socket, wanted))?;
    pages::pages(options, &cache, &client)?;
    if options.wants("host") {
        pages::host_hits(options, &client, threads)?;
    }
    drop(client);
    if options.wants("requests") || options.wants("idle") {
        look_ups::look_ups(&service.socket, small)?;
    }
    if options.wants("hostile") {
        hostile::hostile(&service.socket, small, &options.kind)?;
    }
    if options.wants("idle") {
        look_ups::idle(options, &service)?;
    }
    block_on(cache.close())?;
    Ok(())
}
