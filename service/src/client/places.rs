//! Which of a client's addresses lie in memory that it has lent to the service.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard},
};

use kvhoist::{
    Segment, SharedMemory,
    internals::service::{IPC_HANDLE_BYTES, Ranges},
};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

use crate::{
    error::{Error, Result, ServiceFault},
    protocol::{Failure, PLACES_MAX, Place, RegionKind, Request},
    wire::Shared,
};

/// Memory that a client has registered.
#[derive(Clone)]
pub(super) struct Lent {
    pub(super) number: u32,
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) passed: Passed,
}

/// How memory is passed to the service, and where in what is passed it begins.
#[derive(Clone)]
pub(super) enum Passed {
    Memfd { fd: Arc<OwnedFd>, offset: u64, pin: bool, kind: RegionKind },
    Device { handle: [u8; IPC_HANDLE_BYTES], offset: u64 },
}

impl Lent {
    /// How it is registered.
    pub(super) fn request(&self) -> Request {
        let (region, len) = (self.number, self.len as u64);
        match self.passed {
            Passed::Memfd { offset, pin, kind, .. } => Request::Register { region, kind, pin, offset, len },
            Passed::Device { handle, offset } => Request::RegisterDevice { region, offset, len, handle },
        }
    }

    /// What goes with the request.
    pub(super) fn fd(&self) -> Option<Shared> {
        match &self.passed {
            Passed::Memfd { fd, .. } => Some(fd.clone()),
            Passed::Device { .. } => None,
        }
    }
}

/// Memory that calls may name.
struct Known {
    number: u32,
    /// A call left it to a service that hangs.
    given_up: bool,
    /// Of memory that could not be passed, whose blocks are copied: the calls that name it.
    users: Option<Users>,
    /// Keeps the mapping of memory that this crate has mapped.
    _memory: Option<Arc<SharedMemory>>,
}

/// Memory that is lent for calls of its own, whose blocks are copied.
pub(super) struct LentForCalls {
    pub(super) number: u32,
    pub(super) ranges: Ranges<()>,
    pub(super) users: Users,
}

/// Read-locked by calls that copy from or to memory; `unregister` waits for them, and sets it: no call begins then.
pub(super) type Users = Arc<RwLock<bool>>;

/// Where a block lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// In memory that the service has.
    Straight(Vec<Place>),
    /// In part or wholly in memory that it has not.
    Copied,
}

/// All registered memory.
#[derive(Default)]
pub(super) struct Places {
    known: Mutex<Ranges<Known>>,
    /// Why the service does not have a region since it is back. Locked after `known`.
    refused: Mutex<BTreeMap<u32, Error>>,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, Ranges<Known>> {
        self.known.lock().expect("nothing panics under it")
    }

    fn refused(&self) -> MutexGuard<'_, BTreeMap<u32, Error>> {
        self.refused.lock().expect("nothing panics under it")
    }

    /// Whether a range has no byte in common with registered memory.
    pub(super) fn is_free(&self, range: &Range<usize>) -> bool {
        self.lock().is_free(range)
    }

    /// Memory that the service has.
    pub(super) fn add(&self, lent: &Lent, memory: Option<Arc<SharedMemory>>) {
        let known = Known { number: lent.number, given_up: false, users: None, _memory: memory };
        self.lock().insert(lent.start..lent.start + lent.len, known);
    }

    /// Memory that the service has not.
    pub(super) fn add_copied(&self, number: u32, range: Range<usize>) -> Users {
        let users = Users::default();
        let known = Known { number, given_up: false, users: Some(Arc::clone(&users)), _memory: None };
        self.lock().insert(range, known);
        users
    }

    /// No call moves blocks between these regions and the service any more.
    pub(super) fn give_up(&self, numbers: &BTreeSet<u32>) {
        self.lock().values_mut().for_each(|known| known.given_up |= numbers.contains(&known.number));
    }

    /// A service that is back refuses memory that it had before: calls that name it fail with that. It may be in no
    /// table yet: of a call that has not been polled since the service took it.
    pub(super) fn set_refused(&self, number: u32, Failure { fault, text }: &Failure) {
        let text = format!("region {number}: refused by the service since it is back: {text}");
        self.refused().insert(number, Error::service(*fault, text));
    }

    /// It has this region, or the client has taken it back.
    pub(super) fn remove_refused(&self, number: u32) {
        self.refused().remove(&number);
    }

    /// No service has any region.
    pub(super) fn clear_refused(&self) {
        self.refused().clear();
    }

    /// The regions that it refuses.
    pub(super) fn all_refused(&self) -> Vec<u32> {
        self.refused().keys().copied().collect()
    }

    pub(super) fn remove(&self, number: u32, start: usize) {
        self.remove_refused(number);
        // Dropped after the unlock: the memory may be unmapped with it.
        let removed = self.lock().remove_if(start, |known| known.number == number);
        drop(removed);
    }

    /// Where the blocks of a call lie: in registered memory, or in `lent`; and what keeps the memory that is copied.
    pub(super) fn find(
        &self,
        keys: usize,
        segments: &[Vec<Segment>],
        block_bytes: usize,
        lent: Option<&LentForCalls>,
    ) -> Result<(Vec<Found>, Vec<OwnedRwLockReadGuard<bool>>)> {
        if keys != segments.len() {
            return Err(wrong(format!("{} lists", segments.len()), format!("one for each of {keys} keys")));
        }
        let (known, refused) = (self.lock(), self.refused());
        let (mut found, mut used) = (Vec::with_capacity(keys), BTreeMap::new());
        for of_block in segments {
            Segment::check_block(of_block, block_bytes)?;
            found.push(block((&known, &refused), of_block, lent, &mut used)?);
        }
        // `unregister` removes a range from the table before it locks: only lent memory is found after that.
        let keep = |users: Users| users.try_read_owned().ok().filter(|is_ended| !**is_ended);
        let taken_back =
            || wrong("lent memory that was unregistered".into(), "memory that `Client::lend` lends anew".into());
        let keeps: Result<_> = used.into_values().map(|users| keep(users).ok_or_else(taken_back)).collect();
        Ok((found, keeps?))
    }

    /// Where the blocks of a call lie if they lie alike in memory that the service has: the places of the first, and
    /// how many bytes behind it each one lies, modulo 2^64. `None` if they do not, or are not to be moved.
    pub(super) fn find_shifted(&self, segments: &[Vec<Segment>], block_bytes: usize) -> Option<(Vec<Place>, Vec<u64>)> {
        let (first, known, refused) = (segments.first()?, self.lock(), self.refused());
        Segment::check_block(first, block_bytes).ok()?;
        let of_first = block((&known, &refused), first, None, &mut BTreeMap::new());
        let Ok(Found::Straight(places)) = of_first else { return None };
        let shift = |from: &Segment, to: &Segment| (to.ptr as usize).wrapping_sub(from.ptr as usize);
        let mut shifts = Vec::with_capacity(segments.len());
        for of_block in segments {
            let by = shift(first.first()?, of_block.first()?);
            let is_alike = |(from, to): (&Segment, &Segment)| from.len == to.len && shift(from, to) == by;
            if of_block.len() != first.len() || !first.iter().zip(of_block).all(is_alike) {
                return None;
            }
            shifts.push(by as u64);
        }
        let signed = || shifts.iter().map(|shift| shift.cast_signed());
        let (least, most) = (signed().min()?, signed().max()?);
        for (segment, place) in first.iter().zip(&places) {
            for by in [least, most] {
                let moved = Segment { ptr: segment.ptr.wrapping_add(by as usize), len: segment.len };
                known.of(&moved).filter(|(_, known)| known.number == place.region)?;
            }
        }
        Some((places, shifts))
    }

    /// The place of a segment of memory that the service has.
    pub(super) fn place(&self, segment: &Segment) -> Result<Place> {
        let known = self.lock();
        let (start, known) = known.of(segment).ok_or_else(|| unknown(segment))?;
        self.refused().get(&known.number).cloned().map_or_else(|| place(known, start, segment), Err)
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
    (known, refused): (&Ranges<Known>, &BTreeMap<u32, Error>),
    segments: &[Segment],
    lent: Option<&LentForCalls>,
    used: &mut BTreeMap<u32, Users>,
) -> Result<Found> {
    let mut places = Vec::with_capacity(segments.len());
    for segment in segments {
        let (number, users) = match known.of(segment) {
            Some((_, Known { given_up: true, number, .. })) => return Err(given_up(*number)),
            Some((_, Known { number, users: Some(users), .. })) => (*number, users),
            Some((start, known)) => {
                if let Some(refused) = refused.get(&known.number) {
                    return Err(refused.clone());
                }
                places.push(place(known, start, segment)?);
                continue;
            }
            None => {
                let lent = lent.filter(|lent| lent.ranges.of(segment).is_some()).ok_or_else(|| unknown(segment))?;
                (lent.number, &lent.users)
            }
        };
        used.entry(number).or_insert_with(|| Arc::clone(users));
    }
    if places.len() < segments.len() {
        return Ok(Found::Copied);
    }
    match places.len() <= PLACES_MAX {
        true => Ok(Found::Straight(places)),
        false => Err(wrong(format!("a block of {} segments", places.len()), format!("{PLACES_MAX} at most"))),
    }
}

fn place(known: &Known, start: usize, segment: &Segment) -> Result<Place> {
    let len = u32::try_from(segment.len).map_err(|_| unknown(segment))?;
    Ok(Place { region: known.number, len, offset: (segment.ptr as usize - start) as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lent(number: u32, start: usize, len: usize) -> Lent {
        let fd: OwnedFd = std::fs::File::open("/dev/null").expect("there").into();
        let passed = Passed::Memfd { fd: fd.into(), offset: 0, pin: false, kind: RegionKind::Host };
        Lent { number, start, len, passed }
    }

    fn at(address: usize, len: usize) -> Segment {
        Segment { ptr: std::ptr::without_provenance_mut(address), len }
    }

    #[test]
    fn an_address_is_found_in_the_region_that_it_lies_in() {
        let places = Places::default();
        places.add(&lent(1, 4096, 4096), None);
        places.add(&lent(2, 12288, 4096), None);
        let found = |segment| places.find(1, &[vec![segment]], 100, None).map(|(mut found, _)| found.remove(0));
        let straight = |region, offset| Found::Straight(vec![Place { region, len: 100, offset }]);
        assert_eq!(found(at(4096 + 10, 100)).expect("in it"), straight(1, 10));
        assert_eq!(found(at(16284, 100)).expect("its end"), straight(2, 3996));
        for address in [0, 4000, 8100, 8192, 16285, usize::MAX - 10] {
            found(at(address, 100)).expect_err("in no region, or not wholly");
        }
        found(at(4096, 99)).expect_err("no whole block");
        assert!(!places.is_free(&(8191..8192)) && places.is_free(&(8192..12288)));
        places.remove(2, 4096);
        found(at(4096, 100)).expect("the range of another number");
        places.remove(1, 4096);
        found(at(4096, 100)).expect_err("taken back");
    }

    /// Its connection was lost between the service's answer and the poll of the call that registers.
    #[test]
    fn memory_is_refused_also_where_its_call_adds_it_later() {
        let places = Places::default();
        places.set_refused(1, &Failure::new(ServiceFault::Busy, "no room"));
        places.add(&lent(1, 4096, 4096), None);
        let find = || places.find(1, &[vec![at(4096, 100)]], 100, None).map(|(found, _)| found);
        find().expect_err("refused");
        places.clear_refused();
        find().expect("the service is away, and says so");
    }

    #[test]
    fn a_block_of_too_many_segments_is_refused() {
        let places = Places::default();
        places.add(&lent(1, 4096, 2 * PLACES_MAX), None);
        for (count, is_taken) in [(PLACES_MAX, true), (PLACES_MAX + 1, false)] {
            let segments = [(0..count).map(|byte| at(4096 + byte, 1)).collect::<Vec<_>>()];
            assert_eq!(places.find(1, &segments, count, None).is_ok(), is_taken, "{count}");
            assert_eq!(places.find_shifted(&segments, count).is_some(), is_taken, "{count}");
        }
    }

    #[test]
    fn blocks_are_shifted_that_lie_alike_in_the_regions_of_the_first() {
        let places = Places::default();
        places.add(&lent(1, 4096, 4096), None);
        places.add(&lent(2, 8192, 4096), None);
        let blocks = |starts: &[(usize, usize)]| {
            starts.iter().map(|(one, other)| vec![at(*one, 50), at(*other, 50)]).collect::<Vec<_>>()
        };
        let found = |starts: &[(usize, usize)]| places.find_shifted(&blocks(starts), 100);
        let (of_first, shifts) = found(&[(5000, 9000), (5050, 9050), (4990, 8990)]).expect("alike");
        assert_eq!(shifts, [0, 50, 10_u64.wrapping_neg()]);
        assert_eq!(of_first.iter().map(|place| (place.region, place.offset)).collect::<Vec<_>>(), [(1, 904), (2, 808)]);
        // Not by as much, past the end of a region, and into the next one.
        for starts in [[(5000, 9000), (5050, 9060)], [(5000, 12200), (5050, 12250)], [(8100, 9000), (8192, 9092)]] {
            assert!(found(&starts).is_none(), "{starts:?}");
        }
        assert!(places.find_shifted(&[vec![at(5000, 100)], vec![at(5100, 99)]], 100).is_none(), "another length");
        assert!(places.find_shifted(&[vec![at(20000, 100)]], 100).is_none(), "nobody's memory");
        assert!(places.find_shifted(&[], 100).is_none());
        places.give_up(&BTreeSet::from([1]));
        assert!(found(&[(5000, 9000)]).is_none(), "the call is to say why");
    }

    #[test]
    fn a_block_that_the_service_cannot_reach_wholly_is_copied() {
        let places = Places::default();
        places.add(&lent(1, 4096, 4096), None);
        let users = places.add_copied(2, 8192..12288);
        let lent = LentForCalls {
            number: 3,
            ranges: Ranges::from_iter(std::iter::once(20000..20050)),
            users: Users::default(),
        };
        let found =
            |parts: Vec<Segment>| places.find(1, &[parts], 100, Some(&lent)).map(|(mut found, _)| found.remove(0));
        assert!(matches!(found(vec![at(4096, 50), at(5000, 50)]), Ok(Found::Straight(_))));
        for parts in [[at(4096, 50), at(9000, 50)], [at(20000, 50), at(4096, 50)], [at(20010, 40), at(8192, 60)]] {
            assert_eq!(found(parts.to_vec()).expect("known"), Found::Copied);
        }
        let (_, keeps) = places.find(1, &[vec![at(8192, 100)]], 100, Some(&lent)).expect("known");
        assert!(users.try_write().is_err(), "a call copies");
        drop(keeps);
        assert!(users.try_write().is_ok());
        for parts in [[at(4096, 50), at(20001, 50)], [at(19999, 50), at(4096, 50)], [at(8192, 50), at(12270, 50)]] {
            found(parts.to_vec()).expect_err("in nothing that was lent");
        }
        *lent.users.try_write().expect("no call copies") = true;
        found(vec![at(20000, 50), at(4096, 50)]).expect_err("taken back");
    }
}
