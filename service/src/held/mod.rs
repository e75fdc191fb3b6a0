//! Whole files in memory, for the clients that read them: each is read once, whoever wants it.

pub(super) mod memory;
mod reading;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use kvhoist_files::{FileIdentity, SourceFile};

use self::{
    memory::{Filling, Freed, memory_bytes},
    reading::{Job, Reads},
};
use crate::wire::Descriptor;

/// A file in memory, which is being read or has been.
pub(super) struct HeldFile {
    identity: FileIdentity,
    /// As the client that held it first named it.
    path: PathBuf,
    memory: RefCell<Option<(Arc<Descriptor>, Freed)>>,
    fate: Arc<Fate>,
    /// Clients that hold it.
    holds: Cell<u32>,
    /// It stays without a client.
    keep: Cell<bool>,
    /// When its last client let go of it, in turns.
    used: Cell<u64>,
}

impl HeldFile {
    /// For clients that hold it.
    pub(super) fn memory(&self) -> Arc<Descriptor> {
        let memory = self.memory.borrow();
        Arc::clone(&memory.as_ref().expect("it is not taken out while a client holds the file").0)
    }

    /// Takes the memory out of a file that nobody wants any more. The thread that reads the file may have it yet.
    pub(super) fn take_memory(&self) -> Option<(Arc<Descriptor>, Freed)> {
        self.memory.take()
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What it takes of the host memory.
    pub(super) fn bytes(&self) -> u64 {
        memory_bytes(self.identity.size)
    }

    /// It could not be read.
    pub(super) fn has_failed(&self) -> bool {
        is_set(&self.fate.failed)
    }

    #[cfg(test)]
    pub(super) fn fail(&self) {
        self.fate.failed.store(true, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn set_stuck(&self, is_stuck: bool) {
        self.fate.stuck.store(is_stuck, Ordering::Relaxed);
    }

    /// No client holds it.
    pub(super) fn is_idle(&self) -> bool {
        self.holds.get() == 0
    }

    /// No client holds it, and its memory is free soon after it is given up.
    fn is_spare(&self) -> bool {
        self.is_idle() && !is_set(&self.fate.stuck)
    }

    /// A client more has it.
    pub(super) fn add_hold(&self, keep: bool) {
        self.holds.set(self.holds.get() + 1);
        self.keep.set(self.keep.get() || keep);
    }
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        self.fate.given_up.store(true, Ordering::Relaxed);
    }
}

fn is_set(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed)
}

/// What a job and the table of files tell each other.
#[derive(Default)]
struct Fate {
    /// Nobody wants the file any more.
    given_up: AtomicBool,
    /// It could not be read.
    failed: AtomicBool,
    /// Its drive reads nothing of it now. It has its memory until the drive does, also where nobody wants it.
    stuck: AtomicBool,
}

/// Memory for a file that is to be read.
pub(super) struct NewMemory(Filling, Freed);

impl NewMemory {
    /// For a file of `size` bytes. None of it is filled.
    ///
    /// # Errors
    /// Where the system has no memory or descriptor for it.
    pub(super) fn new(size: u64) -> io::Result<Self> {
        let (filling, freed) = Filling::new(size)?;
        Ok(NewMemory(filling, freed))
    }
}

/// The files that a service holds.
#[derive(Default)]
pub(super) struct HeldFiles {
    files: RefCell<BTreeMap<FileIdentity, Rc<HeldFile>>>,
    reads: Arc<Reads>,
    turns: Cell<u64>,
}

impl HeldFiles {
    /// Begins to read a file into memory of its size.
    ///
    /// # Errors
    /// Where the system has no thread for it. The file is not closed then.
    pub(super) fn begin(&self, file: SourceFile, memory: NewMemory) -> Result<(), (SourceFile, io::Error)> {
        let (identity, path) = (file.identity(), file.path().to_owned());
        let NewMemory(filling, freed) = memory;
        let memory = RefCell::new(Some((filling.readable(), freed)));
        let fate = Arc::<Fate>::default();
        let added = self.reads.add(Job { file, filling, fate: Arc::clone(&fate) });
        added.map_err(|(job, error)| (job.file, error))?;
        let (holds, keep, used) = (Cell::new(0), Cell::new(false), Cell::new(0));
        let file = HeldFile { identity, path, memory, fate, holds, keep, used };
        self.files.borrow_mut().insert(identity, Rc::new(file));
        Ok(())
    }

    /// A drive that reads nothing, or nothing more: the files that wait for it are dropped.
    #[cfg(test)]
    pub(super) fn set_hung(&self, drive: u64, hangs: bool) {
        self.reads.set_hung(drive, hangs);
    }

    pub(super) fn find(&self, identity: &FileIdentity) -> Option<Rc<HeldFile>> {
        self.files.borrow().get(identity).cloned()
    }

    /// A client less has it. True if nobody wants it any more.
    pub(super) fn end_hold(&self, file: &HeldFile) -> bool {
        file.holds.set(file.holds.get() - 1);
        self.turns.set(self.turns.get() + 1);
        file.used.set(self.turns.get());
        file.is_idle() && (!file.keep.get() || file.has_failed())
    }

    /// The file without a client that was used longest ago, but for those whose drive hangs: that they are given up
    /// frees nothing.
    pub(super) fn oldest_spare(&self) -> Option<Rc<HeldFile>> {
        let files = self.files.borrow();
        let spare = files.values().filter(|file| file.is_spare());
        spare.min_by_key(|file| file.used.get()).cloned()
    }

    /// The bytes of all such files.
    pub(super) fn spare_bytes(&self) -> u64 {
        self.files.borrow().values().filter(|file| file.is_spare()).map(|file| file.bytes()).sum()
    }

    /// Holds a file no longer: those who read it have its memory.
    pub(super) fn forget(&self, file: &Rc<HeldFile>) {
        let mut files = self.files.borrow_mut();
        // Another may be in its place.
        if files.get(&file.identity).is_some_and(|found| Rc::ptr_eq(found, file)) {
            files.remove(&file.identity);
        }
    }

    /// How many there are, and their bytes.
    pub(super) fn totals(&self) -> (u32, u64) {
        let files = self.files.borrow();
        (files.len() as u32, files.values().map(|file| file.bytes()).sum())
    }
}
