//! A block in, a block out, in ten lines.

use kvhoist::{Cache, PrefixChain, block_on};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = tempfile::tempdir()?;
    block_on(async {
        let config = Cache::builder().namespace("example model").block_bytes(64 << 10).host_bytes(16 << 20);
        let cache = config.disk(directory.path(), 64 << 20).open().await?;
        let tokens: Vec<u32> = (0..128).collect();
        let keys = PrefixChain::new(&cache.config().namespace).extend_tokens(&tokens, 64)?;
        cache.store(&keys[0], None, &[7; 64 << 10]).await?;
        cache.store(&keys[1], Some(&keys[0]), &[8; 64 << 10]).await?;
        println!("{} of {} blocks resident", cache.match_prefix(&keys).len(), keys.len());
        let block = cache.fetch(&keys[0]).await?.expect("stored above");
        println!("{} bytes of {} by {}", block.len(), block[0], block.route());
        cache.close().await?;
        Ok(())
    })
}
