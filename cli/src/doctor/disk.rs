//! A path: what it lies on, and what a store there reaches.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Instant,
};

use kvhoist::{BlockKey, Cache, Config, DirectIo, DiskPath, Error, StorageKind, block_on};

use super::{Finding, Want};
use crate::{
    scratch::Scratch,
    shown::{reason, shown},
};

/// Bytes of a block of the store that is measured, and how many there are.
const BLOCK_BYTES: usize = 1 << 20;
const BLOCKS: u32 = 64;

/// Blocks in flight.
const DEPTH: usize = 16;

pub fn findings(path: &Path) -> Vec<Finding> {
    let mut findings = vec![Finding::note("measured at", shown(path))];
    let trouble = measure(path, &mut findings).err();
    findings.extend(trouble);
    findings
}

/// Adds what is found until something is in the way, which is returned.
fn measure(path: &Path, findings: &mut Vec<Finding>) -> Result<(), Finding> {
    let trouble = |found, fix: &str| Finding { is_trouble: true, ..Finding::note("a store there", found).fix(fix) };
    let failed = |error: Error| trouble(error.to_string(), "look at dmesg, or name another directory");
    let directory = scratch(Some(path)).map_err(|error| {
        let fix = match error.kind() {
            ErrorKind::PermissionDenied => {
                "run the doctor as the user of the caches, let this user write there (chown), or"
            }
            _ => "look at dmesg for the drive, at `df -i` for room, or",
        };
        let found = format!("no directory can be made there ({})", reason(&error));
        trouble(found, &format!("{fix} name another directory"))
    })?;
    let config = |storage, direct_io| {
        Config::default()
            .block_bytes(BLOCK_BYTES)
            .host_blocks(2 * DEPTH as u32)
            .disks(vec![DiskPath::with_blocks(directory.path(), BLOCKS)])
            .storage(storage)
            .direct_io(direct_io)
    };
    // Each by the engine itself: what it refuses is what a cache will be refused. First whether a store can be there at
    // all, so that no feature is blamed for a drive without room.
    match block_on(Cache::open(config(StorageKind::Auto, DirectIo::Prefer))) {
        Ok(cache) => block_on(cache.close()).map_err(failed)?,
        Err(error) => {
            let refused = error.with_settings_named(&[("disks.blocks", "capacity")]).to_string();
            return Err(trouble(refused, "free 128 MiB there, or name another directory"));
        }
    }
    let ring = block_on(Cache::open(config(StorageKind::Uring, DirectIo::Prefer)));
    findings.push(match &ring {
        Ok(_) => Finding::note("io_uring", "may be used").decides(Want::Ring, true),
        Err(error) => Finding::note("io_uring", error.to_string())
            .decides(Want::Ring, false)
            .fix("allow io_uring_setup in the container's seccomp profile, and set kernel.io_uring_disabled = 0"),
    });
    match ring {
        Ok(cache) => {
            findings.push(locked_memory(cache.stats().registered));
            block_on(cache.close()).map_err(failed)?;
        }
        Err(_) => {
            findings.push(Finding::note("registered", "nothing: there is no ring").decides(Want::LockedMemory, false));
        }
    }
    let direct = block_on(Cache::open(config(StorageKind::Auto, DirectIo::Require)));
    findings.push(match &direct {
        Ok(_) => Finding::note("direct I/O", "the path takes O_DIRECT").decides(Want::DirectIo, true),
        Err(error) => Finding::note("direct I/O", error.to_string())
            .decides(Want::DirectIo, false)
            .fix("a directory on ext4 or xfs on a local drive, or direct_io = prefer for the page cache"),
    });
    if let Ok(cache) = direct {
        let (write, read) = block_on(throughput(&cache)).map_err(failed)?;
        let storage = cache.stats().storage;
        let found =
            format!("{write:.0} MiB/s written, {read:.0} MiB/s read (1 MiB blocks, {DEPTH} in flight, {storage})");
        findings.push(Finding::note("a store there", found));
        block_on(cache.close()).map_err(failed)?;
    }
    Ok(())
}

/// A directory for stores that are tried.
pub fn scratch(path: Option<&Path>) -> io::Result<Scratch> {
    Scratch::new("kvhoist-doctor-", path)
}

fn locked_memory(registered: bool) -> Finding {
    let found =
        if registered { "host memory, with the ring" } else { "nothing: the limit on locked memory is too low" };
    let finding = Finding::note("registered", found).decides(Want::LockedMemory, registered);
    if registered { finding } else { finding.fix(kvhoist_doctor::LOCKED_MEMORY_FIX) }
}

/// The drive under a path: its folder in /sys.
fn drive(path: &Path) -> Option<PathBuf> {
    let device = fs::metadata(path).ok()?.dev();
    // As the C library takes a device number apart.
    let (major, minor) = ((device >> 8) & 0xfff, (device & 0xff) | ((device >> 12) & 0xfff00));
    let link = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    // A partition lies in the folder of its drive.
    if link.join("queue").exists() { Some(link) } else { link.parent().map(Path::to_owned) }
}

/// Its name: `nvme0n1`, say.
pub fn drive_name(path: &Path) -> Option<String> {
    Some(drive(path)?.file_name()?.to_string_lossy().into_owned())
}

/// MiB/s of stores that are written through, and of fetches from disk.
async fn throughput(cache: &Cache) -> Result<(f64, f64), Error> {
    let key = |n: u32| BlockKey::new(std::array::from_fn(|i| (n >> (8 * (i % 4))) as u8 ^ i as u8));
    let mib = f64::from(BLOCKS) * BLOCK_BYTES as f64 / f64::from(1 << 20);
    let started = Instant::now();
    in_flight(|n| async move { cache.store(&key(n), None, &vec![n as u8; BLOCK_BYTES]).await }).await?;
    cache.sync().await?;
    let write = mib / started.elapsed().as_secs_f64();
    // Whatever is still in host memory is found there: at most half of them.
    let started = Instant::now();
    in_flight(|n| async move { cache.fetch(&key(n)).await.map(drop) }).await?;
    Ok((write, mib / started.elapsed().as_secs_f64()))
}

async fn in_flight<F: Future<Output = Result<(), Error>>>(task: impl Fn(u32) -> F) -> Result<(), Error> {
    for first in (0..BLOCKS).step_by(DEPTH) {
        let mut tasks: Vec<_> = (first..(first + DEPTH as u32).min(BLOCKS)).map(|n| Box::pin(task(n))).collect();
        std::future::poll_fn(|context| {
            let mut failed = None;
            tasks.retain_mut(|task| match task.as_mut().poll(context) {
                std::task::Poll::Pending => true,
                std::task::Poll::Ready(Ok(())) => false,
                std::task::Poll::Ready(Err(error)) => {
                    failed = Some(error);
                    false
                }
            });
            match failed {
                Some(error) => std::task::Poll::Ready(Err(error)),
                None if tasks.is_empty() => std::task::Poll::Ready(Ok(())),
                None => std::task::Poll::Pending,
            }
        })
        .await?;
    }
    Ok(())
}
