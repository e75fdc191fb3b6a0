//! The service of tiers and routes, and the failures that end it.
//!
//! After a number of consecutive failures a disk's tier is taken out of service, with a reason, until the cache is
//! opened again. Failing writes only make the tier read-only: its blocks are served as long as reads succeed. A page of
//! records that cannot be written is tried again by each sync, and only the first of these failures counts.

use std::{
    io,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::{block::OpKind, error::Error, io::is_shortage};

/// Whether a tier or a route is in service. It never rises again while the cache is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    /// Reads and writes. With the evidence, if there was a self-test.
    Up(String),
    /// Reads, for the reason given.
    ReadOnly(String),
    /// Nothing, for the reason given.
    Retired(String),
}

impl Default for Health {
    fn default() -> Self {
        Health::Up(String::new())
    }
}

impl Health {
    #[inline]
    pub(crate) fn reads(&self) -> bool {
        !matches!(self, Health::Retired(_))
    }

    pub(crate) fn writes(&self) -> bool {
        matches!(self, Health::Up(_))
    }

    /// The evidence while it is up, the reason otherwise.
    pub(crate) fn detail(&self) -> &str {
        match self {
            Health::Up(detail) | Health::ReadOnly(detail) | Health::Retired(detail) => detail,
        }
    }

    /// Why it is read-only or out of service.
    pub(crate) fn reason(&self) -> Option<&str> {
        (!self.writes()).then(|| self.detail())
    }

    /// Why it is out of service, if it is.
    pub(crate) fn retired(&self) -> Option<&str> {
        (!self.reads()).then(|| self.detail())
    }

    /// The error of a write to `tier`, whose health this is.
    pub(crate) fn check_writes(&self, tier: &'static str) -> Result<(), Error> {
        match self.reason() {
            None => Ok(()),
            Some(reason) => Err(Error::unavailable(tier, reason.to_owned())),
        }
    }

    /// Lowers the service to `to`, unless it is as low already.
    pub(crate) fn lower(&mut self, to: Health) -> bool {
        let is_lower = (to.reads(), to.writes()) < (self.reads(), self.writes());
        if is_lower {
            *self = to;
        }
        is_lower
    }
}

/// Failures in a row of one file, by kind of operation.
#[derive(Default)]
pub(crate) struct Failures([AtomicU32; 3]);

impl Failures {
    /// Counts the end of an operation; the number of failures in a row when it was one.
    pub(super) fn count<T>(&self, kind: OpKind, result: &io::Result<T>) -> Option<u32> {
        let count = &self.0[kind as usize];
        match result {
            Ok(_) => {
                // Mostly it is 0 already, and the threads of all callers come here.
                if count.load(Ordering::Relaxed) != 0 {
                    count.store(0, Ordering::Relaxed);
                }
                None
            }
            Err(error) if !blames_disk(error) => None,
            // Not more often than the limit of failures: the disk is out of service then.
            Err(_) => Some(count.fetch_add(1, Ordering::Relaxed).saturating_add(1)),
        }
    }
}

/// False if an operation failed for lack of space or of the machine's resources, or because of its memory: this says
/// nothing about the disk or the block.
pub(crate) fn blames_disk(error: &io::Error) -> bool {
    let elsewhere = [libc::ENOSPC, libc::EDQUOT, libc::EFAULT];
    !is_shortage(error) && error.raw_os_error().is_none_or(|errno| !elsewhere.contains(&errno))
}

/// Whether a write failed because its memory is not there, which says nothing about the disk.
pub(crate) fn is_of_memory(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.raw_os_error() == Some(libc::EFAULT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_lowered_and_never_raised() {
        let [up, read_only, retired] = [Health::default(), Health::ReadOnly("a".into()), Health::Retired("b".into())];
        let mut health = up.clone();
        assert!(health.check_writes("disk").is_ok() && health.reason().is_none() && !health.lower(up.clone()));
        assert!(health.lower(read_only.clone()) && health.reads() && health.reason() == Some("a"));
        assert!(!health.lower(up) && !health.lower(Health::ReadOnly("c".into())) && health.retired().is_none());
        assert!(health.lower(retired) && !health.lower(read_only) && health.retired() == Some("b"));
        assert!(health.check_writes("disk").is_err_and(|error| error.to_string().contains('b')));
    }

    #[test]
    fn only_failures_in_a_row_count() {
        let failures = Failures::default();
        let eio = || Err::<(), _>(io::Error::from_raw_os_error(libc::EIO));
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(1));
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(2));
        assert_eq!(failures.count(OpKind::Write, &eio()), Some(1), "each kind for itself");
        assert_eq!(failures.count(OpKind::Read, &Err::<(), _>(io::Error::from_raw_os_error(libc::ENOSPC))), None);
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(3), "a shortage says nothing of the disk");
        assert_eq!(failures.count(OpKind::Read, &Ok(())), None);
        assert_eq!(failures.count(OpKind::Read, &eio()), Some(1));
    }
}
