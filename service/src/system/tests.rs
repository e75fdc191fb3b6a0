//! Folders of spaces, and what others put in their place.

use std::os::unix::fs::{PermissionsExt, symlink};

use kvhoist::internals::disk::FILE_NAME as STORE_NAME;
use rustix::fs::FileType;

use super::*;

#[test]
fn a_link_in_the_place_of_a_folder_is_not_followed() {
    let root = tempfile::tempdir().expect("a directory");
    let [folder, theirs] = ["space-1", "theirs"].map(|name| root.path().join(name));
    fs::create_dir(&theirs).expect("made");
    for name in [FILE_NAME, "letter"] {
        fs::write(theirs.join(name), name).expect("written");
    }
    symlink(&theirs, &folder).expect("linked");
    let folders = [folder.clone()];
    for refused in [make_folders(&folders, "text", true).map(drop), remove_folder(&folder)] {
        let error = refused.expect_err("a link").to_string();
        assert!(error.contains("space-1") && error.contains("found a link"), "{error}");
    }
    assert!(forget_folders(&folders), "no space has its file there");
    assert_eq!(fs::read_to_string(theirs.join(FILE_NAME)).expect("there"), FILE_NAME);
    assert_eq!(fs::read_dir(&theirs).expect("there").count(), 2);
    fs::remove_file(&folder).expect("removed");
    make_folders(&folders, "text", true).expect("made");
    fs::create_dir(folder.join("below")).expect("made");
    remove_folder(&folder).expect("removed");
    assert!(!folder.exists());
}

/// Who may write to a path puts a folder of the right name there, with whatever in it.
#[test]
fn a_folder_that_others_may_write_to_is_no_space() {
    let root = tempfile::tempdir().expect("a directory");
    let [folder, victim] = ["space-1", "victim"].map(|name| root.path().join(name));
    fs::write(&victim, "kept").expect("written");
    fs::create_dir(&folder).expect("made");
    symlink(&victim, folder.join(NEW_FILE_NAME)).expect("linked");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("changed");
    let folders = [folder.clone()];
    let error = make_folders(&folders, "text", true).expect_err("anybody's").to_string();
    assert!(error.contains("space-1") && error.contains("of mode 777"), "{error}");
    fs::write(folder.join(FILE_NAME), "text").expect("written");
    let [(_, text)] = &Machine.spaces(root.path()).expect("listed")[..] else { panic!("expected a space") };
    assert!(text.as_ref().is_err_and(|error| error.to_string().contains("of mode 777")), "{text:?}");
    // Nor is a link followed that lies in the service's own, nor is a pipe waited for.
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("changed");
    fs::remove_file(folder.join(FILE_NAME)).expect("removed");
    make_folders(&folders, "new", true).expect("made");
    assert_eq!(fs::read_to_string(&victim).expect("there"), "kept");
    assert_eq!(fs::read_to_string(folder.join(FILE_NAME)).expect("there"), "new");
    fs::remove_file(folder.join(FILE_NAME)).expect("removed");
    let made = rustix::fs::mknodat(rustix::fs::CWD, folder.join(FILE_NAME), FileType::Fifo, Mode::RUSR, 0);
    made.expect("a pipe");
    let [(file, text)] = &Machine.spaces(root.path()).expect("listed")[..] else { panic!("expected a space") };
    assert!(*file == folder.join(FILE_NAME) && text.is_err(), "{text:?}");
    fs::remove_file(file).expect("removed");
    symlink(&victim, file).expect("linked");
    assert!(Machine.spaces(root.path()).expect("listed")[0].1.is_err(), "a link is not read");
    // Whoever may write to it, the space can be removed, and nothing else.
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("changed");
    remove_folder(&folder).expect("removed");
    assert!(!folder.exists() && victim.exists());
}

/// By no right, on a drive that fails, or in a process that may open no more files.
#[test]
fn a_folder_that_cannot_be_looked_into_is_a_space_that_has_all_disk() {
    // Without the rights of root, which may be alone in looking into the folder of temporary files.
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let folder = root.path().join("space-1");
    fs::create_dir(&folder).expect("made");
    fs::write(folder.join(STORE_NAME), [0; 5000]).expect("written");
    let folders = [folder.clone(), root.path().join("space-2")];
    assert_eq!(Machine.store_bytes(&folders), 5000);
    fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).expect("changed");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o000)).expect("changed");
    let look = || {
        // The rights of root are those of this thread, for files, and are no more.
        // SAFETY: plain system call.
        unsafe { libc::setfsuid(65534) };
        let spaces = Machine.spaces(root.path()).expect("listed");
        (spaces, Machine.store_bytes(&folders), forget_folders(&folders))
    };
    let (spaces, bytes, forgotten) = std::thread::scope(|scope| scope.spawn(look).join()).expect("no panic");
    assert!(matches!(&spaces[..], [(file, Err(_))] if *file == folder.join(FILE_NAME)), "{spaces:?}");
    assert_eq!((bytes, forgotten), (u64::MAX, false));
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("changed");
}

/// Put there since the service has started, with a store that has the capacity of its file.
#[test]
fn a_new_space_leaves_the_file_of_another_as_it_is() {
    let root = tempfile::tempdir().expect("a directory");
    let [first, second] = ["1", "2"].map(|path| root.path().join(path).join("space-1"));
    for folder in [&first, &second] {
        fs::create_dir_all(folder).expect("made");
        fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).expect("changed");
    }
    fs::write(first.join(FILE_NAME), "4 TiB").expect("written");
    fs::write(second.join(STORE_NAME), "a store").expect("written");
    let folders = [first.clone(), second.clone()];
    let found = make_folders(&folders, "1 TiB", true).expect("looked into");
    assert_eq!(found, Made::Others(7));
    // Whoever else may write to the folder of a store.
    fs::set_permissions(&second, fs::Permissions::from_mode(0o770)).expect("changed");
    assert!(!forget_folders(&folders), "there is a store");
    assert_eq!(fs::read_to_string(first.join(FILE_NAME)).expect("there"), "4 TiB");
    fs::set_permissions(&second, fs::Permissions::from_mode(0o700)).expect("changed");
    make_folders(&folders, "1 TiB", false).expect("a space that is known has its file");
    assert_eq!(fs::read_to_string(first.join(FILE_NAME)).expect("there"), "4 TiB");
}

/// A drive that fails, for one: a store is made only after the file.
#[test]
fn a_new_space_that_cannot_be_made_leaves_nothing() {
    let root = tempfile::tempdir().expect("a directory");
    let [first, second] = ["1", "2"].map(|path| root.path().join(path).join("space-1"));
    fs::create_dir(root.path().join("1")).expect("made");
    fs::write(root.path().join("2"), "no folder").expect("written");
    let folders = [first.clone(), second];
    make_folders(&folders, "text", true).expect_err("its second folder");
    assert!(!first.exists());
    // One whose file cannot be removed is a space at the next start.
    let folders = [first.clone()];
    assert_eq!(make_folders(&folders, "text", true).expect("made"), Made::Space);
    fs::set_permissions(&first, fs::Permissions::from_mode(0o770)).expect("changed");
    assert!(!forget_folders(&folders) && first.join(FILE_NAME).exists());
    fs::set_permissions(&first, fs::Permissions::from_mode(0o700)).expect("changed");
    assert!(forget_folders(&folders) && !first.exists());
}
