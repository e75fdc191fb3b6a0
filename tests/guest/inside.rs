//! The guest's side: finds its job, and does it.

use std::{
    ffi::CString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use kvhoist::{Cache, block_on};

use crate::{
    crash::{self, Checked, Death, History, Plan},
    faults, log,
    machine::JOB,
};

/// The disk of the machine.
pub const NVME: &str = "/dev/nvme0n1";

/// Not a test of its own: what a guest runs.
#[test]
fn inside() {
    let Ok(job) = fs::read_to_string(JOB) else { return };
    let (mode, rest) = job.split_once('\n').expect("a line");
    let seed = || rest.trim().strip_prefix("seed=").and_then(|seed| seed.parse().ok()).expect("a seed");
    match mode.split_once(' ').unwrap_or((mode, "")) {
        ("faults", _) => faults::all(seed()),
        ("log", kind) => log::all(kind == "ext4", seed()),
        (mode, moment) => crash_job(mode, moment, rest),
    }
}

/// Checks what earlier deaths left, then works until this one.
fn crash_job(mode: &str, moment: &str, rest: &str) {
    let (plan, transcript) = rest.split_once('\n').expect("a plan");
    let mut plan = Plan::from_text(plan);
    if plan.disks == [PathBuf::from("/mnt")] {
        mount_ext4(Path::new(NVME), Path::new("/mnt"));
    }
    let mut history = History::default();
    for line in transcript.lines() {
        if line == "died" {
            history.end(&plan, Death::Machine);
        } else {
            history.read(line);
        }
    }
    let checked = check(&plan, &history).expect("what was flushed is there, and nothing else");
    println!("checked: {checked:?}");
    plan.first = history.next();
    if mode == "reset" {
        let moment = Duration::from_millis(moment.parse().expect("a number"));
        std::thread::spawn(move || {
            std::thread::sleep(moment);
            // At once, and without flushing anything.
            fs::write("/proc/sysrq-trigger", "b").expect("reset");
        });
    }
    if mode != "check" {
        crash::run(&plan, &crash::print);
    }
}

/// Opens the store, holds it to the history, and closes it.
pub fn check(plan: &Plan, history: &History) -> Result<Checked, String> {
    let cache = block_on(Cache::open(plan.config())).map_err(|error| error.to_string())?;
    let checked = block_on(history.check(plan, &cache));
    block_on(cache.close()).map_err(|error| error.to_string())?;
    checked
}

pub fn make_ext4(device: &Path) {
    let status = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(device).status().expect("mkfs.ext4 in the guest");
    assert!(status.success(), "mkfs.ext4: {status}");
}

/// # Panics
/// If the file system cannot be mounted: a journal must bring it into order after every crash.
pub fn mount_ext4(device: &Path, at: &Path) {
    fs::create_dir_all(at).expect("a place to mount");
    let text = |path: &Path| CString::new(path.to_str().expect("our own names")).expect("no zeros");
    let (device, at, kind) = (text(device), text(at), text(Path::new("ext4")));
    // SAFETY: strings that outlive the call; no data.
    let result = unsafe { libc::mount(device.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    assert_eq!(result, 0, "mount: {}", std::io::Error::last_os_error());
}

pub fn unmount(at: &Path) {
    let at = CString::new(at.to_str().expect("our own names")).expect("no zeros");
    // SAFETY: a string that outlives the call.
    let result = unsafe { libc::umount(at.as_ptr()) };
    assert_eq!(result, 0, "umount: {}", std::io::Error::last_os_error());
}
