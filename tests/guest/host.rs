//! The host's side: boots guests, kills them, keeps their history.

use std::{
    fs::{self, File},
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use kvhoist::StorageKind;
use tempfile::TempDir;

use crate::{
    common::{Rng, directory, seed},
    crash::{Death, History, PREFIX, Plan},
    inside::JOB,
};

const NVME_BYTES: u64 = 160 << 20;

/// The program that boots a guest, if this machine has it and the tests were asked for.
fn guest_run() -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/vm/guest-run");
    if !program.exists() {
        println!("SKIPPED: no {}", program.display());
        return None;
    }
    if std::env::var("KVHOIST_GUEST").is_err() {
        println!("SKIPPED: guests take minutes; run with KVHOIST_GUEST=1");
        return None;
    }
    Some(program)
}

/// Boots of which one at least must succeed: an emulator that gets no processor time cannot calibrate its clocks.
const BOOTS: u32 = 4;

/// A guest that is running.
struct Guest {
    process: Child,
    /// Its temporary files, and what it prints as it prints it.
    scratch: TempDir,
}

impl Guest {
    /// Boots a guest on `image`, where this program does the job.
    fn boot(program: &Path, image: &Path, job: &str, limit: Duration) -> Self {
        let scratch = directory();
        let file = scratch.path().join(JOB);
        fs::write(&file, job).expect("a job");
        let process = Command::new(program)
            .env("TMPDIR", scratch.path())
            .args(["-t", &limit.as_secs().to_string(), "-m", "1024", "-i"])
            .arg(image)
            .arg("-f")
            .arg(&file)
            .arg("--")
            .arg(lean_program(scratch.path()))
            .args(["--exact", "inside::inside", "--nocapture", "--test-threads", "1"])
            .stdin(Stdio::null())
            .stdout(File::create(scratch.path().join("printed")).expect("a file"))
            .spawn()
            .expect("guest-run starts");
        Guest { process, scratch }
    }

    /// What it has printed so far.
    fn said(&self) -> String {
        let Ok(entries) = fs::read_dir(self.scratch.path()) else { return String::new() };
        let mut out = entries.filter_map(Result::ok).map(|entry| entry.path().join("out"));
        let Some(out) = out.find(|out| out.exists()) else { return String::new() };
        let mut bytes = Vec::new();
        let _ = File::open(out).and_then(|mut file| file.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Kills the machine once it has printed `text` and some time has passed, if it did not end before.
    fn kill_after(&mut self, text: &str, more: Duration) {
        while !self.said().contains(text) {
            if self.process.try_wait().expect("our child").is_some() {
                return;
            }
            // A file that another process writes cannot be waited for.
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(more);
        if let Some(machine) = machine_below(self.process.id()) {
            // SAFETY: takes numbers. The process is a child of a child of ours, which is waiting for it.
            unsafe { libc::kill(machine as i32, libc::SIGKILL) };
        }
    }

    /// Its end, and all that it printed. `None` if our program was not reached.
    fn ended(self) -> Option<(ExitStatus, String)> {
        let (status, printed) = self.wait();
        if printed.contains("inside::inside") {
            return Some((status, printed));
        }
        println!("a guest that did not boot ({status}), once more: {printed}");
        None
    }

    /// Its end, and all that it printed.
    fn wait(mut self) -> (ExitStatus, String) {
        let status = self.process.wait().expect("our child");
        let printed = fs::read(self.scratch.path().join("printed")).expect("printed");
        (status, String::from_utf8_lossy(&printed).into_owned())
    }
}

/// This program without what only debuggers read, where there is a tool for that: the guest holds it in memory.
fn lean_program(scratch: &Path) -> PathBuf {
    let (this, lean) = (std::env::current_exe().expect("this test"), scratch.join("lean"));
    let stripped = Command::new("strip").arg("-g").arg("-o").arg(&lean).arg(&this).status();
    if stripped.is_ok_and(|status| status.success()) { lean } else { this }
}

/// The emulator among the descendants of a process.
fn machine_below(ancestor: u32) -> Option<u32> {
    let parents: Vec<(u32, u32, String)> = fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            let (head, tail) = stat.rsplit_once(')')?;
            let parent = tail.split_whitespace().nth(1)?.parse().ok()?;
            Some((pid, parent, head.split_once('(')?.1.to_owned()))
        })
        .collect();
    let mut family = vec![ancestor];
    let mut at = 0;
    while at < family.len() {
        let of = family[at];
        family.extend(parents.iter().filter(|(_, parent, _)| *parent == of).map(|(pid, ..)| *pid));
        at += 1;
    }
    parents.iter().find(|(pid, _, name)| family.contains(pid) && name.starts_with("qemu")).map(|(pid, ..)| *pid)
}

fn image(dir: &TempDir) -> PathBuf {
    let image = dir.path().join("nvme.img");
    File::create(&image).and_then(|file| file.set_len(NVME_BYTES)).expect("an image");
    image
}

/// Machines that die under load, by their own reset or by the emulator's death, and what the next boot finds.
fn crashes(ext4: bool) {
    let Some(program) = guest_run() else { return };
    let crashes: u32 = std::env::var("KVHOIST_CRASHES").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let mut rng = Rng(seed());
    let dir = directory();
    let image = image(&dir);
    if ext4 {
        let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image).status();
        if !made.is_ok_and(|status| status.success()) {
            println!("SKIPPED: no mkfs.ext4 here");
            return;
        }
    }
    let mut plan = Plan {
        disks: vec![if ext4 { "/mnt" } else { "/dev/nvme0n1" }.into()],
        blocks: 16_384,
        block_bytes: 4_096,
        storage: StorageKind::Auto,
        write_back: false,
        evicts: false,
        first: 0,
        end: 16_000,
        seed: 0,
    };
    let (mut transcript, mut history) = (String::new(), History::default());
    for crash in 0..=crashes {
        (plan.seed, plan.write_back) = (rng.next(), rng.below(2) == 1);
        let last = crash == crashes || history.next() + 1_000 > plan.end;
        let moment = Duration::from_millis(rng.below(6_000));
        let mode = match (last, crash % 2) {
            (true, _) => "check".to_owned(),
            (false, 0) => "load".to_owned(),
            (false, _) => format!("reset {}", moment.as_millis()),
        };
        let job = format!("{mode}\n{}\n{transcript}", plan.to_text());
        let ended = (0..BOOTS).find_map(|_| {
            let mut guest = Guest::boot(&program, &image, &job, Duration::from_secs(180));
            if mode == "load" {
                guest.kill_after("opened by", moment);
            }
            guest.ended()
        });
        let (status, printed) = ended.expect("a guest that boots");
        assert!(!last || status.success(), "crash {crash}, {mode}: {status}: {printed}");
        for line in printed.lines() {
            if line.contains("checked:") || line.contains("panicked") {
                println!("crash {crash}, {mode}: {line}");
            }
            assert!(!line.contains("panicked"), "crash {crash}: {printed}");
            if history.read(line) {
                assert!(!line.contains("opened by blocking"), "the guest has a ring: {line}");
                transcript.push_str(&format!("{PREFIX}{};\n", history.last));
            }
        }
        println!("crash {crash}, {mode}: {} keys, the last word was {:?}", history.next(), history.last);
        transcript.push_str("died\n");
        history.end(&plan, Death::Machine);
        if last {
            break;
        }
    }
}

#[test]
fn a_machine_that_dies_leaves_what_it_flushed_on_a_raw_device() {
    crashes(false);
}

#[test]
fn a_machine_that_dies_leaves_what_it_flushed_on_ext4() {
    crashes(true);
}

/// One boot in which the disk itself misbehaves.
fn disk_that(job: &str, minutes: u64) {
    let Some(program) = guest_run() else { return };
    let dir = directory();
    let job = format!("{job}\nseed={}\n", seed());
    let limit = Duration::from_secs(60 * minutes);
    let ended = (0..BOOTS).find_map(|_| Guest::boot(&program, &image(&dir), &job, limit).ended());
    let (status, printed) = ended.expect("a guest that boots");
    println!("{printed}");
    assert!(status.success(), "{status}");
}

#[test]
fn a_disk_that_drops_fails_corrupts_and_stalls() {
    disk_that("faults", 15);
}

#[test]
fn every_state_that_a_power_cut_can_leave_is_sound_on_a_raw_device() {
    disk_that("log raw", 20);
}

#[test]
fn every_state_that_a_power_cut_can_leave_is_sound_on_ext4() {
    disk_that("log ext4", 20);
}
