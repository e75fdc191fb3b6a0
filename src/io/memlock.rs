//! The limit of locked memory, and how to raise it.

use std::{fmt, io};

/// The soft limit of `RLIMIT_MEMLOCK` in bytes. `None`: unlimited.
pub(super) fn limit_bytes() -> io::Result<Option<u64>> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable and lives across the call.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur))
}

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
        match limit_bytes() {
            Ok(Some(limit)) => write!(
                f,
                "; RLIMIT_MEMLOCK is {limit} bytes: raise it (`ulimit -l unlimited`, systemd LimitMEMLOCK=infinity, \
                 docker --ulimit memlock=-1) or grant CAP_IPC_LOCK"
            ),
            Ok(None) => write!(f, "; RLIMIT_MEMLOCK is unlimited: too little memory is free, or a cgroup limits it"),
            Err(error) => write!(f, "; RLIMIT_MEMLOCK could not be read ({error})"),
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
