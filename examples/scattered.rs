//! A layer-first load: one block's layers land far apart in a pool of device memory, which host memory plays here.

use kvhoist::{BlockGeometry, Cache, DeviceKind, Memory, PrefixChain, Segment, block_on};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A small model: 4 layers, 2 KV heads of 64, 16 tokens a block, 2-byte elements.
    let geometry = BlockGeometry::Mha { kv_heads: 2, head_dim: 64, layers: 4, tokens: 16, dtype_bytes: 2 };
    let (block_bytes, layout) = (geometry.block_bytes()?, geometry.layer_first()?);
    let cache = block_on(
        Cache::builder()
            .namespace("a small model")
            .block_bytes(block_bytes)
            .host_bytes(1 << 20)
            .device_bytes(1 << 20)
            .device(DeviceKind::Simulated)
            .device_layout(layout.clone())
            .open(),
    )?;
    let keys = PrefixChain::new(&cache.config().namespace).extend_tokens(&(0..64).collect::<Vec<_>>(), 16)?;
    for (n, key) in keys.iter().enumerate() {
        block_on(cache.store(key, n.checked_sub(1).map(|n| &keys[n]), &vec![n as u8; block_bytes]))?;
    }
    // The engine's own pool: for each of the 2 x layers segments a buffer with a place for every block.
    let mut pool: Vec<Vec<u8>> = layout.segments().iter().map(|len| vec![0xff; len * keys.len()]).collect();
    let mut regions = Vec::new();
    for buffer in &mut pool {
        // SAFETY: a simulated device has host addresses, and a GPU its own. The pool outlives the cache's use of it,
        // which ends with `unregister` below; nothing touches it while it is loaded.
        let memory = unsafe { Memory::device(buffer.as_mut_ptr(), buffer.len()) };
        regions.push(block_on(cache.register(memory))?);
    }
    let places: Vec<Vec<Segment>> = (0..keys.len())
        .map(|n| {
            let lens = layout.segments().iter().zip(&mut pool);
            lens.map(|(&len, buffer)| Segment { ptr: buffer[n * len..].as_mut_ptr(), len }).collect()
        })
        .collect();
    let loaded = block_on(cache.load_into(&keys, &places))?;
    println!("{} of {} blocks loaded", loaded.iter().filter(|block| matches!(block, Ok(true))).count(), keys.len());
    for region in regions {
        block_on(cache.unregister(&region)).expect("its own region");
    }
    for (buffer, len) in pool.iter().zip(layout.segments()) {
        assert!(buffer.chunks(*len).enumerate().all(|(n, layer)| layer.iter().all(|byte| *byte == n as u8)));
    }
    println!("every layer of every block is in its place: {} segments a block", layout.segments().len());
    block_on(cache.close())?;
    Ok(())
}
