//! `kvhoist ls`, and the commands that docs/resize.md has, on stores as engines and services lay them out.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use kvhoist::{BlockKey, Cache, Config, DirectIo, DiskPath, block_on};
use kvhoist_service::{Client, ClientOptions, Server, ServerConfig};
use serde_json::Value;

const BLOCK_BYTES: usize = 4096;

fn kvhoist(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvhoist")).args(args).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn shown(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Two drives, each with the folder of a rank's pool, as SGLang's adapter makes them.
fn engine() -> (tempfile::TempDir, [PathBuf; 2], [PathBuf; 2]) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let roots = ["nvme0", "nvme1"].map(|name| dir.path().join(name));
    let folders = roots.clone().map(|root| root.join("llama-0123456789ab/tp0of2-pp0of1-cp0of1-dp0/kv"));
    folders.iter().for_each(|folder| fs::create_dir_all(folder).expect("made"));
    let config = Config::default()
        .block_bytes(BLOCK_BYTES)
        .host_blocks(4)
        .disks(folders.clone().map(|folder| DiskPath::with_blocks(folder, 10)).into())
        .direct_io(DirectIo::Prefer)
        .namespace("llama/tp0of2-pp0of1-cp0of1-dp0/kv/0123456789abcdef");
    let cache = block_on(Cache::open(config)).expect("a cache");
    for n in 0..5 {
        block_on(cache.store(&BlockKey::new([n; 32]), None, &[n; BLOCK_BYTES])).expect("stored");
    }
    block_on(cache.close()).expect("closed");
    (dir, roots, folders)
}

#[test]
fn stores_are_listed_by_model_and_rank_with_their_folders() {
    let (_dir, roots, folders) = engine();
    let output = kvhoist(&["ls", shown(&roots[0]), shown(&roots[1])]);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let row = table.lines().nth(1).expect("a store");
    assert!(
        row.contains(" 25.0%") && row.contains(" s ago") && row.contains("llama/tp0of2-pp0of1-cp0of1-dp0/kv/"),
        "{row}"
    );
    assert_eq!(table.lines().count(), 4, "one store in two folders: {table}");
    assert!(folders.iter().all(|folder| table.contains(shown(folder))), "{table}");
    let output = kvhoist(&["ls", "--json", shown(&roots[1]), shown(&roots[0])]);
    let list: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&list[0]["full"], &list[0]["slots"], &list[0]["in_use"]), (&5.into(), &20.into(), &false.into()));
    assert!(list[0]["bytes"].as_u64().is_some_and(|bytes| bytes > 20 * BLOCK_BYTES as u64), "{list}");
    // From farther above than folders are looked into.
    let deep = roots[0].join("1/2/3/4/5");
    fs::create_dir_all(&deep).expect("made");
    let cut = kvhoist(&["ls", shown(&roots[0])]);
    assert!(text(&cut.stderr).contains("deeper than the 4 folders"), "{}", text(&cut.stderr));
    fs::remove_dir_all(roots[0].join("1")).expect("removed");
    // A drive that is not named, or is gone.
    let half = kvhoist(&["ls", shown(&roots[0])]);
    assert!(text(&half.stdout).contains("a store of 2 members"), "{}", text(&half.stdout));
    assert_eq!(kvhoist(&["ls", "/nonexistent"]).status.code(), Some(2));
}

/// A store in the folder `store` below each of some drives, closed; every member has a slot.
fn store_below(drives: &[&Path]) -> Vec<PathBuf> {
    let folders: Vec<PathBuf> = drives.iter().map(|drive| drive.join("store")).collect();
    folders.iter().for_each(|folder| fs::create_dir_all(folder).expect("made"));
    let disks = folders.iter().map(|folder| DiskPath::with_blocks(folder, 10)).collect();
    let config = Config::default().block_bytes(BLOCK_BYTES).host_blocks(4).disks(disks).direct_io(DirectIo::Prefer);
    let cache = block_on(Cache::open(config)).expect("a cache");
    block_on(cache.close()).expect("closed");
    folders.iter().map(|folder| folder.join("kvhoist.store")).collect()
}

/// What each store is said to be, and in how many folders it lies.
fn states(args: &[&Path]) -> Vec<(String, usize)> {
    let args: Vec<&str> = args.iter().map(|path| shown(path)).collect();
    let output = kvhoist(&[&["ls", "--json"][..], &args].concat());
    let list: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let of = |store: &Value| {
        let state = store["state"].as_str().unwrap_or("sound").to_owned();
        (state, store["paths"].as_array().expect("a list").len())
    };
    list.as_array().expect("a list").iter().map(of).collect()
}

#[test]
fn a_sound_store_is_listed_as_one_whatever_lies_beside_it() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let drives = ["a", "b", "c"].map(|name| dir.path().join(name));
    let [a, b, c] = drives.each_ref().map(PathBuf::as_path);
    let said = |state: &str, folders| (state.to_owned(), folders);
    let one = store_below(&[a]).remove(0);
    assert_eq!(states(&[a, a]), [said("sound", 1)], "named twice");
    // Independent stores at the same place below their drives.
    let two = store_below(&[b, c]);
    assert_eq!(states(&[a, b, c]), [said("sound", 1), said("sound", 2)]);
    assert_eq!(states(&[a, b]), [said("sound", 1), said("incomplete", 1)]);
    // A member without a superblock is that of the store that lacks one.
    let bytes = fs::read(&two[1]).expect("a store");
    let mut damaged = bytes.clone();
    [100, 4196].into_iter().for_each(|at| damaged[at] ^= 1);
    fs::write(&two[1], &damaged).expect("written");
    assert_eq!(states(&[a, b, c]), [said("sound", 1), said("damaged", 2)]);
    fs::write(&two[1], &bytes).expect("written");
    // A creation that was cut off.
    fs::write(&one, vec![0; fs::read(&one).expect("a store").len()]).expect("written");
    assert_eq!(states(&[a, b, c]), [said("unfinished", 1), said("sound", 2)]);
    fs::write(&one, "not a store").expect("written");
    assert_eq!(states(&[a, b, c]), [said("unreadable", 1), said("sound", 2)]);
    let table = kvhoist(&["ls", shown(a)]);
    assert!(text(&table.stdout).contains(" unreadable ") && !text(&table.stdout).contains("damaged"));
}

#[test]
fn the_commands_of_the_page_on_sizes_work_on_the_folders_of_an_engine() {
    let (_dir, roots, folders) = engine();
    for command in [&["inspect"][..], &["verify"], &["wipe", "--yes"]] {
        let refused = kvhoist(&[command, &[shown(&roots[0]), shown(&roots[1])]].concat());
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains("1 store below it") && said.contains(shown(&folders[0])), "{said}");
        assert!(folders.iter().all(|folder| folder.join("kvhoist.store").exists()), "nothing is removed");
    }
    for command in [&["inspect"][..], &["verify"], &["wipe", "--yes"]] {
        let output = kvhoist(&[command, &[shown(&folders[1]), shown(&folders[0])]].concat());
        assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    }
    assert_eq!(text(&kvhoist(&["ls", shown(&roots[0])]).stdout), "no stores\n");
}

#[test]
fn a_space_of_a_service_is_listed_and_not_wiped_behind_its_back() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let place = tempfile::tempdir().expect("a directory");
    let mut config = ServerConfig::new(place.path().join("s"));
    let roots = ["nvme0", "nvme1"].map(|name| dir.path().join(name));
    roots.iter().for_each(|root| fs::create_dir(root).expect("made"));
    config.paths = roots.to_vec();
    (config.capacity_bytes, config.host_bytes) = (16 << 20, 1 << 20);
    config.cache = Config::default().direct_io(DirectIo::Prefer);
    let server = Server::start(config).expect("a service");
    let client =
        block_on(Client::connect(server.socket(), ClientOptions::new("qwen", BLOCK_BYTES))).expect("connected");
    let listed = kvhoist(&["ls", shown(&roots[0]), shown(&roots[1])]);
    let listed = text(&listed.stdout);
    assert!(listed.contains("yes     qwen") && listed.contains("(a service's space)"), "{listed}");
    block_on(client.close()).expect("closed");
    server.drain();
    server.wait().expect("ended");
    let list = kvhoist(&["ls", "--json", shown(&roots[0]), shown(&roots[1])]);
    let list: Value = serde_json::from_slice(&list.stdout).expect("JSON");
    for folder in list[0]["paths"].as_array().filter(|paths| paths.len() == 2).expect("two folders") {
        let folder = folder.as_str().expect("a folder");
        let file = Path::new(folder).join("kvhoist.store");
        // Also beside a folder that is not there, as of a mistyped one.
        for paths in [&[folder][..], &[shown(&file)], &[shown(&roots[0].join("mistyped")), folder]] {
            let refused = kvhoist(&[&["wipe", "--yes"][..], paths].concat());
            assert!(text(&refused.stderr).contains("`kvhoist space rm`"), "{}", text(&refused.stderr));
            assert!(file.exists());
        }
    }
}
