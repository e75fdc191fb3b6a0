//! Device-mapper devices, by its control device: the guest has no tools.

use std::{
    fs::{File, OpenOptions},
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
};

/// Bytes of `struct dm_ioctl` (linux/dm-ioctl.h, version 4).
const HEAD_BYTES: usize = 312;
/// Bytes of the whole argument.
const ARGUMENT_BYTES: usize = 4096;
const DEV_CREATE: libc::Ioctl = 3;
const DEV_REMOVE: libc::Ioctl = 4;
const DEV_SUSPEND: libc::Ioctl = 6;
const TABLE_LOAD: libc::Ioctl = 9;
const TARGET_MSG: libc::Ioctl = 14;
const SUSPEND_FLAG: u32 = 1 << 1;
const SKIP_LOCKFS_FLAG: u32 = 1 << 10;
const NOFLUSH_FLAG: u32 = 1 << 11;
const SECTOR_BYTES: u64 = 512;

/// A device of one target.
pub struct Mapped {
    name: &'static str,
    sectors: u64,
    control: File,
    pub path: PathBuf,
}

impl Mapped {
    /// Makes the device `name` of `bytes` bytes. `target` is its kind and parameters.
    pub fn new(name: &'static str, bytes: u64, target: &str) -> Self {
        let control = OpenOptions::new().read(true).write(true).open("/dev/mapper/control").expect("device mapper");
        let mut mapped = Mapped { name, sectors: bytes / SECTOR_BYTES, control, path: PathBuf::new() };
        let answer = mapped.ask(DEV_CREATE, 0, &[]);
        let device = u64::from_le_bytes(answer[40..48].try_into().expect("eight bytes"));
        mapped.load(target);
        mapped.resume();
        // A device number as the kernel passes it out: the minor's low byte, the major, the minor's rest.
        let minor = (device & 0xff) | ((device >> 12) & 0xfff00);
        mapped.path = PathBuf::from(format!("/dev/dm-{minor}"));
        assert!(mapped.path.exists(), "{} for {name}", mapped.path.display());
        mapped
    }

    /// `bytes` bytes of `device` from `offset` on.
    pub fn linear(name: &'static str, device: &Path, offset: u64, bytes: u64) -> Self {
        Self::new(name, bytes, &format!("linear {} {}", device.display(), offset / SECTOR_BYTES))
    }

    /// Becomes another target, for all that is asked from now on.
    pub fn become_target(&self, target: &str) {
        self.load(target);
        self.suspend();
        self.resume();
    }

    /// From now on requests wait. File systems are not notified, and I/O in flight is not awaited.
    pub fn suspend(&self) {
        self.ask(DEV_SUSPEND, SUSPEND_FLAG | SKIP_LOCKFS_FLAG | NOFLUSH_FLAG, &[]);
    }

    pub fn resume(&self) {
        self.ask(DEV_SUSPEND, 0, &[]);
    }

    /// A message to the target.
    pub fn message(&self, text: &str) {
        let mut payload = 0u64.to_le_bytes().to_vec();
        payload.extend(text.as_bytes());
        payload.push(0);
        self.ask(TARGET_MSG, 0, &payload);
    }

    /// It must not be in use.
    pub fn remove(self) {
        self.ask(DEV_REMOVE, 0, &[]);
    }

    fn load(&self, target: &str) {
        let (kind, parameters) = target.split_once(' ').unwrap_or((target, ""));
        let mut payload = 0u64.to_le_bytes().to_vec();
        payload.extend(self.sectors.to_le_bytes());
        payload.extend([0; 8]);
        payload.extend(kind.as_bytes());
        payload.resize(40, 0);
        payload.extend(parameters.as_bytes());
        payload.push(0);
        payload.resize(payload.len().next_multiple_of(8), 0);
        self.ask(TABLE_LOAD, 0, &payload);
    }

    fn ask(&self, command: libc::Ioctl, flags: u32, payload: &[u8]) -> Vec<u8> {
        let mut argument = vec![0u8; ARGUMENT_BYTES];
        let mut put = |at: usize, bytes: &[u8]| argument[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &4u32.to_le_bytes());
        put(12, &(ARGUMENT_BYTES as u32).to_le_bytes());
        put(16, &(HEAD_BYTES as u32).to_le_bytes());
        put(20, &u32::from(command == TABLE_LOAD).to_le_bytes());
        put(28, &flags.to_le_bytes());
        put(48, self.name.as_bytes());
        put(HEAD_BYTES, payload);
        // _IOWR(0xfd, command, struct dm_ioctl)
        let request = (3 << 30) | ((HEAD_BYTES as libc::Ioctl) << 16) | (0xfd << 8) | command;
        // SAFETY: an argument of the size that it says of itself, which the kernel reads and writes.
        let result = unsafe { libc::ioctl(self.control.as_raw_fd(), request, argument.as_mut_ptr()) };
        assert!(result >= 0, "device mapper, {} of {}: {}", command, self.name, io::Error::last_os_error());
        argument
    }
}
