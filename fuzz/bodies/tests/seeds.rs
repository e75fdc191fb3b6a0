//! Every body over its committed seeds: what fuzzing once found interesting, on a stable compiler, in every test run.

use std::{fs, path::PathBuf};

use kvhoist_fuzz_bodies::{TARGETS, Target};
use kvhoist_simulation::sim::Rng;

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

/// All targets, or the one that `KVHOIST_FUZZ_TARGET` names.
fn targets() -> Vec<Target> {
    let only = std::env::var("KVHOIST_FUZZ_TARGET").ok();
    TARGETS.into_iter().filter(|(name, _)| only.as_ref().is_none_or(|only| only == name)).collect()
}

#[test]
fn every_seed_passes() {
    for (target, run) in targets() {
        let files = seeds(target);
        assert!(!files.is_empty(), "{target} has no seeds");
        for file in files {
            // The last line of a failing run names the seed.
            println!("{target}: {}", file.display());
            run(&fs::read(&file).expect("a readable seed"));
        }
    }
}

/// Without coverage to lead them random bytes find little, but they need no other compiler. `KVHOIST_FUZZ_INPUTS` sets
/// how many, `KVHOIST_FUZZ_SEED` the first seed.
#[test]
fn random_bytes_pass() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let inputs = number("KVHOIST_FUZZ_INPUTS").unwrap_or(20);
    let first = number("KVHOIST_FUZZ_SEED").unwrap_or(0);
    for (target, run) in targets() {
        for seed in first..first + inputs {
            // The last line of a failing run names the seed.
            println!("{target}: seed {seed}");
            let mut rng = Rng::new(seed);
            let len = 16 << rng.below(8);
            let bytes: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
            run(&bytes);
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
