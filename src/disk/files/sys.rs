//! System calls that the standard library lacks.

use std::{fs::File, io, os::unix::fs::MetadataExt};

use rustix::{
    fs::{self, AtFlags, FallocateFlags, OFlags, StatxFlags},
    io::{Errno, retry_on_intr},
    process::{Resource, geteuid, getrlimit},
    rand::{GetRandomFlags, getrandom},
};

/// Turns direct I/O on or off. Also clears `O_NONBLOCK`, with which a ring fails requests that would have to wait.
///
/// # Errors
/// `EINVAL` if the file system has no direct I/O; `Unsupported` if it accepted the flag and dropped it.
pub(super) fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let wanted = if direct { OFlags::DIRECT } else { OFlags::empty() };
    let kept = fs::fcntl_getfl(file)? - (OFlags::DIRECT | OFlags::NONBLOCK);
    fs::fcntl_setfl(file, kept | wanted)?;
    if fs::fcntl_getfl(file)? & OFlags::DIRECT == wanted {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "the file system accepted O_DIRECT but did not set it"))
}

/// Memory alignment of direct I/O on the file, in bytes (`STATX_DIOALIGN`, Linux 6.1); `None` if the kernel does not
/// report it.
pub(super) fn direct_memory_align_bytes(file: &File) -> Option<usize> {
    let stat = fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    // Zero means that the file has no direct I/O.
    let said = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && stat.stx_dio_mem_align > 0;
    said.then_some(stat.stx_dio_mem_align as usize)
}

/// Reserves the blocks that a file lacks below `bytes`, and gives it this size if it is smaller.
///
/// Reserves the blocks first and sets the size in one step: a crash leaves an empty file or a complete one.
pub(super) fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    // Some file systems want room for all of it again, or have no fallocate.
    let found = file.metadata()?;
    if found.len() >= bytes && found.blocks() * 512 >= bytes {
        return Ok(());
    }
    match retry_on_intr(|| fs::fallocate(file, FallocateFlags::KEEP_SIZE, 0, bytes)) {
        // Without this mode (on NFS, for example) the plain call below does everything.
        Err(Errno::OPNOTSUPP) => {}
        other => other?,
    }
    if file.metadata()?.len() < bytes {
        file.set_len(bytes)?;
    }
    // Some file systems release the blocks past the old end when the size changes.
    Ok(retry_on_intr(|| fs::fallocate(file, FallocateFlags::empty(), 0, bytes))?)
}

/// The user who owns files that this process creates.
pub(super) fn effective_user() -> u32 {
    geteuid().as_raw()
}

/// Largest file that this process may write (RLIMIT_FSIZE), in bytes; `u64::MAX` without a limit.
pub(super) fn file_bytes_max() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

/// Bytes that the file of an unprivileged process may have on its file system: those that are available, and those that
/// it has already, of a call that was killed.
pub(super) fn available_bytes(file: &File) -> io::Result<u64> {
    let stat = fs::fstatvfs(file)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize).saturating_add(file.metadata()?.blocks() * 512))
}

/// Whether the block device of this number is read-only: it can be opened for writing, and then every write fails.
/// False where sysfs does not say.
pub(super) fn is_read_only(device: u64) -> bool {
    let said = format!("/sys/dev/block/{}:{}/ro", fs::major(device), fs::minor(device));
    std::fs::read_to_string(said).is_ok_and(|text| text.trim() == "1")
}

/// Name of the file's file system, for messages.
pub(super) fn file_system(file: &File) -> String {
    let Ok(stat) = fs::fstatfs(file) else { return "an unknown file system".into() };
    let magic = stat.f_type as u32;
    // linux/magic.h, and the sources of file systems that it does not list.
    let name = match magic {
        0xEF53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683E => "btrfs",
        0x2FC1_2FC1 => "zfs",
        0xF2F5_2010 => "f2fs",
        0xCA45_1A4E => "bcachefs",
        0x0102_1994 => "tmpfs",
        0x8584_58F6 => "ramfs",
        0x794C_7630 => "overlay",
        0x6969 => NFS,
        0xFF53_4D42 | 0xFE53_4D42 => "cifs",
        0x0102_1997 => "9p",
        0x00C3_6400 => "ceph",
        0x0BD0_0BD0 => "lustre",
        0x6573_5546 => "fuse",
        0x9660 => "iso9660",
        0x7371_7368 => "squashfs",
        0x4D44 => "vfat",
        0x2011_BAB0 => "exfat",
        0xF15F => "ecryptfs",
        _ => return format!("a file system of type {magic:#x}"),
    };
    name.into()
}

/// A network file system that accepts `O_DIRECT` although its disk is remote.
pub(super) const NFS: &str = "nfs";

/// Random bytes for a new store's id.
pub(super) fn random_uuid() -> io::Result<[u8; 16]> {
    let mut uuid = [0; 16];
    // Requests of up to 256 bytes are never short.
    getrandom(&mut uuid, GetRandomFlags::empty())?;
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_call_has_reserved_is_available_to_the_next() {
        const BYTES: u64 = 64 << 20;
        let file = tempfile::tempfile().expect("a file");
        let before = available_bytes(&file).expect("a file system");
        fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, BYTES).expect("reserved");
        assert_eq!(file.metadata().expect("a file").len(), 0);
        // Others use the disk meanwhile.
        assert!(available_bytes(&file).expect("a file system") > before - BYTES / 2);
    }
}
