//! System calls that the standard library lacks.

use std::{ffi::c_int, fs::File, io, mem::MaybeUninit, os::fd::AsRawFd};

/// Status flags of an open file (`F_GETFL`).
fn flags(file: &File) -> io::Result<c_int> {
    // SAFETY: F_GETFL takes no pointer; the borrowed file is open.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })
}

/// Turns direct I/O on or off. Also clears `O_NONBLOCK`, with which a ring fails requests that would have to wait.
///
/// # Errors
/// `EINVAL` if the file system has no direct I/O; `Unsupported` if it accepted the flag and dropped it.
pub(super) fn set_direct(file: &File, direct: bool) -> io::Result<()> {
    let wanted = if direct { libc::O_DIRECT } else { 0 };
    let kept = flags(file)? & !(libc::O_DIRECT | libc::O_NONBLOCK);
    // SAFETY: F_SETFL takes an integer; the borrowed file is open.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, kept | wanted) })?;
    if flags(file)? & libc::O_DIRECT == wanted {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::Unsupported, "the file system accepted O_DIRECT but did not set it"))
}

/// Memory alignment of direct I/O on the file, in bytes (`STATX_DIOALIGN`, Linux 6.1); `None` if the kernel does not
/// report it.
pub(super) fn direct_memory_align_bytes(file: &File) -> Option<usize> {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    let (fd, flags) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
    // SAFETY: the path is a C string, `stat` is writable, and the borrowed file is open.
    check(unsafe { libc::statx(fd, c"".as_ptr(), flags, libc::STATX_DIOALIGN, stat.as_mut_ptr()) }).ok()?;
    // SAFETY: zeros are a valid value of every field, and the call succeeded.
    let stat = unsafe { stat.assume_init() };
    // Zero means that the file has no direct I/O.
    let said = stat.stx_mask & libc::STATX_DIOALIGN != 0 && stat.stx_dio_mem_align > 0;
    said.then_some(stat.stx_dio_mem_align as usize)
}

/// Gives an empty file its size and reserves its blocks.
///
/// Reserves the blocks first and sets the size in one step: a crash leaves an empty file or a complete one.
pub(super) fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    match fallocate(file, libc::FALLOC_FL_KEEP_SIZE, bytes) {
        // Without this mode (on NFS, for example) the plain call below does everything.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        other => other?,
    }
    file.set_len(bytes)?;
    // Some file systems release the blocks past the old end when the size changes.
    fallocate(file, 0, bytes)
}

fn fallocate(file: &File, mode: c_int, bytes: u64) -> io::Result<()> {
    let len = libc::off64_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        // SAFETY: takes no pointers; the borrowed file is open.
        match check(unsafe { libc::fallocate64(file.as_raw_fd(), mode, 0, len) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(drop),
        }
    }
}

/// The user who owns files that this process creates.
pub(super) fn effective_user() -> u32 {
    // SAFETY: takes no arguments and cannot fail.
    unsafe { libc::geteuid() }
}

/// Largest file that this process may write (RLIMIT_FSIZE), in bytes; `u64::MAX` without a limit.
pub(super) fn file_bytes_max() -> io::Result<u64> {
    let mut limit = MaybeUninit::<libc::rlimit64>::uninit();
    // SAFETY: `limit` is writable.
    check(unsafe { libc::getrlimit64(libc::RLIMIT_FSIZE, limit.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so `limit` is initialized.
    Ok(unsafe { limit.assume_init() }.rlim_cur)
}

/// Bytes that an unprivileged process may still allocate on the file's file system.
pub(super) fn available_bytes(file: &File) -> io::Result<u64> {
    let mut stat = MaybeUninit::<libc::statvfs64>::uninit();
    // SAFETY: `stat` is writable; the borrowed file is open.
    check(unsafe { libc::fstatvfs64(file.as_raw_fd(), stat.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so `stat` is initialized.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Name of the file's file system, for messages.
pub(super) fn file_system(file: &File) -> String {
    let mut stat = MaybeUninit::<libc::statfs64>::uninit();
    // SAFETY: `stat` is writable; the borrowed file is open.
    if check(unsafe { libc::fstatfs64(file.as_raw_fd(), stat.as_mut_ptr()) }).is_err() {
        return "an unknown file system".into();
    }
    // SAFETY: the call succeeded, so `stat` is initialized.
    let magic = unsafe { stat.assume_init() }.f_type as u32;
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
    // SAFETY: the buffer is writable for its length.
    let got = unsafe { libc::getrandom(uuid.as_mut_ptr().cast(), uuid.len(), 0) };
    // Requests of up to 256 bytes are never short.
    if got == uuid.len() as isize { Ok(uuid) } else { Err(io::Error::last_os_error()) }
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
