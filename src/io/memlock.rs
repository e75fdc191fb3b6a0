//! The limit of locked memory, and how to raise it.

use std::{fmt, io};

use rustix::process::{Resource, getrlimit};

/// The error text for `wanted_bytes` that could not be registered, with the fix.
pub(super) struct Refusal<'a> {
    pub wanted_bytes: u64,
    pub error: &'a io::Error,
}

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the kernel refused to register {} bytes ({})", self.wanted_bytes, self.error)?;
        let refused_for_size = matches!(self.error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN));
        if !refused_for_size {
            return Ok(());
        }
        match getrlimit(Resource::Memlock).current {
            Some(limit) => write!(
                f,
                "; RLIMIT_MEMLOCK is {limit} bytes: raise it (`ulimit -l unlimited`, systemd LimitMEMLOCK=infinity, \
                 docker --ulimit memlock=-1) or grant CAP_IPC_LOCK"
            ),
            None => write!(f, "; RLIMIT_MEMLOCK is unlimited: too little memory is free, or a cgroup limits it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_what_was_wanted_and_what_to_do() {
        let error = io::Error::from_raw_os_error(libc::ENOMEM);
        let text = Refusal { wanted_bytes: 123_456, error: &error }.to_string();
        assert!(text.contains("123456 bytes") && text.contains("RLIMIT_MEMLOCK"), "{text}");
        let error = io::Error::from_raw_os_error(libc::EFAULT);
        let text = Refusal { wanted_bytes: 1, error: &error }.to_string();
        assert!(!text.contains("RLIMIT_MEMLOCK"), "a bad address has nothing to do with the limit: {text}");
    }
}
