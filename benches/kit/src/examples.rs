//! What the examples of the documentation begin with, so that they show the call that they are about.

use kvhoist::{BlockKey, Cache, Error, block_on};
#[cfg(feature = "service")]
pub use service::{with_client, with_device_client, with_stored};

/// Runs an example with a cache in host memory.
pub fn with_cache(example: impl AsyncFnOnce(&Cache) -> Result<(), Error>) {
    block_on(async {
        let cache = Cache::builder().block_bytes(4096).host_bytes(1 << 20).open().await?;
        example(&cache).await?;
        cache.close().await
    })
    .expect("the example runs");
}

/// As [`with_cache`], with the key of a block that is stored.
pub fn with_block(example: impl AsyncFnOnce(&Cache, BlockKey) -> Result<(), Error>) {
    with_cache(async |cache| {
        let key = BlockKey::new([1; 32]);
        cache.store(&key, None, &[7; 4096]).await?;
        example(cache, key).await
    });
}

#[cfg(feature = "service")]
mod service {
    use kvhoist::{BlockKey, DeviceKind, DirectIo, Error, PrefixChain, Segment, block_on};
    use kvhoist_service::{Client, ClientOptions, Server, ServerConfig};

    /// Runs an example with a client of a service that has host memory and a disk.
    pub fn with_client(example: impl AsyncFnOnce(&Client) -> Result<(), Error>) {
        with_client_of(ClientOptions::new("model", 4096), example);
    }

    /// As [`with_client`], in a space with a simulated device.
    pub fn with_device_client(example: impl AsyncFnOnce(&Client) -> Result<(), Error>) {
        let mut options = ClientOptions::new("model", 4096);
        options.device = Some(DeviceKind::Simulated);
        with_client_of(options, example);
    }

    fn with_client_of(options: ClientOptions, example: impl AsyncFnOnce(&Client) -> Result<(), Error>) {
        let dir = tempfile::tempdir().expect("a directory");
        let mut config = ServerConfig::new(dir.path().join("socket"));
        (config.host_bytes, config.capacity_bytes) = (1 << 20, 64 << 20);
        config.paths.push(dir.path().to_owned());
        config.cache = config.cache.direct_io(DirectIo::Prefer);
        let server = Server::start(config).expect("a service");
        block_on(async {
            let client = Client::connect(server.socket(), options).await?;
            example(&client).await?;
            drop(client);
            Ok::<_, Error>(())
        })
        .expect("the example runs");
        server.drain();
        server.wait().expect("the service ends");
    }

    /// As [`with_client`], with the keys of two blocks, the first of which is stored.
    pub fn with_stored(example: impl AsyncFnOnce(&Client, &[BlockKey]) -> Result<(), Error>) {
        with_client(async |client| {
            let keys = PrefixChain::new("model").extend_tokens(&[1, 2, 3, 4], 2)?;
            let mut block = vec![7; client.block_bytes()];
            let place = Segment { ptr: block.as_mut_ptr(), len: block.len() };
            // SAFETY: the block lives until the call has ended, and nobody writes to it before.
            let region = unsafe { client.lend(&[place]) }?;
            for stored in region.store_from(&keys[..1], None, &[vec![place]]).await? {
                stored?;
            }
            example(client, &keys).await
        });
    }
}
