//! What a build says of the engines that it left out, and that it works without them. Runs in every build: of an engine
//! that the build has, the error is about the machine.

use kvhoist::{
    BlockKey, Cache, Config, DeviceKind, DirectIo, DiskPath, EngineMode, Error, block_on, internals::device::ENGINES,
};

fn base() -> Config {
    Config::default()
        .block_bytes(4096)
        .host_blocks(4)
        .device_blocks(4)
        .device(DeviceKind::Simulated)
        .direct_io(DirectIo::Prefer)
}

/// The reason why a cache that insists on an engine cannot be opened; `None` where it was opened.
fn refusal(config: Config) -> Option<String> {
    match block_on(Cache::open(config)) {
        Ok(cache) => {
            block_on(cache.close()).expect("closed");
            None
        }
        Err(Error::Unavailable { reason, .. }) => Some(reason),
        Err(other) => panic!("found {other}, expected Error::Unavailable"),
    }
}

#[test]
fn an_engine_that_was_left_out_is_refused_by_the_name_of_its_feature() {
    let store = tempfile::tempdir().expect("a directory");
    for (feature, is_built) in ENGINES {
        let refused = refusal(match feature {
            "cuda" => base().device(DeviceKind::Cuda),
            "cufile" => base().cufile(EngineMode::On).disks(vec![DiskPath::with_blocks(store.path(), 4)]),
            "rdma" => base().gdr(EngineMode::On),
            other => panic!("no setting of this test insists on {other}"),
        });
        let names_it = refused.as_ref().is_some_and(|reason| reason.contains(&format!("`--features {feature}`")));
        assert_eq!(names_it, !is_built, "{feature}, built: {is_built}: {refused:?}");
    }
}

/// Settings that leave the choice open never need an engine.
#[test]
fn a_cache_that_insists_on_no_engine_works_without_them() {
    let store = tempfile::tempdir().expect("a directory");
    let config = base().device(DeviceKind::Auto).disks(vec![DiskPath::with_blocks(store.path(), 4)]);
    let (key, block) = (BlockKey::new([1; 32]), [7; 4096]);
    block_on(async {
        let cache = Cache::open(config).await?;
        cache.store(&key, None, &block).await?;
        let on_device = cache.fetch_to_device(&key).await?.expect("stored");
        assert_eq!(cache.read_device(&on_device, vec![0; 4096]).await?[..], block);
        drop(on_device);
        cache.close().await
    })
    .expect("a cache over a store and memory that plays the device");
}
