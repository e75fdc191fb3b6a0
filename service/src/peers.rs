//! Who may connect to a service: processes of the users and of the group that its settings name.

use std::{
    ffi::CString,
    io,
    mem::{size_of_val, zeroed},
    os::fd::AsRawFd,
    ptr::null_mut,
};

use tokio::net::UnixStream;

use super::protocol::Failure;
use crate::error::{Error, Result, ServiceFault};

/// Most supplementary groups of a process (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;
/// Bytes of a group's entry in the system's database, at most.
const ENTRY_BYTES_MAX: usize = 1 << 20;

/// The process at the other end of a connection, as the kernel knew it when it connected.
pub struct Peer {
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
}

/// The user of this process.
pub(super) fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Admits a process of the service's own user, of a user in the list, or with the socket's group.
///
/// # Errors
/// [`ServiceFault::Permission`] for all others.
pub(super) fn admit(stream: &UnixStream, uids: &[u32], group: Option<u32>) -> Result<Peer, Failure> {
    let unknown = |error: io::Error| {
        let text = format!("user: found none ({error}), expected the kernel to name the process that connects");
        Failure::new(ServiceFault::Permission, text)
    };
    let found = stream.peer_cred().map_err(unknown)?;
    let (uid, own) = (found.uid(), own_uid());
    let has_group = |group: u32| -> io::Result<bool> { Ok(found.gid() == group || groups(stream)?.contains(&group)) };
    let admitted =
        uid == own || uids.contains(&uid) || group.map(has_group).transpose().map_err(unknown)?.unwrap_or(false);
    if admitted {
        let pid = found.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0);
        return Ok(Peer { pid, uid });
    }
    let members = group.map(|group| format!(" or a member of group {group}")).unwrap_or_default();
    let join = if group.is_some() { ", or add the user to the group and log in again" } else { "" };
    let text = format!(
        "user: found {uid}, expected {own}, whose service it is, a user that --allow-uid names{members}; start the \
         service with --allow-uid {uid}{join}"
    );
    Err(Failure::new(ServiceFault::Permission, text))
}

/// Supplementary groups of the process at the other end.
fn groups(stream: &UnixStream) -> io::Result<Vec<libc::gid_t>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        // SAFETY: `groups` and `bytes`, its length, outlive the call.
        let refused = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = bytes as usize / size_of::<libc::gid_t>();
        if refused == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // ERANGE comes with the number of bytes that are needed.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() || count > GROUPS_MAX {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// The number of a group, given by number or by name.
///
/// # Errors
/// [`Error::Config`] if the system knows no such group.
pub(super) fn group_number(group: &str) -> Result<u32> {
    if let Ok(number) = group.parse() {
        return Ok(number);
    }
    let wrong = |why: String| {
        Error::config(
            "socket_group",
            format!("{group:?}, {why}"),
            "the number of a group, or the name of one that `getent group` lists",
        )
    };
    let name = CString::new(group).map_err(|_| wrong("which contains a zero".into()))?;
    let mut room: Vec<libc::c_char> = vec![0; 4096];
    loop {
        // SAFETY: all zero is a valid value; the call fills it in.
        let mut entry: libc::group = unsafe { zeroed() };
        let mut found = null_mut();
        // SAFETY: all arguments outlive the call, and `room` has the length that is given.
        let failed =
            unsafe { libc::getgrnam_r(name.as_ptr(), &raw mut entry, room.as_mut_ptr(), room.len(), &raw mut found) };
        match failed {
            0 if found.is_null() => return Err(wrong("which the system does not know".into())),
            0 => return Ok(entry.gr_gid),
            libc::ERANGE if room.len() < ENTRY_BYTES_MAX => room.resize(room.len() * 2, 0),
            error => return Err(wrong(format!("({})", io::Error::from_raw_os_error(error)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_a_number_a_name_or_neither() {
        assert_eq!(group_number("1234").expect("a number"), 1234);
        assert_eq!(group_number("root").expect("there is one everywhere"), 0);
        for unknown in ["", "no such group", "a\0b", "-1"] {
            let error = group_number(unknown).expect_err("no group").to_string();
            assert!(error.starts_with("socket_group: found"), "{error}");
        }
    }
}
