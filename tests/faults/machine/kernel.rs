//! A kernel that refuses: forbidden rings, system calls that fail, no descriptors left.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use kvhoist::{Cache, Config, Error, StorageKind, block_on};

use super::{
    apart::{apart, case, forbid, forbid_where, limit, run_case},
    common::{config, directory, store_file},
    config_at, serves,
    warnings::Warnings,
};

const RING: [libc::c_long; 3] = [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

#[test]
fn a_forbidden_ring_is_replaced_by_threads_with_a_warning() {
    apart("kernel::a_forbidden_ring_is_replaced_by_threads_with_a_warning", || {
        let warnings = Warnings::listen();
        forbid(&RING, libc::EPERM);
        let dir = directory();
        let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 8, 64))).expect("threads serve");
        assert_eq!(cache.stats().storage, "blocking");
        serves(&cache);
        let text = warnings.text();
        assert!(text.contains("io_uring is refused") && text.contains("seccomp"), "{text}");
    });
}

#[test]
fn a_forbidden_ring_that_was_asked_for_is_refused() {
    apart("kernel::a_forbidden_ring_that_was_asked_for_is_refused", || {
        forbid(&RING, libc::EPERM);
        let dir = directory();
        match block_on(Cache::open(config(&dir, StorageKind::Uring, 8, 64))) {
            Err(Error::Config { field: "storage", found, expected }) => {
                assert!(found.contains("io_uring_setup") && found.contains("seccomp"), "{found}");
                assert!(expected.contains("blocking"), "{expected}");
            }
            other => panic!("{:?}", other.err()),
        }
        assert!(!store_file(&dir).exists(), "nothing was created");
    });
}

/// The result of an open without this system call.
enum Then {
    /// An error with these words, and nothing left behind.
    Refused(&'static str),
    /// An error with these words; what is left behind is no store yet.
    Left(&'static str),
    /// A cache that serves.
    Serves,
}

/// System calls that opening makes, and an error of each.
fn failures() -> Vec<(&'static str, libc::c_long, i32, Then)> {
    use Then::{Left, Refused, Serves};
    vec![
        ("fallocate", libc::SYS_fallocate, libc::ENOSPC, Refused("room for")),
        ("fallocate", libc::SYS_fallocate, libc::EDQUOT, Refused("quota")),
        ("fallocate", libc::SYS_fallocate, libc::EOPNOTSUPP, Refused("cannot reserve")),
        ("fallocate", libc::SYS_fallocate, libc::EIO, Refused("fallocate")),
        ("ftruncate", libc::SYS_ftruncate, libc::EIO, Refused("fallocate")),
        ("fsync", libc::SYS_fsync, libc::EIO, Refused("fsync")),
        ("flock", libc::SYS_flock, libc::ENOLCK, Left("lock")),
        ("fcntl", libc::SYS_fcntl, libc::EINVAL, Refused("direct")),
        ("pread64", libc::SYS_pread64, libc::EIO, Refused("read")),
        ("pwrite64", libc::SYS_pwrite64, libc::EIO, Refused("write")),
        ("fdatasync", libc::SYS_fdatasync, libc::EIO, Left("flush")),
        ("fstatfs", libc::SYS_fstatfs, libc::EIO, Refused("statvfs")),
        ("madvise", libc::SYS_madvise, libc::EINVAL, Refused("host_blocks")),
        ("clone3", libc::SYS_clone3, libc::EAGAIN, Refused("thread")),
        ("epoll_create1", libc::SYS_epoll_create1, libc::EMFILE, Refused("runtime")),
        ("io_uring_register", libc::SYS_io_uring_register, libc::EPERM, Serves),
        ("io_uring_enter", libc::SYS_io_uring_enter, libc::EPERM, Serves),
        ("io_uring_setup", libc::SYS_io_uring_setup, libc::ENOSYS, Serves),
        ("io_uring_setup", libc::SYS_io_uring_setup, libc::ENOMEM, Serves),
    ]
}

#[test]
fn every_system_call_of_an_open_may_fail() {
    const NAME: &str = "kernel::every_system_call_of_an_open_may_fail";
    let failures = failures();
    if let Some(case) = case() {
        let mut words = case.split(' ');
        let mut word = || words.next().expect("a number, an engine and a path");
        let (name, number, errno, then) = &failures[word().parse::<usize>().expect("a number")];
        let storage = if word() == "auto" { StorageKind::Auto } else { StorageKind::Blocking };
        let settings = config_at(Path::new(word()), storage, 64);
        forbid(&[*number], *errno);
        return open_without(name, then, settings);
    }
    let mut wrong = Vec::new();
    for (at, (name, _, errno, _)) in failures.iter().enumerate() {
        for storage in ["auto", "blocking"] {
            let dir = directory();
            let (status, said) = run_case(NAME, &format!("{at} {storage} {}", dir.path().display()));
            if !status.success() {
                wrong.push(format!("{name} with {errno}, {storage}: {status}: {said}"));
            }
            serves(&block_on(Cache::open(config(&dir, StorageKind::Auto, 8, 64))).expect("opens after the fault"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn open_without(name: &str, then: &Then, settings: Config) {
    let path = settings.disk.paths[0].path.join("kvhoist.store");
    match (block_on(Cache::open(settings)), then) {
        // Not every engine makes every call.
        (Ok(cache), _) => serves(&cache),
        (Err(error), Then::Serves) => panic!("without {name}: {error}"),
        (Err(error), Then::Refused(words) | Then::Left(words)) => {
            let text = error.to_string();
            assert!(text.contains(words), "without {name}: {words:?} is not in: {text}");
            let left = matches!(then, Then::Left(_));
            assert!(left || !path.exists(), "without {name}: left behind after: {text}");
        }
    }
}

/// Blocks are reserved without a size, the size is set, and blocks are reserved again.
#[test]
fn an_empty_file_is_empty_again_where_an_open_fails_after_it_has_reserved_blocks() {
    apart("kernel::an_empty_file_is_empty_again_where_an_open_fails_after_it_has_reserved_blocks", || {
        let (dir, other) = (directory(), directory());
        serves(&block_on(Cache::open(config(&other, StorageKind::Auto, 8, 64))).expect("open"));
        let bytes = fs::metadata(store_file(&other)).expect("a store").len();
        let file = File::create(store_file(&dir)).expect("created");
        file.set_permissions(Permissions::from_mode(0o600)).expect("its owner's");
        let steps = [
            (libc::SYS_fallocate, 0, libc::EDQUOT, "a used up quota"),
            (libc::SYS_ftruncate, bytes as u32, libc::EIO, "fallocate"),
        ];
        for (system_call, value, errno, words) in steps {
            forbid_where(system_call, 1, value, errno);
            let refused = block_on(Cache::open(config(&dir, StorageKind::Auto, 8, 64))).expect_err("a fault");
            assert!(refused.to_string().contains(words), "{refused}");
            let left = file.metadata().expect("not ours to remove");
            assert_eq!((left.nlink(), left.len(), left.blocks()), (1, 0, 0), "after: {refused}");
        }
    });
}

#[test]
fn without_descriptors_an_open_fails_and_leaves_nothing() {
    apart("kernel::without_descriptors_an_open_fails_and_leaves_nothing", || {
        for storage in [StorageKind::Uring, StorageKind::Blocking] {
            let mut refused = 0;
            loop {
                let dir = directory();
                // Standard input, output and errors are open.
                limit(libc::RLIMIT_NOFILE, 3 + refused);
                let opened = block_on(Cache::open(config(&dir, storage, 8, 64)));
                limit(libc::RLIMIT_NOFILE, 1024);
                match opened {
                    Ok(cache) => break serves(&cache),
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.contains("Too many open files"), "{text}");
                        assert!(!store_file(&dir).exists(), "left behind after: {text}");
                    }
                }
                serves(&block_on(Cache::open(config(&dir, storage, 8, 64))).expect("with descriptors it opens"));
                refused += 1;
                assert!(refused < 64, "an open does not need that many");
            }
            assert!(refused > 0, "the limit was never met");
        }
    });
}
