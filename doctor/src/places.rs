//! Paths of the disk tier: file system, drive, free space.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    os::unix::{
        ffi::OsStringExt,
        fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use kvhoist::internals::{
    disk::FILE_NAME,
    machine::{Kernel, drive_folder, shown},
};

use crate::plan::{Finding, Plan, PlannedPath};

/// Share of a file system that the adapters leave free.
const FREE_SHARE_MIN: f64 = 0.01;

/// Depth below a path at which adapters put their stores, and how many directories are searched.
const DEPTH: usize = 4;
const FOLDERS_MAX: usize = 4096;

pub(crate) fn findings(plan: &Plan, kernel: &Kernel<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut systems: BTreeMap<u64, Shared<'_>> = BTreeMap::new();
    for planned in &plan.paths {
        let path = planned.at.as_path();
        let metadata = match fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) => {
                findings.extend(unmounted(path, kernel));
                let fix = format!("mkdir -p -m 700 '{}', after mounting what belongs there", path.display());
                let found = match error.kind() {
                    io::ErrorKind::NotFound => "not there".to_owned(),
                    _ => error.to_string(),
                };
                findings.push(Finding::trouble("path", format!("{}: {found}", path.display()), fix));
                continue;
            }
        };
        if !metadata.is_dir() && !plan.takes_files {
            let fix = "name a directory on a drive: lsblk -o NAME,MOUNTPOINTS,MODEL";
            findings.push(Finding::trouble("path", format!("{}: no directory", path.display()), fix));
            continue;
        }
        findings.push(lies_on(planned, kernel, plan));
        findings.extend(unmounted(path, kernel));
        findings.extend(drive(&metadata, kernel));
        if metadata.file_type().is_block_device() {
            continue;
        }
        systems.entry(metadata.dev()).or_default().paths.push(planned);
    }
    if plan.paths.iter().any(|path| path.bytes > 0) {
        findings.extend(systems.values().filter_map(|system| system.space(plan)));
    }
    findings
}

/// Paths on one file system, which share its space.
#[derive(Default)]
struct Shared<'a> {
    paths: Vec<&'a PlannedPath>,
}

impl Shared<'_> {
    fn space(&self, plan: &Plan) -> Option<Finding> {
        let (free, size) = free_bytes(&self.paths[0].at)?;
        let names: Vec<String> = self.paths.iter().map(|path| path.path.display().to_string()).collect();
        let (ranks, here, all) = (u64::from(plan.ranks), self.paths.len(), plan.paths.len());
        let of_rank = self.paths.iter().fold(0, |sum: u64, path| sum.saturating_add(path.bytes));
        let wanted = of_rank.saturating_mul(ranks);
        // Those of others, beside a path that will be made, are theirs.
        let stores: u64 = self.paths.iter().map(|path| store_bytes(&path.path)).sum();
        let usable = free.saturating_sub((size as f64 * FREE_SHARE_MIN) as u64).saturating_add(stores);
        let mut found = format!("{}: {} for stores", names.join(" and "), shown(usable));
        if stores > 0 {
            found.push_str(&format!(" ({} of them in stores that are there)", shown(stores)));
        }
        found.push_str(&format!(", {} configured: {ranks} rank(s), {here} of {all} path(s)", shown(wanted)));
        if wanted <= usable {
            return Some(Finding::note("space", found));
        }
        let all_of_rank = plan.paths.iter().fold(0, |sum: u64, path| sum.saturating_add(path.bytes));
        let fits = (all_of_rank as f64 * (usable as f64 / wanted as f64)) as u64;
        let folder = self.paths[0].at.display();
        let fix = format!("lower capacity to {} a rank, or free space: du -xh --max-depth=2 {folder}", shown(fits));
        Some(Finding::trouble("space", found, fix))
    }
}

/// Bytes available to this process on a path's file system, and its size.
pub(crate) fn free_bytes(path: &Path) -> Option<(u64, u64)> {
    let stat = rustix::fs::statvfs(path).ok()?;
    Some((stat.f_bavail.saturating_mul(stat.f_frsize), stat.f_blocks.saturating_mul(stat.f_frsize)))
}

/// Bytes of the existing stores at a path and some directories below it: the file system counts them as used.
fn store_bytes(path: &Path) -> u64 {
    let allocated = |metadata: fs::Metadata| metadata.blocks() * 512;
    if path.is_file() {
        return fs::metadata(path).map_or(0, allocated);
    }
    let (mut bytes, mut looked_at) = (0, 0);
    let mut folders = vec![(path.to_owned(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        looked_at += 1;
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && depth < DEPTH && looked_at + folders.len() < FOLDERS_MAX => {
                    folders.push((entry.path(), depth + 1));
                }
                Ok(kind) if kind.is_file() && entry.file_name() == FILE_NAME => {
                    bytes += entry.metadata().map_or(0, allocated);
                }
                _ => {}
            }
        }
    }
    bytes
}

/// A mounted file system: mount point, type, source, and whether it is read-only.
struct Mount {
    point: PathBuf,
    kind: String,
    source: String,
    read_only: bool,
}

fn mount_of(path: &Path, kernel: &Kernel<'_>) -> Option<Mount> {
    let path = path.canonicalize().ok()?;
    let mounts = kernel.read("proc/self/mountinfo")?;
    // "36 35 98:0 / /mount options - type source super": the longest mount point above the path is its mount, the last
    // one if several have the same mount point.
    let mount = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut fields = left.split(' ').skip(4);
        let point = unescaped(fields.next()?);
        let read_only = fields.next()?.split(',').any(|option| option == "ro");
        let mut kind = right.split(' ');
        let (kind, source) = (kind.next()?.to_owned(), kind.next()?.to_owned());
        path.starts_with(&point).then_some(Mount { point, kind, source, read_only })
    };
    mounts.lines().filter_map(mount).max_by_key(|mount| mount.point.as_os_str().len())
}

/// A path as tables of mounts have it: white space and backslashes are three octal digits after a backslash.
fn unescaped(field: &str) -> PathBuf {
    let mut parts = field.split('\\');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend(&part.as_bytes()[3..]);
            }
            None => {
                bytes.push(b'\\');
                bytes.extend(part.as_bytes());
            }
        }
    }
    OsString::from_vec(bytes).into()
}

/// True for file systems of a network. The kernel calls those in user space `fuse`, or `fuse.` and a name of their own;
/// `fuseblk` is a local drive's.
fn is_of_network(kind: &str) -> bool {
    matches!(kind, "nfs" | "nfs4" | "cifs" | "smb3" | "ceph" | "lustre" | "9p" | "fuse") || kind.starts_with("fuse.")
}

/// The file system of a path.
fn lies_on(planned: &PlannedPath, kernel: &Kernel<'_>, plan: &Plan) -> Finding {
    const WHAT: &str = "path";
    let path = planned.at.as_path();
    let Some(Mount { point, kind, source, read_only }) = mount_of(path, kernel) else {
        return Finding::note(WHAT, path.display().to_string());
    };
    let found = format!("{}: {kind} on {source}, mounted at {}", path.display(), point.display());
    match kind.as_str() {
        _ if read_only => {
            let fix = format!("mount -o remount,rw '{}', after looking at dmesg for why it is not", point.display());
            Finding::trouble(WHAT, format!("{found}, read-only"), fix)
        }
        "tmpfs" | "ramfs" => Finding::trouble(
            WHAT,
            format!(
                "{found}: its files take memory, have no direct I/O before Linux 6.6, and are gone after a restart"
            ),
            "name a directory on a drive: lsblk -o NAME,MOUNTPOINTS,MODEL",
        ),
        "overlay" => Finding::trouble(
            WHAT,
            format!("{found}: the container's own layer"),
            "mount a directory of a drive into the container: docker -v /mnt/nvme/kv:/kv, hostPath in Kubernetes",
        ),
        kind if is_of_network(kind) => Finding::trouble(
            WHAT,
            format!("{found}: a store on a network is slower than what it saves, and its locks are not dependable"),
            "name a directory on a local drive: lsblk -o NAME,MOUNTPOINTS,MODEL",
        ),
        _ if point == Path::new("/") => {
            let bytes = planned.bytes.saturating_mul(plan.ranks.into());
            let takes = if bytes > 0 { format!(", and will take {} of it", shown(bytes)) } else { String::new() };
            Finding::note(WHAT, format!("{found}, the root file system{takes}"))
                .fix("if a drive belongs there it is not mounted: lsblk -o NAME,MOUNTPOINTS,MODEL")
        }
        _ => Finding::note(WHAT, found),
    }
}

/// A drive that /etc/fstab mounts at the path or above it, and that is not mounted.
fn unmounted(path: &Path, kernel: &Kernel<'_>) -> Option<Finding> {
    let (table, mounts) = (kernel.read("etc/fstab")?, kernel.read("proc/self/mountinfo").unwrap_or_default());
    let is_mounted =
        |point: &Path| mounts.lines().any(|line| line.split(' ').nth(4).map(unescaped).as_deref() == Some(point));
    // What is mounted at the path or nearer to it hides what is farther up.
    let under = mount_of(path, kernel).map(|mount| mount.point);
    let wanted = table.lines().filter(|line| !line.trim_start().starts_with('#')).filter_map(|line| {
        let mut fields = line.split_whitespace();
        let (source, point) = (fields.next()?, unescaped(fields.next()?));
        let is_nearest = under.as_ref().is_none_or(|under| point.starts_with(under));
        let is_wanted = point != Path::new("/") && path.starts_with(&point) && is_nearest && !is_mounted(&point);
        is_wanted.then_some((source, point))
    });
    let (source, point) = wanted.max_by_key(|(_, point)| point.as_os_str().len())?;
    let (path, point) = (path.display(), point.display());
    let found = format!("{path}: /etc/fstab has {source} for {point}, and it is not mounted");
    Some(Finding::trouble("mount", found, format!("mount '{point}'")))
}

/// The drive under a path.
fn drive(metadata: &fs::Metadata, kernel: &Kernel<'_>) -> Option<Finding> {
    let folder = drive_folder(metadata, kernel)?;
    let file = |name: &str| fs::read_to_string(folder.join(name)).ok().map(|text| text.trim().to_owned());
    let name = folder.file_name()?.to_string_lossy().into_owned();
    let model = file("device/model").unwrap_or_else(|| "no model".into());
    if file("queue/rotational").as_deref() == Some("1") && name.starts_with("sd") {
        let found = format!("{name}: {model}, which rotates");
        return Some(Finding::trouble(
            "drive",
            found,
            "name a directory on an SSD: lsblk -o NAME,ROTA,MOUNTPOINTS,MODEL",
        ));
    }
    let finding = Finding::note("drive", format!("{name}: {model}"));
    Some(match name.strip_prefix("nvme").and_then(|rest| rest.split_once('n')) {
        Some((controller, _)) => {
            finding.fix(format!("its wear (percentage_used): nvme smart-log /dev/nvme{controller}"))
        }
        None => finding,
    })
}
