//! The limit of locked memory, and how to raise it.

use std::io;

use rustix::process::{Resource, getrlimit};

/// The text for `wanted_bytes` that could not be registered, with the fix.
pub(super) fn refusal(wanted_bytes: u64, error: &io::Error) -> String {
    let refused = format!("the kernel refused to register {wanted_bytes} bytes ({error})");
    if !matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN)) {
        return refused;
    }
    match getrlimit(Resource::Memlock).current {
        Some(limit) => format!(
            "{refused}; RLIMIT_MEMLOCK is {limit} bytes: raise it (`ulimit -l unlimited`, systemd \
             LimitMEMLOCK=infinity, docker --ulimit memlock=-1) or grant CAP_IPC_LOCK"
        ),
        None => format!("{refused}; RLIMIT_MEMLOCK is unlimited: too little memory is free, or a cgroup limits it"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_what_was_wanted_and_what_to_do() {
        let error = io::Error::from_raw_os_error(libc::ENOMEM);
        let text = refusal(123_456, &error);
        assert!(text.contains("123456 bytes") && text.contains("RLIMIT_MEMLOCK"), "{text}");
        let error = io::Error::from_raw_os_error(libc::EFAULT);
        let text = refusal(1, &error);
        assert!(!text.contains("RLIMIT_MEMLOCK"), "a bad address has nothing to do with the limit: {text}");
    }
}
