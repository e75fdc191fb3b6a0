//! Readers of a store, beside caches that open it.

use std::time::Duration;

use kvhoist::{internals::disk::format::TABLE_OFFSET, store::Verification};

use super::*;

#[test]
fn a_cache_starts_while_its_store_is_read_by_who_allows_for_one() {
    let dir = scratch();
    let mut config = config(&[dir.path()]);
    open_store(&config).expect("created");
    config.disk.lock_wait = Duration::ZERO;
    for allows in [true, false] {
        let mut opened = Vec::new();
        let look = |_: &Verification| {
            opened.push(open_files(&config).map(drop));
            ControlFlow::Continue(())
        };
        let report = Store::at([dir.path()]).allow_in_use(allows).verify(look).expect("a store");
        assert!(report.is_clean() && !report.in_use);
        assert!(!opened.is_empty() && opened.iter().all(|opened| opened.is_ok() == allows), "{opened:?}");
    }
    let _open = open_files(&config).expect("nobody has it");
    let found = Store::at([dir.path()]).allow_in_use(true).inspect().expect("a store");
    assert!(found.in_use);
}

#[test]
fn faults_are_listed_while_the_tables_are_read_and_not_copied_for_it() {
    let dir = scratch();
    let mut config = config(&[dir.path()]);
    config.disk.paths[0].capacity = Capacity::Blocks(300);
    open_store(&config).expect("created");
    let file = File::options().write(true).open(dir.path().join("kvhoist.store")).expect("there");
    file.write_all_at(b"not zero", TABLE_OFFSET).expect("written");
    let mut listed = Vec::new();
    let look = |report: &Verification| {
        listed.extend(report.faults().iter().map(|fault| fault.path.as_os_str().as_bytes().as_ptr().addr()));
        ControlFlow::Continue(())
    };
    let report = Store::at([dir.path()]).verify(look).expect("a store");
    assert_eq!((report.records_bad, report.faults().len()), (1, 1));
    assert!(listed.len() > 9 && listed.iter().all(|at| *at == listed[0]), "{listed:?}");
}
