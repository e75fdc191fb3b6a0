//! Joining movements: limits of waiters, and movements that are overdue.

use super::*;

const KEY: BlockKey = BlockKey::new([1; 32]);

fn flights() -> Flights {
    Flights::new(Arc::default(), KeyHasher::new(1))
}

/// A movement of `entry`, whose first waiter is returned with it.
fn in_flight(tier: Tier, entry: u32) -> (Flights, oneshot::Receiver<Outcome>) {
    let mut flights = flights();
    let (sender, receiver) = oneshot::channel();
    flights.begin((&KEY, tier), EntryId::from_u32(entry), Class::Awaited, Few::from([sender]), false);
    (flights, receiver)
}

#[test]
fn a_movement_has_no_more_waiters_than_permitted_and_those_that_left_make_room() {
    let (mut flights, first) = in_flight(Tier::Host, 1);
    let Ok(second) = flights.join(&KEY, Tier::Host, 2) else { panic!("there is room for two") };
    assert!(matches!(flights.join(&KEY, Tier::Host, 2), Err(NoWait::Full)));
    drop(first);
    assert!(flights.join(&KEY, Tier::Host, 2).is_ok());
    drop(second);
}

#[test]
fn nobody_joins_a_movement_that_is_overdue() {
    let (mut flights, _first) = in_flight(Tier::Disk, 1);
    assert_eq!(flights.take_overdue(1, 9).0.len(), 1, "its waiter is told");
    assert_eq!((flights.overdue(Tier::Disk), flights.overdue(Tier::Host)), (1, 0));
    assert!(matches!(flights.join(&KEY, Tier::Disk, 9), Err(NoWait::Overdue)));
    let (sender, _receiver) = oneshot::channel();
    let refused = flights.wait_for_write((&KEY, Tier::Disk), EntryId::from_u32(1), Few::from([sender]), 9);
    let (why, waiters) = refused.expect_err("it is overdue");
    assert_eq!((why, waiters.len()), (NoWait::Overdue, 1), "they are given back");
    flights.finish(&KEY, Tier::Disk);
    assert!(!flights.any_overdue());
    assert!(matches!(flights.join(&KEY, Tier::Disk, 9), Err(NoWait::Absent)));
}

#[test]
fn waiters_wait_for_the_write_of_their_entry_or_for_the_one_that_follows() {
    for (tier, entry, follows) in [(Tier::Disk, 1, false), (Tier::Disk, 2, true), (Tier::Host, 1, true)] {
        let (mut flights, _first) = in_flight(tier, 1);
        let entry = EntryId::from_u32(entry);
        let (sender, _receiver) = oneshot::channel();
        let waits = flights.wait_for_write((&KEY, tier), entry, Few::from([sender]), 9);
        assert!(waits.is_ok(), "a movement is in flight");
        let (sender, _other) = oneshot::channel();
        let refused = flights.wait_for_write((&KEY, tier), entry, Few::from([sender]), 2 - u32::from(follows));
        assert!(matches!(refused, Err((NoWait::Full, waiters)) if waiters.len() == 1), "they are given back");
        let (waiters, next) = flights.finish(&KEY, tier);
        assert_eq!((waiters.len(), next.map(|next| next.len())), (2 - usize::from(follows), follows.then_some(1)));
    }
}

fn key(n: u32) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&n.to_le_bytes());
    BlockKey::new(bytes)
}

#[test]
fn movements_that_end_leave_the_list_by_age_though_an_older_one_stays() {
    let (mut flights, _first) = in_flight(Tier::Host, 1);
    for n in 0..10_000 {
        flights.begin(
            (&key(n), Tier::Disk),
            EntryId::from_u32(2),
            Class::Background,
            Few::from([oneshot::channel().0]),
            false,
        );
        assert_eq!(flights.finish(&key(n), Tier::Disk).0.len(), 1);
        assert!(flights.by_age.len() <= 5 + ENDED_MAX, "{}", flights.by_age.len());
    }
    let begun = flights.next_number();
    let mut told = 0;
    loop {
        let (waiters, is_all) = flights.take_overdue(begun, 2);
        told += waiters.len();
        if is_all {
            break;
        }
    }
    assert_eq!(told, 1, "only the one in flight is overdue");
    assert!(flights.by_age.is_empty());
}

#[test]
fn movements_become_overdue_some_at_a_time_the_oldest_first() {
    let mut flights = flights();
    let mut receivers = Vec::new();
    let mut begin = |flights: &mut Flights, n| {
        let (sender, receiver) = oneshot::channel();
        receivers.push(receiver);
        flights.begin((&key(n), Tier::Disk), EntryId::from_u32(n), Class::Awaited, Few::from([sender]), true)
    };
    let begun = (0..5).map(|n| begin(&mut flights, n)).last().expect("five");
    begin(&mut flights, 5);
    for overdue in [2, 4, 5] {
        let (told, is_all) = flights.take_overdue(begun, 2);
        assert!(told.len() <= 2 && is_all == (overdue == 5), "{} told of", told.len());
        assert_eq!(flights.overdue(Tier::Disk), overdue);
        assert!(matches!(flights.join(&key(overdue as u32 - 1), Tier::Disk, 9), Err(NoWait::Overdue)));
    }
    assert!(flights.take_overdue(begun, 2).0.is_empty(), "the last has just begun");
    assert!(flights.join(&key(5), Tier::Disk, 9).is_ok());
}

#[test]
fn a_movement_is_as_urgent_by_its_number_as_by_its_key() {
    let mut flights = flights();
    let numbers: Vec<u64> = (0..100)
        .map(|n| {
            let entry = EntryId::from_u32(n);
            flights.begin((&key(n), Tier::Host), entry, Class::Background, Few::default(), true)
        })
        .collect();
    for n in (0..100).step_by(3) {
        flights.finish(&key(n), Tier::Host);
    }
    assert_eq!(flights.raise(&key(1), Tier::Host), Some(numbers[1]));
    // In a place that another one has left.
    flights.begin(
        (&key(200), Tier::Host),
        EntryId::from_u32(200),
        Class::Awaited,
        Few::from([oneshot::channel().0]),
        false,
    );
    for (n, &number) in numbers.iter().enumerate() {
        let urgency = if n == 1 { Urgency::Awaited } else { Urgency::Background(number) };
        assert_eq!(flights.urgency_of(number), urgency, "movement {n}");
    }
}
