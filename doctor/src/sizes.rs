//! What a machine has: the most that caches and services may be given.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use kvhoist::internals::machine::Kernel;

use crate::{limits, places};

/// Bytes of disk for stores of equal size on all of these paths, as if their file systems were empty. `None` if one
/// cannot be looked at, or there are none.
pub fn disk_bytes(paths: &[PathBuf]) -> Option<u64> {
    let mut systems: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for path in paths {
        let (_, size) = places::free_bytes(path)?;
        systems.entry(fs::metadata(path).ok()?.dev()).or_insert((size, 0)).1 += 1;
    }
    let share = systems.values().map(|(size, here)| size / here).min()?;
    Some(share.saturating_mul(paths.len() as u64))
}

/// Bytes of memory that this process can ever have: those of the machine, or the limit of its cgroup.
pub fn memory_bytes() -> Option<u64> {
    limits::memory_bytes(&Kernel { root: Path::new("/") })
}

/// Whether a path lies on the root file system.
pub fn is_on_root(path: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
    device(path).is_some_and(|found| Some(found) == device(Path::new("/")))
}
