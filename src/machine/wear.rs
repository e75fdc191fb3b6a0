//! How worn a drive is, as it says itself: the SMART log of NVMe drives, by the kernel's own call.
//!
//! Format: NVM Express Base Specification 2.0, figure 208 (SMART / Health Information, log page 02h).

use std::{
    fmt,
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::Path,
};

use super::{
    drives,
    kernel::{Kernel, shown},
};

const LOG_BYTES: usize = 512;
const GET_LOG_PAGE: u8 = 0x02;
const SMART: u32 = 0x02;
/// The log of the drive as a whole.
const EVERY_NAMESPACE: u32 = u32::MAX;
/// `_IOWR('N', 0x41, struct nvme_admin_cmd)` of linux/nvme_ioctl.h.
const NVME_IOCTL_ADMIN_CMD: libc::c_ulong = 0xc048_4e41;
const HOURS_A_YEAR: f64 = 8766.0;

/// `struct nvme_passthru_cmd` of linux/nvme_ioctl.h.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    result: u32,
}

/// What a drive says of its wear.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriveWear {
    /// The drive's name: `nvme0n1`, say.
    pub drive: String,
    /// The share of its life that is used, percent, as its vendor estimates it; may be more than 100.
    pub used_percent: u8,
    /// Bytes written to it, in its whole life, by everybody.
    pub bytes_written: u64,
    /// Hours for which it was on.
    pub hours: u64,
}

impl DriveWear {
    /// Wear as it is told.
    #[doc(hidden)]
    pub fn new(drive: &str, used_percent: u8, bytes_written: u64, hours: u64) -> Self {
        DriveWear { drive: drive.to_owned(), used_percent, bytes_written, hours }
    }

    /// The share of its life that is used; may be more than 1.
    pub fn used(&self) -> f64 {
        f64::from(self.used_percent) / 100.0
    }

    /// Years of being on until all of its life is used, at the pace of its life so far. `None` where less than a
    /// percent is used, which is no pace to go by.
    pub fn years_left(&self) -> Option<f64> {
        let used = f64::from(self.used_percent);
        let left = (100.0 - used).max(0.0);
        (self.used_percent > 0).then(|| left / used * self.hours as f64 / HOURS_A_YEAR)
    }

    /// Years until all of its life is used, where so many bytes a day are written from now on. `None` where less than a
    /// percent is used.
    pub fn years_left_at(&self, bytes_a_day: u64) -> Option<f64> {
        let used = f64::from(self.used_percent);
        let left = self.bytes_written as f64 / used * (100.0 - used).max(0.0);
        (self.used_percent > 0).then(|| left / (bytes_a_day.max(1) as f64) / (HOURS_A_YEAR / 24.0))
    }

    fn parse(drive: &str, log: &[u8; LOG_BYTES]) -> Self {
        // 128 bits, of which no drive fills 64.
        let number = |at: usize| {
            let bytes: [u8; 16] = log[at..at + 16].try_into().expect("16 bytes of the log");
            u64::try_from(u128::from_le_bytes(bytes)).unwrap_or(u64::MAX)
        };
        // Written is counted in thousands of 512 bytes.
        let bytes_written = number(48).saturating_mul(512_000);
        DriveWear { drive: drive.to_owned(), used_percent: log[5], bytes_written, hours: number(128) }
    }
}

impl fmt::Display for DriveWear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DriveWear { drive, used_percent, bytes_written, hours } = self;
        write!(f, "{drive}: {used_percent} % of its life used, {} written in {hours} hours", shown(*bytes_written))?;
        match self.years_left() {
            Some(years) => write!(f, "; {years:.1} years left at this pace"),
            None => write!(f, "; too little for an estimate of its years"),
        }
    }
}

/// Asks the drive under a path how worn it is. Takes the right to read the drive's control device (root, as a rule).
///
/// # Errors
/// In words, where the drive is no NVMe drive or cannot be asked.
pub fn drive_wear(path: &Path) -> Result<DriveWear, String> {
    let metadata = std::fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let folder = drives::drive_folder(&metadata, &Kernel { root: Path::new("/") });
    let folder = folder.ok_or_else(|| {
        let (major, minor) = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        format!("{}: the kernel names no drive for device {major}:{minor}", path.display())
    })?;
    let drive = folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some(controller) = controller(&drive) else {
        return Err(format!("{drive} is no NVMe drive: its wear is not known here"));
    };
    let device = format!("/dev/{controller}");
    let log = File::open(&device).and_then(|file| smart_log(&file));
    match log {
        Ok(log) => Ok(DriveWear::parse(&drive, &log)),
        Err(error) => Err(format!("{drive}: {device} cannot be asked for its wear: {error}")),
    }
}

/// `nvme0` of `nvme0n1`.
fn controller(drive: &str) -> Option<&str> {
    let rest = drive.strip_prefix("nvme")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit())?;
    (digits > 0 && rest[digits..].starts_with('n')).then(|| &drive[.."nvme".len() + digits])
}

fn smart_log(file: &File) -> io::Result<[u8; LOG_BYTES]> {
    let mut log = [0; LOG_BYTES];
    let dwords = (LOG_BYTES / 4 - 1) as u32;
    let mut command = AdminCommand {
        opcode: GET_LOG_PAGE,
        nsid: EVERY_NAMESPACE,
        addr: log.as_mut_ptr() as u64,
        data_len: LOG_BYTES as u32,
        cdw10: dwords << 16 | SMART,
        timeout_ms: 1000,
        ..AdminCommand::default()
    };
    // SAFETY: the command is laid out as the kernel wants it, and names a buffer of `data_len` bytes that outlives the
    // call; a kernel or a driver that does not know the call leaves both alone.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), NVME_IOCTL_ADMIN_CMD as _, &raw mut command) };
    match status {
        0 => Ok(log),
        1.. => Err(io::Error::other(format!("the drive answers with NVMe status {status:#x}"))),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(used: u8, thousands: u128, hours: u128) -> [u8; LOG_BYTES] {
        let mut log = [0; LOG_BYTES];
        log[5] = used;
        log[48..64].copy_from_slice(&thousands.to_le_bytes());
        log[128..144].copy_from_slice(&hours.to_le_bytes());
        log
    }

    #[test]
    fn the_command_is_as_large_as_the_kernels() {
        assert_eq!(size_of::<AdminCommand>(), 72);
        assert_eq!((NVME_IOCTL_ADMIN_CMD >> 16) & 0x3fff, 72);
    }

    #[test]
    fn a_log_is_read_and_the_years_follow_from_it() {
        let wear = DriveWear::parse("nvme3n1", &log(20, 2_000_000, 8766));
        assert_eq!((wear.used_percent, wear.bytes_written, wear.hours), (20, 1_024_000_000_000, 8766));
        assert_eq!(wear.years_left(), Some(4.0));
        // Of 5.12 TB in all 4.096 TB are left.
        let years = wear.years_left_at(4_096_000_000_000 / 1000).expect("a pace");
        assert!((years - 1000.0 / 365.25).abs() < 1e-6, "{years}");
        assert!(wear.to_string().contains("20 % of its life used"), "{wear}");
    }

    #[test]
    fn what_a_drive_may_say_is_no_panic() {
        let wear = DriveWear::parse("nvme0n1", &[0xff; LOG_BYTES]);
        assert_eq!((wear.used_percent, wear.bytes_written, wear.years_left()), (255, u64::MAX, Some(0.0)));
        let fresh = DriveWear::parse("nvme0n1", &log(0, 1, 1));
        assert_eq!((fresh.years_left(), fresh.years_left_at(0)), (None, None));
    }

    #[test]
    fn the_controller_is_named_by_its_drive() {
        let cases =
            [("nvme0n1", Some("nvme0")), ("nvme12n3", Some("nvme12")), ("sda", None), ("nvme", None), ("nvmen1", None)];
        for (drive, wanted) in cases {
            assert_eq!(controller(drive), wanted, "{drive}");
        }
    }

    #[test]
    fn what_cannot_be_asked_says_why() {
        let error = drive_wear(Path::new("/proc/self")).expect_err("no drive");
        assert!(error.contains("/proc/self") && error.contains("no drive"), "{error}");
        assert!(drive_wear(Path::new("/nowhere/at/all")).is_err());
        let error = smart_log(&File::open("/dev/null").expect("there")).expect_err("no drive");
        assert!(error.raw_os_error().is_some(), "{error}");
    }
}
