//! The system calls that the standard library does not have.

use std::{ffi::c_int, fs::File, io, mem::MaybeUninit, os::fd::AsRawFd};

/// Status flags of an open file (`F_GETFL`).
fn flags(file: &File) -> io::Result<c_int> {
    // SAFETY: F_GETFL takes no pointer; the file is open while it is borrowed.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })
}

/// Turns direct I/O on or off, and clears `O_NONBLOCK`, with which a ring would fail requests that
/// have to wait.
///
/// # Errors
/// `EINVAL` where the file system has no direct I/O; `Unsupported` where it took the flag and dropped it.
pub(super) fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let wanted = if direct { libc::O_DIRECT } else { 0 };
    let kept = flags(file)? & !(libc::O_DIRECT | libc::O_NONBLOCK);
    // SAFETY: F_SETFL takes an integer; the file is open while it is borrowed.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, kept | wanted) })?;
    if flags(file)? & libc::O_DIRECT == wanted {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "the O_DIRECT flag did not stick"))
}

/// What addresses must be multiples of for direct I/O on the file, bytes, as the kernel says (`STATX_DIOALIGN`, Linux
/// 6.1); `None` where it does not.
pub(super) fn direct_memory_align_bytes(file: &File) -> Option<usize> {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    let (fd, flags) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
    // SAFETY: the path is a C string, `stat` a valid place for the result, and the file open while it is borrowed.
    check(unsafe { libc::statx(fd, c"".as_ptr(), flags, libc::STATX_DIOALIGN, stat.as_mut_ptr()) }).ok()?;
    // SAFETY: zeros are a valid value of every field, and the call succeeded.
    let stat = unsafe { stat.assume_init() };
    // Zero where the file has no direct I/O.
    let said = stat.stx_mask & libc::STATX_DIOALIGN != 0 && stat.stx_dio_mem_align > 0;
    said.then_some(stat.stx_dio_mem_align as usize)
}

/// Gives an empty file its size and its blocks.
///
/// The blocks come first and the size at one stroke: a crash leaves an empty file or a whole one.
pub(super) fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    match fallocate(file, libc::FALLOC_FL_KEEP_SIZE, bytes) {
        // NFS, for one, has no such mode; the plain call below then does it all.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        other => other?,
    }
    file.set_len(bytes)?;
    // For file systems that gave up the blocks past the end with the change of size.
    fallocate(file, 0, bytes)
}

fn fallocate(file: &File, mode: c_int, bytes: u64) -> io::Result<()> {
    let len = libc::off64_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        // SAFETY: no pointers; the file is open while it is borrowed.
        match check(unsafe { libc::fallocate64(file.as_raw_fd(), mode, 0, len) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(drop),
        }
    }
}

/// The user as whom this process creates files.
pub(super) fn effective_user() -> u32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::geteuid() }
}

/// Bytes that a file may have where this process writes it: `u64::MAX` where there is no limit.
pub(super) fn file_bytes_max() -> io::Result<u64> {
    let mut limit = MaybeUninit::<libc::rlimit64>::uninit();
    // SAFETY: `limit` is a valid place for the result.
    check(unsafe { libc::getrlimit64(libc::RLIMIT_FSIZE, limit.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, and so filled all of `limit`.
    Ok(unsafe { limit.assume_init() }.rlim_cur)
}

/// Bytes that an unprivileged process may still allocate on the file's file system.
pub(super) fn available_bytes(file: &File) -> io::Result<u64> {
    let mut stat = MaybeUninit::<libc::statvfs64>::uninit();
    // SAFETY: `stat` is a valid place for the result; the file is open while it is borrowed.
    check(unsafe { libc::fstatvfs64(file.as_raw_fd(), stat.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, and so filled all of `stat`.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// The name of the file's file system, for messages.
pub(super) fn file_system(file: &File) -> String {
    let mut stat = MaybeUninit::<libc::statfs64>::uninit();
    // SAFETY: `stat` is a valid place for the result; the file is open while it is borrowed.
    if check(unsafe { libc::fstatfs64(file.as_raw_fd(), stat.as_mut_ptr()) }).is_err() {
        return "an unknown file system".into();
    }
    // SAFETY: the call succeeded, and so filled all of `stat`.
    let magic = unsafe { stat.assume_init() }.f_type as u32;
    // linux/magic.h, and the sources of the file systems that it does not list.
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

/// The name of the network file system that takes `O_DIRECT` and still is none of a local disk.
pub(super) const NFS: &str = "nfs";

/// Random bytes for a new store's id.
pub(super) fn random_uuid() -> io::Result<[u8; 16]> {
    let mut uuid = [0; 16];
    // SAFETY: the buffer is writable for its length.
    let got = unsafe { libc::getrandom(uuid.as_mut_ptr().cast(), uuid.len(), 0) };
    // Requests of up to 256 bytes are answered whole.
    if got == uuid.len() as isize { Ok(uuid) } else { Err(io::Error::last_os_error()) }
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
