//! Which of a client's addresses lie in memory that it has lent to the service.

use std::{
    collections::BTreeMap,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard},
};

use crate::{
    block::Segment,
    error::{Error, Result},
    service::{
        protocol::{Blocks, KEYS_MAX, PLACES_MAX, Place},
        shared_memory::SharedMemory,
    },
};

/// Memory that a client has registered.
#[derive(Clone)]
pub(super) struct Lent {
    pub(super) number: u32,
    pub(super) start: usize,
    pub(super) len: usize,
    /// Where in the memfd it begins.
    pub(super) offset: u64,
    pub(super) pin: bool,
    pub(super) fd: Arc<OwnedFd>,
    /// Keeps the client's mapping, where the client lets us.
    pub(super) _memory: Option<Arc<SharedMemory>>,
}

/// All registered memory, by its first address. No two ranges overlap.
#[derive(Default)]
pub(super) struct Places(Mutex<BTreeMap<usize, Lent>>);

impl Places {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Lent>> {
        self.0.lock().expect("nothing panics under it")
    }

    /// Whether a range has no byte in common with registered memory.
    pub(super) fn is_free(&self, start: usize, len: usize) -> bool {
        let lent = self.lock();
        let before = lent.range(..start.saturating_add(len)).next_back();
        before.is_none_or(|(_, lent)| lent.start + lent.len <= start)
    }

    pub(super) fn add(&self, lent: Lent) {
        self.lock().insert(lent.start, lent);
    }

    pub(super) fn remove(&self, number: u32) {
        self.lock().retain(|_, lent| lent.number != number);
    }

    /// What a service is to be told of a call's segments.
    pub(super) fn blocks(
        &self,
        keys: &[crate::block::BlockKey],
        segments: &[Vec<Segment>],
        block_bytes: usize,
    ) -> Result<Blocks> {
        let wrong = |what, found: String, expected: String| Error::Argument { what, found, expected };
        if keys.len() != segments.len() {
            let found = format!("{} lists", segments.len());
            return Err(wrong("segments", found, format!("one for each of {} keys", keys.len())));
        }
        let count: usize = segments.iter().map(Vec::len).sum();
        if keys.len() > KEYS_MAX || count > PLACES_MAX {
            let found = format!("{} blocks in {count} segments", keys.len());
            return Err(wrong("segments", found, format!("{KEYS_MAX} blocks and {PLACES_MAX} segments at most")));
        }
        let lent = self.lock();
        let mut places = Vec::with_capacity(segments.len());
        for of_block in segments {
            let bytes = of_block.iter().try_fold(0usize, |sum, segment| sum.checked_add(segment.len));
            if bytes != Some(block_bytes) {
                let found = format!("{bytes:?} bytes in {} segments", of_block.len());
                return Err(wrong("segments", found, format!("one block of {block_bytes} bytes")));
            }
            places.push(of_block.iter().map(|segment| place(&lent, segment)).collect::<Result<_>>()?);
        }
        Ok(Blocks { keys: keys.to_vec(), places })
    }
}

fn place(lent: &BTreeMap<usize, Lent>, segment: &Segment) -> Result<Place> {
    let start = segment.ptr as usize;
    let found = lent.range(..=start).next_back().map(|(_, lent)| lent);
    let within = |lent: &&Lent| start - lent.start <= lent.len && segment.len <= lent.len - (start - lent.start);
    match (found.filter(within), u32::try_from(segment.len)) {
        (Some(lent), Ok(len)) => Ok(Place { region: lent.number, len, offset: (start - lent.start) as u64 }),
        _ => Err(Error::Argument {
            what: "segments",
            found: format!("{} bytes at {:p}, in no registered region", segment.len, segment.ptr),
            expected: "memory registered with this client".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockKey;

    fn lent(number: u32, start: usize, len: usize) -> Lent {
        let fd: OwnedFd = std::fs::File::open("/dev/null").expect("there").into();
        Lent { number, start, len, offset: 0, pin: false, fd: fd.into(), _memory: None }
    }

    fn at(address: usize, len: usize) -> Segment {
        Segment { ptr: std::ptr::without_provenance_mut(address), len }
    }

    #[test]
    fn an_address_is_found_in_the_region_that_it_lies_in() {
        let places = Places::default();
        places.add(lent(1, 4096, 4096));
        places.add(lent(2, 12288, 4096));
        let key = [BlockKey::new([0; 32])];
        let found = |segment| places.blocks(&key, &[vec![segment]], 100);
        assert_eq!(found(at(4096 + 10, 100)).expect("in it").places[0], [Place { region: 1, len: 100, offset: 10 }]);
        assert_eq!(found(at(16284, 100)).expect("its end").places[0], [Place { region: 2, len: 100, offset: 3996 }]);
        for address in [0, 4000, 8100, 8192, 16285, usize::MAX - 10] {
            found(at(address, 100)).expect_err("in no region, or not wholly");
        }
        found(at(4096, 99)).expect_err("no whole block");
        assert!(!places.is_free(0, 4097) && !places.is_free(8191, 1) && !places.is_free(0, usize::MAX));
        assert!(places.is_free(0, 4096) && places.is_free(8192, 4096) && places.is_free(16384, usize::MAX));
        places.remove(1);
        found(at(4096, 100)).expect_err("taken back");
    }
}
