//! What the fuzz targets do: a function from bytes to nothing, which panics where a promise is broken.
//!
//! Without libFuzzer, so that `cargo test` runs each of them over its committed seeds (`fuzz/seeds/TARGET`) and any
//! debugger over a finding. [`TARGETS`] lists them; `docs/testing.md` says what each is for.

pub mod config;
pub mod file_ranges;
pub mod index_ops;
pub mod keys;
pub mod memory;
pub mod mover_ops;
pub mod prefix_chain;
pub mod record_table;
#[allow(dead_code, reason = "what is sent")]
#[path = "../../../remote/src/redis/resp.rs"] // the file itself: the crate would bring an HTTP client with it
mod resp;
pub mod resp_replies;
pub mod service_frames;
pub mod store_files;
pub mod superblock;
pub mod trace;
pub mod verify;
pub mod weights_header;

/// A target: its name, and what it does with an input.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: [Target; 13] = [
    ("config", config::run),
    ("file_ranges", file_ranges::run),
    ("index_ops", index_ops::run),
    ("keys", keys::run),
    ("mover_ops", mover_ops::run),
    ("prefix_chain", prefix_chain::run),
    ("record_table", record_table::run),
    ("resp_replies", resp_replies::run),
    ("service_frames", service_frames::run),
    ("superblock", superblock::run),
    ("trace", trace::run),
    ("verify", verify::run),
    ("weights_header", weights_header::run),
];
