//! libcufile: what it really does here, and what would let it do better.

use std::path::Path;

use kvhoist::{
    Cache, Config, DeviceKind, DirectIo, DiskPath, EngineMode, block_on,
    internals::device::cufile::{Driver, Library},
};

use super::{
    Finding, Want,
    disk::{drive_name, scratch},
    system::{has_module, read},
};
use crate::shown::reason;

/// Kernel and driver since which a drive can write to the GPU without nvidia-fs.
const P2P_KERNEL: (u32, u32) = (6, 2);
const P2P_DRIVER: u32 = 565;

pub fn findings(ordinal: u32, path: Option<&Path>, has_device: bool) -> Vec<Finding> {
    let mut findings = vec![library(), nvidia_fs(), peer_to_peer(path)];
    findings.push(match has_device {
        true => route(ordinal, path)
            .unwrap_or_else(|why| Finding::note("cuFile", format!("not tried: {why}")).decides(Want::Cufile, false)),
        false => Finding::note("cuFile", "not tried: there is no CUDA device").decides(Want::Cufile, false),
    });
    findings
}

fn library() -> Finding {
    match Library::get() {
        Err(reason) => Finding::note("libcufile", reason),
        Ok(library) => {
            let version = library.version().map_or_else(String::new, |v| format!(" {}.{}", v / 1000, v % 1000 / 10));
            let finding = Finding::note("libcufile", format!("{}{version}", library.name()));
            if library.has_statistics() {
                return finding;
            }
            finding.fix("libcufile 1.15 (CUDA 13) or later: an older one cannot show which way its reads go")
        }
    }
}

fn nvidia_fs() -> Finding {
    if !has_module("nvidia_fs") {
        return Finding::note("nvidia-fs", "not loaded")
            .fix("install nvidia-gds (or nvidia-fs-dkms) and modprobe nvidia-fs, for a direct path to the GPU");
    }
    let version = read("/sys/module/nvidia_fs/version").unwrap_or_else(|| "of unknown version".into());
    Finding::note("nvidia-fs", version)
}

/// What PCI peer-to-peer needs, and what of it is missing.
fn peer_to_peer(path: Option<&Path>) -> Finding {
    let mut missing = Vec::new();
    match kernel_version() {
        Some(version) if version >= P2P_KERNEL => {}
        _ => missing.push(format!("Linux {}.{} or later", P2P_KERNEL.0, P2P_KERNEL.1)),
    }
    let driver = read("/sys/module/nvidia/version").unwrap_or_default();
    let major = driver.split('.').next().and_then(|digits| digits.parse::<u32>().ok());
    if major.is_none_or(|major| major < P2P_DRIVER) {
        missing.push(format!("NVIDIA driver {P2P_DRIVER} or later"));
    }
    let drive = drive_name(path.map_or_else(std::env::temp_dir, Path::to_owned).as_path());
    if !drive.as_ref().is_some_and(|name| name.starts_with("nvme")) {
        missing.push(format!("an NVMe drive (found {})", drive.as_deref().unwrap_or("no drive")));
    }
    if missing.is_empty() {
        return Finding::note("PCI P2PDMA", "kernel, driver and drive are new enough; the rest is shown by cuFile");
    }
    Finding::note("PCI P2PDMA", format!("needs {}", missing.join(", ")))
}

/// What the engine itself makes of it: a small cache there, with a device tier; or why there is none.
fn route(ordinal: u32, path: Option<&Path>) -> Result<Finding, String> {
    let directory = scratch(path).map_err(|error| format!("no directory can be made ({})", reason(&error)))?;
    let config = Config::default()
        .block_bytes(64 << 10)
        .host_blocks(4)
        .device_blocks(4)
        .device(DeviceKind::Cuda)
        .device_ordinal(ordinal)
        .cufile(EngineMode::Auto)
        .direct_io(DirectIo::Prefer)
        .disks(vec![DiskPath::with_blocks(directory.path(), 4)]);
    let cache = block_on(Cache::open(config)).map_err(|error| error.to_string())?;
    let stats = cache.stats();
    block_on(cache.close()).map_err(|error| error.to_string())?;
    if stats.cufile {
        return Ok(Finding::note("cuFile", stats.cufile_reason).decides(Want::Cufile, true));
    }
    let limits = Driver::open(std::time::Duration::ZERO).map_or_else(
        |_| String::new(),
        |driver| match driver.nvfs_version() {
            Some((major, minor)) => format!(" (nvidia-fs {major}.{minor} answers)"),
            None => " (no nvidia-fs answers)".to_owned(),
        },
    );
    let finding = Finding::note("cuFile", format!("not used: {}{limits}", stats.cufile_reason));
    let finding = finding.decides(Want::Cufile, false);
    Ok(finding.fix("none needed to work; for the direct path what nvidia-fs or PCI P2PDMA needs, above"))
}

/// Major and minor number of the kernel.
fn kernel_version() -> Option<(u32, u32)> {
    let release = read("/proc/sys/kernel/osrelease")?;
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse::<u32>().ok());
    Some((parts.next()??, parts.next()??))
}
