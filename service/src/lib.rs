//! One cache for all processes of a node: a service that owns the drives, and its clients.
//!
//! `kvhoist serve` runs a [`Server`]; a [`Client`] has the calls of [`Cache`](kvhoist::Cache) that move blocks. A
//! client lends the service memory as memfds, and blocks go directly between it and the drives; or memory of a GPU.
//! docs/service.md is for operators, docs/protocol.md for authors of clients.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

#[macro_use]
mod debug;

mod accepted;
mod brief;
mod budget;
mod client;
mod config;
mod error;
mod file_client;
mod folders;
mod held;
mod helpers;
mod inbox;
#[doc(hidden)]
pub mod internals;
mod late_close;
mod link;
mod lock;
mod memory;
mod peers;
mod place;
mod protocol;
mod query;
mod regions;
mod report;
#[cfg(feature = "sim")]
mod seams;
mod seldom;
mod server;
mod session;
mod shares;
mod socket;
mod spaces;
mod state;
mod status_frames;
mod system;
mod transfers;
mod wire;

pub use client::{Client, ClientOptions, ClientRegion, Pins};
pub use config::ServerConfig;
pub use file_client::FileClient;
pub use kvhoist::{Stats as SpaceStats, TierStats as TierFigures};
pub use protocol::{ClientStatus, ServiceStatus, SpaceStatus};
pub use query::{default_socket, remove_space, status};
pub use server::Server;
pub use shares::{Bounds, Share};
