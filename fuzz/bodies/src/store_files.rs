//! Stores in memory, for what reads untrusted bytes: heads and record tables, no data.

use kvhoist::{
    Config, DiskPath,
    internals::disk::{
        format::{TABLE_OFFSET, stripe::Stripe},
        recovery::Member,
    },
};

/// Settings of a store with so many slots in each member.
pub fn config(block_bytes: usize, blocks: &[u32]) -> Config {
    let disk = |(at, &blocks): (usize, &u32)| DiskPath::with_blocks(format!("disk{at}"), blocks);
    Config::default().block_bytes(block_bytes).disks(blocks.iter().enumerate().map(disk).collect())
}

/// The members of a store of these settings, each as large as it must be.
pub fn members(config: &Config) -> Vec<Member> {
    let geometry = Stripe::new(config);
    let places = config.disk.paths.iter().zip(geometry.members());
    places.map(|(disk, m)| Member { path: disk.path.clone(), bytes: m.bytes, device: false, zeroed: true }).collect()
}

/// Their files before there is a store.
pub fn blank_files(config: &Config) -> Vec<Vec<u8>> {
    let stripe = Stripe::new(config);
    stripe.members().iter().map(|member| vec![0; (TABLE_OFFSET + member.table_bytes()) as usize]).collect()
}
