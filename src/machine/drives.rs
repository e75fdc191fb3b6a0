//! The drives under paths.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use super::kernel::Kernel;

/// Drives that are stacked upon each other are followed this far: a volume of an array of partitions, for example.
pub(super) const STACK_MAX: usize = 4;

/// The number of drives under paths, where each drive of an array counts. `None` if the kernel does not tell: the file
/// system of a path lies in memory or in the network, or manages drives of its own.
pub(crate) fn drives(paths: &[PathBuf]) -> Option<u32> {
    drives_at(paths, &Kernel { root: Path::new("/") })
}

pub(super) fn drives_at(paths: &[PathBuf], kernel: &Kernel<'_>) -> Option<u32> {
    let mut found = BTreeSet::new();
    for path in paths {
        enter(drive_folder(&metadata(path)?, kernel)?, STACK_MAX, &mut found)?;
    }
    u32::try_from(found.len()).ok()
}

/// The metadata of a file or device, or of the folder in which a file is to be created.
pub(super) fn metadata(path: &Path) -> Option<fs::Metadata> {
    fs::metadata(path).or_else(|_| fs::metadata(path.parent().unwrap_or(path))).ok()
}

/// Enters the drives that a drive is made of, or itself if there are none.
fn enter(folder: PathBuf, stack_max: usize, found: &mut BTreeSet<PathBuf>) -> Option<()> {
    let parts = parts(&folder);
    if parts.is_empty() {
        found.insert(folder);
    }
    for part in parts {
        enter(part?, stack_max.checked_sub(1)?, found)?;
    }
    Some(())
}

/// The directories in /sys of the drives that a drive is made of, each `None` if it cannot be found.
pub(super) fn parts(folder: &Path) -> Vec<Option<PathBuf>> {
    let entries = fs::read_dir(folder.join("slaves")).into_iter().flatten().flatten();
    entries.map(|part| Some(whole(part.path().canonicalize().ok()?))).collect()
}

/// The directory in /sys of the drive under a path.
pub fn drive_folder(metadata: &fs::Metadata, kernel: &Kernel<'_>) -> Option<PathBuf> {
    let number = if metadata.file_type().is_block_device() { metadata.rdev() } else { metadata.dev() };
    let (major, minor) = (libc::major(number), libc::minor(number));
    fs::canonicalize(kernel.root.join(format!("sys/dev/block/{major}:{minor}"))).ok().map(whole)
}

/// The directory in /sys of the drive that a partition lies on, or of a drive itself.
fn whole(folder: PathBuf) -> PathBuf {
    match folder.parent() {
        Some(drive) if !folder.join("queue").exists() => drive.to_owned(),
        _ => folder,
    }
}
