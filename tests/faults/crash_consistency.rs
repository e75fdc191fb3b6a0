//! A crash at any instant: what the next start serves is what was completely stored, or a miss.

use crate::common;
#[path = "../crash/mod.rs"]
mod crash;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader},
    os::unix::{fs::FileExt, process::ExitStatusExt},
    process::{Command, Stdio},
    sync::mpsc::{self, TryRecvError},
    time::{Duration, Instant},
};

use common::{BLOCK_BYTES, Rng, config, directory, fetch_verified, key, payload, store, store_file};
use crash::{Checked, Death, History, Plan};
use kvhoist::{Cache, StorageKind, block_on};
use tempfile::TempDir;

const CHILD: &str = "KVHOIST_CRASH_CHILD";
const SLOTS: u32 = 64;

/// Not a test of its own: what the child process of the next one runs, under load until it is killed.
#[test]
fn child() {
    if let Ok(plan) = std::env::var(CHILD) {
        crash::run(&Plan::from_text(&plan), &crash::print);
    }
}

#[test]
fn a_killed_process_leaves_what_it_acknowledged_and_nothing_wrong() {
    let kills = std::env::var("KVHOIST_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(10);
    let mut rng = Rng(common::seed());
    let mut worlds: Vec<World> = (0..8).map(|kind| World::new(kind, rng.next())).collect();
    let (mut all, mut instants) = (Checked::default(), BTreeMap::<String, u32>::new());
    for kill in 0..kills {
        let world = &mut worlds[kill % 8];
        if world.history.next() + 256 > world.plan.end {
            *world = World::new(kill % 8, rng.next());
        }
        world.run_and_kill(&mut rng);
        let last = world.history.last.split(' ').next().expect("a word").to_owned();
        *instants.entry(last).or_default() += 1;
        match world.check() {
            Ok(checked) => all += checked,
            Err(wrong) => panic!("kill {kill} after {:?} of {:?}: {wrong}", world.history.last, world.plan),
        }
    }
    println!("{kills} kills: {all:?}; the last words were {instants:?}");
    assert!(kills == 0 || all.kept > 0, "every kill came too early to show anything");
}

/// A store, and what is known of its past.
struct World {
    directories: Vec<TempDir>,
    plan: Plan,
    history: History,
}

impl World {
    /// One of eight kinds: both engines, both policies, with and without eviction, on one path and on three.
    fn new(kind: usize, seed: u64) -> Self {
        let (evicts, several) = (kind & 2 != 0, kind & 1 != (kind >> 2) & 1);
        let directories: Vec<TempDir> = (0..if several { 3 } else { 1 }).map(|_| directory()).collect();
        let plan = Plan {
            disks: directories.iter().map(|dir| dir.path().to_owned()).collect(),
            blocks: if evicts { 96 } else { 2_048 } / directories.len() as u32,
            block_bytes: if several { 5_000 } else { 4_096 },
            storage: if kind & 1 == 0 { StorageKind::Uring } else { StorageKind::Blocking },
            write_back: kind & 4 != 0,
            evicts,
            first: 0,
            end: 2_000,
            seed,
        };
        World { directories, plan, history: History::default() }
    }

    /// Runs the child up to a random word of its own, and kills it a random moment later.
    fn run_and_kill(&mut self, rng: &mut Rng) {
        let words = ["opening", "opened", "store", "stored", "synced", "remove", "closing"];
        // The first death of a store comes when there is something to lose.
        let word = if self.history.next() == 0 { "synced" } else { words[rng.below(7) as usize] };
        let times = 1 + rng.below(3);
        let magnitude = rng.below(13);
        let moment = Duration::from_micros(rng.below(1 << magnitude));
        (self.plan.first, self.plan.seed) = (self.history.next(), rng.next());
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "crash_consistency::child", "--nocapture", "--test-threads", "1"])
            .env(CHILD, self.plan.to_text())
            .stdout(Stdio::piped())
            .spawn()
            .expect("spawn");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let mut seen = 0;
        while seen < times {
            // A child that came to the end of its plan dies a natural death.
            let Some(line) = lines.next() else { break };
            if self.history.read(&line) {
                seen += u64::from(self.history.last.split(' ').next() == Some(word));
            }
        }
        // Not a wait for anything: the kill is to come at any point of what follows the word.
        let until = Instant::now() + moment;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        child.kill().expect("SIGKILL");
        // What it said before the end counts too.
        lines.for_each(|line| {
            self.history.read(&line);
        });
        let status = child.wait().expect("reaped");
        assert!(status.success() || status.signal() == Some(libc::SIGKILL), "{status} after {:?}", self.history.last);
        self.history.end(&self.plan, Death::Process);
    }

    /// Holds a copy to the history: the store itself keeps the traces of all its crashes.
    fn check(&self) -> Result<Checked, String> {
        let copies: Vec<TempDir> = self.directories.iter().map(|_| directory()).collect();
        for (dir, copy) in self.directories.iter().zip(&copies) {
            // The kernel ends the writes of a killed process, and then its lock.
            let Ok(file) = File::open(store_file(dir)) else { continue };
            file.lock().expect("a lock");
            std::fs::copy(store_file(dir), store_file(copy)).expect("copied");
        }
        let plan = Plan { disks: copies.iter().map(|dir| dir.path().to_owned()).collect(), ..self.plan.clone() };
        let cache = block_on(Cache::open(plan.config())).map_err(|error| error.to_string())?;
        let checked = block_on(self.history.check(&plan, &cache))?;
        block_on(cache.close()).map_err(|error| error.to_string())?;
        Ok(checked)
    }
}

/// Copies of the file taken while it is written are what crashes at those instants could leave, and worse: a copy sees
/// later pages later.
#[test]
fn copies_taken_under_load_serve_only_right_bytes() {
    let dir = directory();
    let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 8, SLOTS))).expect("open");
    block_on(store(&cache, 0));
    let (copied, is_copied) = mpsc::channel();
    let writer = {
        let cache = cache.clone();
        // Goes on until a copy was taken, however late the thread that takes it runs.
        std::thread::spawn(move || {
            while is_copied.try_recv() == Err(TryRecvError::Empty) {
                (1..600).for_each(|n| block_on(store(&cache, n)));
            }
        })
    };
    let mut copies = 0;
    while !writer.is_finished() {
        let copy = directory();
        std::fs::copy(store_file(&dir), store_file(&copy)).expect("copy");
        _ = copied.send(());
        let crashed = block_on(Cache::open(config(&copy, StorageKind::Auto, 8, SLOTS))).expect("open the copy");
        for n in 0..600 {
            // A torn block is a miss; `fetch_verified` panics on a wrong byte.
            block_on(fetch_verified(&crashed, n));
        }
        kvhoist::internals::validate(&crashed).expect("valid");
        block_on(crashed.close()).expect("close");
        copies += 1;
    }
    writer.join().expect("the writer ends");
    assert!(copies > 0);
    block_on(cache.close()).expect("close");
}

/// Every kind of place in the file, damaged one at a time: a miss or a refusal, never wrong bytes.
#[test]
fn damage_anywhere_is_a_miss_or_a_refusal() {
    let dir = directory();
    let cache = block_on(Cache::open(config(&dir, StorageKind::Auto, 4, 16))).expect("open");
    for n in 0..16 {
        block_on(store(&cache, n));
    }
    block_on(cache.close()).expect("close");
    let whole = std::fs::read(store_file(&dir)).expect("the store");
    let block = payload(0, BLOCK_BYTES);
    let data = whole.windows(64).position(|window| window == &block[..64]).expect("block 0 is in the file") as u64;
    let mut rng = Rng(common::seed());
    let mut places = vec![0, 8, 12, 16, 40, 88, 500, 504, 4096, 4104, 4600];
    places.extend((0..32).map(|field| 8192 + 128 * 3 + field * 4));
    places.extend([data, data + 1, data + BLOCK_BYTES as u64 - 1]);
    places.extend((0..20).map(|_| rng.below(whole.len() as u64)));
    for place in places {
        let hurt = directory();
        common::write_private(&store_file(&hurt), &whole);
        let file = std::fs::OpenOptions::new().write(true).open(store_file(&hurt)).expect("open");
        file.write_all_at(&[whole[place as usize] ^ 1 << rng.below(8)], place).expect("damage");
        drop(file);
        match block_on(Cache::open(config(&hurt, StorageKind::Auto, 4, 16))) {
            Err(error) => assert!(matches!(error, kvhoist::Error::Store { .. }), "at {place}: {error}"),
            Ok(cache) => {
                let served = (0..16).filter(|n| block_on(fetch_verified(&cache, *n))).count();
                assert!(served >= 15, "at {place}: one damaged byte cost {} blocks", 16 - served);
                block_on(cache.close()).expect("close");
            }
        }
    }
    assert!(block_on(async { cache.fetch(&key(0)).await }).is_err(), "the first cache is closed");
}
