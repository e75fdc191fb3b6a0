//! Where a replay keeps its blocks: its settings, and what it makes on disk for them.

use std::{
    cell::Cell,
    fs,
    io::{self, ErrorKind, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use kvhoist::{Capacity, Config, DeviceKind, DiskPath};

use super::{Args, args::Device};
use crate::{
    failure::Failure,
    scratch::Scratch,
    settings::{self, Settings},
    shown::shown,
};

/// Slots of a replay without a given size.
const DEVICE_BLOCKS: u32 = 256;
const HOST_BLOCKS: u32 = 2048;
const DISK_BLOCKS: u32 = 18_279;

/// Directories that a replay made. Dropped, the temporary one goes, and so do all where no store came to be in them.
#[derive(Default)]
pub struct Place {
    temporary: Option<Scratch>,
    made: Vec<PathBuf>,
    kept: Cell<bool>,
}

impl Place {
    /// A store is in them.
    pub fn keep(&self) {
        self.kept.set(true);
    }

    /// Fails unless the store is a temporary one: each of several traces begins with an empty store.
    fn check_is_temporary(&self, config: &Config, traces: usize) -> Result<(), Failure> {
        if self.temporary.is_some() || config.disk.paths.is_empty() {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "--trace: found {traces} files and a path for one store, expected one file, or no path: each trace begins \
             with an empty store"
        )))
    }

    /// Makes directories of the paths that do not exist; what they lie in must.
    fn make(&mut self, paths: &[PathBuf]) -> Result<(), Failure> {
        for path in paths {
            match fs::DirBuilder::new().mode(0o700).create(path) {
                Ok(()) => self.made.push(path.clone()),
                // The engine says what is wrong with all others, and with what is there.
                Err(error) if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::NotFound) => {}
                Err(error) => return Err(Failure::usage(format!("--path {}: {error}", shown(path)))),
            }
        }
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.kept.get() {
            // What is not empty is not ours to remove.
            self.made.iter().for_each(|path| drop(fs::remove_dir(path)));
        }
    }
}

/// The cache's settings, and the directories that were made for it.
pub fn settings(args: &Args) -> Result<(Config, Place), Failure> {
    let (mut config, mut paths) = base(args)?;
    let mut place = Place::default();
    sizes(args, &mut config);
    if !args.path.is_empty() {
        paths.clone_from(&args.path);
    }
    if paths.is_empty() {
        let made = Scratch::new("kvhoist-replay-", None).map_err(|error| {
            Failure::usage(format!("no temporary directory: {error}; name one with --path or TMPDIR"))
        })?;
        paths.push(made.path().to_owned());
        place.temporary = Some(made);
    }
    if let Some(disks) = disks(args, &config, &paths)? {
        config.disk.paths = disks;
    }
    config.remote.url = None;
    config.namespace = "replay".into();
    // The file's, where no flag says another.
    let of_file = match config.device.kind {
        DeviceKind::Cuda => Device::Cuda,
        DeviceKind::Simulated => Device::Simulated,
        _ => Device::Auto,
    };
    config.device.kind = args.device.unwrap_or(of_file).into();
    config.eviction_policy = args.policy.unwrap_or(config.eviction_policy);
    config.disk.write_policy = args.write_policy.unwrap_or(config.disk.write_policy);
    if let Some(bytes) = args.write_budget {
        config.disk.write_budget = Some(bytes as u64);
        // The file may say it in the other way.
        (config.disk.drive_writes_per_day, config.disk.drive_bytes) = (None, None);
    }
    config.disk.storage = args.storage.unwrap_or(config.disk.storage);
    config.disk.direct_io = args.direct_io.unwrap_or(config.disk.direct_io);
    config.validate().map_err(|error| args.failure(error))?;
    place.make(&config.disk.paths.iter().map(|disk| disk.path.clone()).collect::<Vec<_>>())?;
    Ok((config, place))
}

/// Checks the settings before a trace is read, which may take minutes. Returns the bytes of a block.
pub fn check(args: &Args) -> Result<usize, Failure> {
    let (config, place) = settings(args)?;
    if args.trace.len() > 1 {
        place.check_is_temporary(&config, args.trace.len())?;
    }
    if base(args)?.0.remote.url.is_some() {
        let text = "the remote store of --config is left out: a replay's blocks are nobody else's";
        drop(writeln!(io::stderr(), "kvhoist: {text}"));
    }
    Ok(config.block_bytes)
}

/// What the file of settings says, or the settings of a replay without one.
fn base(args: &Args) -> Result<(Config, Vec<PathBuf>), Failure> {
    let Some(file) = &args.config else {
        let (host_blocks, device_blocks) = (HOST_BLOCKS, DEVICE_BLOCKS);
        let block_bytes = args.block_bytes.unwrap_or(64 << 10);
        return Ok((
            Config::default().block_bytes(block_bytes).host_blocks(host_blocks).device_blocks(device_blocks),
            Vec::new(),
        ));
    };
    let settings = Settings::read(file)?;
    let block_bytes = args.block_bytes.unwrap_or(settings.config.block_bytes);
    let wrong = |failure: Failure| Failure::usage(format!("--config {}: {failure}", shown(file)));
    let config = settings.config(block_bytes).map_err(wrong)?;
    let paths = config.disk.paths.iter().map(|disk| disk.path.clone()).collect();
    Ok((config, paths))
}

/// What the flags say of memory.
fn sizes(args: &Args, config: &mut Config) {
    let capacity = |bytes: Option<usize>, blocks: Option<u32>, default| {
        let bytes = bytes.map(|bytes| Capacity::Bytes(bytes as u64));
        bytes.or(blocks.map(Capacity::Blocks)).unwrap_or(default)
    };
    config.host.capacity = capacity(args.host_bytes, args.host_blocks, config.host.capacity);
    config.device.capacity = capacity(args.device_bytes, args.device_blocks, config.device.capacity);
}

/// What the flags say of the disk tier; `None` where the file's settings stand.
fn disks(args: &Args, config: &Config, paths: &[PathBuf]) -> Result<Option<Vec<DiskPath>>, Failure> {
    if let Some(capacity) = args.capacity {
        return settings::disks("--capacity", paths, capacity as u64, config.block_bytes).map(Some);
    }
    let of_file = (config.disk_slots() > 0).then(|| u32::try_from(config.disk_slots()).unwrap_or(u32::MAX));
    if args.disk_blocks.is_none() && args.path.is_empty() && of_file.is_some() {
        return Ok(None);
    }
    let blocks = args.disk_blocks.or(of_file).unwrap_or(DISK_BLOCKS);
    if blocks == 0 {
        if args.path.is_empty() {
            return Ok(Some(Vec::new()));
        }
        return Err(Failure::usage("--disk-blocks: found 0 and --path, expected one slot a path at least"));
    }
    striped(paths, blocks).map(Some)
}

fn striped(paths: &[impl AsRef<Path>], blocks: u32) -> Result<Vec<DiskPath>, Failure> {
    let members = u32::try_from(paths.len()).unwrap_or(u32::MAX);
    if members > blocks {
        return Err(Failure::usage(format!(
            "--disk-blocks: found {blocks} for {members} paths, expected one slot a path at least"
        )));
    }
    let disks = paths.iter().zip(0..).map(|(path, member)| {
        // The first ones take what does not divide.
        let blocks = blocks / members + u32::from(member < blocks % members);
        DiskPath::with_blocks(path.as_ref(), blocks)
    });
    Ok(disks.collect())
}
