//! The end of a store.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::Stdio,
};

use kvhoist::{Cache, Config, DiskPath, block_on, internals::checksum::checksum};

use super::{command, directory, kvhoist, shown, terminal, text};

fn stored(dir: &Path) -> Config {
    let disks = ["a", "b"].map(|name| DiskPath::with_blocks(dir.join(name), 16)).into();
    let config = Config::default().block_bytes(4096).host_blocks(4).disks(disks);
    block_on(async {
        let cache = Cache::open(config.clone()).await.expect("open");
        cache.close().await.expect("close");
    });
    config
}

#[test]
fn a_store_is_wiped_only_if_it_is_one_and_nobody_uses_it_and_that_is_meant() {
    let dir = directory();
    let config = stored(dir.path());
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let (foreign, damaged) = (dir.path().join("foreign"), dir.path().join("damaged"));
    fs::write(&foreign, "not a store").expect("written");
    let mut bytes = fs::read(&a).expect("read");
    [100, 4196].into_iter().for_each(|at| bytes[at] ^= 1);
    fs::write(&damaged, bytes).expect("written");
    let state = || [&a, &b, &foreign].map(|path| fs::read(path).ok());
    let before = state();
    let both = ["wipe", "--yes", shown(&a), shown(&b)];
    let cases: [(&[&str], &str); 6] = [
        (&["wipe", shown(&a), shown(&b)], "add --yes"),
        (&["wipe", "--yes", shown(&a)], "a store of 2 members"),
        (&["wipe", "--yes", shown(&foreign)], "kvhoist did not write"),
        (&["wipe", "--yes", shown(&a), shown(&b), shown(&foreign)], "kvhoist did not write"),
        (&["wipe", "--yes", shown(&damaged), shown(&a), shown(&b)], "a store of 2 members"),
        (&["wipe", "--yes", "/dev/null"], "character device"),
    ];
    for (args, wanted) in cases {
        let output = kvhoist(args);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{args:?}: {said}");
        assert!(said.contains(wanted), "{args:?}: {said}");
        assert!(state() == before, "{args:?} changed something");
    }
    let cache = block_on(Cache::open(config.clone())).expect("open");
    let output = kvhoist(&both);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("close what has it open first"), "{}", text(&output.stderr));
    block_on(cache.close()).expect("closed");
    // Nor one that another process looks at.
    let look = fs::File::open(&a).expect("open");
    look.lock_shared().expect("locked");
    assert!(text(&kvhoist(&both).stderr).contains("close what has it open first"));
    drop(look);
    let (ours, theirs) = terminal();
    for (answer, status) in [("no\n", 1), ("yes\n", 0)] {
        let stdin = theirs.try_clone().expect("a copy");
        let mut asked = command(&["wipe", shown(&a), shown(&b)]);
        let child = asked.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command runs");
        fs::File::from(ours.try_clone().expect("a copy")).write_all(answer.as_bytes()).expect("typed");
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(status), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("16 slots") || text(&output.stderr).contains("32 slots"));
        assert_eq!((a.exists(), b.exists(), foreign.exists()), (status == 1, status == 1, true));
    }
}

#[test]
fn a_wipe_that_was_cut_off_is_finished_by_another() {
    for foreign in [&b"not a store"[..], &[&[0; 65536][..], b"data behind zeros"].concat()] {
        let dir = directory();
        stored(dir.path());
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let both = ["wipe", "--yes", shown(&a), shown(&b)];
        fs::write(&a, foreign).expect("written");
        let output = kvhoist(&both);
        assert_eq!((output.status.code(), b.exists()), (Some(2), true), "{}", text(&output.stderr));
        assert!(fs::read(&a).expect("still there") == foreign, "it is not the store's");
        // Zeros of a name that no store in a folder has may be anything.
        fs::write(&a, vec![0; 65536]).expect("zeros");
        let output = kvhoist(&both);
        assert_eq!((output.status.code(), a.exists(), b.exists()), (Some(2), true, true), "{}", text(&output.stderr));
        fs::remove_file(&a).expect("removed");
        assert_eq!(kvhoist(&["wipe", "--yes", shown(&b)]).status.code(), Some(2), "not all are named");
        let output = kvhoist(&both);
        let wanted = format!("removed the rest of a store, at {} (gone already: {})\n", shown(&b), shown(&a));
        assert_eq!(text(&output.stdout), wanted, "{}", text(&output.stderr));
        // Before it is removed, too.
        assert_eq!(text(&output.stderr), wanted.replacen("removed", "kvhoist: removing", 1));
        assert!(!b.exists());
        let output = kvhoist(&both);
        assert_eq!(output.status.code(), Some(2), "nothing is left");
        assert!(text(&output.stderr).contains("no store"), "{}", text(&output.stderr));
    }
}

/// The file of a store in one folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    Missing,
    Empty,
    Zeros,
    Forming,
    Torn,
    Whole,
}

/// Leaves folders as a creation does that was cut off, or as they are after some damage.
fn left(dir: &Path, files: &[Left]) -> Vec<PathBuf> {
    let folders: Vec<PathBuf> = (0..files.len()).map(|n| dir.join(n.to_string())).collect();
    folders.iter().for_each(|folder| fs::create_dir(folder).expect("made"));
    let disks = folders.iter().map(|folder| DiskPath::with_blocks(folder, 16)).collect();
    let config = Config::default().block_bytes(4096).host_blocks(4).disks(disks);
    let cache = block_on(Cache::open(config)).expect("open");
    block_on(cache.close()).expect("close");
    for (folder, left) in folders.iter().zip(files) {
        let path = folder.join("kvhoist.store");
        let mut bytes = fs::read(&path).expect("a store");
        match left {
            Left::Missing => fs::remove_file(&path).expect("removed"),
            Left::Empty => bytes.clear(),
            Left::Zeros => bytes.fill(0),
            Left::Forming | Left::Torn => {
                bytes[12] = 1;
                // Another creation, which was cut off too, began with another id.
                bytes[16] = bytes[16].wrapping_add(u8::from(folder.ends_with("1")));
                let crc = checksum(&bytes[..504]).to_le_bytes();
                bytes[504..512].copy_from_slice(&crc);
                bytes[4096..8192].fill(0);
                bytes[if *left == Left::Torn { 100..512 } else { 0..0 }].fill(0);
            }
            Left::Whole => {}
        }
        if *left != Left::Missing {
            fs::write(&path, bytes).expect("written");
        }
    }
    folders
}

#[test]
fn what_a_killed_creation_leaves_is_wiped_and_gone() {
    use Left::{Empty, Forming, Missing, Torn, Whole, Zeros};
    let cases = [
        [Zeros, Empty, Empty],
        [Zeros, Zeros, Missing],
        [Forming, Zeros, Zeros],
        [Forming, Forming, Zeros],
        [Forming, Torn, Zeros],
        // Not of a creation: a member's file was zeroed.
        [Whole, Zeros, Whole],
    ];
    for files in cases {
        let dir = directory();
        let folders = left(dir.path(), &files);
        let paths: Vec<&str> = folders.iter().map(|folder| shown(folder)).collect();
        let is_creation = files.iter().all(|left| [Zeros, Empty, Forming].contains(left));
        for look in ["inspect", "verify"] {
            let output = kvhoist(&[&[look][..], &paths].concat());
            let said = text(&output.stderr);
            assert!(!output.status.success() && !said.contains("close what"), "{files:?}: {said}");
            let expected = is_creation.then_some("its first and last MiB hold no block: open it again");
            assert!(expected.is_none_or(|expected| said.contains(expected)), "{files:?}: {said}");
            assert!(!is_creation || output.status.code() == Some(2), "{files:?}: {said}");
        }
        let output = kvhoist(&[&["wipe", "--yes"][..], &paths].concat());
        assert!(output.status.success(), "{files:?}: {}", text(&output.stderr));
        let gone = if files[2] == Missing { "(gone already: " } else { "a damaged or unfinished store" };
        assert!(text(&output.stdout).contains(gone), "{files:?}: {}", text(&output.stdout));
        for folder in &folders {
            assert_eq!(fs::read_dir(folder).expect("it stays").count(), 0, "{files:?}: {}", folder.display());
        }
    }
}

#[test]
fn a_file_of_a_stores_name_with_data_behind_zeros_is_not_wiped() {
    let dir = directory();
    let folders = left(dir.path(), &[Left::Zeros, Left::Zeros]);
    let path = folders[0].join("kvhoist.store");
    let zeros = fs::read(&path).expect("zeros");
    for at in [9000, zeros.len() - 1] {
        let mut bytes = zeros.clone();
        bytes[at] = 1;
        fs::write(&path, &bytes).expect("written");
        let output = kvhoist(&["wipe", "--yes", shown(&folders[0]), shown(&folders[1])]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains("no store (zeros)"), "{said}");
        assert!(fs::read(&path).expect("it stays") == bytes && folders[1].join("kvhoist.store").exists());
    }
}

#[test]
fn a_store_with_a_second_name_is_not_called_removed() {
    let dir = directory();
    stored(dir.path());
    let (a, b, other) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("other"));
    fs::hard_link(&b, &other).expect("linked");
    let both = ["wipe", "--yes", shown(&a), shown(&b)];
    let output = kvhoist(&both);
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), a.exists(), b.exists()), (Some(2), true, true), "{said}");
    assert!(said.contains("2 hard links") && said.contains("remove its other names (find -inum"), "{said}");
    assert!(!said.contains("--path"), "{said}");
    fs::remove_file(&other).expect("removed");
    assert!(kvhoist(&both).status.success() && !a.exists() && !b.exists());
}
