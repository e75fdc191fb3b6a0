//! Files of a store: modes, and what others plant where they go.

use super::*;

#[test]
fn a_store_is_for_its_owner_alone_whatever_the_umask() {
    for umask in ["000", "022", "077", "777"] {
        let dir = directory();
        let before = fs::metadata(dir.path()).expect("metadata").permissions();
        let status = Command::new("sh")
            .args(["-c", "umask $0; exec \"$1\" --exact child --test-threads 1", umask])
            .arg(std::env::current_exe().expect("this test"))
            .env(CHILD, dir.path())
            .stdout(std::process::Stdio::null())
            .status();
        assert!(status.expect("sh runs").success());
        let mode = fs::metadata(store_file(&dir)).expect("the store").permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "umask {umask}");
        // It creates that file, and nothing else anywhere.
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 1);
        assert_eq!(fs::metadata(dir.path()).expect("metadata").permissions(), before);
    }
}

/// A user who may write to the directory puts a link where the store's file goes.
#[test]
fn a_planted_link_is_not_followed() {
    let (dir, elsewhere) = (directory(), directory());
    let victim = store_file(&elsewhere);
    block_on(async {
        let cache = Cache::open(config(&elsewhere, StorageKind::Auto, 4, 4)).await.expect("open");
        cache.close().await.expect("close");
    });
    fs::write(elsewhere.path().join("empty"), "").expect("written");
    for target in [victim, elsewhere.path().join("empty"), elsewhere.path().join("missing")] {
        symlink(&target, store_file(&dir)).expect("linked");
        let before = fs::metadata(&target).ok().map(|metadata| (metadata.len(), metadata.mtime_nsec()));
        let settings = config(&dir, StorageKind::Auto, 4, 4);
        for text in [
            refusal(block_on(Cache::open(settings))),
            refusal(Store::at([dir.path()]).allow_in_use(true).inspect()),
            refusal(Store::at([store_file(&dir)]).allow_in_use(true).verify(|_| ControlFlow::Continue(()))),
        ] {
            assert!(text.contains("a symbolic link"), "{text}");
        }
        let after = fs::metadata(&target).ok().map(|metadata| (metadata.len(), metadata.mtime_nsec()));
        assert_eq!(before, after, "{}", target.display());
        fs::remove_file(store_file(&dir)).expect("removed");
    }
}

/// A user who may write to the directory puts an own file there, or a second name of a file elsewhere.
#[test]
fn a_planted_file_does_not_become_the_store() {
    let dir = directory();
    let (path, elsewhere) = (store_file(&dir), dir.path().join("elsewhere"));
    let plant = |mode: u32| {
        fs::write(&path, "").expect("written");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("chmod");
    };
    let check = |words: &str| {
        let state =
            || fs::metadata(&path).map(|m| (m.len(), m.mode(), m.uid(), m.nlink(), m.mtime_nsec())).expect("there");
        let before = state();
        let text = refusal(block_on(Cache::open(config(&dir, StorageKind::Auto, 4, 4))));
        assert!(text.contains(words), "{text}");
        assert_eq!(state(), before, "{words}");
        fs::remove_file(&path).expect("removed");
    };
    for mode in [0o666, 0o644, 0o640, 0o620, 0o601, 0o602, 0o604] {
        plant(mode);
        check(&format!("a file of mode {mode:04o}"));
    }
    plant(0o600);
    fs::hard_link(&path, &elsewhere).expect("linked");
    check("a file with 2 hard links");
    assert_eq!(fs::read(&elsewhere).expect("the other name"), b"");
    plant(0o600);
    match chown(&path, Some(1), None) {
        Ok(()) => check("a file of user 1"),
        Err(error) => common::skip::skipped(format_args!("giving a file away needs root: {error}")),
    }
    // What is ours alone is as good as no file.
    plant(0o600);
    let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 4, 4))).expect("open");
    block_on(cache.close()).expect("close");
}

/// A store that others may read was copied there without keeping it private.
#[test]
fn a_store_that_others_may_use_is_refused_until_its_mode_is_mended() {
    let dir = directory();
    let settings = || config(&dir, StorageKind::Auto, 4, 4);
    let cache = block_on(Cache::open(settings())).expect("open");
    block_on(common::store(&cache, 1));
    block_on(cache.close()).expect("close");
    fs::set_permissions(store_file(&dir), Permissions::from_mode(0o644)).expect("chmod");
    let text = refusal(block_on(Cache::open(settings())));
    assert!(text.contains("mode 0644") && text.contains("chmod 600"), "{text}");
    assert!(verify(dir.path()).expect("looking is no harm").is_clean());
    fs::set_permissions(store_file(&dir), Permissions::from_mode(0o600)).expect("chmod");
    let cache = block_on(Cache::open(settings())).expect("open");
    assert!(block_on(common::fetch_verified(&cache, 1)));
    block_on(cache.close()).expect("close");
}
