//! Errors, grouped by what the caller can do about them.

use std::{io, path::PathBuf, sync::Arc};

/// The result type of this crate's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed, grouped by what the caller can do about it.
///
/// Cheap to clone: one failed movement may have many waiters.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is invalid. Correct the field and open again.
    #[error("{field}: found {found}, expected {expected}")]
    Config {
        /// The setting: the name of the method of `Config` that sets it, and its name in files. `disks.path`,
        /// `disks.bytes` and `disks.blocks` are of one path of `disks`, which `Config::disk` adds too.
        field: &'static str,
        /// The value found.
        found: String,
        /// The accepted values, and what to do.
        expected: String,
    },

    /// An argument is invalid. Correct the call; the cache is unaffected.
    #[error("{what}: found {found}, expected {expected}")]
    Argument {
        /// The argument.
        what: &'static str,
        /// The value found.
        found: String,
        /// The accepted values.
        expected: String,
    },

    /// A store on disk was refused and left unchanged.
    #[error("{}: found {found}, expected {expected}; {action}", path.display())]
    Store {
        /// The store's file or device.
        path: PathBuf,
        /// What was found there.
        found: String,
        /// What was expected.
        expected: String,
        /// What to do.
        action: String,
    },

    /// A limit was reached, and nothing was done. Retry later, or raise the setting.
    #[error("busy: {what} reached its limit of {limit} (setting `{setting}`); retry later or raise it")]
    Busy {
        /// What is full.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// The setting of the limit.
        setting: &'static str,
    },

    #[error(
        "timeout: waited for {what} longer than {limit:?} (setting `deadline_ms`); {}",
        timeout_advice(*leases, *reservations, *slots, setting)
    )]
    /// The call took longer than `deadline_ms`. The awaited work continues. Retry later: the disk is slow or stuck.
    Timeout {
        /// What was awaited.
        what: &'static str,
        /// The time limit.
        limit: std::time::Duration,
        /// Leases on slots of the awaited tier, if the call waited for a slot. Several may be for one block.
        leases: u64,
        /// Reservations of slots of the awaited tier that are not yet committed.
        reservations: u64,
        /// Slots of the awaited tier; 0 if callers held none of them.
        slots: u64,
        /// The setting to raise: that of the number of slots if callers held some, otherwise
        /// `deadline_ms`.
        setting: &'static str,
    },

    /// The disk tier refused a block. The block may still be resident in a faster tier.
    #[error("write refused: {reason}")]
    Refused {
        /// The reason.
        reason: String,
    },

    /// A system call failed.
    #[error("{op} {}: {source}", path.display())]
    Io {
        /// The operation.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: Arc<io::Error>,
    },

    /// A copy between memories failed.
    #[error("copy by {engine}: {reason}")]
    Copy {
        /// The copy engine.
        engine: &'static str,
        /// The engine's error.
        reason: String,
    },

    /// A tier that the call needs is absent or out of service.
    #[error("{tier} tier is not available: {reason}")]
    Unavailable {
        /// The tier.
        tier: &'static str,
        /// The reason.
        reason: String,
    },

    /// The node's service is unreachable, or refused or failed the call (`kvhoist_service::Client`).
    #[error("service: {text}")]
    Service {
        /// What the caller can do about it.
        fault: ServiceFault,
        /// What was found, what was expected, what to do.
        text: String,
    },

    /// The cache is closed or closing. Open a new one.
    #[error("the cache is closed")]
    Closed,
}

/// Why the node's service did not carry out a client's call, grouped by what the client can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(test, derive(proptest_derive::Arbitrary))]
#[non_exhaustive]
pub enum ServiceFault {
    /// No service answers at the socket, or the connection was lost. The client reconnects by itself: retry later.
    Away,
    /// The service is shutting down and accepts no more work. Retry later.
    Draining,
    /// A limit of the service was reached, and nothing was done. Retry later, or raise the limit.
    Busy,
    /// The call took too long; work that has started continues. Retry later.
    Timeout,
    /// The call was canceled before this part of it started.
    Canceled,
    /// An argument is invalid: a region, a range, a size, a space. Correct the call.
    Argument,
    /// The memory cannot be shared safely: it is not a memfd in plain memory, or is shorter than the range.
    Memory,
    /// There is no capacity left for a new space.
    Capacity,
    /// The disk tier refused a block.
    Refused,
    /// A system call of the service failed.
    Io,
    /// A tier that the call needs is absent or out of service.
    Unavailable,
    /// This user may not use the service.
    Permission,
    /// Client and service have no protocol version in common. Update the older one.
    Version,
    /// The peer violated the protocol; the connection is closed.
    Protocol,
    /// The service did not let go of the memory of a call in time, and may still read and write it: until the client's
    /// `unregister` has returned Ok, whatever the memory holds is not to be used.
    Abandoned,
}

impl ServiceFault {
    /// All faults, in the order of their numbers in the protocol: a new one goes to the end.
    #[doc(hidden)]
    pub const ALL: [ServiceFault; 15] = [
        ServiceFault::Away,
        ServiceFault::Draining,
        ServiceFault::Busy,
        ServiceFault::Timeout,
        ServiceFault::Canceled,
        ServiceFault::Argument,
        ServiceFault::Memory,
        ServiceFault::Capacity,
        ServiceFault::Refused,
        ServiceFault::Io,
        ServiceFault::Unavailable,
        ServiceFault::Permission,
        ServiceFault::Version,
        ServiceFault::Protocol,
        ServiceFault::Abandoned,
    ];

    /// True if the same call may succeed later without any change.
    pub fn is_transient(self) -> bool {
        matches!(self, ServiceFault::Away | ServiceFault::Draining | ServiceFault::Busy | ServiceFault::Timeout)
    }
}

/// Slots of a tier that callers held while another caller waited for one, as in [`Error::Timeout`].
#[derive(Debug, Clone, Copy)]
pub struct HeldSlots {
    /// Leases that callers held.
    pub leases: u64,
    /// Reservations that callers held.
    pub reservations: u64,
    /// Slots of the tier. 0: another limit was reached.
    pub slots: u64,
    /// The setting to raise.
    pub setting: &'static str,
}

fn timeout_advice(leases: u64, reservations: u64, slots: u64, setting: &str) -> String {
    if slots == 0 {
        return "retry later, or look at the disk".into();
    }
    format!(
        "callers held {leases} leases and {reservations} reservations, and there are {slots} slots (setting \
         `{setting}`); drop them sooner, copy out what slow readers are sent, or raise `{setting}`"
    )
}

impl Error {
    /// An [`Error::Config`]: `field` is `found`, and was to be `expected`.
    #[doc(hidden)]
    pub fn config(field: &'static str, found: impl ToString, expected: impl Into<String>) -> Self {
        Error::Config { field, found: found.to_string(), expected: expected.into() }
    }

    /// An [`Error::Argument`]: `what` is `found`, and was to be `expected`.
    #[doc(hidden)]
    pub fn argument(what: &'static str, found: impl ToString, expected: impl Into<String>) -> Self {
        Error::Argument { what, found: found.to_string(), expected: expected.into() }
    }

    /// An [`Error::Store`]: what was `found` at `path`, what was `expected`, and the `action` to take.
    #[doc(hidden)]
    pub fn store(
        path: impl Into<PathBuf>,
        found: impl ToString,
        expected: impl Into<String>,
        action: impl Into<String>,
    ) -> Self {
        Error::Store { path: path.into(), found: found.to_string(), expected: expected.into(), action: action.into() }
    }

    /// An [`Error::Unavailable`] of `tier`.
    #[doc(hidden)]
    pub fn unavailable(tier: &'static str, reason: impl ToString) -> Self {
        Error::Unavailable { tier, reason: reason.to_string() }
    }

    /// An [`Error::Copy`] by `engine`.
    pub fn copy(engine: &'static str, reason: impl ToString) -> Self {
        Error::Copy { engine, reason: reason.to_string() }
    }

    /// An [`Error::Busy`]: `what` has reached `limit`, which `setting` sets.
    pub fn busy(what: &'static str, limit: u64, setting: &'static str) -> Self {
        Error::Busy { what, limit, setting }
    }

    /// An [`Error::Timeout`]: the wait for `what` took longer than `limit`, while callers had the slots `held`.
    pub fn timeout(what: &'static str, limit: std::time::Duration, held: Option<HeldSlots>) -> Self {
        let none = HeldSlots { leases: 0, reservations: 0, slots: 0, setting: "deadline_ms" };
        let HeldSlots { leases, reservations, slots, setting } = held.unwrap_or(none);
        Error::Timeout { what, limit, leases, reservations, slots, setting }
    }

    /// An [`Error::Refused`].
    pub fn refused(reason: impl ToString) -> Self {
        Error::Refused { reason: reason.to_string() }
    }

    /// An [`Error::Service`]: what the caller can do about it, and what was found, expected, and is to be done.
    #[doc(hidden)]
    pub fn service(fault: ServiceFault, text: impl ToString) -> Self {
        Error::Service { fault, text: text.to_string() }
    }

    /// An [`Error::Io`] of `op` on `path`.
    #[doc(hidden)]
    pub fn io(op: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Error::Io { op, path: path.into(), source: Arc::new(source) }
    }

    /// Renames settings for a layer that gives them other names: `("disks.blocks", "capacity")` makes the error mention
    /// `capacity`. Replaces the error's field, and names in backticks in its text.
    #[doc(hidden)]
    pub fn with_settings_named(mut self, names: &[(&'static str, &'static str)]) -> Self {
        let known = |old: &'static str| names.iter().find(|(name, _)| *name == old).map_or(old, |(_, new)| new);
        let rename = |text: &mut String| {
            for (old, new) in names {
                *text = text.replace(&format!("`{old}`"), &format!("`{new}`"));
            }
        };
        match &mut self {
            Error::Config { field, found, expected } | Error::Argument { what: field, found, expected } => {
                *field = known(field);
                [found, expected].into_iter().for_each(rename);
            }
            Error::Store { found, expected, action, .. } => [found, expected, action].into_iter().for_each(rename),
            Error::Busy { setting, .. } | Error::Timeout { setting, .. } => *setting = known(setting),
            Error::Refused { reason } | Error::Unavailable { reason, .. } | Error::Copy { reason, .. } => {
                rename(reason);
            }
            Error::Service { text, .. } => {
                rename(text);
                // The setting that an error of the service is about stands at its beginning.
                for (old, new) in names {
                    if let Some(rest) = text.strip_prefix(old).filter(|rest| rest.starts_with(':')) {
                        *text = format!("{new}{rest}");
                        break;
                    }
                }
            }
            Error::Io { .. } | Error::Closed => {}
        }
        self
    }

    /// How the node's service says it to a client.
    #[doc(hidden)]
    pub fn fault(&self) -> ServiceFault {
        match self {
            Error::Config { .. } | Error::Argument { .. } => ServiceFault::Argument,
            Error::Busy { .. } => ServiceFault::Busy,
            Error::Timeout { .. } => ServiceFault::Timeout,
            Error::Refused { .. } => ServiceFault::Refused,
            Error::Io { .. } | Error::Copy { .. } => ServiceFault::Io,
            Error::Service { fault, .. } => *fault,
            Error::Store { .. } | Error::Unavailable { .. } | Error::Closed => ServiceFault::Unavailable,
        }
    }

    /// True if the same call may succeed later without any change.
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Busy { .. } | Error::Timeout { .. } => true,
            Error::Service { fault, .. } => fault.is_transient(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn every_fault_of_the_service_is_in_the_list(fault: ServiceFault) {
            assert!(ServiceFault::ALL.contains(&fault));
        }
    }

    #[test]
    fn a_client_gets_the_fault_of_the_error() {
        let second = std::time::Duration::from_secs(1);
        let io = Error::io("read", "a", io::ErrorKind::Other.into());
        let faults = [
            (Error::argument("keys", 0, "some"), ServiceFault::Argument),
            (Error::busy("a queue", 1, "waiters_max"), ServiceFault::Busy),
            (Error::timeout("a slot", second, None), ServiceFault::Timeout),
            (Error::refused("read-only"), ServiceFault::Refused),
            (io, ServiceFault::Io),
            (Error::unavailable("disk", "gone"), ServiceFault::Unavailable),
            (Error::service(ServiceFault::Memory, "a region"), ServiceFault::Memory),
            (Error::Closed, ServiceFault::Unavailable),
        ];
        for (error, fault) in faults {
            assert_eq!(error.fault(), fault, "{error}");
        }
    }

    #[test]
    fn settings_are_called_what_the_layer_calls_them() {
        let names = [("disks.blocks", "capacity"), ("disks", "path"), ("host_blocks", "host_bytes")];
        let config =
            Error::Config { field: "disks.blocks", found: "0".into(), expected: "1, or less of `host_blocks`".into() };
        assert_eq!(
            config.with_settings_named(&names).to_string(),
            "capacity: found 0, expected 1, or less of `host_bytes`"
        );
        let store = Error::Store {
            path: "a".into(),
            found: "5 slots, by `disks.blocks`".into(),
            expected: "6".into(),
            action: "choose another path in `disks`".into(),
        };
        let told = store.with_settings_named(&names).to_string();
        assert!(told.contains("by `capacity`") && told.ends_with("another path in `path`"), "{told}");
        let busy = Error::Busy { what: "a queue", limit: 1, setting: "host_blocks" };
        assert!(busy.with_settings_named(&names).to_string().contains("(setting `host_bytes`)"));
        let busy = Error::Busy { what: "a queue", limit: 1, setting: "waiters_max" };
        assert!(busy.with_settings_named(&names).to_string().contains("(setting `waiters_max`)"));
    }
}
