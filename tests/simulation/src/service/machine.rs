//! The machine that the service runs on: the files of its spaces, the drives of their caches, and mappings.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use kvhoist::{Cache, Config, Error, ServiceFault, Tier};
use kvhoist_service::internals::{
    protocol::Failure,
    seams::{Later, Made, Mapped, System, map},
};
use tokio::sync::Semaphore;

use super::{
    mappings::{Landing, Mappings},
    plan::{PATIENCE, Plan},
};
use crate::{
    context::claims_of,
    model::Claims,
    report::Report,
    sim::{self, FaultRates, Reactor, Rng, SimOptions, Simulated, World},
};

/// The cache of a space that is open.
struct Opened {
    cache: Cache,
    reactor: Reactor,
}

#[derive(Default)]
struct State {
    /// The file of each space, by the folder that has it.
    texts: BTreeMap<PathBuf, String>,
    /// The drives' files of each space, by the name of its folder, while no process uses them.
    files: BTreeMap<String, Vec<Vec<u8>>>,
    /// The drives of the spaces whose caches are open, or are being opened.
    worlds: BTreeMap<String, World>,
    opened: BTreeMap<String, Opened>,
    /// Mappings that the service has.
    mapped: BTreeMap<usize, usize>,
    report: Report,
}

pub struct Machine {
    state: RefCell<State>,
    rng: RefCell<Rng>,
    pub mappings: Mappings,
    rates: RefCell<FaultRates>,
    /// A client may write to its memory while the service uses it.
    hostile: bool,
    disk_latency_max: Duration,
    /// The chance that a copy fails.
    copy_failure: Cell<f64>,
    /// The chance that a mapping cannot be had.
    map_refused: Cell<f64>,
    /// The chance that a thread cannot be started.
    thread_refused: Cell<f64>,
    /// The service's thread for work that takes long, which is there from its start on.
    helper: Semaphore,
    /// How a space's file names it, for each space of the plan.
    names: Vec<Vec<String>>,
    failure: Rc<RefCell<Option<String>>>,
}

impl Machine {
    pub fn new(plan: &Plan, rng: Rng, failure: Rc<RefCell<Option<String>>>) -> Rc<Self> {
        // As JSON has them.
        let names = plan
            .spaces
            .iter()
            .map(|space| vec![format!("\"namespace\": \"{}\"", space.namespace), format!("\"uid\": {},", space.uid)]);
        Rc::new(Machine {
            names: names.collect(),
            state: RefCell::default(),
            rng: RefCell::new(rng),
            mappings: Mappings::default(),
            rates: RefCell::new(plan.rates),
            hostile: plan.hostile > 0,
            disk_latency_max: plan.disk_latency_max,
            copy_failure: Cell::new(plan.copy_failure),
            map_refused: Cell::new(plan.map_refused),
            thread_refused: Cell::new(plan.thread_refused),
            helper: Semaphore::new(1),
            failure,
        })
    }

    fn fail(&self, what: String) {
        self.failure.borrow_mut().get_or_insert(what);
    }

    /// The folder of a space of the plan, once it was made.
    fn folder(&self, space: usize) -> Option<String> {
        let state = self.state.borrow();
        let is_its = |text: &str| self.names[space].iter().all(|name| text.contains(name.as_str()));
        let (folder, _) = state.texts.iter().find(|(_, text)| is_its(text))?;
        Some(folder.file_name()?.to_string_lossy().into_owned())
    }

    /// What the cache of a space must keep; `None` while it is not open.
    pub fn claims(&self, space: usize) -> Option<Claims> {
        let folder = self.folder(space)?;
        let state = self.state.borrow();
        Some(claims_of(&state.opened.get(&folder)?.cache, state.worlds.get(&folder)?, false))
    }

    /// Lets stalled operations of all drives go on.
    pub fn release(&self) {
        for world in self.state.borrow().worlds.values() {
            world.storage.release();
        }
    }

    /// Starts a thread, as far as the system has any left.
    pub fn start_thread(&self) -> io::Result<()> {
        let chance = self.thread_refused.get();
        if chance > 0.0 && self.rng.borrow_mut().chance(chance) {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        Ok(())
    }

    /// Nothing more goes wrong with the drives, and mappings and threads can be had.
    pub fn calm(&self) {
        self.map_refused.set(0.0);
        self.copy_failure.set(0.0);
        self.state.borrow().worlds.values().for_each(|world| world.copy.set_failure(0.0));
        self.thread_refused.set(0.0);
        *self.rates.borrow_mut() = FaultRates::default();
        self.state.borrow().worlds.values().for_each(|world| world.storage.set_rates(FaultRates::default()));
    }

    /// Resolves when nothing is in flight in any cache and its balance holds, or with what is wrong with it. No client
    /// is connected.
    pub async fn settle(&self) -> Result<(), String> {
        let opened = std::mem::take(&mut self.state.borrow_mut().opened);
        let mut settled = Ok(());
        for Opened { reactor, .. } in opened.values() {
            settled = settled.and(reactor.settle(PATIENCE).await);
        }
        self.state.borrow_mut().opened = opened;
        settled
    }

    /// Bytes of clients' memory that the service has mapped.
    pub fn mapped_bytes(&self) -> usize {
        self.state.borrow().mapped.values().sum()
    }

    /// The reads that the drives have in flight into clients' memory. The kernel ends them after a kill.
    pub fn reads_in_flight(&self) -> Vec<Landing> {
        let state = self.state.borrow();
        let landing = |(&start, &len): (&usize, &usize)| {
            let reads = state.worlds.values().flat_map(|world| world.storage.reads_in_flight(start, len));
            let reads: Vec<_> = reads.collect();
            // SAFETY: a mapping of the service, which has not been unmapped.
            (!reads.is_empty()).then(|| unsafe { Landing::new(start, len, reads) })
        };
        state.mapped.iter().filter_map(landing).collect()
    }

    /// Whether a client's memory is copied to or from.
    pub fn copies_in_flight(&self) -> bool {
        let state = self.state.borrow();
        let uses = |world: &World| state.mapped.iter().any(|(&start, &len)| world.copy.uses(start, len));
        state.worlds.values().any(uses)
    }

    /// The process has ended, and nothing of it runs any more: what the drives hold, with a `power_cut` what is on the
    /// medium. Returns a digest of what the drives did.
    pub fn end_process(&self, power_cut: bool) -> u64 {
        let (mut state, mut digest) = (self.state.borrow_mut(), 0);
        for (_, Opened { cache, .. }) in std::mem::take(&mut state.opened) {
            let stats = cache.stats();
            state.report.evictions += Tier::ALL.iter().map(|&tier| stats.tier(tier).evictions).sum::<u64>();
            state.report.checksum_failures += stats.checksum_failures;
            state.report.quarantined += stats.quarantined;
            state.report.read_only += u64::from(stats.disk_read_only.is_some());
            state.report.retired += u64::from(stats.disk_retired.is_some());
        }
        for (folder, world) in std::mem::take(&mut state.worlds) {
            digest ^= world.storage.log_digest();
            state.report.add_world(&world.storage.counts(), &world.copy.counts());
            state.files.insert(folder, world.storage.end(power_cut));
        }
        for (start, len) in std::mem::take(&mut state.mapped) {
            // SAFETY: the process that had the mapping is gone.
            let unmapped = unsafe { self.mappings.unmap(std::ptr::with_exposed_provenance_mut(start), len) };
            unmapped.unwrap_or_else(|what| self.fail(what));
        }
        digest
    }

    /// Numbers of the drives so far.
    pub fn add_to(&self, report: &mut Report) {
        report.add(&self.state.borrow().report);
    }

    async fn open(self: Rc<Self>, config: Config) -> Result<Cache, Error> {
        let path = config.disk.paths.first().map(|disk| disk.path.clone()).unwrap_or_default();
        let folder = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (mut world, storage_seed) = {
            let mut rng = self.rng.borrow_mut();
            (World::new(rng.next_u64(), Vec::new()), rng.next_u64())
        };
        let no_thread = |error: io::Error| {
            let source = Arc::new(error);
            Error::Io { op: "start the reactor's thread", path: PathBuf::new(), source }
        };
        self.start_thread().map_err(no_thread)?;
        let files = self.state.borrow_mut().files.remove(&folder);
        if let Err(error) = self.start_thread() {
            // That of a worker: the files are made before.
            let files = files.unwrap_or_else(|| sim::blank_files(&config));
            self.state.borrow_mut().files.insert(folder, files);
            return Err(no_thread(error));
        }
        let options = SimOptions {
            latency: Duration::ZERO..=self.disk_latency_max,
            rates: *self.rates.borrow(),
            memory_may_change: self.hostile,
            ..SimOptions::default()
        };
        world.copy.set_memory_may_change(self.hostile);
        world.copy.set_failure(self.copy_failure.get());
        world.storage = sim::Sim::new(storage_seed, files.unwrap_or_else(|| sim::blank_files(&config)), options);
        self.state.borrow_mut().worlds.insert(folder.clone(), world.clone());
        let opened = sim::open(config, &world).await;
        while opened.is_err() && world.storage.in_flight() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut state = self.state.borrow_mut();
        match opened {
            Ok(Simulated { cache, reactor }) => {
                state.opened.insert(folder, Opened { cache: cache.clone(), reactor });
                Ok(cache)
            }
            Err(error) => {
                state.worlds.remove(&folder);
                state.files.insert(folder, world.storage.end(false));
                Err(error)
            }
        }
    }
}

/// The machine as the service sees it.
pub struct Handle(pub Rc<Machine>);

impl System for Handle {
    fn spaces(&self, path: &Path) -> Result<Vec<(PathBuf, Result<String, Error>)>, Error> {
        let state = self.0.state.borrow();
        let below = state.texts.iter().filter(|(folder, _)| folder.parent() == Some(path));
        Ok(below.map(|(folder, text)| (folder.join("space"), Ok(text.clone()))).collect())
    }

    fn make_space(&self, folders: Vec<PathBuf>, text: String, is_new: bool) -> Later<Result<Made, Error>> {
        let store_bytes = self.store_bytes(&folders);
        let machine = Rc::clone(&self.0);
        Box::pin(async move {
            let texts = &mut machine.state.borrow_mut().texts;
            match folders.into_iter().next() {
                Some(folder) if is_new && texts.contains_key(&folder) => return Ok(Made::Others(store_bytes)),
                Some(folder) => drop(texts.entry(folder).or_insert(text)),
                None => {}
            }
            Ok(Made::Space)
        })
    }

    fn forget_space(&self, folders: Vec<PathBuf>) -> Later<bool> {
        let machine = Rc::clone(&self.0);
        Box::pin(async move {
            let mut state = machine.state.borrow_mut();
            let Some(folder) = folders.first() else { return true };
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // The files of a store that was begun are there, as far as they were written.
            let has_store = state.files.contains_key(&name);
            if !has_store {
                state.texts.remove(folder);
            }
            !has_store
        })
    }

    fn store_bytes(&self, folders: &[PathBuf]) -> u64 {
        let state = self.0.state.borrow();
        let name = folders.first().and_then(|folder| folder.file_name()).unwrap_or_default();
        let files = state.files.get(&*name.to_string_lossy());
        files.map_or(0, |files| files.iter().map(|file| file.len() as u64).sum())
    }

    fn remove_space(&self, folders: Vec<PathBuf>) -> Later<Result<(), Error>> {
        let machine = Rc::clone(&self.0);
        let pause = Duration::from_millis(machine.rng.borrow_mut().below(20));
        Box::pin(async move {
            tokio::time::sleep(pause).await;
            let mut state = machine.state.borrow_mut();
            for folder in folders {
                let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
                state.texts.remove(&folder);
                state.files.remove(&name);
                state.opened.remove(&name);
                state.worlds.remove(&name);
            }
            Ok(())
        })
    }

    fn open_cache(&self, config: Config) -> Later<Result<Cache, Error>> {
        Box::pin(Rc::clone(&self.0).open(config))
    }

    fn run(&self, work: Box<dyn FnOnce() + Send>) {
        let machine = Rc::clone(&self.0);
        let pause = Duration::from_millis(machine.rng.borrow_mut().below(4));
        let has_own = machine.start_thread().is_ok();
        tokio::task::spawn_local(async move {
            // Without a thread of its own the work waits for the one that there is.
            let others_wait = if has_own { None } else { Some(machine.helper.acquire().await) };
            tokio::time::sleep(pause).await;
            work();
            drop(others_wait);
        });
    }

    fn map(&self, fd: &OwnedFd, offset: u64, len: u64) -> Result<Mapped, Failure> {
        if self.0.rng.borrow_mut().chance(self.0.map_refused.get()) {
            return Err(Failure::new(ServiceFault::Memory, "mmap: found no mapping that is left"));
        }
        let mapped = map(fd, offset, len)?;
        self.0.state.borrow_mut().mapped.insert(mapped.start().expose_provenance(), mapped.len());
        Ok(mapped)
    }

    unsafe fn unmap(&self, start: *mut u8, len: usize) -> Later<()> {
        let machine = &self.0;
        let used = {
            let mut state = machine.state.borrow_mut();
            if state.mapped.remove(&start.addr()) != Some(len) {
                machine.fail(format!("{len} bytes are unmapped that are no mapping of the service"));
            }
            let uses = |world: &World| world.storage.uses(start.addr(), len) || world.copy.uses(start.addr(), len);
            state.worlds.values().any(uses)
        };
        if used {
            machine.fail(format!("{len} bytes of a client's memory are unmapped while I/O on them is in flight"));
        }
        // SAFETY: the caller promises that it is such a mapping, and that nobody uses it.
        let unmapped = unsafe { machine.mappings.unmap(start, len) };
        unmapped.unwrap_or_else(|what| machine.fail(what));
        let pause = Duration::from_millis(machine.rng.borrow_mut().below(4));
        Box::pin(tokio::time::sleep(pause))
    }
}
