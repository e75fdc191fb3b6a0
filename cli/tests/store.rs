//! `kvhoist inspect` and `kvhoist verify` as a person runs them.

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use kvhoist::{
    BlockKey, Cache, Config, DiskPath, WritePolicy, block_on,
    internals::disk::format::{
        RECORD_BYTES, TABLE_OFFSET,
        record::{Record, RecordSeal},
        stripe::Stripe,
        superblock::Superblock,
    },
};
use serde_json::Value;
use tempfile::TempDir;

const BLOCK_BYTES: usize = 5000;
const BLOCKS: u8 = 20;

fn kvhoist(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvhoist")).args(args).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// What `--json` prints, and the exit status.
fn json(command: &str, args: &[&str]) -> (Value, i32) {
    let output = kvhoist(&[&[command, "--json"], args].concat());
    let status = output.status.code().expect("not killed");
    let value = serde_json::from_slice(&output.stdout);
    (value.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr))), status)
}

/// A store over two files with room for more than it holds, closed.
struct Sample {
    dir: TempDir,
    config: Config,
}

impl Sample {
    fn new() -> Self {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory");
        let disk = |(name, blocks)| DiskPath::with_blocks(dir.path().join(name), blocks);
        let config = Config::default()
            .block_bytes(BLOCK_BYTES)
            .host_blocks(4)
            .disks([("a", 20), ("b", 10)].map(disk).into())
            .namespace("tenant\u{1b}[31m")
            .write_policy(WritePolicy::WriteThrough);
        let sample = Sample { dir, config };
        sample.with_cache(|cache| {
            for n in 0..BLOCKS {
                let parent = (n % 5 > 0).then(|| key(n - 1));
                block_on(cache.store(&key(n), parent.as_ref(), &[n; BLOCK_BYTES])).expect("stored");
            }
        });
        sample
    }

    fn with_cache(&self, work: impl FnOnce(&Cache)) {
        let cache = block_on(Cache::open(self.config.clone())).expect("open");
        work(&cache);
        block_on(cache.close()).expect("close");
    }

    fn path(&self, member: usize) -> &str {
        self.config.disk.paths[member].path.to_str().expect("UTF-8")
    }

    fn file(&self, member: usize) -> File {
        File::options().read(true).write(true).open(self.path(member)).expect("open")
    }

    fn flip(&self, member: usize, offset: u64) {
        let mut byte = [0];
        self.file(member).read_exact_at(&mut byte, offset).expect("read");
        self.file(member).write_all_at(&[byte[0] ^ 0x10], offset).expect("damage");
    }

    fn stripe(&self) -> Stripe {
        Stripe::new(&self.config)
    }

    fn seal(&self, member: u16) -> RecordSeal {
        let mut head = [0; 4096];
        self.file(0).read_exact_at(&mut head, 0).expect("read");
        RecordSeal::new(&Superblock::decode(&head).expect("sound").uuid, member)
    }

    /// The slot of the `n`-th block, as member, number there, and record.
    fn find(&self, n: u8) -> (u16, u32, Record) {
        for (member, geometry) in (0..).zip(self.stripe().members()) {
            for local in 0..geometry.slots {
                let mut bytes = [0; RECORD_BYTES];
                self.file(member.into()).read_exact_at(&mut bytes, record_offset(local)).expect("read");
                match self.seal(member).decode(local, BLOCK_BYTES as u32, &bytes) {
                    Ok(Some(record)) if record.key == key(n) => return (member, local, record),
                    _ => {}
                }
            }
        }
        panic!("block {n} has a record");
    }

    fn free_slot(&self) -> u32 {
        let free = |local: &u32| {
            let mut bytes = [0; RECORD_BYTES];
            self.file(0).read_exact_at(&mut bytes, record_offset(*local)).expect("read");
            bytes == [0; RECORD_BYTES]
        };
        (0..20).find(free).expect("a free slot")
    }

    /// Everything that a look must leave alone.
    fn state(&self) -> Vec<(PathBuf, Vec<u8>, i64, i64, u32)> {
        let mut names: Vec<_> =
            fs::read_dir(self.dir.path()).expect("a directory").map(|entry| entry.expect("an entry").path()).collect();
        names.sort();
        let describe = |path: PathBuf| {
            let metadata = fs::metadata(&path).expect("metadata");
            let bytes = fs::read(&path).expect("readable");
            (path, bytes, metadata.mtime_nsec(), metadata.ctime_nsec(), metadata.mode())
        };
        names.into_iter().map(describe).collect()
    }
}

fn key(n: u8) -> BlockKey {
    BlockKey::new([n + 1; 32])
}

fn record_offset(local: u32) -> u64 {
    TABLE_OFFSET + u64::from(local) * RECORD_BYTES as u64
}

#[test]
fn a_sound_store_is_clean_and_stays_as_it_is() {
    let sample = Sample::new();
    let before = sample.state();
    for engine in ["auto", "blocking"] {
        // In any order.
        let paths = ["--storage", engine, sample.path(1), sample.path(0)];
        let (report, status) = json("verify", &paths);
        assert_eq!((status, &report["clean"], &report["complete"]), (0, &true.into(), &true.into()), "{report:#}");
        let counts = ["full", "empty", "records_bad", "superseded", "payloads_good", "payloads_bad"];
        assert_eq!(counts.map(|name| report[name].as_u64().expect("a number")), [20, 10, 0, 0, 20, 0]);
        assert_eq!(report["paths"], serde_json::json!([sample.path(0), sample.path(1)]), "the store's own order");
        // Two record pages, and every block with its padding.
        assert_eq!(report["bytes_read"], 2 * 4096 + 20 * 8192);
        let (found, status) = json("inspect", &paths);
        assert_eq!(status, 0);
        assert_eq!((&found["full"], &found["empty"], &found["roots"]), (&20.into(), &10.into(), &4.into()));
        assert_eq!(found["store"]["namespace"], sample.config.namespace);
        assert_eq!(found["blocks_by_namespace"], serde_json::json!({ sample.config.namespace.as_str(): 20 }));
        assert_eq!(found["generations"], serde_json::json!({ "lowest": 1, "highest": 20 }));
        assert_eq!(found["bytes"], 20 * BLOCK_BYTES as u64);
        assert_eq!(found["members"][1]["slots"], 10);
    }
    let output = kvhoist(&["verify", sample.path(0), sample.path(1)]);
    let (table, progress) = (text(&output.stdout), text(&output.stderr));
    assert!(table.contains("payloads good                    20"), "{table}");
    assert!(progress.contains("20/20 blocks"), "{progress}");
    assert!(kvhoist(&["verify", "--quiet", sample.path(0), sample.path(1)]).stderr.is_empty());
    let table = kvhoist(&["inspect", sample.path(0), sample.path(1)]).stdout;
    assert!(text(&table).contains("20 (66.7%)") && !table.contains(&0x1b), "{}", text(&table));
    assert!(sample.state() == before, "looking changes nothing");
    // An older copy with a record that was never cleared: reported, but not damage.
    let (_, local) = (0, sample.free_slot());
    let (.., record) = sample.find(7);
    let older = sample.seal(0).encode(local, &Record { generation: 0, ..record });
    sample.file(0).write_all_at(&older, record_offset(local)).expect("written");
    let (report, status) = json("verify", &[sample.path(0), sample.path(1)]);
    assert_eq!((status, &report["superseded"], &report["payloads_good"]), (0, &1.into(), &20.into()));
    let twice = &report["duplicates"][0];
    assert_eq!((&twice["key_prefix"], &twice["generation"]), (&"08080808".into(), &record.generation.into()));
    assert_eq!(twice["superseded_generation"], 0);
}

#[test]
fn damage_is_listed_and_is_status_1() {
    let sample = Sample::new();
    let before = sample.state();
    let (member, local, _) = sample.find(3);
    let geometry = sample.stripe().members()[usize::from(member)];
    let payload = geometry.data_offset + u64::from(local) * 8192;
    sample.flip(member.into(), payload + BLOCK_BYTES as u64 - 1);
    let (other, other_local, _) = sample.find(9);
    sample.flip(other.into(), record_offset(other_local) + 40);
    sample.flip(1, 4096 + 20);
    let paths = [sample.path(0), sample.path(1)];
    let (report, status) = json("verify", &paths);
    assert_eq!((status, &report["clean"]), (1, &false.into()));
    let kinds = serde_json::json!({ "payload": 1, "record_crc": 1, "superblock_copy": 1 });
    assert_eq!((&report["faults"]["by_kind"], &report["faults"]["count"]), (&kinds, &3.into()));
    let listed = report["faults"]["listed"].as_array().expect("a list");
    let fault = listed.iter().find(|fault| fault["kind"] == "payload").expect("listed");
    assert_eq!((&fault["path"], &fault["offset"]), (&sample.path(member.into()).into(), &payload.into()));
    assert_eq!(fault["key_prefix"], "04040404", "four bytes of the key and no more");
    let (report, _) = json("verify", &[&["--list", "1"], &paths[..]].concat());
    assert_eq!(report["faults"]["listed"].as_array().map(Vec::len), Some(1));
    let output = kvhoist(&[&["verify", "--quiet", "--list", "1"], &paths[..]].concat());
    assert_eq!(text(&output.stderr), "kvhoist: 3 faults found\n");
    assert!(text(&output.stdout).contains("and 2 more"), "{}", text(&output.stdout));
    let (found, status) = json("inspect", &paths);
    assert_eq!((status, &found["full"], &found["bad"]), (0, &19.into(), &1.into()));
    // Neither mends what it finds.
    for (now, then) in sample.state().iter().zip(before) {
        let changed = now.1.iter().zip(then.1).filter(|(now, then)| *now != then).count();
        assert!(changed <= 3, "{}: {changed} bytes differ", now.0.display());
    }
    // No cache can open what follows.
    sample.flip(1, 20);
    let (report, status) = json("verify", &paths);
    assert_eq!((status, &report["faults"]["by_kind"]["superblocks"], &report["store"]), (1, &1.into(), &Value::Null));
    let output = kvhoist(&[&["inspect"], &paths[..]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("both superblocks are damaged"), "{}", text(&output.stderr));
}

#[test]
fn a_file_that_was_cut_short_is_damage() {
    let sample = Sample::new();
    let bytes = sample.stripe().members()[0].bytes;
    sample.file(0).set_len(bytes - 1).expect("cut");
    let (report, status) = json("verify", &[sample.path(0), sample.path(1)]);
    assert_eq!((status, &report["faults"]["by_kind"]), (1, &serde_json::json!({ "cut_short": 1 })));
    let output = kvhoist(&["inspect", sample.path(0), sample.path(1)]);
    let wanted = format!(
        "found {} bytes, expected {bytes} bytes, as the store was made with; restore the whole file, or remove the \
         store's files (wipe its devices)\n",
        bytes - 1
    );
    assert!(text(&output.stderr).ends_with(&wanted), "{}", text(&output.stderr));
}

#[test]
fn a_member_that_is_empty_or_zeros_is_not_called_damaged() {
    let sample = Sample::new();
    let folder = sample.dir.path().join("folder");
    fs::create_dir(&folder).expect("created");
    // An open calls the file in a folder so.
    let (file, paths) = (folder.join("kvhoist.store"), [sample.path(0), folder.to_str().expect("UTF-8")]);
    for bytes in [vec![], vec![0; 9000]] {
        fs::write(&file, bytes).expect("written");
        let (report, status) = json("verify", &paths);
        assert_eq!((status, &report["faults"]["by_kind"]), (1, &serde_json::json!({ "blank": 1 })));
        let output = kvhoist(&[&["inspect"], &paths[..]].concat());
        let wanted = "kvhoist.store: found an empty file, or one of zeros, expected a member of the store; bring it \
                      back, or remove the store's files (wipe its devices)\n";
        assert!(text(&output.stderr).ends_with(wanted), "{}", text(&output.stderr));
    }
}

#[test]
fn what_is_no_store_is_one_line_and_status_2() {
    let (sample, other) = (Sample::new(), Sample::new());
    let path = |name: &str| sample.dir.path().join(name).to_str().expect("UTF-8").to_owned();
    fs::write(path("foreign"), "this is no store").expect("written");
    fs::write(path("zeros"), [0; 9000]).expect("written");
    fs::write(path("empty"), "").expect("written");
    fs::write(path("newer"), {
        let mut bytes = fs::read(sample.path(0)).expect("readable");
        for copy in [0, 4096] {
            bytes[copy + 8] = 99;
            let crc = kvhoist::internals::checksum::checksum(&bytes[copy..copy + 504]);
            bytes[copy + 504..copy + 512].copy_from_slice(&crc.to_le_bytes());
        }
        bytes
    })
    .expect("written");
    std::os::unix::fs::symlink(sample.path(0), path("link")).expect("linked");
    let before = sample.state();
    let (a, b) = (sample.path(0), sample.path(1));
    let cases: &[(&[&str], &str)] = &[
        (&[a], "a store of 2 members"),
        (&[a, a], "missing or here twice"),
        (&[a, other.path(1)], "a member of another store"),
        (&[a, b, other.path(1)], "a member of another store"),
        (&[b], "missing or here twice"),
        (&[&path("missing")], "missing: found no store, expected a store"),
        (&[&path("no/such/place")], "no directory"),
        (&[sample.dir.path().to_str().expect("UTF-8")], ": found no store, expected a store; name every path"),
        (&[&path("foreign")], "kvhoist did not write"),
        (&[&path("zeros")], "no store (zeros)"),
        (&[&path("empty")], "no store (zeros)"),
        (&[&path("newer")], "format version 99, expected format version 2; open it with the newer kvhoist that wrote"),
        (&[&path("link"), b], "symbolic link"),
        (&["/dev/null"], "character device"),
        (&["--storage", "magic", a, b], "magic"),
    ];
    for (args, wanted) in cases {
        for command in ["verify", "inspect"] {
            let output = kvhoist(&[&[command], *args].concat());
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{command} {args:?}: {stderr}");
            assert_eq!(stderr.lines().count(), 1, "{command} {args:?}: {stderr}");
            assert!(stderr.starts_with("kvhoist: ") && stderr.contains(wanted), "{command} {args:?}: {stderr}");
            assert!(!stderr.contains("`disks`"), "there are no settings here: {stderr}");
            assert!(output.stdout.is_empty());
        }
    }
    for depth in ["0", "1025"] {
        let output = kvhoist(&["verify", "--depth", depth, a, b]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("1 to 1024"), "{}", text(&output.stderr));
    }
    assert!(sample.state() == before, "nothing was created or changed");
}

#[test]
fn a_store_in_use_is_refused_unless_allowed() {
    let sample = Sample::new();
    let paths = [sample.path(0), sample.path(1)];
    sample.with_cache(|_| {
        for command in ["verify", "inspect"] {
            let output = kvhoist(&[&[command], &paths[..]].concat());
            let stderr = text(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{stderr}");
            assert!(stderr.contains("--allow-in-use"), "{stderr}");
            let (report, status) = json(command, &[&["--allow-in-use"], &paths[..]].concat());
            assert_eq!((status, &report["in_use"]), (0, &true.into()));
        }
    });
    // Beside each other they run.
    let held = sample.file(0);
    held.lock_shared().expect("as another look holds it");
    let (report, status) = json("verify", &paths);
    assert_eq!((status, &report["in_use"]), (0, &false.into()));
    let refused = block_on(Cache::open(sample.config.clone())).expect_err("the store is being inspected");
    assert!(refused.to_string().contains("a lock on it"), "{refused}");
}

#[test]
fn an_interrupt_ends_it_with_what_is_known() {
    let sample = Sample::new();
    // It waits for the lock, so that the signal comes while there is still all to do.
    let lock = sample.file(1);
    lock.lock().expect("locked");
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvhoist"))
        .args(["verify", "--json", "--quiet", sample.path(0), sample.path(1)])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command runs");
    let give_up = Instant::now() + Duration::from_secs(60);
    while !catches_interrupts(child.id()) {
        assert!(child.try_wait().expect("a child").is_none() && Instant::now() < give_up, "it catches SIGINT");
        std::thread::yield_now();
    }
    // SAFETY: a plain system call; the child was not waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    drop(lock);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "kvhoist: interrupted\n");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!((&report["complete"], &report["clean"]), (&false.into(), &false.into()));
}

/// SIGINT has a handler in this process.
fn catches_interrupts(pid: u32) -> bool {
    let status = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 0b10 != 0)
}
