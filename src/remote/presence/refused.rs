//! Blocks that are not written, because the store has an object of their name and they are not offered all the same.

use super::{Presence, Run};

impl Presence {
    /// Notes that the store has an object of this name, the first block of which is not offered. One that is not known
    /// is entered without blocks, if there is room; the next listing that has it has its table read again.
    pub(crate) fn refuse_writes(&mut self, name: &str, listing: u64) {
        if self.id_of(name).is_none() {
            self.enter(Run { is_doubted: true, ..Run::new(name, None, Box::default(), listing) });
        }
        if let Some(id) = self.id_of(name) {
            self.objects[id as usize].refuses_writes = Some(self.forgotten);
        }
    }

    /// Notes that an object has no table, and so no blocks, as [`refuse_writes`](Self::refuse_writes) does; false if
    /// that is known. Each listing has its table read again: the read may have been wrong.
    pub(crate) fn pass_over(&mut self, name: &str, listing: u64) -> bool {
        if self.id_of(name).is_some_and(|id| self.objects[id as usize].is_passed_over) {
            return false;
        }
        self.forget_object(name);
        self.refuse_writes(name, listing);
        if let Some(id) = self.id_of(name) {
            self.objects[id as usize].is_passed_over = true;
        }
        true
    }

    /// Whether a write of the block of this name would be in vain, as [`refuse_writes`](Self::refuse_writes) noted.
    pub(crate) fn refuses_writes(&self, name: &str) -> bool {
        self.id_of(name).is_some_and(|id| self.objects[id as usize].refuses_writes == Some(self.forgotten))
    }

    /// Notes that the block of this name was removed: what it is stored with next may be what its object has.
    pub(crate) fn allow_writes(&mut self, name: &str) {
        if let Some(id) = self.id_of(name) {
            self.objects[id as usize].refuses_writes = None;
        }
    }
}
