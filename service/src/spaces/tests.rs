//! Removals of spaces, and what they share with files, over this machine's files.

use std::{
    cell::Cell,
    collections::BTreeSet,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    pin::pin,
    rc::Rc,
    time::Duration,
};

use futures_util::{
    FutureExt,
    future::{Either, select},
};
use kvhoist::{BlockKey, Cache, Config, DirectIo};
use tokio::{sync::Semaphore, task::LocalSet};

use super::{SourceFile, Spaces, Wanted, files::WantedFile};
use crate::{
    config::ServerConfig,
    error::{Error, Result, ServiceFault},
    held::memory::memory_bytes,
    memory::Mapped,
    peers::own_uid,
    protocol::Failure,
    system::{Later, Machine, Made, System},
};

const BLOCK_BYTES: usize = 4096;

/// This machine, which deletes the folders of a space when a test lets it.
struct Gated {
    deletions: Rc<Semaphore>,
    /// The next cache fails to open, after its files were made.
    opens_fail: Rc<Cell<bool>>,
    /// The next removal fails, after the folders were removed.
    removals_fail: Rc<Cell<bool>>,
}

impl System for Gated {
    fn spaces(&self, path: &Path) -> Result<Vec<(PathBuf, Result<String>)>> {
        Machine.spaces(path)
    }

    fn make_space(&self, folders: Vec<PathBuf>, text: String, is_new: bool) -> Later<Result<Made>> {
        Machine.make_space(folders, text, is_new)
    }

    fn forget_space(&self, folders: Vec<PathBuf>) -> Later<bool> {
        Machine.forget_space(folders)
    }

    fn store_bytes(&self, folders: &[PathBuf]) -> u64 {
        Machine.store_bytes(folders)
    }

    fn remove_space(&self, folders: Vec<PathBuf>) -> Later<Result<()>> {
        let (deletions, fails) = (Rc::clone(&self.deletions), Rc::clone(&self.removals_fail));
        Box::pin(async move {
            deletions.acquire().await.expect("nobody closes it").forget();
            Machine.remove_space(folders).await?;
            if fails.replace(false) { Err(broken("remove")) } else { Ok(()) }
        })
    }

    fn open_cache(&self, config: Config) -> Later<Result<Cache>> {
        let fails = self.opens_fail.replace(false);
        Box::pin(async move {
            let cache = Machine.open_cache(config).await?;
            if !fails {
                return Ok(cache);
            }
            cache.close().await?;
            Err(broken("read"))
        })
    }

    fn run(&self, work: Box<dyn FnOnce() + Send>) {
        Machine.run(work);
    }

    fn map(&self, fd: &OwnedFd, offset: u64, len: u64) -> Result<Mapped, Failure> {
        Machine.map(fd, offset, len)
    }

    unsafe fn unmap(&self, start: *mut u8, len: usize) -> Later<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { Machine.unmap(start, len) }
    }
}

fn broken(op: &'static str) -> Error {
    Error::io(op, "a drive", io::Error::from_raw_os_error(libc::EIO))
}

fn load(folder: &Path) -> (Rc<Spaces>, Rc<Semaphore>) {
    load_with(folder, &[])
}

fn load_with(folder: &Path, shares: &[&str]) -> (Rc<Spaces>, Rc<Semaphore>) {
    load_failing(folder, shares, Rc::default())
}

fn load_failing(folder: &Path, shares: &[&str], opens_fail: Rc<Cell<bool>>) -> (Rc<Spaces>, Rc<Semaphore>) {
    load_config(config(folder, shares), opens_fail)
}

fn config(folder: &Path, shares: &[&str]) -> ServerConfig {
    let mut config = ServerConfig::new(folder.join("socket"));
    config.paths = vec![folder.to_owned()];
    (config.capacity_bytes, config.host_bytes) = (16 << 20, 1 << 20);
    config.cache = Config::default().direct_io(DirectIo::Prefer);
    config.shares = shares.iter().map(|share| share.parse().expect("a share")).collect();
    config
}

fn load_config(config: ServerConfig, opens_fail: Rc<Cell<bool>>) -> (Rc<Spaces>, Rc<Semaphore>) {
    let gated = Gated { deletions: Rc::new(Semaphore::new(0)), opens_fail, removals_fail: Rc::default() };
    let deletions = Rc::clone(&gated.deletions);
    (load_gated(config, gated), deletions)
}

fn load_gated(config: ServerConfig, gated: Gated) -> Rc<Spaces> {
    Rc::new(Spaces::load(config, Rc::new(gated)).expect("loaded"))
}

#[tokio::test]
async fn a_removal_whose_caller_has_gone_continues_to_its_end() {
    let folder = tempfile::tempdir().expect("a directory");
    let (spaces, deletions) = load(folder.path());
    let run = async {
        let before = spaces.left();
        drop(spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached"));
        assert!(
            spaces.remove(Wanted::of_tests(BLOCK_BYTES)).now_or_never().is_none(),
            "the cache has to be closed first"
        );
        let refused = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).now_or_never().expect("an answer at once");
        assert_eq!(refused.err().map(|failure| failure.fault), Some(ServiceFault::Busy));
        deletions.add_permits(1);
        spaces.remove(Wanted::of_tests(BLOCK_BYTES)).await.expect("the end of the removal");
        assert_eq!(spaces.left(), before);
        drop(spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("made anew"));
        assert!(
            spaces.remove(Wanted::of_tests(BLOCK_BYTES)).now_or_never().is_none(),
            "the cache has to be closed first"
        );
        deletions.add_permits(1);
        spaces.close().await.expect("closed, after the removal");
        assert_eq!(spaces.left(), before);
    };
    LocalSet::new().run_until(run).await;
}

#[tokio::test]
async fn a_new_space_that_fails_to_open_keeps_the_disk_that_its_file_takes() {
    let folder = tempfile::tempdir().expect("a directory");
    let opens_fail = Rc::new(Cell::new(true));
    let (spaces, deletions) = load_failing(folder.path(), &[], Rc::clone(&opens_fail));
    let run = async {
        let before = spaces.left();
        let of = |namespace: &str| Wanted {
            namespace: namespace.into(),
            capacity_bytes: 12 << 20,
            ..Wanted::of_tests(BLOCK_BYTES)
        };
        let failed = spaces.attach(of("tests")).await;
        assert_eq!(failed.err().map(|failure| failure.fault), Some(ServiceFault::Io));
        assert_eq!(spaces.left(), (before.0 - (12 << 20), before.1), "the file is there, and no host memory is taken");
        let other = spaces.attach(of("other")).await;
        assert_eq!(other.err().map(|failure| failure.fault), Some(ServiceFault::Capacity), "no disk is promised twice");
        let space = spaces.attach(of("tests")).await.expect("another attach opens it");
        assert_eq!(space.capacity_bytes, 12 << 20);
        // Also after a kill that left the drive busy for longer than an open of a cache waits.
        let config = space.cache.config();
        assert_eq!(config.disk.lock_wait, Duration::from_millis(config.limits.deadline_ms / 2));
        drop(space);
        deletions.add_permits(1);
        spaces.remove(of("tests")).await.expect("removed");
        assert_eq!(spaces.left(), before);
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

/// No store was made: that comes after all folders and the file.
#[tokio::test]
async fn a_new_space_whose_folders_cannot_be_made_keeps_no_disk() {
    let folder = tempfile::tempdir().expect("a directory");
    let [first, second] = ["1", "2"].map(|path| folder.path().join(path));
    for path in [&first, &second] {
        std::fs::create_dir(path).expect("made");
    }
    let config = ServerConfig { paths: vec![first.clone(), second.clone()], ..config(folder.path(), &[]) };
    let (spaces, _) = load_config(config, Rc::default());
    let run = async {
        let before = spaces.left();
        std::fs::remove_dir(&second).and_then(|()| std::fs::write(&second, "no folder")).expect("in its place");
        let failed = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await;
        assert_eq!(failed.err().map(|failure| failure.fault), Some(ServiceFault::Io));
        assert_eq!((spaces.left(), spaces.count()), (before, 0));
        assert_eq!(std::fs::read_dir(&first).expect("there").count(), 0);
    };
    LocalSet::new().run_until(run).await;
}

/// The parent of the folder could not be flushed, for one.
#[tokio::test]
async fn a_space_whose_removal_failed_in_the_end_has_its_file_again_with_its_next_store() {
    let folder = tempfile::tempdir().expect("a directory");
    let removals_fail = Rc::new(Cell::new(true));
    let gated = Gated {
        deletions: Rc::new(Semaphore::new(1)),
        opens_fail: Rc::default(),
        removals_fail: Rc::clone(&removals_fail),
    };
    let spaces = load_gated(config(folder.path(), &[]), gated);
    let of_tests = || Wanted { capacity_bytes: 4 << 20, ..Wanted::of_tests(BLOCK_BYTES) };
    let run = async {
        drop(spaces.attach(of_tests()).await.expect("made"));
        let failed = spaces.remove(of_tests()).await.expect_err("a drive that is broken");
        assert_eq!((failed.fault, removals_fail.get()), (ServiceFault::Io, false));
        drop(spaces.attach(of_tests()).await.expect("made anew"));
        let left = spaces.left().0;
        spaces.close().await.expect("closed");
        let (spaces, _) = load(folder.path());
        assert_eq!((spaces.count(), spaces.left().0), (1, left), "the next service knows it");
    };
    LocalSet::new().run_until(run).await;
}

#[tokio::test]
async fn two_removals_at_a_time_remove_a_space_once() {
    let folder = tempfile::tempdir().expect("a directory");
    let (key, block) = (BlockKey::new([7; 32]), [7; BLOCK_BYTES]);
    let (spaces, deletions) = load(folder.path());
    let run = async {
        drop(spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached"));
        let (first, second) =
            (pin!(spaces.remove(Wanted::of_tests(BLOCK_BYTES))), pin!(spaces.remove(Wanted::of_tests(BLOCK_BYTES))));
        deletions.add_permits(1);
        let (Either::Left((removed, other)) | Either::Right((removed, other))) = select(first, second).await;
        removed.expect("removed");
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("made anew");
        space.cache.store(&key, None, &block).await.expect("stored");
        deletions.add_permits(1);
        other.await.expect("removed before");
        drop(space);
        spaces.close().await.expect("closed");
        let (spaces, _) = load(folder.path());
        let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("the space that was made anew");
        let lease = space.cache.fetch(&key).await.expect("served").expect("the block stays");
        assert_eq!(lease[..], block);
    };
    LocalSet::new().run_until(run).await;
}

/// Each user may name a space as a share is named; only the share's own user gets the floor, at once and after a
/// restart.
#[tokio::test]
async fn a_floor_is_not_for_another_users_space_of_the_same_name() {
    let folder = tempfile::tempdir().expect("a directory");
    let share = format!("tests:uid={},disk=12MiB..,host=768KiB..", own_uid() + 7);
    let run = async {
        let (spaces, _) = load_with(folder.path(), &[&share]);
        let of = |uid: u32| Wanted { uid, ..Wanted::of_tests(BLOCK_BYTES) };
        let found = spaces.attach(Wanted { capacity_bytes: 5 << 20, ..of(own_uid() + 8) }).await;
        assert_eq!(found.err().map(|failure| failure.fault), Some(ServiceFault::Capacity), "the floor is not its");
        let shared = spaces.attach(Wanted {
            shared: true,
            capacity_bytes: 2 << 20,
            host_bytes: 65_536,
            ..Wanted::of_tests(BLOCK_BYTES)
        });
        let shared = shared.await.expect("of what others leave");
        let other = spaces.attach(of(own_uid() + 8)).await.expect("what is left of the rest");
        assert_eq!((other.capacity_bytes, other.host_bytes()), (2 << 20, (1 << 18) - 65_536));
        let own = spaces.attach(of(own_uid() + 7)).await.expect("the floor");
        assert_eq!((own.capacity_bytes, own.host_bytes()), (12 << 20, 768 << 10));
        drop((shared, other, own));
        spaces.close().await.expect("closed");
        let (spaces, _) = load_with(folder.path(), &[&share]);
        assert_eq!(spaces.left().0, 0, "each space has what it had");
    };
    LocalSet::new().run_until(run).await;
}

/// Whoever may write to a space in a remote store gives all who read there their blocks.
#[tokio::test]
async fn spaces_of_one_name_have_their_own_objects_in_a_remote_store() {
    let folder = tempfile::tempdir().expect("a directory");
    let run = async {
        let (spaces, _) = load(folder.path());
        let mut owners = BTreeSet::new();
        for (uid, shared) in [(own_uid(), false), (own_uid() + 1, false), (own_uid(), true)] {
            let wanted =
                Wanted { uid, shared, capacity_bytes: 2 << 20, host_bytes: 65_536, ..Wanted::of_tests(BLOCK_BYTES) };
            let space = spaces.attach(wanted).await.expect("room for three");
            owners.insert(space.cache.config().remote.owner.clone());
        }
        assert_eq!(owners.len(), 3, "{owners:?}");
        spaces.close().await.expect("closed");
    };
    LocalSet::new().run_until(run).await;
}

/// What a refused request asks for is counted before a file is given up for it.
async fn refuses_then_opens(move_host: bool) {
    let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    let file_in = |folder: &Path, name: &str, len: u64| {
        let path = folder.join(name);
        std::fs::File::create(&path).and_then(|file| file.set_len(len)).expect("made");
        let identity = SourceFile::open(&path).expect("there").identity();
        WantedFile { path: path.display().to_string(), identity, keep: true }
    };
    let file = |name: &str, len: u64| file_in(folder.path(), name, len);
    let space = |namespace: &str, capacity_bytes: u64, host_bytes: u64| {
        let namespace = namespace.into();
        Wanted { namespace, capacity_bytes, host_bytes, ..Wanted::of_tests(BLOCK_BYTES) }
    };
    let opens_fail = Rc::new(Cell::new(false));
    let config = ServerConfig { move_host, ..config(folder.path(), &[]) };
    let (spaces, _) = load_config(config, Rc::clone(&opens_fail));
    drop(spaces.hold(file("old", 300 << 10)).await.expect("room"));
    drop(spaces.hold(file("kept", 500 << 10)).await.expect("room"));
    let before = spaces.held_files();
    assert_eq!(before, (2, memory_bytes(300 << 10) + memory_bytes(500 << 10)));
    let fault = |refused: Option<Failure>| refused.expect("refused").fault;
    assert_eq!(fault(spaces.attach(space("greedy", 2 << 20, 1 << 40)).await.err()), ServiceFault::Capacity);
    assert_eq!(fault(spaces.hold(file("large", 2 << 20)).await.err()), ServiceFault::Capacity);
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let never_held = spaces.hold(file_in(memory.path(), "in memory", 500 << 10)).await;
    assert_eq!(fault(never_held.err()), ServiceFault::Argument);
    opens_fail.set(true);
    assert_eq!(fault(spaces.attach(space("tests", 4 << 20, 512 << 10)).await.err()), ServiceFault::Io);
    assert_eq!(spaces.held_files(), before, "nothing was given up");
    // One of them is enough: the one that was used longest ago.
    let opened = spaces.attach(space("tests", 4 << 20, 512 << 10)).await.expect("its memory");
    assert_eq!((opened.host_bytes(), spaces.held_files()), (512 << 10, (1, memory_bytes(500 << 10))));
    // Another file gets what is left, and the memory of the last one.
    drop(spaces.hold(file("larger", 505 << 10)).await.expect("room"));
    assert_eq!((spaces.held_files(), spaces.left().1), ((1, 512 << 10), 0));
    drop(opened);
    spaces.close().await.expect("closed");
}

#[tokio::test]
async fn a_refusal_gives_up_no_kept_file_and_a_space_that_opens_does() {
    for move_host in [true, false] {
        LocalSet::new().run_until(refuses_then_opens(move_host)).await;
    }
}

/// A panic under the lock, after which every look into the cache panics too, and the end of a cache that is whole.
#[cfg(feature = "sim")]
#[tokio::test]
async fn a_space_whose_cache_has_ended_is_opened_anew_once_its_clients_are_gone() {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    let folder = tempfile::tempdir().expect("a directory");
    let (key, block) = (BlockKey::new([7; 32]), [7; BLOCK_BYTES]);
    let run = async {
        for is_broken in [true, false] {
            let (spaces, _) = load(folder.path());
            let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("attached");
            let left = spaces.left();
            space.cache.store(&key, None, &block).await.expect("stored");
            if is_broken {
                kvhoist::internals::seams::panic_under_lock(1);
                catch_unwind(AssertUnwindSafe(|| space.cache.contains(&key))).expect_err("on purpose");
            } else {
                space.cache.close().await.expect("closed");
            }
            let refused = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.err().expect("it has a client");
            assert!(refused.text.contains("ended by a defect"), "{}", refused.text);
            assert_eq!((refused.fault, refused.fault.is_transient()), (ServiceFault::Unavailable, false));
            assert_eq!(Failure::from(&Error::Closed), refused, "as calls are answered");
            let told = &spaces.opened()[0];
            assert_eq!((told.is_served, &told.stats.disk_retired), (false, &Some(refused.text)), "as health has it");
            drop(space);
            let space = spaces.attach(Wanted::of_tests(BLOCK_BYTES)).await.expect("opened anew");
            let lease = space.cache.fetch(&key).await.expect("served").expect("it was stored");
            assert_eq!((lease[..] == block, spaces.left()), (true, left));
            drop((lease, space));
            spaces.close().await.expect("closed");
        }
    };
    LocalSet::new().run_until(run).await;
}
