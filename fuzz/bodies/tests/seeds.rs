//! Every body over its committed seeds: what fuzzing once found interesting, on a stable compiler, in every test run.

use std::{fs, path::PathBuf};

use kvhoist_fuzz_bodies::TARGETS;

/// More than this is not minimised: see docs/testing.md.
const SEEDS_MAX: usize = 50;
const SEED_BYTES_MAX: u64 = 200 << 10;

fn seeds(target: &str) -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../seeds").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    files.sort();
    files
}

#[test]
fn every_seed_passes() {
    for (target, run) in TARGETS {
        let files = seeds(target);
        assert!(!files.is_empty(), "{target} has no seeds");
        for file in files {
            // The last line of a failing run names the seed.
            println!("{target}: {}", file.display());
            run(&fs::read(&file).expect("a readable seed"));
        }
    }
}

#[test]
fn seeds_are_few_and_small() {
    for (target, _) in TARGETS {
        let files = seeds(target);
        let bytes: u64 = files.iter().map(|file| fs::metadata(file).expect("a readable seed").len()).sum();
        let found = (files.len(), bytes);
        assert!(found.0 <= SEEDS_MAX && found.1 <= SEED_BYTES_MAX, "{target}: {found:?} files and bytes");
    }
}

#[test]
fn every_target_has_an_entry_point_and_every_entry_point_a_target() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz_targets");
    let files = fs::read_dir(folder).expect("the entry points");
    let stem = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.expect("a readable folder").path();
        path.file_stem().expect("a file").to_string_lossy().into_owned()
    };
    let mut names: Vec<String> = files.map(stem).collect();
    names.sort();
    assert_eq!(names, TARGETS.map(|(name, _)| name));
}
