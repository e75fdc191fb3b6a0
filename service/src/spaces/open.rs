//! The opening of a space.
//!
//! An attach is checked before anything is taken from another space: how much host memory can be had is counted first,
//! then the cache is opened, with its files, locks and records, and only then do other spaces and kept files give up
//! memory. So a refused attach evicts no block of theirs, and no kept file. Memory that is pinned for a GPU must be the
//! space's when its cache is opened: it is taken once the GPU and all settings are found right.

use std::{cell::Cell, rc::Rc};

use kvhoist::{Cache, Capacity, Config, DeviceKind, EngineMode, internals::service::discover};

use super::{
    Space, Spaces, State, ended::keep_disk, host::HostShare, manifest::SpaceManifest, pool::Grant, settings::slots,
};
use crate::{
    error::{Error, Result},
    protocol::{Failure, SpaceDevice},
    seldom::Seldom,
    system::Made,
};

/// What clients call the settings of a space, in its cache's errors.
const OF_SPACES: [(&str, &str); 6] = [
    ("capacity", "capacity_bytes"),
    ("disks.blocks", "capacity_bytes"),
    ("disks.bytes", "capacity_bytes"),
    ("disks.path", "path"),
    ("disks", "path"),
    ("host_blocks", "host_bytes"),
];

/// Settings that a space's first client chooses, and those that are wrong only for its device or its blocks.
const OF_CLIENTS: [&str; 6] = ["block_bytes", "capacity_bytes", "device_layout", "gdr", "host_bytes", "namespace"];

impl Spaces {
    /// Opens a space and answers its waiters.
    pub(super) async fn open(
        self: Rc<Self>,
        manifest: SpaceManifest,
        host_bytes: u64,
        device: SpaceDevice,
        is_new: bool,
    ) {
        let folder = manifest.folder();
        let opened = self.open_space(&manifest, host_bytes, device, is_new).await;
        let made = self.entries.borrow_mut().get_mut(&folder).and_then(|entry| entry.made.take());
        let is_forgotten = match made {
            _ if !is_new || opened.is_ok() => false,
            None => true,
            // A store that was made keeps its disk, and the space stays: a later attach opens it.
            Some(made) => made == Made::Space && self.forget_folders(&folder).await,
        };
        let mut entries = self.entries.borrow_mut();
        let entry = entries.get_mut(&folder).expect("entries that are being opened stay");
        let state = match (&opened, made) {
            (Ok(space), _) => State::Open(Rc::clone(space)),
            (Err(failure), Some(Made::Others(store_bytes))) => {
                self.disk.give_back(manifest.of(), manifest.capacity_bytes);
                keep_disk(&self.disk, &mut entry.manifest, store_bytes);
                State::Refused(failure.clone())
            }
            (Err(_), _) => State::Closed,
        };
        match &opened {
            Ok(_) => {
                entry.trouble = None;
                self.trouble.take();
            }
            Err(failure) => tell_refused(&manifest.namespace, failure, entry.trouble.as_ref() == Some(failure)),
        }
        let State::Opening(waiters) = std::mem::replace(&mut entry.state, state) else {
            unreachable!("only this call ends the opening");
        };
        if is_forgotten {
            let trouble = entries.remove(&folder).and_then(|entry| entry.trouble);
            if let Some(failure) = trouble {
                self.has_trouble(format!("a new space, {:?}: {}", manifest.namespace, failure.text));
            }
            self.disk.give_back(manifest.of(), manifest.capacity_bytes);
        }
        for waiter in waiters {
            drop(waiter.send(opened.clone()));
        }
    }

    async fn open_space(
        &self,
        manifest: &SpaceManifest,
        host_bytes: u64,
        device: SpaceDevice,
        is_new: bool,
    ) -> Result<Rc<Space>, Failure> {
        let slot_bytes = self.config.cache.clone().block_bytes(manifest.block_bytes as usize).slot_bytes() as u64;
        self.freed().await;
        let mut grant = self.reserve_host(manifest.of(), slot_bytes, host_bytes)?;
        let opened = self.open_cache(manifest, &mut grant, device, is_new).await;
        let cache = opened.inspect_err(|_| self.host.give_back(manifest.of(), grant.bytes))?;
        let claimed = self.claim_host(manifest.of(), &grant).await;
        let bytes = match claimed {
            Ok(claimed) => grant.bytes + claimed,
            Err(failure) => {
                if let Err(error) = cache.close().await {
                    tracing::warn!(%error, "the cache of a space that is not opened");
                }
                self.host.give_back(manifest.of(), grant.bytes);
                return Err(failure);
            }
        };
        let host = HostShare::new(&cache, grant.floor, bytes);
        host.resize(&cache, bytes, &*self.system).await;
        let SpaceManifest { namespace, uid, block_bytes, capacity_bytes, .. } = manifest.clone();
        let system = Rc::clone(&self.system);
        let (clients, lenders, pins) = (Cell::default(), Rc::default(), Cell::default());
        Ok(Rc::new(Space {
            namespace,
            uid,
            block_bytes,
            capacity_bytes,
            host,
            cache,
            system,
            clients,
            lenders,
            device,
            pins,
        }))
    }

    async fn open_cache(
        &self,
        manifest: &SpaceManifest,
        grant: &mut Grant,
        device: SpaceDevice,
        is_new: bool,
    ) -> Result<Cache, Failure> {
        let refused = |error| self.refused(manifest, error);
        let mut config = self.checked_config(manifest, grant, device, is_new).await.map_err(refused)?;
        if let SpaceDevice::Cuda(_) = device {
            // No other space's by then. It may be less than was asked for.
            grant.keep(self.claim_host(manifest.of(), grant).await?);
            let slots = slots(grant.total(), config.slot_bytes() as u64).map_err(refused)?;
            config.host.capacity = Capacity::Blocks(slots);
        }
        self.system.open_cache(config).await.map_err(refused)
    }

    /// What the clients of a space that cannot be opened are told. The operator is told of what none of them can mend.
    pub(super) fn refused(&self, manifest: &SpaceManifest, error: Error) -> Failure {
        let error = error.with_settings_named(&OF_SPACES);
        let failure = Failure::from(&error);
        let is_trouble = match &error {
            Error::Store { .. } | Error::Io { .. } => true,
            Error::Config { field, .. } => !OF_CLIENTS.contains(field),
            _ => false,
        };
        if is_trouble && let Some(entry) = self.entries.borrow_mut().get_mut(&manifest.folder()) {
            entry.trouble = Some(failure.clone());
        }
        failure
    }

    /// The settings of a space's cache, once all that can be known without opening it is right, and its folders are
    /// made.
    async fn checked_config(
        &self,
        manifest: &SpaceManifest,
        grant: &Grant,
        device: SpaceDevice,
        is_new: bool,
    ) -> Result<Config> {
        let mut config = self.cache_config(manifest, grant)?;
        let kind = match device {
            SpaceDevice::None => None,
            SpaceDevice::Simulated => Some(DeviceKind::Simulated),
            SpaceDevice::Cuda(uuid) => {
                let discovery = discover();
                let gpu = discovery.device_of(&uuid).map_err(|reason| Error::unavailable("device", reason))?;
                config = config.device_ordinal(gpu.ordinal);
                // Pinned for the GPU, its memory cannot be another's: it gives none up.
                config.host.parks = false;
                config.host.capacity = Capacity::Blocks(slots(grant.total(), config.slot_bytes() as u64)?);
                Some(DeviceKind::Cuda)
            }
        };
        if let Some(kind) = kind {
            // Blocks reach the device through host memory, where others find them. No slot is used: none may be 0.
            config = config.device_blocks(1).device(kind).cufile(EngineMode::Off).bypass_host(false);
        }
        config.validate()?;
        self.tables.take(&manifest.folder(), &config, |folder| self.entries.borrow().contains_key(folder))?;
        self.make_folders(manifest, is_new).await?;
        Ok(config)
    }
}

/// Tells the operator that a client is refused a space; for trouble, that no client can mend it.
pub(super) fn tell_refused(space: &str, failure: &Failure, is_trouble: bool) {
    static TROUBLE: Seldom = Seldom::new();
    static REFUSED: Seldom = Seldom::new();
    let reason = &failure.text;
    if is_trouble {
        if let Some(others) = TROUBLE.turn() {
            tracing::error!(space, reason, others, "a space could not be opened");
        }
    } else if let Some(others) = REFUSED.turn() {
        tracing::warn!(space, reason, others, "a client was refused its space");
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::DirBuilder, os::unix::fs::DirBuilderExt, path::Path};

    use kvhoist::DirectIo;
    use tokio::task::LocalSet;

    use super::*;
    use crate::{config::ServerConfig, spaces::Wanted, system::Machine};

    /// What no client can mend is for the operator to see.
    #[tokio::test]
    async fn a_setting_of_the_service_that_a_space_cannot_have_is_its_trouble() {
        let folder = tempfile::tempdir().expect("a directory");
        let run = async {
            for (workers, is_served) in [(1, true), (1000, false), (1, true)] {
                let spaces = load(folder.path(), Config::default().workers(workers));
                let attached = spaces.attach(Wanted::of_tests(4096)).await;
                let refused = attached.err().map(|failure| failure.text);
                assert_eq!(refused.is_none(), is_served, "{refused:?}");
                assert_eq!(spaces.opened()[0].stats.disk_retired, refused, "what health is reckoned by");
                spaces.close().await.expect("closed");
            }
            // Without a device, which other clients have.
            let spaces = load(folder.path(), Config::default().gdr(EngineMode::On));
            spaces.attach(Wanted::of_tests(4096)).await.err().expect("no device");
            assert!(spaces.opened().is_empty(), "nobody else's trouble");
        };
        LocalSet::new().run_until(run).await;
    }

    /// The space is forgotten, and with it whatever is known of it.
    #[tokio::test]
    async fn the_trouble_of_a_new_space_is_the_services_until_some_space_opens() {
        let folder = tempfile::tempdir().expect("a directory");
        let run = async {
            let spaces = load(folder.path(), Config::default().workers(1000));
            let refused = spaces.attach(Wanted::of_tests(4096)).await.err().expect("no such cache").text;
            assert_eq!((spaces.count(), spaces.trouble()), (0, Some(format!("a new space, \"tests\": {refused}"))));
            let spaces = load(folder.path(), Config::default().gdr(EngineMode::On));
            spaces.attach(Wanted::of_tests(4096)).await.err().expect("no device");
            assert_eq!(spaces.trouble(), None, "of that client");
            let spaces = load(folder.path(), Config::default());
            spaces.has_trouble("a path without its lock".into());
            drop(spaces.attach(Wanted::of_tests(4096)).await.expect("opened"));
            assert_eq!(spaces.trouble(), None);
            spaces.close().await.expect("closed");
        };
        LocalSet::new().run_until(run).await;
    }

    /// Put there since the service has started, before its stores.
    #[tokio::test]
    async fn the_file_of_another_space_stays_and_refuses_its_clients() {
        let [folder, known] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let of_tests = |capacity_bytes| Wanted { capacity_bytes, ..Wanted::of_tests(4096) };
        let run = async {
            let spaces = load(known.path(), Config::default());
            drop(spaces.attach(of_tests(4 << 20)).await.expect("made"));
            spaces.close().await.expect("closed");
            let name = spaces.status()[0].folder.clone();
            let [file, theirs] = [&folder, &known].map(|root| root.path().join(&name).join("space"));
            let spaces = load(folder.path(), Config::default());
            let before = spaces.left();
            DirBuilder::new().mode(0o700).create(folder.path().join(&name)).expect("made");
            std::fs::copy(&theirs, &file).expect("put there");
            for _ in 0..2 {
                let refused = spaces.attach(of_tests(8 << 20)).await.err().expect("another's").text;
                assert!(refused.contains("restart the service"), "{refused}");
                assert_eq!(std::fs::read(&file).expect("there"), std::fs::read(&theirs).expect("there"));
                assert_eq!(spaces.left(), before, "it has no store");
                assert_eq!(spaces.opened()[0].stats.disk_retired, Some(refused), "what health is reckoned by");
            }
            let spaces = load(folder.path(), Config::default());
            let space = spaces.attach(of_tests(8 << 20)).await.expect("known at the start");
            assert_eq!(space.capacity_bytes, 4 << 20);
        };
        LocalSet::new().run_until(run).await;
    }

    /// Whoever names a GPU that is not there would have the others' blocks evicted.
    #[tokio::test]
    async fn a_space_for_a_gpu_that_is_not_there_takes_no_memory_of_others() {
        let folder = tempfile::tempdir().expect("a directory");
        let run = async {
            let spaces = load(folder.path(), Config::default());
            let of_tests = || Wanted { capacity_bytes: 4 << 20, ..Wanted::of_tests(4096) };
            let first = spaces.attach(of_tests()).await.expect("opened");
            let before = first.host.bytes();
            assert!(first.host.spare() > 0, "it has what others may want");
            let (namespace, device) = ("gpu".to_owned(), SpaceDevice::Cuda([1; 16]));
            let wanted = Wanted { namespace, device, host_bytes: 64 << 10, ..of_tests() };
            let refused = spaces.attach(wanted).await.err().expect("there is no such GPU");
            assert!(refused.text.contains("device"), "{}", refused.text);
            assert_eq!(first.host.bytes(), before);
            drop(first);
            spaces.close().await.expect("closed");
        };
        LocalSet::new().run_until(run).await;
    }

    fn load(folder: &Path, cache: Config) -> Rc<Spaces> {
        let mut config = ServerConfig::new(folder.join("socket"));
        config.paths = vec![folder.to_owned()];
        (config.capacity_bytes, config.host_bytes) = (16 << 20, 1 << 20);
        config.cache = cache.direct_io(DirectIo::Prefer);
        Rc::new(Spaces::load(config, Rc::new(Machine)).expect("loaded"))
    }
}
