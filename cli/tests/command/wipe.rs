//! The end of a store.

use std::{fs, io::Write, path::Path, process::Stdio};

use kvhoist::{Cache, Config, DiskPath, block_on};

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
        match foreign.len() {
            11 => fs::remove_file(&a).expect("removed"),
            _ => fs::write(&a, vec![0; 65536]).expect("zeros"),
        }
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
