//! Stores in memory, for what reads untrusted bytes: heads and record tables, no data.

use std::{cell::RefCell, io};

use kvhoist::{
    Config, DiskPath,
    io::{FileId, Lent, Storage},
    tier::disk::{
        format::{TABLE_OFFSET, stripe::Stripe},
        recovery::Member,
    },
};

/// Files in memory, answered at once. As long as the record tables; the data behind them is never asked for.
#[derive(Debug)]
pub struct Memory(RefCell<Vec<Vec<u8>>>);

impl Memory {
    /// A storage with these files.
    pub fn new(files: Vec<Vec<u8>>) -> Self {
        Memory(RefCell::new(files))
    }

    /// The files as they are now.
    pub fn into_files(self) -> Vec<Vec<u8>> {
        self.0.into_inner()
    }
}

impl Storage for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn read(&self, file: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
        let files = self.0.borrow();
        let from = &files[usize::from(file.0)][offset as usize..][..buf.len()];
        // SAFETY: the `Lent` is this operation's alone, and as long as `from`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), buf.as_ptr(), buf.len()) };
        (Ok(buf.len()), buf)
    }

    async fn write(&self, file: FileId, offset: u64, buf: Lent) -> (io::Result<usize>, Lent) {
        let mut files = self.0.borrow_mut();
        let to = &mut files[usize::from(file.0)][offset as usize..][..buf.len()];
        // SAFETY: the `Lent` is as long as `to`, and nobody writes to it meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(buf.as_ptr(), to.as_mut_ptr(), buf.len()) };
        (Ok(buf.len()), buf)
    }

    async fn sync(&self, _: FileId) -> io::Result<()> {
        Ok(())
    }
}

/// Settings of a store with so many slots in each member.
pub fn config(block_bytes: usize, blocks: &[u32]) -> Config {
    let disk = |(at, &blocks): (usize, &u32)| DiskPath { path: format!("disk{at}").into(), blocks };
    Config { block_bytes, disks: blocks.iter().enumerate().map(disk).collect(), ..Config::default() }
}

/// The members of a store of these settings, each as large as it must be.
pub fn members(config: &Config) -> Vec<Member> {
    let geometry = Stripe::new(config);
    let places = config.disks.iter().zip(geometry.members());
    places.map(|(disk, m)| Member { path: disk.path.clone(), bytes: m.bytes, device: false, zeroed: true }).collect()
}

/// Their files before there is a store.
pub fn blank_files(config: &Config) -> Vec<Vec<u8>> {
    let stripe = Stripe::new(config);
    stripe.members().iter().map(|member| vec![0; (TABLE_OFFSET + member.table_bytes()) as usize]).collect()
}
