//! Who may connect, and whose a space is: clients that are processes of other users. Needs root.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use kvhoist::{Config, DirectIo, Error, block_on};
use kvhoist_service::{Client, Server, ServerConfig, remove_space, status};

use crate::{
    node::{BLOCK_BYTES, DISK_BLOCKS, HOST_BLOCKS, Process, options_of, say, status_of},
    pool_client::{POOL_BLOCKS, PoolClient},
};

const NAMED: u32 = 64_001;
const MEMBER: u32 = 64_002;
const STRANGER: u32 = 64_003;
const GROUP: u32 = 64_100;

/// The space of all tests here.
const SPACE: &str = "users";

/// The process of another user: `USER GROUPS SOCKET DEED [shared]`, its groups with commas between them.
pub fn run(words: &[&str]) {
    let [user, groups, socket, request, more @ ..] = words else { panic!("{words:?}") };
    become_user(user.parse().expect("a number"), &numbers(groups));
    let shared = more == ["shared"];
    let socket = Path::new(socket);
    let done = match *request {
        "rm" => remove_space(socket, SPACE, BLOCK_BYTES as u64, shared).map(|()| "done".to_owned()),
        "status" => status(socket).map(|_| "done".to_owned()),
        request => {
            let mut options = options_of(SPACE);
            options.shared = shared;
            block_on(Client::connect(socket, options)).and_then(|client| {
                let pool_client = PoolClient::of(client);
                let found = match request {
                    "store" => pool_client.store(0, POOL_BLOCKS)?.into_iter().collect::<Result<Vec<_>, _>>()?,
                    "load" => pool_client.load(0, POOL_BLOCKS)?,
                    other => panic!("{other}"),
                };
                block_on(pool_client.client.close())?;
                Ok(format!("{} blocks", found.iter().filter(|found| **found).count()))
            })
        }
    };
    match done {
        Ok(done) => say(&done),
        Err(Error::Service { fault, text }) => say(&format!("{fault:?}: {text}")),
        Err(error) => say(&error.to_string()),
    }
}

fn numbers(text: &str) -> Vec<libc::gid_t> {
    text.split(',').map(|number| number.parse().expect("a number")).collect()
}

/// For good, with all threads. The first group is the process's own, the others are supplementary.
fn become_user(user: libc::uid_t, groups: &[libc::gid_t]) {
    let own = groups[0];
    // SAFETY: plain system calls; `groups` outlives the first.
    let refused = unsafe {
        [
            libc::setgroups(groups.len() - 1, groups[1..].as_ptr()),
            libc::setresgid(own, own, own),
            libc::setresuid(user, user, user),
        ]
    };
    assert_eq!(refused, [0; 3], "{}", std::io::Error::last_os_error());
}

/// What a process of `user` with `groups` says that it found.
fn as_user(user: u32, groups: &str, socket: &Path, request: &str) -> String {
    let mut process = Process::start(&format!("as {user} {groups} {} {request}", socket.display()));
    let said = process.word().expect("a word");
    assert!(process.wait().success(), "{said}");
    said
}

pub fn is_root() -> bool {
    // SAFETY: plain system call without arguments.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!(
            "SKIPPED: needs root, to run clients as other users, and to have more descriptors in flight than its limit"
        );
    }
    root
}

/// A folder that all users may enter, with a service in it.
fn start(settings: impl FnOnce(&mut ServerConfig)) -> (tempfile::TempDir, ServerConfig, Server) {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("set");
    let mut config = ServerConfig::new(folder.path().join("socket"));
    config.paths = vec![folder.path().to_owned()];
    config.capacity_bytes = 4 * DISK_BLOCKS * BLOCK_BYTES as u64;
    config.host_bytes = 4 * HOST_BLOCKS * BLOCK_BYTES as u64;
    config.cache = Config::default().bypass_host(true).direct_io(DirectIo::Prefer);
    settings(&mut config);
    let server = Server::start(config.clone()).expect("a service");
    (folder, config, server)
}

fn end(server: Server) {
    server.drain();
    server.wait().expect("a whole store");
}

#[test]
fn users_that_are_named_and_members_of_the_group_are_admitted_and_others_are_told_why_not() {
    if !is_root() {
        return;
    }
    let (_folder, config, server) = start(|config| {
        config.uids = vec![NAMED];
        config.socket_group = Some(GROUP.to_string());
    });
    let all = format!("{POOL_BLOCKS} blocks");
    assert_eq!(as_user(NAMED, "64001", &config.socket, "store"), all);
    assert_eq!(as_user(MEMBER, "64002,5,64100", &config.socket, "store"), all, "a supplementary group");
    assert_eq!(as_user(MEMBER, "64100", &config.socket, "load"), all, "the process's own group");
    for request in ["store", "status", "rm"] {
        let said = as_user(STRANGER, "64003,5", &config.socket, request);
        for part in ["Permission: ", "found 64003", "expected 0", "group 64100", "--allow-uid 64003"] {
            assert!(said.contains(part), "{request}: {part} in {said}");
        }
    }
    end(server);
}

#[test]
fn a_socket_of_a_group_opens_for_its_members_alone() {
    if !is_root() {
        return;
    }
    // SAFETY: plain system call; no other test here depends on the mask.
    let before = unsafe { libc::umask(0o077) };
    let (_folder, config, server) = start(|config| config.socket_group = Some(GROUP.to_string()));
    // SAFETY: plain system call.
    unsafe { libc::umask(before) };
    let found = fs::metadata(&config.socket).expect("a socket");
    assert_eq!((found.mode() & 0o777, found.gid()), (0o660, GROUP));
    assert_eq!(as_user(MEMBER, "64002,64100", &config.socket, "status"), "done");
    for request in ["store", "status"] {
        let said = as_user(STRANGER, "64003", &config.socket, request);
        for part in ["Permission: ", "mode 0660 of user 0, group 64100", "user 64003", "--allow-uid 64003"] {
            assert!(said.contains(part), "{request}: {part} in {said}");
        }
    }
    end(server);
}

#[test]
fn a_space_is_its_users_unless_users_share_it() {
    if !is_root() {
        return;
    }
    let (_folder, config, server) = start(|config| config.uids = vec![NAMED, MEMBER]);
    let [all, none] = [POOL_BLOCKS, 0].map(|count| format!("{count} blocks"));
    let named = |request| as_user(NAMED, "64001", &config.socket, request);
    let member = |request| as_user(MEMBER, "64002", &config.socket, request);
    assert_eq!(named("store"), all);
    assert_eq!(member("load"), none, "a space of another user");
    assert_eq!(member("load shared"), none, "made now");
    assert_eq!(named("load shared"), none, "not the user's own of this name");
    assert_eq!(named("store shared"), all);
    assert_eq!(member("load shared"), all);
    assert_eq!(member("load"), none);
    end(server);

    // A restart: the file of the space says whose it is.
    let server = Server::start(config.clone()).expect("a service");
    assert_eq!(member("load shared"), all);
    assert_eq!(member("load"), none);
    let said = named("rm shared");
    assert!(said.contains("Permission: space: found user 64001, expected 64002"), "{said}");
    let root = remove_space(&config.socket, SPACE, BLOCK_BYTES as u64, false).expect_err("root has none of this name");
    let bytes = format!("with {BLOCK_BYTES}-byte blocks");
    for part in
        [format!("none of this name of user 0 {bytes}"), format!("one of user 64001 {bytes}"), "as that user".into()]
    {
        assert!(root.to_string().contains(&part), "{part} in {root}");
    }
    assert_eq!(named("rm"), "done");
    assert_eq!(member("rm shared"), "done");
    let left: Vec<(u32, bool)> =
        status_of(&config.socket).spaces.iter().map(|space| (space.uid, space.shared)).collect();
    assert_eq!(left, [(MEMBER, false)]);
    end(server);
}

/// A forked child has a copy of the client, and the parent's socket.
#[test]
fn a_forked_child_that_drops_a_client_does_not_hang_up() {
    let (_folder, config, server) = start(|_| {});
    let pool_client = PoolClient::of(block_on(Client::connect(&config.socket, options_of(SPACE))).expect("a service"));
    let connection = || {
        let clients = status_of(&config.socket).clients;
        clients.iter().find(|client| client.namespace == SPACE).map(|client| client.id)
    };
    let before = connection();
    assert!(before.is_some());
    // SAFETY: the child only drops the client, which must touch nothing that another thread may hold, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        drop(pool_client);
        // SAFETY: ends the child without running what the parent has registered for its end.
        unsafe { libc::_exit(0) };
    }
    let mut ended = 0;
    // SAFETY: `ended` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut ended, 0) }, child);
    assert_eq!(ended, 0, "the child failed");
    assert_eq!(pool_client.load(0, 1).expect("connected"), [false]);
    assert_eq!(connection(), before, "the same connection");
    drop(pool_client);
    end(server);
}
