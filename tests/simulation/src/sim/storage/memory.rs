//! Files in memory, read and written at once.

use std::{cell::RefCell, io};

use kvhoist::internals::io::{FileId, Lent, OpKind, Storage};

/// A storage without time or faults, for code that only reads and writes.
///
/// # Panics
/// If a file does not exist, or ends before the range.
#[derive(Debug)]
pub struct Memory(RefCell<Vec<Vec<u8>>>);

impl Memory {
    /// A storage with these files.
    pub fn new(files: Vec<Vec<u8>>) -> Self {
        Memory(RefCell::new(files))
    }

    /// What the files hold now.
    pub fn files(&self) -> Vec<Vec<u8>> {
        self.0.borrow().clone()
    }

    /// Ends the storage and returns its files.
    pub fn into_files(self) -> Vec<Vec<u8>> {
        self.0.into_inner()
    }
}

impl Storage for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn transfer(&self, kind: OpKind, file: FileId, offset: u64, buf: Lent) -> io::Result<()> {
        let mut files = self.0.borrow_mut();
        let place = &mut files[usize::from(file.0)][offset as usize..][..buf.len()];
        match kind {
            // SAFETY: memory that was lent for a read is the operation's alone, and as long as `place`.
            OpKind::Read => unsafe { std::ptr::copy_nonoverlapping(place.as_ptr(), buf.as_ptr(), buf.len()) },
            // SAFETY: nothing writes to memory lent for a write, and it is as long as `place`.
            OpKind::Write => unsafe { std::ptr::copy_nonoverlapping(buf.as_ptr(), place.as_mut_ptr(), buf.len()) },
            OpKind::Sync => {}
        }
        Ok(())
    }
}
