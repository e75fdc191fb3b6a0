//! What a child is to do, in a line of text.

use std::path::PathBuf;

use kvhoist::{Config, DiskPath, StorageKind, WritePolicy};

/// What a child is to do. As text: words of the form `field=value`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The paths of the disk tier.
    pub disks: Vec<PathBuf>,
    /// Slots of each path.
    pub blocks: u32,
    pub block_bytes: usize,
    pub storage: StorageKind,
    pub write_back: bool,
    /// More blocks are stored than there are slots; nothing but storing touches a block then.
    pub evicts: bool,
    /// The first key to store.
    pub first: u64,
    /// The first key not to store.
    pub end: u64,
    pub seed: u64,
}

impl Plan {
    pub fn config(&self) -> Config {
        let disk = |path: &PathBuf| DiskPath::with_blocks(path.clone(), self.blocks);
        Config::default()
            .block_bytes(self.block_bytes)
            .host_blocks(24)
            .disks(self.disks.iter().map(disk).collect())
            .storage(self.storage)
            .blocking_threads(4)
            .write_policy(if self.write_back { WritePolicy::WriteBack } else { WritePolicy::WriteThrough })
    }

    /// Slots of all paths.
    pub fn slots(&self) -> u64 {
        u64::from(self.blocks) * self.disks.len() as u64
    }

    pub fn to_text(&self) -> String {
        let storage = match self.storage {
            StorageKind::Uring => "uring",
            StorageKind::Blocking => "blocking",
            _ => "auto",
        };
        let mut text = format!(
            "blocks={} block_bytes={} storage={storage} write_back={} evicts={} first={} end={} seed={}",
            self.blocks, self.block_bytes, self.write_back, self.evicts, self.first, self.end, self.seed
        );
        for disk in &self.disks {
            text.push_str(&format!(" disk={}", disk.display()));
        }
        text
    }

    pub fn from_text(text: &str) -> Self {
        let mut plan = Plan {
            disks: Vec::new(),
            blocks: 0,
            block_bytes: 0,
            storage: StorageKind::Auto,
            write_back: false,
            evicts: false,
            first: 0,
            end: 0,
            seed: 0,
        };
        for word in text.split_whitespace() {
            let (field, value) = word.split_once('=').expect("words of the form field=value");
            let number = || value.parse::<u64>().expect("a number");
            match field {
                "disk" => plan.disks.push(value.into()),
                "blocks" => plan.blocks = number() as u32,
                "block_bytes" => plan.block_bytes = number() as usize,
                "storage" if value == "uring" => plan.storage = StorageKind::Uring,
                "storage" if value == "blocking" => plan.storage = StorageKind::Blocking,
                "storage" => plan.storage = StorageKind::Auto,
                "write_back" => plan.write_back = value == "true",
                "evicts" => plan.evicts = value == "true",
                "first" => plan.first = number(),
                "end" => plan.end = number(),
                "seed" => plan.seed = number(),
                other => panic!("a plan has no field {other}"),
            }
        }
        plan
    }
}
