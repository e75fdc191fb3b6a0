//! One life of a cache: opened, called, and ended.

use std::{cell::Cell, future::Future, rc::Rc, time::Duration};

use arbitrary::Unstructured;
use kvhoist::{
    Cache, DeviceLease, Error, Lease, Segment, Tier, WritePolicy,
    io::{FileId, OpKind},
};
use kvhoist_simulation::sim::{self, CopyOptions, FaultKind, Reactor, SimOptions, Simulated, World};
use tokio::time::{sleep, timeout};

use super::{
    KEYS, Run, block_key,
    model::Claims,
    ops::{Cancel, Exit, FaultPlan, Op},
    parent_key,
};

/// Calls of one life at most.
const OPS_MAX: usize = 64;
/// Virtual time in which everything must have come to its end.
const PATIENCE: Duration = Duration::from_secs(3_600);
/// Stalled operations go on after this.
const STALL: Duration = Duration::from_secs(5);
/// Blocks of a call on many.
const MANY_MAX: usize = 4;
/// What memory holds that nothing was loaded into.
const UNTOUCHED: u8 = 0x55;

enum Kept {
    Host(Lease),
    Device(DeviceLease),
}

/// A caller's own memory, of `MANY_MAX` blocks.
#[derive(Clone, Copy)]
struct Memory {
    start: *mut u8,
    block_bytes: usize,
}

impl Memory {
    fn place(&self, at: usize) -> *mut u8 {
        assert!(at < MANY_MAX, "a block of this memory");
        self.start.wrapping_add(at * self.block_bytes)
    }

    fn segments(&self, at: usize, cut: u16) -> Vec<Segment> {
        let (start, cut) = (self.place(at), usize::from(cut) % self.block_bytes);
        let halves = [(start, cut), (start.wrapping_add(cut), self.block_bytes - cut)];
        halves.into_iter().filter(|half| half.1 > 0).map(|(ptr, len)| Segment { ptr, len }).collect()
    }

    fn write(&self, at: usize, data: &[u8]) {
        assert_eq!(data.len(), self.block_bytes, "one block");
        // SAFETY: the range is in the memory (`place` checks), which outlives the life, and no call is in flight on it.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.place(at), data.len()) }
    }

    fn read(&self, at: usize) -> Vec<u8> {
        // SAFETY: as in `write`; it is initialized.
        unsafe { std::slice::from_raw_parts(self.place(at), self.block_bytes) }.to_vec()
    }
}

pub struct Life<'a> {
    run: &'a mut Run,
    world: World,
    cache: Cache,
    kept: Vec<(u8, Kept)>,
    memory: Memory,
    /// Something may go wrong with any call from now on.
    trouble: Rc<Cell<bool>>,
}

impl Life<'_> {
    /// Lives once on `files`; what it leaves, or `None` where the store is refused because a disk lied.
    pub fn live(run: &mut Run, files: Vec<Vec<u8>>, input: &mut Unstructured<'_>) -> Option<Vec<Vec<u8>>> {
        run.torn_off = false;
        let options = SimOptions { log_entries_max: 0, ..SimOptions::default() };
        let world = World {
            storage: sim::Sim::new(run.rng.next_u64(), files, options),
            copy: sim::SimCopy::new(run.rng.next_u64(), CopyOptions::default()),
            seed: run.rng.next_u64(),
        };
        // Outlives the runtime: what dies with it may still name the memory.
        let block_bytes = run.config.block_bytes;
        let mut memory = vec![UNTOUCHED; block_bytes * MANY_MAX];
        let memory_view = Memory { start: memory.as_mut_ptr(), block_bytes };
        let left = sim::block_on(async {
            let stalled = world.storage.clone();
            let releaser = tokio::task::spawn_local(async move {
                loop {
                    sleep(STALL).await;
                    stalled.release();
                }
            });
            let left = match Self::open(run, &world, input).await {
                Opened::Refused => None,
                Opened::CutOff { power_cut } => {
                    let honest = !has_lied(run, &world);
                    (run.cut_off, run.torn_off) = (true, true);
                    run.model.restart(power_cut, Claims { keeps: honest, honest });
                    Some(world.storage.end(power_cut))
                }
                Opened::Open(Simulated { cache, reactor }, trouble) => {
                    let trouble = Rc::new(Cell::new(trouble));
                    let life =
                        Life { run, world: world.clone(), cache, kept: Vec::new(), memory: memory_view, trouble };
                    Some(life.spend(&reactor, input).await)
                }
            };
            releaser.abort();
            left
        });
        drop(memory);
        run.lied = has_lied(run, &world);
        left
    }

    /// Opens the cache, with faults on the way where the input says so.
    async fn open(run: &Run, world: &World, input: &mut Unstructured<'_>) -> Opened {
        let mut trouble = false;
        if let Ok(Some(plan)) = input.arbitrary::<Option<FaultPlan>>()
            && !input.is_empty()
        {
            plan.script(&world.storage);
            trouble = true;
        }
        if let Ok(Some(ms)) = input.arbitrary::<Option<u8>>()
            && !input.is_empty()
        {
            match timeout(Duration::from_millis(ms.into()), sim::open(run.config.clone(), world)).await {
                Err(_) => return Opened::CutOff { power_cut: ms % 2 == 0 },
                Ok(Ok(simulated)) => return Opened::Open(simulated, trouble),
                // It is tried again.
                Ok(Err(_)) => {}
            }
        }
        for _ in 0..20 {
            match timeout(PATIENCE, sim::open(run.config.clone(), world)).await.expect("it opens some time") {
                Ok(simulated) => return Opened::Open(simulated, trouble),
                Err(Error::Store { .. }) if has_lied(run, world) || flipped(world) => return Opened::Refused,
                Err(Error::Io { .. }) if trouble => {}
                Err(error) => panic!("nothing explains that it does not open: {error}"),
            }
        }
        panic!("it does not open in 20 attempts");
    }

    async fn spend(mut self, reactor: &Reactor, input: &mut Unstructured<'_>) -> Vec<Vec<u8>> {
        let mut exit = Exit::Close;
        for _ in 0..OPS_MAX {
            if input.is_empty() {
                break;
            }
            let Ok(op) = input.arbitrary::<Op>() else { break };
            if let Op::Exit(how) = op {
                exit = how;
                break;
            }
            self.step(op).await;
        }
        match exit {
            Exit::Kill | Exit::PowerCut => {
                let (claims, power_cut) = (self.claims(), exit == Exit::PowerCut);
                (self.run.cut_off, self.run.torn_off) = (true, true);
                self.run.model.restart(power_cut, claims);
                self.world.storage.end(power_cut)
            }
            Exit::Close | Exit::Drop => self.end(reactor, exit).await,
        }
    }

    /// The life ends in order: first everything is asked for once more.
    async fn end(mut self, reactor: &Reactor, exit: Exit) -> Vec<Vec<u8>> {
        while !self.kept.is_empty() {
            self.let_go(0).await;
        }
        self.world.copy.set_failure(0.0);
        balance(reactor).await;
        for block in 0..KEYS {
            self.fetch(block, false, Cancel::NEVER).await;
        }
        balance(reactor).await;
        let mut claims = self.claims();
        let closed = match exit {
            Exit::Close => {
                let result = timeout(PATIENCE, self.cache.close()).await.expect("it closes some time");
                self.checked("close", result).is_some()
            }
            _ => false,
        };
        if closed {
            self.run.model.synced();
            let result = self.cache.fetch(&block_key(0)).await;
            assert!(matches!(result, Err(Error::Closed)), "a closed cache answers with {result:?}");
        }
        if closed {
            claims = self.claims();
        } else {
            // Evictions at the end cannot be queried.
            claims.keeps &= self.run.model.writes_through() || self.run.config.disk_slots() >= 2 * u64::from(KEYS);
            // Nor what it decides against.
            claims.keeps &= self.run.config.disk.write_policy != WritePolicy::ByValue;
        }
        let Life { run, world, cache, .. } = self;
        drop(cache);
        timeout(PATIENCE, reactor.ended()).await.expect("it ends some time");
        balance(reactor).await;
        let honest = claims.honest && !has_lied(run, &world);
        run.model.restart(true, Claims { keeps: claims.keeps && honest, honest });
        let power_cut = run.rng.chance(0.5);
        world.storage.end(power_cut)
    }

    fn claims(&self) -> Claims {
        let (stats, honest) = (self.cache.stats(), !has_lied(self.run, &self.world));
        let of_reads = self.world.storage.counts().faults_by_kind[OpKind::Read as usize];
        let keeps = honest
            && of_reads[FaultKind::Error as usize] + of_reads[FaultKind::BitFlip as usize] == 0
            && stats.read_errors == 0
            && stats.disk_retired.is_none()
            && stats.writes_declined + stats.writes_over_budget == 0
            && stats.tier(Tier::Disk).evictions == 0
            && (self.run.model.writes_through() || stats.writes_refused == 0);
        Claims { keeps, honest }
    }

    /// A block was asked for. Of one that was found nothing is claimed, and so nothing has to be found out.
    fn answered(&mut self, block: u8, found: bool) {
        let claims = if found { Claims::NONE } else { self.claims() };
        self.run.model.answered(block, found, claims);
    }

    async fn step(&mut self, op: Op) {
        match op {
            Op::Store { block, cancel } => self.store(block % KEYS, cancel).await,
            Op::Commit { block, clear, cancel } => self.commit(block % KEYS, clear, cancel).await,
            Op::Abandon => {
                let result = self.call(Cancel::NEVER, self.cache.reserve()).await.expect("not dropped");
                drop(self.checked("reserve", result));
            }
            Op::StoreWrong { block } => {
                let data = vec![0; self.run.config.block_bytes + 1];
                let result = self.cache.store(&block_key(block % KEYS), None, &data).await;
                assert!(matches!(result, Err(Error::Argument { .. })), "a block too long: {result:?}");
            }
            Op::Fetch { block, keep, cancel } => self.fetch(block % KEYS, keep, cancel).await,
            Op::FetchAtOnce { blocks } => self.fetch_at_once(blocks.map(|block| block % KEYS)).await,
            Op::FetchToDevice { block, keep, cancel } => self.fetch_to_device(block % KEYS, keep, cancel).await,
            Op::LetGo { pick } => {
                if !self.kept.is_empty() {
                    self.let_go(usize::from(pick) % self.kept.len()).await;
                }
            }
            Op::Prefetch { first, len } => {
                let keys: Vec<_> = blocks(first, len).map(block_key).collect();
                let started = self.cache.prefetch(&keys);
                assert!(self.checked("prefetch", started).is_none_or(|started| started <= keys.len()));
            }
            Op::Remove { block, cancel } => self.remove(block % KEYS, cancel).await,
            Op::Match { block } => self.look(block % KEYS),
            Op::LoadInto { first, len, cut, device, cancel } => self.load(first, len, cut, device, cancel).await,
            Op::StoreFrom { first, len, cut, device } => self.store_from(first, len, cut, device).await,
            Op::Sync { cancel } => {
                if let Some(result) = self.call(cancel, self.cache.sync()).await
                    && self.checked("sync", result).is_some()
                {
                    self.run.model.synced();
                }
            }
            Op::Wait { ms } => sleep(Duration::from_millis(ms.into())).await,
            Op::Fault(plan) => {
                plan.script(&self.world.storage);
                self.trouble.set(true);
            }
            Op::CopiesFail(fail) => {
                self.world.copy.set_failure(if fail { 0.5 } else { 0.0 });
                self.trouble.set(true);
            }
            Op::Rot { disk, at, mask } => self.rot(disk, at, mask),
            Op::Release => drop(self.world.storage.release()),
            Op::Exit(_) => unreachable!("it ends the life"),
        }
    }

    async fn call<T>(&self, cancel: Cancel, call: impl Future<Output = T>) -> Option<T> {
        timeout(PATIENCE, cancel.run(call)).await.expect("every call ends some time")
    }

    /// The answer; panics where nothing explains the error.
    fn checked<T>(&self, what: &str, result: kvhoist::Result<T>) -> Option<T> {
        let error = match result {
            Ok(answer) => return Some(answer),
            Err(error) => error,
        };
        let (trouble, config) = (self.trouble.get() || self.run.lied, &self.run.config);
        let explained = match &error {
            Error::Busy { .. } => self.run.has_tight_limits(),
            // A slot may be waited for that someone keeps.
            Error::Timeout { .. } => trouble || !self.kept.is_empty(),
            Error::Io { .. } | Error::Copy { .. } => trouble,
            Error::Unavailable { tier, .. } if *tier == "device" => config.device_slots() == 0,
            // Slots with torn blocks are taken out of use.
            Error::Refused { .. } | Error::Unavailable { .. } => trouble || self.run.cut_off,
            _ => false,
        };
        assert!(explained, "nothing explains that {what} failed: {error}");
        None
    }

    async fn store(&mut self, block: u8, cancel: Cancel) {
        let data = self.run.payload(block);
        self.run.model.store_begins(block);
        let (key, parent) = (block_key(block), parent_key(block));
        let result = self.call(cancel, self.cache.store(&key, parent.as_ref(), &data)).await;
        let stored = result.and_then(|result| self.checked("store", result));
        self.run.model.store_ends(block, stored.is_some());
    }

    async fn commit(&mut self, block: u8, clear: bool, cancel: Cancel) {
        let reserved = match clear {
            true => self.call(cancel, self.cache.reserve()).await,
            false => self.call(cancel, self.cache.reserve_for_overwrite()).await,
        };
        let Some(mut reservation) = reserved.and_then(|result| self.checked("reserve", result)) else { return };
        assert!(!clear || reservation.iter().all(|byte| *byte == 0), "a reservation shows what was there before");
        reservation.copy_from_slice(&self.run.payload(block));
        self.run.model.store_begins(block);
        let (key, parent) = (block_key(block), parent_key(block));
        let result = self.call(cancel, reservation.commit(&key, parent.as_ref())).await;
        let stored = result.and_then(|result| self.checked("commit", result));
        self.run.model.store_ends(block, stored.is_some());
    }

    async fn fetch(&mut self, block: u8, keep: bool, cancel: Cancel) {
        let result = self.call(cancel, self.cache.fetch(&block_key(block))).await;
        let Some(found) = result.and_then(|result| self.checked("fetch", result)) else { return };
        self.answered(block, found.is_some());
        let Some(lease) = found else { return };
        assert_eq!(*lease, *self.run.payload(block), "wrong bytes of block {block}");
        if keep {
            self.kept.push((block, Kept::Host(lease)));
        }
    }

    /// Fetches that share one flight, or want slots at the same time.
    async fn fetch_at_once(&mut self, blocks: [u8; 3]) {
        let keys = blocks.map(block_key);
        let fetch = |at: usize| self.call(Cancel::NEVER, self.cache.fetch(&keys[at]));
        let (first, second, third) = tokio::join!(fetch(0), fetch(1), fetch(2));
        for (block, result) in blocks.into_iter().zip([first, second, third]) {
            // What the others hold may be waited for until the deadline.
            let result = result.expect("not dropped");
            if matches!(result, Err(Error::Timeout { .. })) && self.run.config.host_slots() < 3 {
                continue;
            }
            let Some(found) = self.checked("one of three fetches", result) else { continue };
            self.answered(block, found.is_some());
            if let Some(lease) = found {
                assert_eq!(*lease, *self.run.payload(block), "wrong bytes of block {block}");
            }
        }
    }

    async fn fetch_to_device(&mut self, block: u8, keep: bool, cancel: Cancel) {
        let result = self.call(cancel, self.cache.fetch_to_device(&block_key(block))).await;
        let Some(found) = result.and_then(|result| self.checked("fetch_to_device", result)) else { return };
        self.answered(block, found.is_some());
        let Some(lease) = found else { return };
        self.kept.push((block, Kept::Device(lease)));
        if !keep {
            self.let_go(self.kept.len() - 1).await;
        }
    }

    /// Drops a lease after a last look at what it holds.
    async fn let_go(&mut self, at: usize) {
        let (block, kept) = self.kept.swap_remove(at);
        let bytes = match &kept {
            Kept::Host(lease) => Some(lease.to_vec()),
            Kept::Device(lease) => {
                let read = self.cache.read_device(lease, Vec::new());
                match self.call(Cancel::NEVER, read).await.expect("not dropped") {
                    // The block was removed meanwhile, which ends new uses.
                    Err(Error::Argument { what: "lease", .. }) => None,
                    result => self.checked("read_device", result),
                }
            }
        };
        let expected = self.run.payload(block);
        assert!(bytes.is_none_or(|bytes| *bytes == *expected), "a lease on block {block} shows wrong bytes");
    }

    async fn remove(&mut self, block: u8, cancel: Cancel) {
        self.run.model.remove_begins(block);
        match self.call(cancel, self.cache.remove(&block_key(block))).await {
            None => {}
            Some(Ok(_)) => self.run.model.remove_ends(block, true),
            Some(Err(error)) => {
                let forgotten = matches!(error, Error::Io { .. } | Error::Timeout { .. });
                self.checked::<bool>("remove", Err(error));
                if forgotten {
                    self.run.model.remove_ends(block, false);
                }
            }
        }
    }

    fn look(&self, block: u8) {
        let path: Vec<u8> = (block - block % 4..=block).collect();
        let keys: Vec<_> = path.iter().map(|&block| block_key(block)).collect();
        let len = self.cache.match_len(&keys);
        assert_eq!(self.cache.match_prefix(&keys).len(), len);
        let claims = self.claims();
        path[..len].iter().for_each(|&block| self.run.model.listed(block, true, claims));
        path.get(len).into_iter().for_each(|&block| self.run.model.listed(block, false, claims));
    }

    async fn load(&mut self, first: u8, len: u8, cut: u16, device: bool, cancel: Cancel) {
        let Some(region) = self.register(device) else { return };
        let blocks: Vec<u8> = blocks(first, len).collect();
        let keys: Vec<_> = blocks.iter().map(|&block| block_key(block)).collect();
        let untouched = vec![UNTOUCHED; self.memory.block_bytes];
        (0..blocks.len()).for_each(|at| self.memory.write(at, &untouched));
        let segments: Vec<_> = (0..blocks.len()).map(|at| self.memory.segments(at, cut)).collect();
        let results = self.call(cancel, self.cache.load_into(&keys, &segments)).await;
        let unregistered = timeout(PATIENCE, self.cache.unregister(&region)).await;
        unregistered.expect("loads end some time").expect("its own region");
        let Some(results) = results.and_then(|results| self.checked("load_into", results)) else { return };
        assert_eq!(results.len(), blocks.len());
        for ((at, block), result) in blocks.into_iter().enumerate().zip(results) {
            let Some(found) = self.checked("a load", result) else { continue };
            self.answered(block, found);
            // A block that is found out to be damaged may be there by then.
            if !found && device {
                continue;
            }
            let expected = if found { self.run.payload(block) } else { Rc::from(&*untouched) };
            assert_eq!(*self.memory.read(at), *expected, "block {block}, loaded: {found}, left wrong bytes");
        }
    }

    async fn store_from(&mut self, first: u8, len: u8, cut: u16, device: bool) {
        let Some(region) = self.register(device) else { return };
        let blocks: Vec<u8> = blocks(first, len).collect();
        let keys: Vec<_> = blocks.iter().map(|&block| block_key(block)).collect();
        for (at, &block) in blocks.iter().enumerate() {
            self.memory.write(at, &self.run.payload(block));
            self.run.model.store_begins(block);
        }
        let segments: Vec<_> = (0..blocks.len()).map(|at| self.memory.segments(at, cut)).collect();
        let parent = blocks.first().and_then(|&first| parent_key(first));
        let call = self.cache.store_from(&keys, parent.as_ref(), &segments);
        let results = self.call(Cancel::NEVER, call).await.expect("not dropped");
        let unregistered = timeout(PATIENCE, self.cache.unregister(&region)).await;
        unregistered.expect("stores end some time").expect("its own region");
        let results = self.checked("store_from", results);
        let results = results.unwrap_or_else(|| blocks.iter().map(|_| Ok(false)).collect());
        for (block, result) in blocks.into_iter().zip(results) {
            let stored = self.checked("a store", result) == Some(true);
            self.run.model.store_ends(block, stored);
        }
    }

    fn register(&self, device: bool) -> Option<kvhoist::Region> {
        let len = self.memory.block_bytes * MANY_MAX;
        // SAFETY: the memory outlives the runtime and with it the cache; nothing touches it while a call on it is under
        // way: calls are made one at a time, and `unregister` is waited for after each.
        let region = unsafe {
            match device {
                true => self.cache.register_device(self.memory.start, len),
                false => self.cache.register_host(self.memory.start, len),
            }
        };
        self.checked("register", region)
    }

    /// A bit on the medium turns, unnoticed.
    fn rot(&mut self, disk: u8, at: u32, mask: u8) {
        let disks = self.run.config.disk.paths.len();
        if disks == 0 || mask == 0 {
            return;
        }
        let file = FileId((usize::from(disk) % disks) as u16);
        let at = u64::from(at) % self.world.storage.file_bytes(file);
        self.world.storage.flip(file, at as usize, mask);
        self.run.lied = true;
        self.trouble.set(true);
    }
}

enum Opened {
    Open(Simulated, bool),
    /// The life is over before that.
    CutOff {
        power_cut: bool,
    },
    Refused,
}

/// `first` and those after it.
fn blocks(first: u8, len: u8) -> impl Iterator<Item = u8> {
    (0..1 + len % MANY_MAX as u8).map(move |n| (first % KEYS + n) % KEYS)
}

fn has_lied(run: &Run, world: &World) -> bool {
    let [_, writes, syncs] = world.storage.counts().faults_by_kind;
    let lies = [FaultKind::Lost, FaultKind::Misdirected].map(|kind| writes[kind as usize] + syncs[kind as usize]);
    run.lied || lies != [0; 2]
}

/// A read showed a wrong bit.
fn flipped(world: &World) -> bool {
    world.storage.counts().faults_by_kind[OpKind::Read as usize][FaultKind::BitFlip as usize] > 0
}

/// With nothing in flight, every slot and every byte is accounted for.
async fn balance(reactor: &Reactor) {
    reactor.settle(PATIENCE).await.unwrap_or_else(|what| panic!("the balance does not hold: {what}"));
}
