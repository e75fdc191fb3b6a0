//! Several who open one store: a refused open changes nothing that another made meanwhile, and a closed store is free.

#[path = "../common/mod.rs"]
mod common;

use std::{
    fs::{self, File},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use common::{config, directory, fetch_verified, store, store_file};
use kvhoist::{Cache, Config, Error, StorageKind, block_on, internals::disk::open_files};
use tempfile::TempDir;

fn settings(dir: &TempDir, namespace: &str) -> Config {
    config(dir, StorageKind::Blocking, 4, 8).namespace(namespace)
}

/// An empty file as an open creates it.
fn create_empty(path: &Path) -> File {
    File::options().read(true).write(true).create_new(true).mode(0o600).open(path).expect("created")
}

/// The bytes of a store of this namespace that holds block 1.
fn template(namespace: &str) -> Vec<u8> {
    let dir = directory();
    let cache = block_on(Cache::open(settings(&dir, namespace))).expect("open");
    block_on(store(&cache, 1));
    block_on(cache.close()).expect("close");
    fs::read(store_file(&dir)).expect("the store")
}

/// Descriptors of this process that have the file open.
fn descriptors_of(file: &File) -> usize {
    let wanted = file.metadata().expect("metadata");
    let same = |entry: fs::DirEntry| {
        fs::metadata(entry.path()).is_ok_and(|other| (other.dev(), other.ino()) == (wanted.dev(), wanted.ino()))
    };
    fs::read_dir("/proc/self/fd").expect("procfs").flatten().filter_map(|entry| same(entry).then_some(())).count()
}

/// Runs `while_waiting` when an open with these settings has the empty store file open and waits for its lock. `None`
/// where that took longer than the open waits.
fn open_while_locked(
    config: Config,
    path: &Path,
    while_waiting: impl FnOnce(&File),
) -> Option<Result<Cache, kvhoist::Error>> {
    let winner = create_empty(path);
    winner.lock().expect("not locked elsewhere");
    let opened = thread::scope(|scope| {
        let loser = scope.spawn(move || block_on(Cache::open(config)));
        let give_up = Instant::now() + Duration::from_secs(60);
        while descriptors_of(&winner) < 2 && !loser.is_finished() {
            assert!(Instant::now() < give_up, "it opens the file");
            thread::yield_now();
        }
        while_waiting(&winner);
        // Not by closing it: children of other tests may have inherited the descriptor.
        winner.unlock().expect("locked");
        loser.join().expect("no panic")
    });
    let too_late = opened.as_ref().is_err_and(|error| error.to_string().contains("a lock on it"));
    (!too_late).then_some(opened)
}

#[test]
fn a_refused_open_leaves_a_store_that_was_made_while_it_waited() {
    let bytes = template("winner");
    let decided = (0..50).any(|_| {
        let dir = directory();
        let path = store_file(&dir);
        let opened = open_while_locked(settings(&dir, "loser"), &path, |_| fs::write(&path, &bytes).expect("written"));
        assert!(fs::read(&path).expect("the store is there") == bytes, "the winner's store is as it was");
        let Some(opened) = opened else { return false };
        let error = opened.expect_err("another namespace");
        assert!(error.to_string().contains("`namespace` = \"winner\""), "{error}");
        true
    });
    assert!(decided, "no open ever met the finished store");
}

#[test]
fn an_open_that_waited_for_a_file_that_went_away_opens_what_is_there_now() {
    let bytes = template("both");
    let decided = (0..50).any(|_| {
        let dir = directory();
        let (path, other) = (store_file(&dir), dir.path().join("other"));
        let opened = open_while_locked(settings(&dir, "both"), &path, |_| {
            create_empty(&other);
            fs::write(&other, &bytes).expect("written");
            fs::rename(&other, &path).expect("renamed");
        });
        let Some(opened) = opened else { return false };
        let cache = opened.expect("the path names a sound store");
        assert!(block_on(fetch_verified(&cache, 1)));
        block_on(cache.close()).expect("close");
        true
    });
    assert!(decided, "no open ever met the other file");
}

/// A round of two caches that start at once on one path: who won, stored and closed is there afterwards.
fn race(round: u64) {
    let dir = directory();
    let start = Barrier::new(2);
    let run = |namespace: &'static str| {
        start.wait();
        match block_on(Cache::open(settings(&dir, namespace))) {
            Ok(cache) => {
                block_on(store(&cache, 1));
                block_on(cache.close()).expect("close");
                Some(namespace)
            }
            Err(Error::Store { .. }) => None,
            Err(other) => panic!("round {round}: {other}"),
        }
    };
    let winners: Vec<&str> = thread::scope(|scope| {
        let runs = ["one", "two"].map(|namespace| scope.spawn(move || run(namespace)));
        runs.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
    });
    let [winner] = winners[..] else { panic!("round {round}: a store has one namespace, not {winners:?}") };
    let cache = block_on(Cache::open(settings(&dir, winner))).expect("the winner's store");
    assert!(block_on(fetch_verified(&cache, 1)), "round {round}: a block that was stored and closed over");
    block_on(cache.close()).expect("close");
}

#[test]
fn of_two_caches_that_start_at_once_the_winner_keeps_what_it_stored() {
    (0..60).for_each(race);
}

/// A child of this process that does this and then waits to be ended.
struct Child(libc::pid_t);

impl Child {
    fn fork(work: impl FnOnce()) -> Self {
        let (mut ready, mut tell) = std::io::pipe().expect("a pipe");
        // SAFETY: the child does no more than `work`, which waits for no other thread, and ends without destructors.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            work();
            let _ = std::io::Write::write_all(&mut tell, b"x");
            loop {
                // SAFETY: takes nothing; a signal ends it.
                unsafe { libc::pause() };
            }
        }
        assert!(pid > 0, "{}", std::io::Error::last_os_error());
        drop(tell);
        std::io::Read::read_exact(&mut ready, &mut [0]).expect("the child has done its work");
        Child(pid)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: takes numbers; the child is not waited for elsewhere.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: as above; the status may be left out.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

#[test]
fn a_closed_store_opens_again_while_a_forked_child_lives() {
    for storage in [StorageKind::Auto, StorageKind::Blocking] {
        let dir = directory();
        let settings = || config(&dir, storage, 4, 8);
        let cache = block_on(Cache::open(settings())).expect("open");
        block_on(store(&cache, 1));
        let child = Child::fork(|| ());
        block_on(cache.close()).expect("close");
        let cache = block_on(Cache::open(settings())).expect("the store is closed, whatever the child has open");
        assert!(block_on(fetch_verified(&cache, 1)));
        block_on(cache.close()).expect("close");
        drop(child);
    }
}

#[test]
fn a_forked_child_does_not_release_the_lock_of_its_parent() {
    let dir = directory();
    let settings = config(&dir, StorageKind::Blocking, 4, 8);
    let files = open_files(&settings).expect("opened");
    // SAFETY: the child's copy of the files is dropped in the child alone.
    let copy = std::mem::ManuallyDrop::new(unsafe { std::ptr::read(&raw const files) });
    let child = Child::fork(move || drop(std::mem::ManuallyDrop::into_inner(copy)));
    let refused = open_files(&settings).expect_err("the parent has it open");
    assert!(refused.to_string().contains("a lock on it"), "{refused}");
    drop(child);
    drop(files);
    open_files(&settings).expect("closed");
}
