//! What clients' memory takes of the service's process, over all connections: address space, and mappings.
//!
//! A process has 2^47 bytes of addresses and `vm.max_map_count` mappings, however much memory the machine has, and a
//! client's memfd can be as long as it likes and empty. At their end the service could allocate nothing, start no
//! thread and map no other client's memory. So a part of both is the service's own, and the rest is divided:
//! half of it in equal parts, one for each connection that there may be, and half between those that want more than
//! their part. No user's connections get more of that half than they leave to others.

mod room;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

pub(super) use self::room::{Room, memory_bytes};
use super::{config::ServerConfig, protocol::Failure};
use crate::error::ServiceFault;

/// One thing that is divided.
struct Pot {
    /// What it is, for messages.
    what: &'static str,
    all: u64,
    /// What each connection gets in any case.
    part: u64,
    /// What all connections have beyond their parts.
    beyond: Cell<u64>,
}

impl Pot {
    fn new(what: &'static str, all: u64, connections: u32) -> Self {
        Pot { what, all, part: all / 2 / u64::from(connections.max(1)), beyond: Cell::new(0) }
    }

    /// What is left for those that want more than their part.
    fn left(&self) -> u64 {
        (self.all / 2).saturating_sub(self.beyond.get())
    }

    /// What a connection takes beyond its part for `more` than it has.
    fn step(&self, own: u64, more: u64) -> u64 {
        own.saturating_add(more).saturating_sub(self.part) - own.saturating_sub(self.part)
    }
}

/// What all connections may have: bytes, and regions.
pub(super) struct Budget {
    pots: [Pot; 2],
    /// What each user's connections have beyond their parts.
    users: RefCell<BTreeMap<u32, [u64; 2]>>,
}

/// What one connection has.
pub(super) struct Account {
    budget: Rc<Budget>,
    uid: u32,
    own: Cell<[u64; 2]>,
}

/// A region's bytes and its mapping, until it is dropped.
pub(super) struct Charge {
    account: Rc<Account>,
    bytes: u64,
}

impl Budget {
    /// Of a service with these settings, in this process.
    pub(super) fn new(config: &ServerConfig) -> Self {
        let room = Room::of_process();
        let bytes = config.region_bytes_total_max.unwrap_or(room.region_bytes());
        let regions = config.regions_total_max.map_or(room.regions(), u64::from);
        let connections = config.connections_max;
        let pots = [
            Pot::new("bytes of clients' memory", bytes, connections),
            Pot::new("regions of clients' memory", regions, connections),
        ];
        Budget { pots, users: RefCell::default() }
    }

    /// The account of a connection of this user.
    pub(super) fn account(self: &Rc<Self>, uid: u32) -> Rc<Account> {
        Rc::new(Account { budget: Rc::clone(self), uid, own: Cell::new([0; 2]) })
    }
}

impl Account {
    /// Charges a region of so many bytes.
    ///
    /// # Errors
    /// [`ServiceFault::Busy`] with the numbers, where it would leave too little to others.
    pub(super) fn take(self: &Rc<Self>, bytes: u64) -> Result<Charge, Failure> {
        let (more, own) = ([bytes, 1], self.own.get());
        let mut users = self.budget.users.borrow_mut();
        let mut of_user = users.get(&self.uid).copied().unwrap_or_default();
        let mut steps = [0; 2];
        for (at, pot) in self.budget.pots.iter().enumerate() {
            steps[at] = pot.step(own[at], more[at]);
            let left = pot.left().checked_sub(steps[at]);
            if steps[at] > 0 && left.is_none_or(|left| left < of_user[at] + steps[at]) {
                let Pot { what, all, part, .. } = *pot;
                let text = format!(
                    "busy: this connection has {} {what} and asks for {}; of the {all} of all connections each gets \
                     {part} in any case, {} more are left, and this user's connections have {} of these: no user gets \
                     more than is left to others. Lend less, or unregister some",
                    own[at],
                    more[at],
                    pot.left(),
                    of_user[at],
                );
                return Err(Failure::new(ServiceFault::Busy, text));
            }
        }
        for (at, pot) in self.budget.pots.iter().enumerate() {
            of_user[at] += steps[at];
            pot.beyond.set(pot.beyond.get() + steps[at]);
        }
        if of_user != [0; 2] {
            users.insert(self.uid, of_user);
        }
        self.own.set([own[0] + bytes, own[1] + 1]);
        Ok(Charge { account: Rc::clone(self), bytes })
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let Account { budget, uid, own } = &*self.account;
        let [bytes, regions] = own.get();
        let left = [bytes - self.bytes, regions - 1];
        let mut users = budget.users.borrow_mut();
        let mut of_user = users.remove(uid).unwrap_or_default();
        for (at, (pot, less)) in budget.pots.iter().zip([self.bytes, 1]).enumerate() {
            let step = pot.step(left[at], less);
            of_user[at] -= step;
            pot.beyond.set(pot.beyond.get() - step);
        }
        if of_user != [0; 2] {
            users.insert(*uid, of_user);
        }
        own.set(left);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn budget(bytes: u64, regions: u32, connections: u32) -> Rc<Budget> {
        let mut config = ServerConfig::new("unused");
        config.connections_max = connections;
        (config.region_bytes_total_max, config.regions_total_max) = (Some(bytes), Some(regions));
        Rc::new(Budget::new(&config))
    }

    /// As much as an account gets, within reason.
    fn take_all(account: &Rc<Account>, bytes: u64) -> Vec<Charge> {
        std::iter::from_fn(|| account.take(bytes).ok()).take(10_000).collect()
    }

    #[test]
    fn whatever_the_others_took_a_connection_gets_its_part() {
        let budget = budget(1600, 1600, 8);
        let greedy: Vec<_> = (0..7).map(|_| budget.account(1)).collect();
        let held: Vec<_> = greedy.iter().map(|account| take_all(account, 10)).collect();
        let late = budget.account(1);
        let taken = take_all(&late, 10);
        assert!(taken.len() >= 10, "{} of {held:?}", taken.len(), held = held.iter().map(Vec::len).collect::<Vec<_>>());
        let refused = late.take(10).err().expect("refused");
        assert!(refused.fault == ServiceFault::Busy && refused.text.contains("1600"), "{}", refused.text);
        drop(held);
        late.take(10).expect("what others had");
    }

    #[test]
    fn a_user_who_takes_all_there_is_leaves_as_much_to_others() {
        let budget = budget(1600, 1600, 8);
        let greedy: Vec<_> = (0..4).map(|_| budget.account(1)).collect();
        let _held: Vec<_> = greedy.iter().map(|account| take_all(account, 1)).collect();
        let other = budget.account(2);
        assert_eq!(take_all(&other, 1).len(), 100 + 200, "its part, and half of what user 1 left");
    }

    #[test]
    fn regions_are_counted_whatever_their_bytes() {
        let budget = budget(1 << 40, 16, 4);
        let account = budget.account(1);
        let held = take_all(&account, 1);
        assert_eq!(held.len(), 2 + 4, "its part, and half of what is left of the others' half");
        assert!(account.take(1).err().expect("refused").text.contains("regions"));
        assert!(budget.account(2).take(u64::MAX).err().expect("refused").text.contains("bytes"));
        assert!(budget.users.borrow().keys().eq([&1]), "nothing is kept of a user who has nothing");
    }

    proptest! {
        /// Nothing is lost, nothing is taken twice, and a connection within its part is never refused.
        #[test]
        fn all_that_is_given_back_is_there_again(
            steps in prop::collection::vec((0..6usize, 1..400u64, any::<bool>()), 1..200)
        ) {
            let budget = budget(2400, 60, 6);
            let accounts: Vec<_> = (0..6).map(|at| budget.account(at % 3)).collect();
            let mut held: Vec<Vec<Charge>> = (0..6).map(|_| Vec::new()).collect();
            for (at, bytes, gives) in steps {
                let [own, count] = accounts[at].own.get();
                if gives && !held[at].is_empty() {
                    let first = bytes as usize % held[at].len();
                    drop(held[at].swap_remove(first));
                } else {
                    let taken = accounts[at].take(bytes);
                    prop_assert!(taken.is_ok() || own + bytes > 200 || count + 1 > 5);
                    held[at].extend(taken);
                }
                let bytes: u64 = held.iter().flatten().map(|charge| charge.bytes).sum();
                prop_assert!(bytes <= 2400 && held.iter().map(Vec::len).sum::<usize>() <= 60);
            }
            drop(held);
            prop_assert!(budget.pots.iter().all(|pot| pot.beyond.get() == 0));
            prop_assert!(budget.users.borrow().is_empty());
        }
    }
}
