//! Which of a client's addresses lie in memory that it has lent to the service.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard},
};

use kvhoist::{Segment, SharedMemory};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

use crate::{
    error::{Error, Result, ServiceFault},
    protocol::{PLACES_MAX, Place, RegionKind},
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
    pub(super) kind: RegionKind,
    pub(super) fd: Arc<OwnedFd>,
}

/// Memory that calls may name.
struct Known {
    number: u32,
    start: usize,
    len: usize,
    /// A call left it to a service that hangs.
    given_up: bool,
    /// Of memory that could not be passed, whose blocks are copied: the calls that name it.
    users: Option<Users>,
    /// Keeps the mapping of memory that this crate has mapped.
    _memory: Option<Arc<SharedMemory>>,
}

/// Read-locked by calls that copy from or to a range; `unregister` waits for them.
pub(super) type Users = Arc<RwLock<()>>;

/// Where a block lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// In memory that the service has.
    Straight(Vec<Place>),
    /// In part or wholly in memory that it has not.
    Copied,
}

/// All registered memory, by its first address. No two ranges overlap.
#[derive(Default)]
pub(super) struct Places(Mutex<BTreeMap<usize, Known>>);

impl Places {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Known>> {
        self.0.lock().expect("nothing panics under it")
    }

    /// Whether a range has no byte in common with registered memory.
    pub(super) fn is_free(&self, start: usize, len: usize) -> bool {
        let known = self.lock();
        let before = known.range(..start.saturating_add(len)).next_back();
        before.is_none_or(|(_, known)| known.start + known.len <= start)
    }

    /// Memory that the service has.
    pub(super) fn add(&self, lent: &Lent, memory: Option<Arc<SharedMemory>>) {
        let Lent { number, start, len, .. } = *lent;
        self.lock().insert(start, Known { number, start, len, given_up: false, users: None, _memory: memory });
    }

    /// Memory that the service has not.
    pub(super) fn add_copied(&self, number: u32, start: usize, len: usize) -> Users {
        let users = Users::default();
        let known = Known { number, start, len, given_up: false, users: Some(Arc::clone(&users)), _memory: None };
        self.lock().insert(start, known);
        users
    }

    /// No call moves blocks between these regions and the service any more.
    pub(super) fn give_up(&self, numbers: &BTreeSet<u32>) {
        self.lock().values_mut().for_each(|known| known.given_up |= numbers.contains(&known.number));
    }

    pub(super) fn remove(&self, number: u32) {
        // Dropped after the unlock: the memory may be unmapped with it.
        let removed: Vec<_> = self.lock().extract_if(.., |_, known| known.number == number).collect();
        drop(removed);
    }

    /// Where the blocks of a call lie: in registered memory, or in `loan`; and what keeps the memory that is copied.
    pub(super) fn find(
        &self,
        keys: usize,
        segments: &[Vec<Segment>],
        block_bytes: usize,
        loan: &[Segment],
    ) -> Result<(Vec<Found>, Vec<OwnedRwLockReadGuard<()>>)> {
        if keys != segments.len() {
            return Err(wrong(format!("{} lists", segments.len()), format!("one for each of {keys} keys")));
        }
        let known = self.lock();
        let (mut found, mut used) = (Vec::with_capacity(keys), BTreeMap::new());
        for of_block in segments {
            Segment::check_block(of_block, block_bytes)?;
            found.push(block(&known, of_block, loan, &mut used)?);
        }
        // Not write-locked: `unregister` removes a range from the map first.
        let keeps = used.into_values().filter_map(|users: Users| users.try_read_owned().ok()).collect();
        Ok((found, keeps))
    }

    /// The place of a segment of memory that the service has.
    pub(super) fn place(&self, segment: &Segment) -> Result<Place> {
        let known = self.lock();
        place(holder(&known, segment)?, segment)
    }
}

fn wrong(found: String, expected: String) -> Error {
    Error::argument("segments", found, expected)
}

fn unknown(segment: &Segment) -> Error {
    let found = format!("{} bytes at {:p}, in no registered region", segment.len, segment.ptr);
    wrong(found, "memory registered with this client".into())
}

fn given_up(number: u32) -> Error {
    let text = format!(
        "region {number} was given up to a service that hangs, which may still read and write it; unregister it, which \
         waits for the service, or move blocks to other memory"
    );
    Error::service(ServiceFault::Abandoned, text)
}

fn block(
    known: &BTreeMap<usize, Known>,
    segments: &[Segment],
    loan: &[Segment],
    used: &mut BTreeMap<u32, Users>,
) -> Result<Found> {
    let mut places = Vec::with_capacity(segments.len());
    for segment in segments {
        match holder(known, segment) {
            Ok(Known { given_up: true, number, .. }) => return Err(given_up(*number)),
            Ok(Known { number, users: Some(users), .. }) => drop(used.entry(*number).or_insert_with(|| users.clone())),
            Ok(known) => places.push(place(known, segment)?),
            Err(error) => loan.iter().any(|lent| is_within(segment, lent)).then_some(()).ok_or(error)?,
        }
    }
    if places.len() < segments.len() {
        return Ok(Found::Copied);
    }
    match places.len() <= PLACES_MAX {
        true => Ok(Found::Straight(places)),
        false => Err(wrong(format!("a block of {} segments", places.len()), format!("{PLACES_MAX} at most"))),
    }
}

fn is_within(segment: &Segment, lent: &Segment) -> bool {
    let before = (segment.ptr as usize).wrapping_sub(lent.ptr as usize);
    before <= lent.len && segment.len <= lent.len - before
}

/// The registered memory that a segment lies in.
fn holder<'a>(known: &'a BTreeMap<usize, Known>, segment: &Segment) -> Result<&'a Known> {
    let start = segment.ptr as usize;
    let found = known.range(..=start).next_back().map(|(_, known)| known);
    let within = |known: &&Known| start - known.start <= known.len && segment.len <= known.len - (start - known.start);
    found.filter(within).ok_or_else(|| unknown(segment))
}

fn place(known: &Known, segment: &Segment) -> Result<Place> {
    let len = u32::try_from(segment.len).map_err(|_| unknown(segment))?;
    Ok(Place { region: known.number, len, offset: (segment.ptr as usize - known.start) as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lent(number: u32, start: usize, len: usize) -> Lent {
        let fd: OwnedFd = std::fs::File::open("/dev/null").expect("there").into();
        Lent { number, start, len, offset: 0, pin: false, kind: RegionKind::Host, fd: fd.into() }
    }

    fn at(address: usize, len: usize) -> Segment {
        Segment { ptr: std::ptr::without_provenance_mut(address), len }
    }

    #[test]
    fn an_address_is_found_in_the_region_that_it_lies_in() {
        let places = Places::default();
        places.add(&lent(1, 4096, 4096), None);
        places.add(&lent(2, 12288, 4096), None);
        let found = |segment| places.find(1, &[vec![segment]], 100, &[]).map(|(mut found, _)| found.remove(0));
        let straight = |region, offset| Found::Straight(vec![Place { region, len: 100, offset }]);
        assert_eq!(found(at(4096 + 10, 100)).expect("in it"), straight(1, 10));
        assert_eq!(found(at(16284, 100)).expect("its end"), straight(2, 3996));
        for address in [0, 4000, 8100, 8192, 16285, usize::MAX - 10] {
            found(at(address, 100)).expect_err("in no region, or not wholly");
        }
        found(at(4096, 99)).expect_err("no whole block");
        assert!(!places.is_free(0, 4097) && !places.is_free(8191, 1) && !places.is_free(0, usize::MAX));
        assert!(places.is_free(0, 4096) && places.is_free(8192, 4096) && places.is_free(16384, usize::MAX));
        places.remove(1);
        found(at(4096, 100)).expect_err("taken back");
    }

    #[test]
    fn a_block_that_the_service_cannot_reach_wholly_is_copied() {
        let places = Places::default();
        places.add(&lent(1, 4096, 4096), None);
        let users = places.add_copied(2, 8192, 4096);
        let loan = [at(20000, 50)];
        let found = |parts: Vec<Segment>| places.find(1, &[parts], 100, &loan).map(|(mut found, _)| found.remove(0));
        assert!(matches!(found(vec![at(4096, 50), at(5000, 50)]), Ok(Found::Straight(_))));
        for parts in [[at(4096, 50), at(9000, 50)], [at(20000, 50), at(4096, 50)], [at(20010, 40), at(8192, 60)]] {
            assert_eq!(found(parts.to_vec()).expect("known"), Found::Copied);
        }
        let (_, keeps) = places.find(1, &[vec![at(8192, 100)]], 100, &loan).expect("known");
        assert!(users.try_write().is_err(), "a call copies");
        drop(keeps);
        assert!(users.try_write().is_ok());
        for parts in [[at(4096, 50), at(20001, 50)], [at(19999, 50), at(4096, 50)], [at(8192, 50), at(12270, 50)]] {
            found(parts.to_vec()).expect_err("in nothing that was lent");
        }
    }
}
