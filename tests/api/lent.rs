//! Memory that is lent for calls of its own: as many ranges as there are, overlapping or not, and given back when
//! nothing uses it.

use kvhoist::{BlockKey, Cache, Error, Segment, block_on};

const BLOCK_BYTES: usize = 16 << 10;

fn opened() -> Cache {
    block_on(Cache::builder().block_bytes(BLOCK_BYTES).host_bytes(8 * BLOCK_BYTES as u64).open()).expect("it opens")
}

fn key(n: u8) -> BlockKey {
    BlockKey::new([n; 32])
}

fn pieces(memory: &mut [Vec<u8>]) -> Vec<Segment> {
    memory.iter_mut().map(|piece| Segment { ptr: piece.as_mut_ptr(), len: piece.len() }).collect()
}

#[test]
fn a_call_may_lend_more_ranges_than_may_be_registered() {
    let cache = opened();
    // Two bytes each: 8,192 allocations for one block.
    let mut from: Vec<Vec<u8>> = (0..BLOCK_BYTES / 2).map(|n| (n as u16).to_le_bytes().to_vec()).collect();
    let mut into: Vec<Vec<u8>> = vec![vec![0; 2]; BLOCK_BYTES / 2];
    let (sources, targets) = (pieces(&mut from), pieces(&mut into));
    let all: Vec<Segment> = sources.iter().chain(&targets).copied().collect();
    // SAFETY: the vectors outlive the region's use, which is waited for below; nothing touches them meanwhile.
    let region = unsafe { cache.lend(&all) }.expect("it is lent");
    let stored = block_on(region.store_from(&[key(1)], None, &[sources])).expect("the call is taken");
    assert!(matches!(stored[..], [Ok(true)]), "{stored:?}");
    let loaded = block_on(region.load_into(&[key(1)], &[targets])).expect("the call is taken");
    assert!(matches!(loaded[..], [Ok(true)]), "{loaded:?}");
    block_on(cache.unregister(&region)).expect("its own region");
    assert!(region.is_unused());
    assert_eq!(from, into);
}

#[test]
fn only_a_regions_own_calls_use_lent_memory() {
    let (cache, other) = (opened(), opened());
    let mut memory = vec![7; BLOCK_BYTES + 1];
    let start = memory.as_mut_ptr();
    let whole = Segment { ptr: start, len: BLOCK_BYTES };
    let outside = Segment { ptr: start.wrapping_add(1), len: BLOCK_BYTES };
    // SAFETY: the vector outlives the cache's use, which is waited for below; nothing touches it meanwhile.
    let [region, again] = [(); 2].map(|()| unsafe { cache.lend(&[whole]) }.expect("lent twice"));
    fn refused<T>(result: Result<T, Error>) -> bool {
        matches!(result, Err(Error::Argument { .. }))
    }
    assert!(refused(block_on(cache.store_from(&[key(1)], None, &[vec![whole]]))), "it is not registered");
    assert!(refused(block_on(region.store_from(&[key(1)], None, &[vec![outside]]))), "one byte is not lent");
    let queue = other.completion_queue(1).expect("an eventfd");
    assert!(refused(region.submit_load(&queue, &[key(1)], &[vec![whole]])), "the queue is of another cache");
    assert!(refused(block_on(other.unregister(&region))), "the region too");
    let stored = block_on(again.store_from(&[key(1)], None, &[vec![whole]])).expect("the call is taken");
    assert!(matches!(stored[..], [Ok(true)]), "{stored:?}");
    block_on(cache.unregister(&again)).expect("its own region");
    let nowhere = Segment { ptr: std::ptr::null_mut(), len: 1 };
    // SAFETY: refused, so never used.
    assert!(unsafe { cache.lend(&[nowhere]) }.is_err());
}

#[test]
fn no_call_uses_lent_memory_once_it_was_unregistered() {
    let cache = opened();
    let mut memory = vec![7; BLOCK_BYTES];
    let place = Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES };
    // SAFETY: the vector outlives the region's use, which has ended before it is dropped; nothing touches it before.
    let region = unsafe { cache.lend(&[place]) }.expect("it is lent");
    let stored = block_on(region.store_from(&[key(1)], None, &[vec![place]])).expect("the call is taken");
    assert!(matches!(stored[..], [Ok(true)]), "{stored:?}");
    // A call that was made before, and is polled after.
    let (keys, places) = ([key(2)], [vec![place]]);
    let late = region.store_from(&keys, None, &places);
    block_on(cache.unregister(&region)).expect("its own region");
    drop(memory);
    let queue = cache.completion_queue(1).expect("an eventfd");
    let refused = [
        block_on(late).err(),
        block_on(region.load_into(&[key(1)], &[vec![place]])).err(),
        region.submit_store(&queue, &[key(2)], None, &[vec![place]]).err(),
    ];
    for error in refused {
        let error = error.expect("its owner may have unmapped it");
        assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains("was unregistered"), "{error}");
    }
    assert!(region.is_unused());
}

#[test]
fn a_region_keeps_no_cache_open() {
    let cache = opened();
    let mut memory = vec![7; BLOCK_BYTES];
    let place = Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES };
    // SAFETY: nothing is stored from it.
    let region = unsafe { cache.lend(&[place]) }.expect("it is lent");
    drop(cache);
    let stored = block_on(region.store_from(&[key(1)], None, &[vec![place]]));
    assert!(matches!(stored, Err(Error::Closed)), "{stored:?}");
}
