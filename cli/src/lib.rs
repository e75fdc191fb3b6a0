//! The `kvhoist` command. Without the feature `command` only what it reads: that is what is fuzzed.

#[cfg(feature = "command")]
mod bench;
#[cfg(feature = "command")]
mod choice;
#[cfg(feature = "command")]
mod columns;
#[cfg(feature = "command")]
pub mod command;
#[cfg(feature = "command")]
mod doctor;
pub mod failure;
#[cfg(feature = "command")]
mod found;
#[cfg(feature = "command")]
mod http;
#[cfg(feature = "command")]
mod inspect;
#[cfg(feature = "command")]
mod interrupt;
#[cfg(feature = "command")]
mod json;
#[cfg(feature = "command")]
mod load_bench;
#[cfg(feature = "command")]
mod ls;
#[cfg(feature = "command")]
mod manual;
#[cfg(feature = "command")]
mod output;
#[cfg(feature = "command")]
mod plot;
#[cfg(feature = "command")]
mod progress;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "command")]
mod remote_store;
#[cfg(feature = "command")]
mod replay;
#[cfg(feature = "command")]
mod report;
#[cfg(feature = "command")]
mod scratch;
#[cfg(feature = "command")]
mod serve;
#[cfg(feature = "command")]
mod settings;
pub mod shown;
pub mod size;
#[cfg(feature = "command")]
mod socket;
#[cfg(feature = "command")]
mod space;
#[cfg(feature = "command")]
mod status;
#[cfg(feature = "command")]
mod store;
#[cfg(feature = "command")]
mod top;
#[cfg(feature = "command")]
mod verify;
#[cfg(feature = "command")]
mod wipe;

#[cfg(feature = "command")]
pub use progress::BesideProgress;
#[cfg(feature = "command")]
pub use remote_store::open_remote;
