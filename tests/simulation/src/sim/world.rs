//! What a simulated cache stands on: its disk, its copies, and its seed.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Weak,
};

use super::{
    copy::{CopyOptions, SimCopy},
    storage::{Rng, Sim, SimOptions},
};

/// What a simulated cache stands on. Clones share everything.
#[derive(Clone)]
pub struct World {
    /// The files of the disk tier, one for each of `Config::disks`.
    pub storage: Sim,
    /// What copies between host and device memory.
    pub copy: SimCopy,
    /// Seeds the hash of the index, the id of a new store, and the workers.
    pub seed: u64,
    /// The probability that a worker dies after a step of its work.
    pub deaths: f64,
    /// Reads that a worker has in flight at most, and writes.
    pub transfers_max: usize,
    /// Bytes of blocks that workers checksum after a read.
    pub read_sum_bytes: Rc<Cell<usize>>,
    /// What is left of the cache that was opened last.
    pub(crate) remains: Rc<RefCell<Option<Weak<dyn Any + Send + Sync>>>>,
}

impl World {
    /// A world without faults.
    pub fn new(seed: u64, files: Vec<Vec<u8>>) -> Self {
        let mut rng = Rng::new(seed);
        World {
            storage: Sim::new(rng.next_u64(), files, SimOptions::default()),
            copy: SimCopy::new(rng.next_u64(), CopyOptions::default()),
            seed: rng.next_u64(),
            deaths: 1.0 / 64.0,
            transfers_max: 32,
            read_sum_bytes: Rc::default(),
            remains: Rc::default(),
        }
    }

    /// Checks that nothing owns the cache that was opened last: once its process has ended, that is a leak.
    ///
    /// # Errors
    /// How many owners are left.
    pub fn check_freed(&self) -> Result<(), String> {
        match self.remains.borrow().as_ref().map_or(0, Weak::strong_count) {
            0 => Ok(()),
            owners => Err(format!("{owners} owners of the cache are left at the end of its life")),
        }
    }
}
