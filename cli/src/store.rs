//! What `inspect` and `verify` have in common: flags, and how they show a store.

use std::{collections::BTreeMap, path::PathBuf};

use kvhoist::{
    DirectIo, StorageKind,
    store::{Fault, Shape, Store},
};
use serde_json::{Value, json};

use crate::{
    choice::choice,
    shown::{plain, shown},
    size::show_bytes,
};

/// Number of faults of each kind.
type FaultCounts = BTreeMap<&'static str, u64>;

/// The store to examine, and how.
#[derive(clap::Args)]
pub struct StoreArgs {
    /// All directories, files or block devices of one store, in any order.
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Examine the store even if a cache has it open, or opens it meanwhile. Blocks that are being written may then
    /// look damaged.
    #[arg(long)]
    pub allow_in_use: bool,
    /// How the store is read.
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = choice::<StorageKind>())]
    pub storage: StorageKind,
    /// Whether a path without direct I/O is refused.
    #[arg(long, value_name = "MODE", default_value = "prefer", value_parser = choice::<DirectIo>())]
    pub direct_io: DirectIo,
    /// Number of faults to list; all are counted.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub list: usize,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

impl StoreArgs {
    /// The store, to be read as the flags say.
    pub fn store(&self) -> Store {
        Store::at(&self.paths)
            .storage(self.storage)
            .direct_io(self.direct_io)
            .allow_in_use(self.allow_in_use)
            .listed_max(self.list)
    }
}

/// Lines of a name and a value.
#[derive(Default)]
pub struct Table(String);

impl Table {
    /// Adds a line.
    pub fn row(&mut self, name: &str, value: impl std::fmt::Display) {
        self.line(format!("{name:<23}{value:>12}"));
    }

    /// Adds a line as it is.
    pub fn line(&mut self, text: impl AsRef<str>) {
        self.0.push_str(text.as_ref().trim_end());
        self.0.push('\n');
    }

    /// What the superblocks say.
    pub fn shape(&mut self, shape: &Shape) {
        self.row("store", uuid(shape));
        self.row("format version", shape.version);
        // From the disk: nothing in it may drive a terminal.
        self.row("namespace", plain(&shape.namespace));
        self.row("block", show_bytes(shape.block_bytes));
        self.row("slot", show_bytes(shape.slot_bytes));
        self.row("slots", shape.slots);
    }

    /// The listed faults.
    pub fn faults(&mut self, listed: &[Fault], counts: &FaultCounts) {
        if counts.is_empty() {
            return;
        }
        self.line("");
        for (kind, count) in counts {
            self.row(kind, count);
        }
        self.line("");
        for fault in listed {
            let slot = fault.slot.map(|slot| format!(" slot {slot}")).unwrap_or_default();
            let key = fault.key_prefix.as_ref().map(|key| format!(" key {key}..")).unwrap_or_default();
            self.line(format!("{} at {}{slot}{key}: {}", shown(&fault.path), fault.offset, fault));
        }
        let more = total(counts) - listed.len() as u64;
        if more > 0 {
            self.line(format!("and {more} more; --list N lists more"));
        }
    }

    /// All lines.
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// The id of a store, as hexadecimal digits.
pub fn uuid(shape: &Shape) -> String {
    shape.uuid.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What the superblocks say, as an object.
pub fn shape_object(shape: &Shape) -> Value {
    json!({
        "uuid": uuid(shape),
        "format_version": shape.version,
        "namespace": shape.namespace,
        "block_bytes": shape.block_bytes,
        "slot_bytes": shape.slot_bytes,
        "slots": shape.slots,
    })
}

/// The faults, as an object.
pub fn faults_object(listed: &[Fault], counts: &FaultCounts) -> Value {
    let listed: Vec<Value> = listed.iter().map(fault_object).collect();
    json!({ "count": total(counts), "by_kind": counts, "listed": listed })
}

/// Number of all faults.
pub fn total(counts: &FaultCounts) -> u64 {
    counts.values().sum()
}

fn fault_object(fault: &Fault) -> Value {
    json!({
        "path": fault.path.to_string_lossy(),
        "offset": fault.offset,
        "slot": fault.slot,
        "key_prefix": fault.key_prefix,
        "kind": fault.kind(),
        "text": fault.to_string(),
    })
}
