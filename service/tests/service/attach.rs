//! What an attach may cost those who are attached already: nothing, if it is refused.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use kvhoist::{Config, DirectIo, DiskPath, Error, ServiceFault, Tier, block_on};
use kvhoist_service::{Client, Server, ServerConfig, SpaceStatus, remove_space};

use crate::{
    node::{BLOCK_BYTES, HANG, options_of, status_of},
    pool_client::{POOL_BLOCKS, PoolClient},
};

const SLOTS: u64 = 64;

fn disk(blocks: u64) -> u64 {
    DiskPath::file_bytes(blocks, BLOCK_BYTES as u64)
}

fn start(folder: &Path) -> (Server, PathBuf) {
    let mut config = ServerConfig::new(folder.join("socket"));
    config.paths = vec![folder.to_owned()];
    (config.capacity_bytes, config.host_bytes) = (3 * disk(SLOTS), SLOTS * BLOCK_BYTES as u64);
    config.cache = Config::default().direct_io(DirectIo::Prefer);
    let socket = config.socket.clone();
    (Server::start(config).expect("a service"), socket)
}

fn connect(socket: &Path, space: &str, capacity_bytes: u64, host_blocks: u64) -> Result<Client, Error> {
    let mut options = options_of(space);
    (options.capacity_bytes, options.host_bytes) = (capacity_bytes, host_blocks * BLOCK_BYTES as u64);
    block_on(Client::connect(socket, options))
}

fn store(pool_client: &PoolClient, blocks: u64) {
    for first in (0..blocks).step_by(POOL_BLOCKS as usize) {
        let results = pool_client.store(first, POOL_BLOCKS).expect("a service");
        results.into_iter().for_each(|result| assert!(result.expect("stored")));
    }
}

fn space(socket: &Path, name: &str) -> SpaceStatus {
    let spaces = status_of(socket).spaces;
    spaces.into_iter().find(|space| space.namespace == name).expect("a space of this name")
}

fn end(server: &Server) {
    server.drain();
    server.wait().expect("a whole store");
}

/// A neighbor has filled all host memory with its blocks. Whatever attaches and is refused, the neighbor keeps all.
#[test]
fn a_refused_attach_evicts_no_block_of_a_neighbor() {
    let folder = tempfile::tempdir().expect("a folder");
    let (server, socket) = start(folder.path());
    drop(connect(&socket, "damaged", disk(SLOTS), 8).expect("made"));
    let store_of = folder.path().join(space(&socket, "damaged").folder).join("kvhoist.store");
    end(&server);
    fs::write(&store_of, [0xa5; 1 << 16]).expect("written");

    let (server, socket) = start(folder.path());
    let neighbor = PoolClient::of(connect(&socket, "neighbor", disk(SLOTS), 0).expect("all host memory"));
    store(&neighbor, SLOTS);
    let held = || {
        let found = space(&socket, "neighbor");
        let host = *found.stats.expect("open").tier(Tier::Host);
        (found.host_bytes, host.slots, host.resident, host.evictions)
    };
    let before = held();
    assert_eq!(before, (SLOTS * BLOCK_BYTES as u64, SLOTS, SLOTS, 0));
    let refused = |name: &str, capacity_bytes, host_blocks, why: &str| {
        let error = connect(&socket, name, capacity_bytes, host_blocks).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(held(), before, "{why}");
    };
    refused("greedy", disk(SLOTS), SLOTS, "bytes of host memory left");
    refused("large", 2 * disk(SLOTS), SLOTS / 2, "bytes of disk left");
    refused("small", 1, SLOTS / 2, "capacity");
    refused("damaged", 0, SLOTS / 2, "store");
    // A new one, of which only the settings are wrong.
    let mut options = options_of("odd");
    (options.block_bytes, options.host_bytes) = (BLOCK_BYTES + 1, SLOTS / 2 * BLOCK_BYTES as u64);
    drop(block_on(Client::connect(&socket, options)).expect_err("its blocks have an odd size"));
    assert_eq!(held(), before, "an odd size");
    // One that is right gets what it asks for.
    drop(connect(&socket, "good", disk(SLOTS), SLOTS / 2).expect("half of the neighbor's"));
    assert_eq!(space(&socket, "good").host_bytes, SLOTS / 2 * BLOCK_BYTES as u64);
    assert_eq!(held().0, SLOTS / 2 * BLOCK_BYTES as u64);
    end(&server);
}

#[test]
fn a_client_of_no_service_says_what_is_missing_and_what_to_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("kvhoist.sock");
    let said = |why| connect(&socket, "early", 0, 0).expect_err(why).to_string();
    let none = said("no socket");
    assert!(none.contains("found no socket; start `kvhoist serve`") && !none.contains("os error"), "{none}");
    drop(std::os::unix::net::UnixListener::bind(&socket).expect("a socket that its process has left"));
    let left = said("nobody");
    assert!(left.contains("found nobody who listens there; start") && !left.contains("os error"), "{left}");
    fs::remove_file(&socket).expect("removed");
    fs::create_dir(&socket).expect("made");
    let other = said("a folder");
    assert!(other.contains("found a folder, expected a service's socket"), "{other}");
}

#[test]
fn one_space_whose_file_is_damaged_is_refused_and_the_others_are_served() {
    for damage in [&b"{\n  \"kvhoist_space\": 2,\n"[..], b"", &[0xff; 100]] {
        let folder = tempfile::tempdir().expect("a folder");
        let (server, socket) = start(folder.path());
        let good = PoolClient::of(connect(&socket, "good", disk(SLOTS), 0).expect("made"));
        store(&good, POOL_BLOCKS);
        drop(connect(&socket, "damaged", disk(SLOTS), 0).expect("made"));
        let of_damaged = space(&socket, "damaged").folder;
        drop(good);
        end(&server);
        fs::write(folder.path().join(&of_damaged).join("space"), damage).expect("written");

        let (server, socket) = start(folder.path());
        let good = PoolClient::of(connect(&socket, "good", 0, 0).expect("served"));
        assert_eq!(good.load(0, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
        let refused = connect(&socket, "damaged", disk(SLOTS), 0).expect_err("nobody knows what it has");
        assert!(refused.to_string().contains(&of_damaged), "{refused}");
        let shown = space(&socket, &of_damaged).stats.expect("what is wrong");
        assert!(shown.disk_trouble().is_some_and(|text| text.contains("space")), "{shown:?}");
        let taken = connect(&socket, "other", 2 * disk(SLOTS), 0).expect_err("its disk is its");
        assert!(matches!(taken, Error::Service { fault: ServiceFault::Capacity, .. }), "{taken}");
        // Its user may remove it, also by the name that is shown, and make it anew.
        match damage.is_empty() {
            true => remove_space(&socket, &of_damaged, 0, false),
            false => remove_space(&socket, "damaged", BLOCK_BYTES as u64, false),
        }
        .expect("removed");
        assert!(!folder.path().join(&of_damaged).exists());
        let again = PoolClient::of(connect(&socket, "damaged", disk(SLOTS), 0).expect("made anew"));
        store(&again, POOL_BLOCKS);
        let gone = connect(&socket, "other", disk(SLOTS) + 1, 0).expect_err("the disk is the others'");
        assert!(matches!(gone, Error::Service { fault: ServiceFault::Capacity, .. }), "{gone}");
        drop((good, again));
        end(&server);
    }
}

#[test]
fn a_space_that_does_not_fit_any_longer_is_refused_and_the_others_are_served() {
    let folder = tempfile::tempdir().expect("a folder");
    let (server, socket) = start(folder.path());
    let good = PoolClient::of(connect(&socket, "good", disk(SLOTS), 0).expect("made"));
    store(&good, POOL_BLOCKS);
    drop(connect(&socket, "large", disk(SLOTS), 0).expect("made"));
    let file = folder.path().join(space(&socket, "large").folder).join("space");
    drop(good);
    end(&server);
    // As if the capacity had been lowered.
    let text = fs::read_to_string(&file).expect("there");
    let larger = text.replace(&disk(SLOTS).to_string(), &(3 * disk(SLOTS)).to_string());
    assert_ne!(larger, text);
    fs::write(&file, larger).expect("written");

    let (server, socket) = start(folder.path());
    let good = PoolClient::of(connect(&socket, "good", 0, 0).expect("served"));
    assert_eq!(good.load(0, POOL_BLOCKS).expect("a service"), [true; POOL_BLOCKS as usize]);
    let refused = connect(&socket, "large", 0, 0).expect_err("there is no room for it").to_string();
    assert!(refused.contains("raise the capacity"), "{refused}");
    assert!(space(&socket, "large").stats.expect("why").disk_trouble().is_some_and(|text| text.contains("capacity")));
    let taken = connect(&socket, "other", 2 * disk(SLOTS), 0).expect_err("its stores have their disk");
    assert!(matches!(taken, Error::Service { fault: ServiceFault::Capacity, .. }), "{taken}");
    remove_space(&socket, "large", BLOCK_BYTES as u64, false).expect("removed");
    drop(connect(&socket, "other", 2 * disk(SLOTS), 0).expect("it has what the other had"));
    drop(good);
    end(&server);
}

#[test]
fn a_store_that_cannot_be_opened_is_shown_until_it_can_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let (server, socket) = start(folder.path());
    drop(connect(&socket, "damaged", disk(SLOTS), 0).expect("made"));
    let store_of = folder.path().join(space(&socket, "damaged").folder).join("kvhoist.store");
    end(&server);
    let whole = fs::read(&store_of).expect("there");
    fs::write(&store_of, [0xa5; 1 << 16]).expect("written");

    let (server, socket) = start(folder.path());
    let troubles = || {
        let report = server.report().expect("it runs").spaces;
        let told = report.iter().find(|space| space.namespace == "damaged").expect("not forgotten").stats.clone();
        let shown = space(&socket, "damaged").stats.expect("what is wrong");
        [told, shown].map(|stats| stats.disk_trouble().map(str::to_owned))
    };
    let store = store_of.display().to_string();
    // Before a client comes: the service looks once it listens.
    let begin = Instant::now();
    while space(&socket, "damaged").stats.is_none() {
        assert!(begin.elapsed() < Duration::from_secs(60), "nobody has looked");
        thread::sleep(Duration::from_millis(10));
    }
    let at_the_start = troubles();
    let is_told = at_the_start.iter().flatten().filter(|text| text.contains(&store)).count();
    assert_eq!(is_told, 2, "{at_the_start:?}");
    connect(&socket, "damaged", 0, 0).expect_err("no store");
    assert_eq!(troubles(), at_the_start);
    fs::write(&store_of, whole).expect("put back");
    connect(&socket, "damaged", 0, 0).expect("as it was");
    assert_eq!(troubles(), [None, None]);
    end(&server);
}

#[test]
fn a_service_has_all_of_its_paths_to_itself() {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = ["one", "two"].map(|name| folder.path().join(name));
    paths.iter().for_each(|path| fs::create_dir(path).expect("made"));
    let config = |name: &str, paths: &[PathBuf]| {
        let mut config = ServerConfig::new(folder.path().join(name));
        (config.paths, config.capacity_bytes, config.host_bytes) = (paths.to_vec(), 2 * disk(SLOTS), 1 << 20);
        config
    };
    let server = Server::start(config("both", &paths)).expect("a service");
    let refused = Server::start(config("second", &paths[1..])).expect_err("it is the other's").to_string();
    assert!(refused.contains("two") && refused.contains("another service's"), "{refused}");
    end(&server);
    end(&Server::start(config("second", &paths[1..])).expect("nobody has it"));
}

#[test]
fn who_only_asks_keeps_no_service_alive() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut config = ServerConfig::new(folder.path().join("socket"));
    (config.host_bytes, config.linger_ms) = (1 << 20, Some(1_000));
    let socket = config.socket.clone();
    let server = Server::start(config).expect("a service");
    let begun = Instant::now();
    while kvhoist_service::status(&socket).is_ok() {
        assert!(begun.elapsed() < HANG, "nobody but this has come");
        // Longer than one that has asked is expected to come.
        thread::sleep(Duration::from_millis(250));
    }
    server.wait().expect("a good end");
}
