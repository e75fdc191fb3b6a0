//! Shares: how much of a service's disk and host memory the spaces of one tenant get, at least and at most.
//!
//! Each space has slots of its own, so no eviction in one space takes a block of another. What is left to divide is how
//! large the spaces may be. A [`Ledger`] hands out bytes such that every tenant can still get its floor, and none
//! has more than its ceiling: `take` refuses whatever would break that, and nothing else hands out bytes, also when
//! host memory moves from one space to another.
//!
//! A tenant is a name of one user. A space of the same name that another user made is none of its spaces: names are
//! the clients' choice, users are what the kernel says.

use std::{cell::RefCell, str::FromStr};

use kvhoist::internals::size;

use super::{
    peers::own_uid,
    protocol::{Failure, NAMESPACE_BYTES_MAX},
};
use crate::error::{Error, ServiceFault};

/// What the spaces of one tenant get of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The spaces: the one of this name, and those whose names continue with `/`. Without a slash at its end.
    pub name: String,
    /// The user that made these spaces. `None`: the service's own.
    pub uid: Option<u32>,
    /// Disk of these spaces together, bytes.
    pub disk: Bounds,
    /// Host memory of these spaces together, bytes.
    pub host: Bounds,
}

/// The least and the most that a tenant gets, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Set aside for the tenant, whether it has a space or not.
    pub floor: u64,
    /// More than this it does not get.
    pub ceiling: u64,
}

impl Bounds {
    /// All that others leave.
    pub const ANY: Bounds = Bounds { floor: 0, ceiling: u64::MAX };

    /// `FLOOR..CEILING`, either of which may be missing.
    fn parse(text: &str) -> Option<Self> {
        let (floor, ceiling) = text.split_once("..")?;
        let bytes = |text: &str, missing: u64| match text {
            "" => Some(missing),
            text => size::parse_bytes(text),
        };
        let bounds = Bounds { floor: bytes(floor, 0)?, ceiling: bytes(ceiling, u64::MAX)? };
        (bounds.floor <= bounds.ceiling).then_some(bounds)
    }
}

impl Share {
    /// What [`from_str`](FromStr::from_str) accepts, for messages: "expected ...".
    pub const EXPECTED: &str = "NAME:disk=FLOOR..CEILING,host=FLOOR..CEILING,uid=USER, where NAME has no / at its end, \
                                each part and each bound may be missing, no floor is above its ceiling, and USER is \
                                the number of the user that makes the spaces (the service's own if missing), such as \
                                llama-8b:disk=200GiB..1TiB,host=8GiB..";

    /// The user whose spaces it is for.
    fn user(&self) -> u32 {
        self.uid.unwrap_or_else(own_uid)
    }

    /// Whether a space is this tenant's.
    fn has(&self, space: SpaceOf<'_>) -> bool {
        let rest = space.name.strip_prefix(self.name.as_str());
        space.uid == self.user() && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Whether no space can have such a name, or no space whose name continues with `/` is meant by it.
    fn binds_nothing(name: &str) -> bool {
        name.is_empty() || name.ends_with('/') || name.len() > NAMESPACE_BYTES_MAX
    }

    /// Checks shares of a service with so much disk and host memory: found and expected, where they are wrong.
    pub(super) fn check(shares: &[Share], disk: u64, host: u64) -> Result<(), (String, String)> {
        for (at, share) in shares.iter().enumerate() {
            if Share::binds_nothing(&share.name) {
                return Err((format!("a share of the name {:?}", share.name), Share::EXPECTED.into()));
            }
            let mut others = shares.iter().enumerate().filter(|(other, _)| *other != at);
            let space = |other: &Share| share.has(SpaceOf { uid: other.user(), name: &other.name });
            if let Some((_, other)) = others.find(|(_, other)| space(other)) {
                return Err((format!("{:?} and {:?}", share.name, other.name), "one share for each space".into()));
            }
        }
        let resources: [(&str, u64, BoundsOf); 2] =
            [("disk", disk, |share| share.disk), ("host memory", host, |share| share.host)];
        for (what, total, of) in resources {
            if let Some(share) = shares.iter().find(|share| of(share).floor > of(share).ceiling) {
                return Err((
                    format!("a floor of {what} of {:?} above its ceiling", share.name),
                    Share::EXPECTED.into(),
                ));
            }
            let floors: u128 = shares.iter().map(|share| u128::from(of(share).floor)).sum();
            if floors > u128::from(total) {
                return Err((format!("floors of {floors} bytes of {what}"), format!("{total} at most, the service's")));
            }
        }
        Ok(())
    }
}

impl FromStr for Share {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || Error::argument("share", format!("{text:?}"), Share::EXPECTED);
        let (name, parts) = text.rsplit_once(':').filter(|(name, _)| !Share::binds_nothing(name)).ok_or_else(wrong)?;
        let mut share = Share { name: name.to_owned(), uid: None, disk: Bounds::ANY, host: Bounds::ANY };
        for part in parts.split(',') {
            let (what, value) = part.split_once('=').ok_or_else(wrong)?;
            let bounds = || Bounds::parse(value).ok_or_else(wrong);
            match what {
                "disk" => share.disk = bounds()?,
                "host" => share.host = bounds()?,
                "uid" => share.uid = Some(value.parse().map_err(|_| wrong())?),
                _ => return Err(wrong()),
            }
        }
        Ok(share)
    }
}

/// A space, as shares know it: the user that made it, and its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpaceOf<'a> {
    pub(super) uid: u32,
    pub(super) name: &'a str,
}

/// The bounds of one resource.
type BoundsOf = fn(&Share) -> Bounds;

/// Who has how much of one resource.
pub(super) struct Ledger {
    /// In messages: "bytes of disk".
    what: &'static str,
    total: u64,
    tenants: Vec<(Share, Bounds)>,
    /// By tenant, and at the end of all other spaces.
    taken: RefCell<Vec<u64>>,
}

impl Ledger {
    /// `shares` have passed [`Share::check`].
    pub(super) fn new(what: &'static str, total: u64, shares: &[Share], of: BoundsOf) -> Self {
        let tenants: Vec<_> = shares.iter().map(|share| (share.clone(), of(share))).collect();
        Ledger { what, total, taken: RefCell::new(vec![0; tenants.len() + 1]), tenants }
    }

    /// Takes `wanted` for a space, or all that it may have where that is 0.
    pub(super) fn take(&self, space: SpaceOf<'_>, wanted: u64) -> Result<u64, Failure> {
        let found = self.available(space);
        let bytes = if wanted == 0 { found } else { wanted };
        if bytes == 0 || bytes > found {
            return Err(self.refusal(found, wanted));
        }
        self.taken.borrow_mut()[self.tenant(space)] += bytes;
        debug_assert_eq!(self.validate(), Ok(()));
        Ok(bytes)
    }

    /// The answer to a space that wants more than the `found` bytes that it may have.
    pub(super) fn refusal(&self, found: u64, wanted: u64) -> Failure {
        let what = self.what;
        let wanted = if wanted == 0 { "1 or more".to_owned() } else { wanted.to_string() };
        let text = format!(
            "space: found {found} {what} left for it, expected {wanted}; attach with a smaller share, give earlier \
             spaces smaller ones, or start the service with more"
        );
        Failure::new(ServiceFault::Capacity, text)
    }

    /// A space is gone, or was not made.
    pub(super) fn give_back(&self, space: SpaceOf<'_>, bytes: u64) {
        self.taken.borrow_mut()[self.tenant(space)] -= bytes;
    }

    /// What no space has.
    pub(super) fn left(&self) -> u64 {
        self.total - self.taken.borrow().iter().sum::<u64>()
    }

    fn tenant(&self, space: SpaceOf<'_>) -> usize {
        self.tenants.iter().position(|(share, _)| share.has(space)).unwrap_or(self.tenants.len())
    }

    /// The most that a space can ever have.
    pub(super) fn most(&self, space: SpaceOf<'_>) -> u64 {
        self.tenants.get(self.tenant(space)).map_or(u64::MAX, |(_, bounds)| bounds.ceiling).min(self.total)
    }

    /// Whether `bytes` of the space `from` may become the space `to`'s.
    pub(super) fn may_move(&self, from: SpaceOf<'_>, to: SpaceOf<'_>, bytes: u64) -> bool {
        let mut taken = self.taken.borrow().clone();
        taken[self.tenant(from)] -= bytes;
        self.available_of(&taken, to) >= bytes
    }

    /// How many bytes each of the `donors`, which can spare so many, has to give back so that the space `to` may take
    /// `wanted` bytes more than it may now: the first ones as many as are of use, and none more than it takes. Nothing
    /// is given back yet.
    pub(super) fn gifts(&self, donors: &[(SpaceOf<'_>, u64)], to: SpaceOf<'_>, wanted: u64) -> Vec<u64> {
        let mut taken = self.taken.borrow().clone();
        let before = self.available_of(&taken, to);
        let gift = |&(donor, spare): &(SpaceOf<'_>, u64)| {
            let (tenant, had) = (self.tenant(donor), self.available_of(&taken, to));
            let most = spare.min(wanted - (had - before));
            taken[tenant] -= most;
            // The floor of its own tenant keeps the others.
            let of_use = self.available_of(&taken, to) - had;
            taken[tenant] += most - of_use;
            of_use
        };
        donors.iter().map(gift).collect()
    }

    /// What a space may take: the floors of other tenants stay for them.
    pub(super) fn available(&self, space: SpaceOf<'_>) -> u64 {
        self.available_of(&self.taken.borrow(), space)
    }

    /// As [`available`](Self::available), where the tenants have taken this much.
    fn available_of(&self, taken: &[u64], space: SpaceOf<'_>) -> u64 {
        let own = self.tenant(space);
        let others = (0..self.tenants.len()).filter(|tenant| *tenant != own);
        let set_aside: u64 = others.map(|tenant| self.owed(taken, tenant)).sum();
        let below_ceiling = self.tenants.get(own).map_or(u64::MAX, |(_, bounds)| bounds.ceiling - taken[own]);
        (self.total - taken.iter().sum::<u64>() - set_aside).min(below_ceiling)
    }

    /// What a tenant has not taken of its floor.
    fn owed(&self, taken: &[u64], tenant: usize) -> u64 {
        self.tenants[tenant].1.floor.saturating_sub(taken[tenant])
    }

    /// Checks that every tenant can still get its floor and has no more than its ceiling.
    pub(super) fn validate(&self) -> Result<(), String> {
        let taken = self.taken.borrow();
        let owed: u64 = (0..self.tenants.len()).map(|tenant| self.owed(&taken, tenant)).sum();
        let sum: u64 = taken.iter().sum();
        if sum > self.total || owed > self.total - sum {
            return Err(format!("{sum} {} of {} are taken, {owed} owed", self.what, self.total));
        }
        let over = self.tenants.iter().zip(&*taken).find(|((_, bounds), taken)| **taken > bounds.ceiling);
        over.map_or(Ok(()), |((share, bounds), taken)| {
            Err(format!("{:?} has {taken} {}, at most {}", share.name, self.what, bounds.ceiling))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn share(name: &str, floor: u64, ceiling: u64) -> Share {
        Share { name: name.into(), uid: None, disk: Bounds { floor, ceiling }, host: Bounds::ANY }
    }

    /// A space of the service's own user.
    fn own(name: &str) -> SpaceOf<'_> {
        SpaceOf { uid: own_uid(), name }
    }

    fn ledger(total: u64, shares: &[Share]) -> Ledger {
        Ledger::new("bytes", total, shares, |share| share.disk)
    }

    #[test]
    fn a_share_is_read_as_it_is_written() {
        let read = |text: &str| text.parse::<Share>();
        let (disk, host) = (Bounds { floor: 1 << 30, ceiling: 2 << 30 }, Bounds { floor: 4096, ceiling: u64::MAX });
        let found = read("a/b:c:disk=1GiB..2GiB,host=4KiB..").expect("good");
        assert_eq!(found, Share { name: "a/b:c".into(), uid: None, disk, host });
        assert_eq!(read("a:uid=7,disk=1..").expect("good").uid, Some(7));
        assert_eq!(read("a:host=..4KiB").expect("good").host, Bounds { floor: 0, ceiling: 4096 });
        for wrong in [
            "",
            "a",
            "a:",
            ":disk=1..2",
            "a:disk=2..1",
            "a:disk=1",
            "a:tape=1..2",
            "a:disk=1..2;host=1..2",
            "a/:disk=1..2",
            "a:uid=b",
        ] {
            assert!(read(wrong).expect_err(wrong).to_string().contains("expected NAME:disk="), "{wrong}");
        }
    }

    #[test]
    fn shares_that_cannot_be_kept_are_refused() {
        let check = |shares: &[Share]| Share::check(shares, 100, 100);
        check(&[share("a", 50, 60), share("b", 50, 50), share("ab", 0, 10)]).expect("good");
        check(&[share("a", 50, 60), Share { uid: Some(own_uid() + 1), ..share("a", 50, 60) }]).expect("of two users");
        for (shares, found) in [
            (vec![share("a", 50, 60), share("b", 51, 60)], "floors of 101 bytes of disk"),
            (vec![share("a", 2, 1)], "a floor of disk of \"a\" above"),
            (vec![share("a", 0, 1), share("a/b", 0, 1)], "\"a\" and \"a/b\""),
            (vec![share("", 0, 1)], "of the name \"\""),
            (vec![share("a/", 0, 1)], "of the name \"a/\""),
            (vec![Share { uid: Some(own_uid()), ..share("a", 0, 1) }, share("a", 0, 1)], "\"a\" and \"a\""),
        ] {
            assert!(check(&shares).expect_err(found).0.contains(found), "{found}");
        }
    }

    #[test]
    fn no_more_is_taken_than_is_left() {
        let ledger = ledger(100, &[]);
        assert_eq!(ledger.take(own("a"), 60).expect("left"), 60);
        let failure = ledger.take(own("b"), 60).expect_err("40 are left");
        assert!(failure.fault == ServiceFault::Capacity && failure.text.contains("found 40 bytes left"), "{failure:?}");
        assert_eq!(ledger.take(own("b"), 0).expect("all"), 40);
        let failure = ledger.take(own("c"), 0).expect_err("none is left");
        assert!(failure.text.contains("found 0 bytes left for it, expected 1 or more;"), "{failure:?}");
    }

    #[test]
    fn a_floor_stays_for_its_tenant_and_a_ceiling_holds() {
        let ledger = ledger(100, &[share("a", 30, 50), share("b", 20, 20)]);
        assert_eq!(ledger.take(own("scanner"), 0).expect("the rest"), 50);
        assert_eq!(ledger.take(own("a/1"), 10).expect("of its floor"), 10);
        assert_eq!(ledger.take(own("a/2"), 0).expect("the rest of its floor"), 20);
        ledger.take(own("a"), 1).expect_err("the rest is b's");
        ledger.give_back(own("scanner"), 50);
        ledger.take(own("a"), 21).expect_err("above the ceiling");
        assert_eq!(ledger.take(own("a"), 0).expect("up to the ceiling"), 20);
        assert_eq!(ledger.take(own("b"), 0).expect("its floor"), 20);
    }

    #[test]
    fn a_floor_is_for_the_spaces_of_one_user() {
        let (mine, yours) = (own("a/1"), SpaceOf { uid: own_uid() + 1, name: "a/1" });
        let ledger = ledger(100, &[share("a", 60, 70)]);
        ledger.take(yours, 41).expect_err("the floor is not this user's");
        assert_eq!(ledger.take(yours, 0).expect("the rest"), 40);
        assert_eq!(ledger.take(mine, 0).expect("the floor"), 60);
    }

    #[test]
    fn gifts_are_what_is_missing_and_no_floor_gives_any() {
        let ledger = ledger(100, &[share("a", 30, 50)]);
        for (space, bytes) in [("a", 40), ("b", 25), ("c", 30)] {
            ledger.take(own(space), bytes).expect("left");
        }
        let gifts = |wanted| ledger.gifts(&[(own("a"), 40), (own("b"), 25), (own("c"), 20)], own("d"), wanted);
        assert_eq!(gifts(0), [0, 0, 0]);
        assert_eq!(gifts(12), [10, 2, 0]);
        assert_eq!(gifts(1000), [10, 25, 20]);
        assert_eq!(ledger.left(), 5, "nothing was given");
    }

    proptest! {
        /// Every tenant gets its floor, in any order of calls that take and give back.
        #[test]
        fn floors_and_ceilings_hold(
            bounds in prop::collection::vec((0u64..40, 0u64..60), 0..4),
            calls in prop::collection::vec((0usize..6, 0u64..60, any::<bool>()), 0..60),
        ) {
            let tenant = |(n, (floor, more)): (usize, &(u64, u64))| share(&n.to_string(), *floor, floor + more);
            let shares: Vec<Share> = bounds.iter().enumerate().map(tenant).collect();
            prop_assume!(Share::check(&shares, 100, 100).is_ok());
            let ledger = ledger(100, &shares);
            let mut taken = [0; 6];
            for (space, bytes, gives_back) in calls {
                if gives_back {
                    ledger.give_back(own(&space.to_string()), std::mem::take(&mut taken[space]));
                } else if let Ok(bytes) = ledger.take(own(&space.to_string()), bytes) {
                    taken[space] += bytes;
                }
                prop_assert_eq!(ledger.validate(), Ok(()));
                prop_assert_eq!(ledger.left(), 100 - taken.iter().sum::<u64>());
            }
            for (tenant, share) in shares.iter().enumerate() {
                let owed = share.disk.floor.saturating_sub(taken[tenant]);
                prop_assert!(owed == 0 || ledger.take(own(&tenant.to_string()), owed).is_ok());
            }
        }
    }
}
