//! Why a command failed, and the exit status that says so.

use std::fmt;

use crate::shown::plain;

/// What the exit statuses mean, for the end of every help text.
pub const EXIT_STATUS: &str = "\
Exit status:
  0    success
  1    failure, damage, or a missing feature that --want names
  2    wrong or missing flag, input or store: correct it and try again
  130  interrupted (Ctrl-C; what takes long also by SIGTERM and SIGHUP, after printing the results so far)";

/// What the command's flags are called for settings of the engine.
const FLAGS: [(&str, &str); 26] = [
    ("block_bytes", "--block-bytes"),
    ("host_blocks", "--host-blocks"),
    ("device_blocks", "--device-blocks"),
    ("device", "--device"),
    ("disks.blocks", "--disk-blocks"),
    ("disks.path", "--path"),
    ("disks", "--path"),
    ("write_policy", "--write-policy"),
    ("write_budget", "--write-budget"),
    ("eviction_policy", "--policy"),
    ("storage", "--storage"),
    ("direct_io", "--direct-io"),
    ("depth", "--depth"),
    ("capacity_bytes", "--capacity"),
    ("host_bytes", "--host-bytes"),
    ("device_bytes", "--device-bytes"),
    ("disks.bytes", "--capacity"),
    ("capacity", "--capacity"),
    ("paths", "--path"),
    ("socket", "--socket"),
    ("socket_group", "--socket-group"),
    ("region_bytes_max", "--region-bytes"),
    ("region_bytes_total_max", "--region-bytes-total"),
    ("regions_total_max", "--regions-total"),
    ("linger_ms", "--linger"),
    ("shares", "--share"),
];

/// One line of text and an exit status.
#[derive(Debug)]
pub struct Failure {
    text: String,
    status: u8,
}

impl Failure {
    /// Exit status of wrong flags, inputs and stores: correct them and try again.
    pub const USAGE: u8 = 2;
    const RUN: u8 = 1;
    // 128 and SIGINT's number, as shells have it.
    const INTERRUPTED: u8 = 130;

    /// A wrong flag, input or store.
    pub fn usage(text: impl Into<String>) -> Self {
        Failure { text: text.into(), status: Self::USAGE }
    }

    /// The run itself failed.
    pub fn run(text: impl Into<String>) -> Self {
        Failure { text: text.into(), status: Self::RUN }
    }

    /// Why settings keep a service from starting, before they are compared with the machine, or why it did not fully
    /// end: what is wrong in flags and settings stays so, all else may pass. A group too, which may come from the
    /// network, and an engine, whose driver may be loaded late.
    pub fn of_settings(error: kvhoist::Error) -> Self {
        use kvhoist::Error::{Argument, Config};
        let status = match &error {
            Config { field: "socket_group" | "storage", .. } => Self::RUN,
            Config { .. } | Argument { .. } => Self::USAGE,
            _ => Self::RUN,
        };
        Failure { status, ..error.into() }
    }

    /// Why the machine keeps a service from starting: a drive may be mounted late, which has the size.
    pub fn of_service(error: kvhoist::Error) -> Self {
        match error {
            kvhoist::Error::Config { field: "capacity_bytes" | "host_bytes", .. } => Self::that_may_pass(error),
            error => Self::of_settings(error),
        }
    }

    /// What the machine may have later, such as the file with the secret of a remote store.
    pub fn that_may_pass(error: kvhoist::Error) -> Self {
        Failure { status: Self::RUN, ..error.into() }
    }

    /// The same failure in other words.
    pub fn saying(self, text: String) -> Self {
        Failure { text, ..self }
    }

    /// Interrupted by the user.
    pub fn interrupted() -> Self {
        Failure { text: "interrupted".into(), status: Self::INTERRUPTED }
    }

    /// What the process exits with.
    pub fn exit_status(&self) -> u8 {
        self.status
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line that drives no terminal, whatever a path or an input may contain.
        f.write_str(&plain(&self.text.replace(['\n', '\r'], " ")))
    }
}

#[cfg(feature = "command")]
impl From<kvhoist_workbench::ReplayError> for Failure {
    fn from(error: kvhoist_workbench::ReplayError) -> Self {
        match error {
            kvhoist_workbench::ReplayError::Cache(error) => error.into(),
            early @ kvhoist_workbench::ReplayError::Early(..) => Failure::run(early.to_string()),
        }
    }
}

impl From<kvhoist::Error> for Failure {
    fn from(error: kvhoist::Error) -> Self {
        use kvhoist::Error::{Argument, Config, Io, Store};
        let error = error.with_settings_named(&FLAGS);
        let text = error.to_string();
        match error {
            Config { .. } | Argument { .. } | Store { .. } | Io { op: "open" | "create", .. } => Failure::usage(text),
            _ => Failure::run(text),
        }
    }
}
