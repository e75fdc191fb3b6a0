//! Power cuts at any write: dm-log-writes keeps every write and flush in their order, and from that any state is made
//! that a power cut could have left.
//!
//! What a flush covered is there; of what came after it each write is there, is not, or is torn between sectors.
//! What the child said stands in the log as marks, so each state has the history that was true then.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use kvhoist::StorageKind;

use crate::{
    common::Rng,
    crash::{self, Checked, Death, History, Plan},
    dm::Mapped,
    inside::{NVME, check, make_ext4, mount_ext4, unmount},
};

const DATA_BYTES: u64 = 12 << 20;
const LOG_BYTES: u64 = 100 << 20;
/// `WRITE_LOG_MAGIC` of drivers/md/dm-log-writes.c.
const MAGIC: u64 = 0x006a_7366_7773_6872;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// One entry of the log.
struct Entry {
    flags: u64,
    /// Where the data go.
    at: usize,
    data: Vec<u8>,
}

impl Entry {
    fn mark(&self) -> Option<String> {
        (self.flags & MARK != 0).then(|| String::from_utf8_lossy(&self.data).replace('_', " "))
    }
}

/// Every kind of plan under the log, and states of each.
pub fn all(ext4: bool, seed: u64) {
    let mut rng = Rng(seed);
    let kinds =
        [(false, false, StorageKind::Uring), (true, true, StorageKind::Uring), (true, false, StorageKind::Blocking)];
    for (evicts, write_back, storage) in kinds {
        let plan = Plan {
            disks: vec![PathBuf::new()],
            blocks: if evicts { 96 } else { 512 },
            block_bytes: if ext4 { 5_000 } else { 4_096 },
            storage,
            write_back,
            evicts,
            first: 0,
            end: 250,
            seed: rng.next(),
        };
        let (base, log) = record(&plan, ext4);
        states(&plan, ext4, base, &log, &mut rng);
    }
}

/// Runs a child on a logged device; what was there before, and the log.
fn record(plan: &Plan, ext4: bool) -> (Vec<u8>, Vec<Entry>) {
    let nvme = Path::new(NVME);
    let data = Mapped::linear("data", nvme, 0, DATA_BYTES);
    let log = Mapped::linear("log", nvme, DATA_BYTES * 2, LOG_BYTES);
    overwrite(&data.path, &vec![0; DATA_BYTES as usize]);
    overwrite(&log.path, &[0; 4096]);
    if ext4 {
        make_ext4(&data.path);
    }
    let mut base = vec![0; DATA_BYTES as usize];
    File::open(&data.path).and_then(|file| file.read_exact_at(&mut base, 0)).expect("the device as it was");
    let target = format!("log-writes {} {}", data.path.display(), log.path.display());
    let logged = Mapped::new("logged", DATA_BYTES, &target);
    let (path, mounted) = place(&logged.path, ext4);
    let plan = Plan { disks: vec![path], ..plan.clone() };
    // The words of a message are one argument only without spaces.
    crash::run(&plan, &|line| logged.message(&format!("mark {}", line.replace(' ', "_"))));
    if mounted {
        unmount(Path::new("/mnt"));
    }
    // Ends the log.
    logged.become_target(&format!("linear {} 0", data.path.display()));
    let entries = read(&log.path).expect("a log");
    for device in [logged, log, data] {
        device.remove();
    }
    (base, entries)
}

/// The configured path of a store on `device`; mounted where it is a file system's.
fn place(device: &Path, ext4: bool) -> (PathBuf, bool) {
    if ext4 {
        mount_ext4(device, Path::new("/mnt"));
        return ("/mnt".into(), true);
    }
    (device.into(), false)
}

fn overwrite(device: &Path, bytes: &[u8]) {
    let file = File::options().write(true).open(device).expect("a device");
    file.write_all_at(bytes, 0).and_then(|()| file.sync_all()).expect("written");
}

fn read(path: &Path) -> io::Result<Vec<Entry>> {
    let file = File::open(path)?;
    let mut head = [0; 512];
    file.read_exact_at(&mut head, 0)?;
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    assert_eq!((word(&head, 0), word(&head, 8)), (MAGIC, 1), "a log of version 1");
    let (count, sector_bytes) = (word(&head, 16), word(&head, 24) & 0xffff_ffff);
    let (mut entries, mut at) = (Vec::new(), sector_bytes);
    for _ in 0..count {
        let mut sector = vec![0; sector_bytes as usize];
        file.read_exact_at(&mut sector, at)?;
        let (to, sectors, flags, inline) = (word(&sector, 0), word(&sector, 8), word(&sector, 16), word(&sector, 24));
        at += sector_bytes;
        let mut data = sector[32..32 + inline as usize].to_vec();
        if flags & (MARK | DISCARD) == 0 {
            data = vec![0; (sectors * sector_bytes) as usize];
            file.read_exact_at(&mut data, at)?;
            at += data.len() as u64;
        }
        assert!(flags & DISCARD == 0, "no discards here");
        entries.push(Entry { flags, at: (to * sector_bytes) as usize, data });
    }
    Ok(entries)
}

/// Makes states, and holds each to its history.
fn states(plan: &Plan, ext4: bool, mut base: Vec<u8>, log: &[Entry], rng: &mut Rng) {
    let flushes = log.iter().filter(|entry| entry.flags & FLUSH != 0).count();
    assert!(flushes > 10 && log.iter().any(|entry| entry.mark().is_some_and(|mark| mark.starts_with("synced"))));
    let replayed = Mapped::linear("replayed", Path::new(NVME), DATA_BYTES, DATA_BYTES);
    let mut cuts: Vec<usize> = (0..30).map(|_| rng.below(log.len() as u64 + 1) as usize).collect();
    cuts.push(log.len());
    cuts.sort_unstable();
    let (mut all, mut durable, mut history) = (Checked::default(), 0, History::default());
    let mut noted = 0;
    for cut in cuts {
        for entry in &log[noted..cut] {
            if let Some(mark) = entry.mark().filter(|mark| !mark.starts_with("dm-log-writes")) {
                history.note(&mark);
            }
        }
        noted = cut;
        let flushed = log[..cut].iter().rposition(|entry| entry.flags & FLUSH != 0).unwrap_or(0).max(durable);
        // A flush covers what came before it, not what it carries.
        log[durable..flushed].iter().for_each(|entry| apply(&mut base, entry, entry.data.len()));
        durable = flushed;
        let mut state = base.clone();
        let mood = rng.below(3);
        for entry in &log[durable..cut] {
            let len = match (entry.flags & FUA != 0, mood, rng.below(3)) {
                (true, ..) | (_, 0, _) | (_, 1, 0) => entry.data.len(),
                (_, 1, 1) => rng.below(entry.data.len() as u64 / 512 + 1) as usize * 512,
                _ => 0,
            };
            apply(&mut state, entry, len);
        }
        overwrite(&replayed.path, &state);
        let mut ended = history.clone();
        ended.end(plan, Death::Machine);
        let (path, mounted) = place(&replayed.path, ext4);
        let checked = check(&Plan { disks: vec![path], ..plan.clone() }, &ended);
        if mounted {
            unmount(Path::new("/mnt"));
        }
        match checked {
            Ok(checked) => all += checked,
            Err(wrong) => panic!("cut at {cut} of {}, mood {mood}, {plan:?}: {wrong}", log.len()),
        }
    }
    println!("log of {} entries, {flushes} flushes; 31 power cuts: {all:?}; {}", log.len(), plan.to_text());
    assert!(all.kept > 0);
    replayed.remove();
}

fn apply(state: &mut [u8], entry: &Entry, len: usize) {
    if entry.flags & MARK == 0 {
        state[entry.at..entry.at + len].copy_from_slice(&entry.data[..len]);
    }
}
