//! What is said to be pinned is what the kernel has pinned.

mod scene;

use kvhoist::{Memory, Segment};
use kvhoist_simulation::sim;
use scene::*;

fn lent(memory: &mut [u8]) -> Memory {
    // SAFETY: the memory outlives the cache, and nothing touches it while a call is under way.
    unsafe { Memory::host(memory.as_mut_ptr(), memory.len()) }.pinned(true)
}

#[test]
fn after_a_refused_table_nothing_is_said_to_be_pinned_until_a_change_that_the_kernel_takes() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        let [mut one, mut other] = [(); 2].map(|()| vec![0; BLOCK_BYTES]);
        let first = cache.register(lent(&mut one)).await.expect("registered");
        assert!(first.is_pinned() && cache.stats().registered, "this kernel pins");
        let start = one.as_ptr().addr();
        disk.unmap(start..start + BLOCK_BYTES);
        let second = cache.register(lent(&mut other)).await.expect("registered, unpinned");
        assert!(disk.pins_refused() >= 2, "the new table, and the former one again");
        assert!(!second.is_pinned() && !first.is_pinned(), "the kernel has no table");
        assert!(!cache.stats().registered, "nor the arena");
        let place = vec![Segment { ptr: other.as_mut_ptr(), len: BLOCK_BYTES }];
        let loaded = cache.load_into(&[key(1)], &[place]).await.expect("registered");
        assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
        cache.unregister(&first).await.expect("its own");
        assert!(!second.is_pinned() && cache.stats().registered, "a table without it is taken, with the arena");
        cache.unregister(&second).await.expect("its own");
        assert!(other == payload(1));
        finish(cache, reactor).await;
    });
}
