//! Damage of every kind, everywhere: what a cache makes of it is a miss or a refusal, never wrong bytes and never a
//! panic; all that is undamaged is served; and a verification finds it.
//!
//! A table of cases, each tried on real files over both storage engines. What a damaged store must serve is worked out
//! from the bytes alone, by comparing them with what was once written.

use crate::common;

mod case;
mod contents;
mod heads;
mod random;
mod sample;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    future::poll_fn,
    ops::ControlFlow,
    os::unix::fs::{FileExt, OpenOptionsExt},
    panic,
    path::PathBuf,
    sync::{
        Once,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    thread,
};

use case::{Case, Cases, Finds, Outcome};
use common::{Rng, directory, fetch_verified, key};
use kvhoist::{
    Cache, Config, Error, StorageKind, Tier, block_on,
    store::{Store, Verification},
};
use sample::{Image, Sample};
use tempfile::TempDir;

/// Panics of the library's own threads, which those who wait for them see as errors only.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if thread::current().name().is_some_and(|name| name.starts_with("kvhoist")) {
                PANICS.fetch_add(1, Ordering::Relaxed);
            }
            hook(info);
        }));
    });
}

#[test]
fn over_the_ring() {
    every_case(StorageKind::Uring);
}

#[test]
fn over_threads() {
    every_case(StorageKind::Blocking);
}

/// The cases of a store of two members.
const STRIPED: &[fn(&mut Cases<'_>)] = &[
    |cases| cases.add("none", "undamaged", Outcome::Loses(0), case::clean(), |_| ()),
    heads::one_copy,
    heads::both_copies,
    heads::resealed,
    heads::sizes,
    contents::records,
    contents::free_records,
    contents::payloads,
    contents::gaps,
    contents::astray,
    contents::older,
    contents::duplicates,
    contents::resealed,
    contents::files,
];

/// And of one member.
const ALONE: &[fn(&mut Cases<'_>)] = &[heads::only_member];

fn every_case(storage: StorageKind) {
    count_panics();
    let samples = [vec![34, 12], vec![34]].map(|slots| match Sample::new(storage, &slots) {
        Ok(sample) => Some(sample),
        Err(error) if storage == StorageKind::Uring => {
            common::skip::skipped(format_args!("no ring here: {error}"));
            None
        }
        Err(error) => panic!("{error}"),
    });
    let [Some(two), Some(one)] = &samples else { return };
    let wanted = std::env::var("KVHOIST_CASE").unwrap_or_default();
    let mut classes = BTreeMap::<&str, u32>::new();
    let mut failures = Vec::new();
    for (sample, kinds) in [(two, STRIPED), (one, ALONE)] {
        let bench = Bench::new(sample, storage);
        let mut attempt = |case: Case| {
            let name = format!("{}: {}", case.class, case.name);
            if name.contains(&wanted) {
                *classes.entry(case.class).or_default() += 1;
                failures.extend(bench.attempt(&case).err().map(|text| format!("{name}: {text}")));
            }
        };
        let mut cases = Cases::new(sample, &mut attempt);
        kinds.iter().for_each(|kind| kind(&mut cases));
    }
    println!("{} cases over {storage:?}: {classes:?}", classes.values().sum::<u32>());
    assert!(failures.is_empty(), "{} cases (KVHOIST_CASE=.. picks):\n{}", failures.len(), failures.join("\n"));
}

/// Several damages at once, anywhere.
#[test]
fn random_damage() {
    count_panics();
    let rounds = std::env::var("KVHOIST_CORRUPTION_ROUNDS").map_or(40, |text| text.parse().expect("a number"));
    let mut rng = Rng(common::seed());
    let sample = Sample::new(StorageKind::Auto, &[34, 12]).expect("a store");
    let bench = Bench::new(&sample, StorageKind::Auto);
    for round in 0..rounds {
        let (image, told) = random::damage(&sample, &mut rng);
        let case = Case {
            class: "random",
            name: round.to_string(),
            image,
            outcome: Outcome::Any,
            finds: Finds::Any,
            crafted: Vec::new(),
        };
        let result = bench.attempt(&case);
        assert!(result.is_ok(), "round {round}: {}: {result:?}", told.join(", "));
    }
    println!("{rounds} rounds");
}

/// Files that are damaged, used and restored again and again.
struct Bench<'a> {
    sample: &'a Sample,
    config: Config,
    storage: StorageKind,
    _directory: TempDir,
}

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

impl<'a> Bench<'a> {
    fn new(sample: &'a Sample, storage: StorageKind) -> Self {
        let directory = directory();
        let slots: Vec<u32> = sample.config.disk.paths.iter().map(|disk| sample.config.path_slots(disk)).collect();
        let config = sample::config(storage, directory.path(), &slots);
        Bench { sample, config, storage, _directory: directory }
    }

    fn paths(&self) -> Vec<PathBuf> {
        sample::paths(&self.config)
    }

    /// Makes the files what the image says, and writes only where they differ.
    fn write(&self, image: &Image) {
        for (path, wanted) in self.paths().iter().zip(image) {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)
                .expect("open");
            file.set_len(wanted.len() as u64).expect("sized");
            let now = std::fs::read(path).expect("readable");
            for (at, (now, wanted)) in now.chunks(4096).zip(wanted.chunks(4096)).enumerate() {
                if now != wanted {
                    file.write_all_at(wanted, at as u64 * 4096).expect("written");
                }
            }
        }
    }

    fn is(&self, image: &Image) -> bool {
        self.paths().iter().zip(image).all(|(path, wanted)| std::fs::read(path).expect("readable") == *wanted)
    }

    fn verify(&self) -> Result<Verification, kvhoist::Error> {
        Store::at(self.paths()).storage(self.storage).verify(|_| ControlFlow::Continue(()))
    }

    fn attempt(&self, case: &Case) -> Result<(), String> {
        let panics = PANICS.load(Ordering::Relaxed);
        self.write(&case.image);
        let report = self.check_finds(case)?;
        ensure!(self.is(&case.image), "a verification changed something");
        let opened = block_on(Cache::open(self.config.clone()));
        let result = match (opened, case.outcome) {
            (Err(error), Outcome::Refused | Outcome::Any) => {
                ensure!(matches!(error, Error::Store { .. }), "refused with {error:?}");
                ensure!(self.is(&case.image), "refused, and something changed");
                Ok(())
            }
            (Err(error), _) => Err(format!("refused: {error}")),
            (Ok(cache), Outcome::Refused) => Err(format!("opened; {:?}", block_on(cache.close()))),
            (Ok(cache), _) => {
                let service = self.check_service(case, &cache, report.as_ref());
                // Whatever it was, the files are to be left alone from now on.
                let closed = block_on(cache.close()).map_err(|error| error.to_string());
                service.and_then(|blocks| closed.and_then(|()| self.check_mended(blocks)))
            }
        };
        let panics = PANICS.load(Ordering::Relaxed) - panics;
        ensure!(panics == 0, "{panics} panics; {result:?}");
        result
    }

    fn check_finds(&self, case: &Case) -> Result<Option<Verification>, String> {
        match (self.verify(), &case.finds) {
            (Ok(report), Finds::Faults(kinds)) => {
                let wanted: BTreeMap<&str, u64> = kinds.iter().copied().collect();
                ensure!(*report.fault_counts() == wanted, "found {:?}, expected {wanted:?}", report.faults());
                ensure!(report.is_clean() == wanted.is_empty(), "{report:?}");
                Ok(Some(report))
            }
            (Ok(report), Finds::Any) => Ok(Some(report)),
            (Err(error), Finds::Refusal | Finds::Any) => {
                ensure!(matches!(error, Error::Store { .. }), "verification refused with {error:?}");
                Ok(None)
            }
            (Ok(report), Finds::Refusal) => Err(format!("verified: {report:?}")),
            (Err(error), _) => Err(format!("verification refused: {error}")),
        }
    }

    /// Asks for every block that there ever was, all at once.
    async fn fetch_all(&self, cache: &Cache) -> Result<BTreeSet<u64>, String> {
        let fetch = |n: u64| async move { (n, cache.fetch(&key(n)).await) };
        let mut fetches: Vec<_> = self.sample.payloads.keys().map(|n| Box::pin(fetch(*n))).collect();
        let mut served = BTreeSet::new();
        let mut failure = Ok(());
        poll_fn(|context| {
            fetches.retain_mut(|fetch| match fetch.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready((n, Ok(Some(lease)))) => {
                    if *lease != self.sample.payloads[&n][..] {
                        failure = Err(format!("wrong bytes for block {n}"));
                    }
                    served.insert(n);
                    false
                }
                Poll::Ready((_, Ok(None))) => false,
                Poll::Ready((n, Err(error))) => {
                    failure = Err(format!("block {n}: {error}"));
                    false
                }
            });
            if fetches.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        failure.map(|()| served)
    }

    /// What is served and what is not. How many blocks the store is left with.
    fn check_service(&self, case: &Case, cache: &Cache, report: Option<&Verification>) -> Result<u64, String> {
        let sample = self.sample;
        // An empty store took the place of one that began like a creation that was cut off.
        let whole = report.is_some_and(|report| report.shape.is_some());
        let expected: BTreeSet<u64> =
            if whole { sample.served(&case.image, &case.crafted) } else { Vec::new() }.into_iter().collect();
        let served = block_on(self.fetch_all(cache))?;
        ensure!(served == expected, "served {served:?}, expected {expected:?}");
        let missing: Vec<u64> = sample.live().into_iter().filter(|n| !served.contains(n)).collect();
        if let Outcome::Loses(lost) = case.outcome {
            ensure!(missing.len() == lost, "{missing:?} are lost, expected {lost}");
        }
        let stats = cache.stats();
        if let Some(report) = report.filter(|_| whole) {
            let counts = (report.payloads_bad, report.records_bad, report.payloads_good);
            let seen = (stats.checksum_failures, stats.records_bad, served.len() as u64);
            ensure!(counts == seen, "verified bad blocks, bad records, good blocks {counts:?}, a cache saw {seen:?}");
            // A kill may have been it: the drive is not to blame for what an earlier run stored.
            let blamed = (stats.changed_memory, stats.quarantined);
            ensure!(blamed == (0, 0), "given up and quarantined {blamed:?}");
        }
        kvhoist::internals::validate(cache).map_err(|error| format!("{error:?}"))?;
        // All that is lost can be stored again.
        for n in &missing {
            block_on(cache.store(&key(*n), None, &sample.payloads[n])).map_err(|error| error.to_string())?;
            ensure!(block_on(fetch_verified(cache, *n)), "{n} was stored again");
        }
        let room = cache.stats().tier(Tier::Disk).slots - stats.quarantined;
        Ok(room.min((served.len() + missing.len()) as u64))
    }

    /// What a cache has had open is sound.
    fn check_mended(&self, blocks: u64) -> Result<(), String> {
        let report = self.verify().map_err(|error| error.to_string())?;
        ensure!(report.is_clean(), "not mended: {:?}", report.faults());
        ensure!(report.committed == blocks && report.superseded == 0, "{blocks} blocks, then {report:?}");
        Ok(())
    }
}
