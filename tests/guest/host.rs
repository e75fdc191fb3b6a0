//! The host's side: boots guests, kills them, keeps their history.

use std::{fs::File, path::PathBuf, process::Command, time::Duration};

use kvhoist::StorageKind;
use tempfile::TempDir;

use crate::{
    common::{Rng, directory, seed},
    crash::{Death, History, PREFIX, Plan},
    machine::{BOOTS, Guest, guest_run},
};

const NVME_BYTES: u64 = 160 << 20;

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
            crate::common::skip::skipped("no mkfs.ext4; install it with: apt-get install e2fsprogs");
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
