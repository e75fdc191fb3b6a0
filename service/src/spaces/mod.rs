//! Spaces: each a namespace with a block size, a share of the disk and of host memory, and a cache of its own.

mod ended;
pub(super) mod files;
mod folders;
mod host;
mod manifest;
mod open;
pub(super) mod opens;
mod pool;
mod removal;
mod settings;
mod tables;
#[cfg(test)]
mod tests;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

use kvhoist::Cache;
use kvhoist_files::SourceFile;
use tokio::sync::{Notify, Semaphore, oneshot};

use self::manifest::{SpaceManifest, manifests};
use self::{files::Freeing, host::HostShare, opens::Opens, tables::Tables};
use super::{
    config::ServerConfig,
    held::HeldFiles,
    protocol::{Failure, SpaceDevice, SpaceStatus},
    report::OpenSpace,
    shares::{Ledger, SpaceOf},
    system::{Made, System},
};
use crate::error::{Error, Result, ServiceFault};

/// Spaces of one service.
const SPACES_MAX: usize = 256;

/// An open space.
pub(super) struct Space {
    pub(super) namespace: String,
    /// The user that made it.
    uid: u32,
    pub(super) block_bytes: u64,
    pub(super) capacity_bytes: u64,
    host: HostShare,
    pub(super) cache: Cache,
    pub(super) system: Rc<dyn System>,
    /// Connections attached to it.
    pub(super) clients: Cell<u32>,
    /// Connections that have lent memory.
    pub(super) lenders: Rc<Cell<u32>>,
    /// What its first client has asked for.
    pub(super) device: SpaceDevice,
    /// Blocks that clients have pinned in host memory.
    pins: Cell<usize>,
}

/// Callers that wait until a space is open, or removed.
type Waiters<T> = Vec<oneshot::Sender<Result<T, Failure>>>;

enum State {
    /// Its store exists, and no client has attached since the service started.
    Closed,
    Opening(Waiters<Rc<Space>>),
    Open(Rc<Space>),
    Removing(Waiters<()>),
    /// Its file describes no space, and its manifest is made up, but for the folder; or it has more disk than there is
    /// for it; or its file was put there after the service started, and its manifest has another capacity.
    Refused(Failure),
}

struct Entry {
    manifest: SpaceManifest,
    state: State,
    /// Why its store could not be opened the last time, or cannot be, by a look after the start.
    trouble: Option<Failure>,
    /// What its opening has made of its folders.
    made: Option<Made>,
}

impl Entry {
    fn new(manifest: SpaceManifest, state: State) -> Self {
        Entry { manifest, state, trouble: None, made: None }
    }
}

/// The space that a client wants.
pub(super) struct Wanted {
    pub(super) namespace: String,
    pub(super) uid: u32,
    pub(super) shared: bool,
    pub(super) block_bytes: u64,
    pub(super) capacity_bytes: u64,
    pub(super) host_bytes: u64,
    pub(super) device: SpaceDevice,
}

#[cfg(test)]
impl Wanted {
    /// A space of user 1 without a share of its own.
    pub(super) fn of_tests(block_bytes: usize) -> Self {
        let (namespace, block_bytes, device) = ("tests".into(), block_bytes as u64, SpaceDevice::None);
        Wanted { namespace, uid: 1, shared: false, block_bytes, capacity_bytes: 0, host_bytes: 0, device }
    }
}

/// All spaces of a service, by folder.
pub(super) struct Spaces {
    config: ServerConfig,
    system: Rc<dyn System>,
    entries: RefCell<BTreeMap<String, Entry>>,
    disk: Ledger,
    host: Rc<Ledger>,
    tables: Tables,
    /// Whole files, which share the host memory.
    files: HeldFiles,
    freeing: Rc<Freeing>,
    opens: Opens,
    /// Lets one file get memory at a time.
    file_turn: Semaphore,
    /// A permit a space whose folders are being made or removed.
    folder_turns: Semaphore,
    /// Host memory moves from one space to another.
    moving: Cell<bool>,
    /// Told when such a move has ended.
    move_ended: Notify,
    /// Why no space could be opened the last time, as far as no entry has it.
    trouble: RefCell<Option<String>>,
}

impl Spaces {
    /// Reads the files of all spaces. One whose file cannot be read or understood, and one that has more disk than it
    /// may have now, is refused to its clients; the others are served.
    ///
    /// # Errors
    /// [`Error::Io`] if the first path cannot be read, [`Error::Config`] if another has been the first.
    pub(super) fn load(config: ServerConfig, system: Rc<dyn System>) -> Result<Self> {
        let mut entries = BTreeMap::new();
        let capacity = if config.paths.is_empty() { 0 } else { config.capacity_bytes };
        let disk = Ledger::new("bytes of disk", capacity, &config.shares, |share| share.disk);
        let host = Ledger::new("bytes of host memory", config.host_bytes, &config.shares, |share| share.host);
        let host = Rc::new(host);
        let mut refused = Vec::new();
        let mut found = manifests(&*system, &config)?;
        // Where not all fit, the small ones are served.
        found.sort_by_key(|(_, folder, manifest)| {
            (manifest.as_ref().map_or(0, |manifest| manifest.capacity_bytes), folder.clone())
        });
        for (path, folder, manifest) in found {
            let fits = |manifest: &SpaceManifest| disk.take(manifest.of(), manifest.capacity_bytes);
            match manifest.map(|manifest| (fits(&manifest), manifest)) {
                Ok((Ok(_), manifest)) => drop(entries.insert(folder, Entry::new(manifest, State::Closed))),
                Ok((Err(failure), manifest)) => {
                    let found = format!(
                        "the space {:?} with {} bytes of disk ({})",
                        manifest.namespace, manifest.capacity_bytes, failure.text
                    );
                    let expected = "what other spaces and the shares leave of the capacity";
                    let hint = "raise the capacity or the share and restart the service, or remove a space";
                    refused.push((folder, manifest, Error::store(path, found, expected, hint)));
                }
                Err(error) => refused.push((folder.clone(), SpaceManifest::unknown(&folder), error)),
            }
        }
        for (folder, mut manifest, error) in refused {
            tracing::error!(%error, "a space is not served; the others are");
            ended::keep_disk(&disk, &mut manifest, system.store_bytes(&folders::of(&config, &folder)));
            entries.insert(folder, Entry::new(manifest, State::Refused(Failure::from(&error))));
        }
        let (moving, move_ended) = (Cell::new(false), Notify::new());
        let tables = Tables::new(&config);
        let (entries, files, file_turn) = (RefCell::new(entries), HeldFiles::default(), Semaphore::new(1));
        let folder_turns = folders::turns();
        let opens = Opens::new(|path| SourceFile::open(path));
        let trouble = RefCell::default();
        Ok(Spaces {
            disk,
            host,
            tables,
            files,
            freeing: Rc::default(),
            opens,
            file_turn,
            folder_turns,
            entries,
            config,
            system,
            moving,
            move_ended,
            trouble,
        })
    }

    /// Something keeps spaces from being opened, until one is.
    pub(super) fn has_trouble(&self, trouble: String) {
        self.trouble.replace(Some(trouble));
    }

    /// What keeps spaces from being opened, and is no space's own.
    pub(super) fn trouble(&self) -> Option<String> {
        self.trouble.borrow().clone()
    }

    /// Has files opened by `open`, which may hang.
    #[cfg(test)]
    pub(super) fn open_files_by(&mut self, open: opens::Open) {
        self.opens = Opens::new(open);
    }

    pub(super) fn system(&self) -> &dyn System {
        &*self.system
    }

    /// The number of spaces, closed ones included.
    pub(super) fn count(&self) -> usize {
        self.entries.borrow().len()
    }

    /// Finds, opens or makes the space that a client wants.
    ///
    /// # Cancel safety
    /// The space is still opened.
    pub(super) async fn attach(self: &Rc<Self>, wanted: Wanted) -> Result<Rc<Space>, Failure> {
        let Wanted { namespace, block_bytes, .. } = &wanted;
        if namespace.is_empty() || *block_bytes == 0 || *block_bytes > 1 << 30 {
            let text = format!("space: found {block_bytes} bytes a block and a name of {} bytes, ", namespace.len());
            return Err(Failure::new(ServiceFault::Argument, text + "expected 1 byte to 1 GiB, and a name"));
        }
        if self.entries.borrow().values().any(Entry::has_ended) {
            // A move of memory has its spaces as clients have theirs.
            self.moves_end().await;
        }
        let begun = self.begin(&wanted).inspect_err(|failure| open::tell_refused(namespace, failure, false))?;
        let space = begun.await.unwrap_or_else(|_| Err(ending()))?;
        if space.device.serves(wanted.device) {
            return Ok(space);
        }
        let text = format!("space: found {}, as its first client has asked for", space.device);
        let text = format!("{text}, expected {}: end the service, or use another name", wanted.device);
        Err(Failure::new(ServiceFault::Argument, text))
    }

    /// The space that is open, or will be: begins to open one that is neither open nor being opened, and opens one anew
    /// whose cache has ended.
    fn begin(self: &Rc<Self>, wanted: &Wanted) -> Result<oneshot::Receiver<Result<Rc<Space>, Failure>>, Failure> {
        let Wanted { ref namespace, uid, shared, block_bytes, capacity_bytes, host_bytes, device } = *wanted;
        let mut manifest = SpaceManifest::new(namespace.clone(), uid, shared, block_bytes);
        let folder = manifest.folder();
        let (sender, receiver) = oneshot::channel();
        let mut entries = self.entries.borrow_mut();
        let (is_new, is_full) = (!entries.contains_key(&folder), entries.len() >= SPACES_MAX);
        let (has_ended, mut before) = (entries.get(&folder).is_some_and(Entry::has_ended), State::Closed);
        match entries.get_mut(&folder) {
            Some(entry) if has_ended && entry.is_attached() => return Err(Failure::from(&Error::Closed)),
            Some(Entry { state: State::Open(space), .. }) if !has_ended => {
                drop(sender.send(Ok(Rc::clone(space))));
                return Ok(receiver);
            }
            Some(Entry { state: State::Opening(waiters), .. }) => {
                waiters.push(sender);
                return Ok(receiver);
            }
            Some(Entry { state: State::Removing(_), .. }) => {
                let text = "busy: the space is being removed; attach again later to make it anew";
                return Err(Failure::new(ServiceFault::Busy, text));
            }
            Some(Entry { state: State::Refused(failure), .. }) => return Err(failure.clone()),
            Some(entry) => {
                manifest = entry.manifest.clone();
                before = std::mem::replace(&mut entry.state, State::Opening(vec![sender]));
            }
            None if is_full => {
                let text = format!("space: found {SPACES_MAX} spaces, expected fewer; delete one");
                return Err(Failure::new(ServiceFault::Capacity, text));
            }
            None => {
                manifest.capacity_bytes = self.take_capacity(manifest.of(), capacity_bytes)?;
                entries.insert(folder, Entry::new(manifest.clone(), State::Opening(vec![sender])));
            }
        }
        let spaces = Rc::clone(self);
        tokio::task::spawn_local(async move {
            spaces.close_cache(before).await;
            spaces.open(manifest, host_bytes, device, is_new).await;
        });
        Ok(receiver)
    }

    /// Sets disk aside for a new space; 0 takes all that it may have.
    fn take_capacity(&self, space: SpaceOf<'_>, wanted: u64) -> Result<u64, Failure> {
        if self.config.paths.is_empty() {
            return Ok(0);
        }
        self.disk.take(space, wanted)
    }

    /// Closes the caches of all spaces, which write and flush their blocks. Removals end before. Returns the first
    /// error.
    pub(super) async fn close(&self) -> Result<()> {
        self.moves_end().await;
        self.removals_end().await;
        let mut result = Ok(());
        for space in self.open_spaces() {
            result = result.and(space.cache.close().await);
        }
        result
    }

    /// Disk and host memory that no space has, bytes.
    pub(super) fn left(&self) -> (u64, u64) {
        (self.disk.left(), self.host.left())
    }

    /// The spaces that are open, and those that are not served.
    pub(super) fn opened(&self) -> Vec<OpenSpace> {
        let entries = self.entries.borrow();
        let report = |(folder, entry): (&String, &Entry)| {
            let (namespace, folder) = (entry.manifest.namespace.clone(), folder.clone());
            Some(OpenSpace { namespace, folder, is_served: entry.is_served(), stats: entry.stats()? })
        };
        entries.iter().filter_map(report).collect()
    }

    pub(super) fn status(&self) -> Vec<SpaceStatus> {
        let status = |(folder, entry): (&String, &Entry)| {
            let SpaceManifest { namespace, uid, shared, block_bytes, capacity_bytes, .. } = entry.manifest.clone();
            let space = entry.space();
            SpaceStatus {
                namespace,
                folder: folder.clone(),
                uid,
                shared,
                block_bytes,
                capacity_bytes,
                host_bytes: space.map_or(0, |space| space.host.bytes()),
                clients: space.map_or(0, |space| space.clients.get()),
                stats: entry.stats(),
            }
        };
        self.entries.borrow().iter().map(status).collect()
    }
}

/// The share of the host memory's slots that clients may pin.
const PINNED_SHARE: u64 = 4;

impl Space {
    /// How many more blocks clients may pin.
    pub(super) fn room_for_pins(&self) -> usize {
        let most = self.host_bytes() / self.host.slot_bytes / PINNED_SHARE;
        usize::try_from(most).unwrap_or(usize::MAX).saturating_sub(self.pins.get())
    }

    /// Blocks were pinned.
    pub(super) fn pinned(&self, blocks: usize) {
        self.pins.set(self.pins.get() + blocks);
    }

    /// And let go.
    pub(super) fn unpinned(&self, blocks: usize) {
        self.pins.set(self.pins.get() - blocks);
    }

    /// What shares know it by.
    fn of(&self) -> SpaceOf<'_> {
        SpaceOf { uid: self.uid, name: &self.namespace }
    }

    /// The host memory that it has now, bytes.
    pub(super) fn host_bytes(&self) -> u64 {
        self.host.bytes()
    }
}

impl Entry {
    /// The space, if it is open.
    fn space(&self) -> Option<&Rc<Space>> {
        match &self.state {
            State::Open(space) => Some(space),
            _ => None,
        }
    }

    /// Resolves when the space is removed; `None` if it is not being removed.
    fn removal(&mut self) -> Option<oneshot::Receiver<Result<(), Failure>>> {
        let State::Removing(waiters) = &mut self.state else { return None };
        let (sender, receiver) = oneshot::channel();
        waiters.push(sender);
        Some(receiver)
    }
}

fn ending() -> Failure {
    Failure::new(ServiceFault::Draining, "the service is ending")
}
