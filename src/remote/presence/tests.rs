use super::*;

const BLOCK: u64 = 10_000;

fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    BlockKey::new(bytes)
}

/// An object of the blocks of these numbers.
fn run(name: &str, numbers: std::ops::Range<u64>) -> Run {
    let first = numbers.start;
    let known = |n: u64| Known { key: key(n), offset: 10 + (n - first) * BLOCK, checksum: n };
    Run::new(name, first.checked_sub(1).map(key), numbers.map(known).collect(), 1)
}

fn presence() -> Presence {
    Presence::new(KeyHasher::new(7), 1 << 30)
}

#[test]
fn blocks_that_follow_one_another_are_one_read_and_know_their_parents() {
    let mut presence = presence();
    assert!(presence.enter(run("a", 0..8)) && presence.enter(run("b", 8..16)));
    let limits = |range_blocks, ranges, blocks| ReadLimits { range_blocks, ranges, blocks };
    let plan = |keys: &[u64], limits| {
        let (reads, unknown) = presence.plan(&keys.iter().map(|n| key(*n)).collect::<Vec<_>>(), limits);
        let block = |block: &ReadBlock| (block.known.checksum, block.follows);
        (reads.iter().map(|read| read.iter().map(block).collect()).collect::<Vec<Vec<_>>>(), unknown)
    };
    let (reads, unknown) = plan(&[2, 3, 4, 6, 8, 9, 99, 3], limits(10, 1, 10));
    let expected = [vec![(2, false), (3, true), (4, true)], vec![(6, false)], vec![(8, false), (9, true)]];
    assert_eq!((reads, unknown), (expected.to_vec(), vec![key(99)]));
    let (reads, _) = presence.plan(&[key(2), key(8)], limits(10, 1, 10));
    let of = |read: &[ReadBlock]| (read[0].object.to_string(), read[0].parent);
    assert_eq!(of(&reads[0]), ("a".into(), Some(key(1))));
    assert_eq!(of(&reads[1]), ("b".into(), Some(key(7))), "of another object");
    let lengths = |keys: &[u64], limits| plan(keys, limits).0.iter().map(Vec::len).collect::<Vec<_>>();
    let all: Vec<u64> = (0..8).collect();
    assert_eq!(lengths(&all, limits(3, 1, 10)), [3, 3, 2], "no range is longer than that");
    assert_eq!(lengths(&all, limits(3, 2, 10)), [6, 2], "two ranges in a read");
    assert_eq!(lengths(&[0, 2, 4, 6, 8], limits(3, 10, 4)), [4, 1], "no read has more blocks than that");
}

#[test]
fn a_block_of_two_objects_is_there_until_both_are_gone() {
    let mut presence = presence();
    assert!(presence.enter(run("a", 0..3)) && presence.enter(run("b", 2..4)));
    assert_eq!((presence.len(), presence.objects()), (5, 2));
    presence.forget_object("a");
    assert!(presence.contains(&key(2)) && !presence.contains(&key(1)));
    assert!(presence.see("b", Some(2), 2) && !presence.see("a", Some(3), 2));
    assert_eq!((presence.forget_unseen(2, 0), presence.objects()), (None, 1));
    assert_eq!(presence.forget_unseen(3, 0), None);
    assert_eq!((presence.len(), presence.objects(), presence.object_bytes), (0, 0, 0));
    // Many are forgotten in several steps.
    (0..5).for_each(|n| assert!(presence.enter(run(&n.to_string(), 100 * n..100 * n + 100))));
    let steps = std::iter::successors(presence.forget_unseen(3, 0), |from| presence.forget_unseen(3, *from));
    assert_eq!((steps.count(), presence.len()), (1, 0), "three objects, and then two");
    // What is forgotten is not found, and does not come back while its object is known.
    assert!(presence.enter(run("c", 0..3)));
    presence.forget(&key(1));
    assert!(presence.enter(run("c", 0..3)) && !presence.contains(&key(1)) && presence.contains(&key(2)));
    presence.forget_object("c");
    assert_eq!(presence.len(), 0);
}

#[test]
fn a_forgotten_block_is_offered_again_by_its_place_and_checksum_and_writes_are_refused_until_the_object_is_gone() {
    let mut presence = presence();
    assert!(presence.enter(run("a", 0..3)));
    presence.forget(&key(1));
    assert!(!presence.offer("a", 1, &key(1), 2) && !presence.offer("a", 2, &key(1), 1), "other bytes, another place");
    assert!(!presence.offer("a", 3, &key(1), 1) && !presence.offer("b", 1, &key(1), 1) && !presence.contains(&key(1)));
    assert!(presence.offer("a", 1, &key(1), 1) && presence.offer("a", 1, &key(1), 1));
    assert_eq!((presence.len(), presence.contains(&key(1))), (3, true), "it is there once");
    assert!(!presence.refuses_writes("a") && !presence.refuses_writes("b"));
    ["a", "b"].into_iter().for_each(|name| presence.refuse_writes(name, 1));
    assert!(presence.refuses_writes("a") && presence.refuses_writes("b"));
    assert!(!presence.see("b", Some(3), 2) && presence.refuses_writes("b"), "its table is to be read");
    assert!(presence.enter(run("b", 3..6)) && presence.see("b", Some(3), 2) && !presence.refuses_writes("b"));
    presence.allow_writes("a");
    assert!(!presence.refuses_writes("a"), "its block was removed");
    presence.refuse_writes("a", 2);
    presence.forget_all();
    assert!(!presence.refuses_writes("a"), "all were removed");
    ["a", "b"].into_iter().for_each(|name| presence.forget_object(name));
    assert!(!presence.refuses_writes("a"));
    assert_eq!((presence.len(), presence.objects(), presence.object_bytes), (0, 0, 0));
}

#[test]
fn an_object_without_a_table_is_news_once_refuses_writes_and_is_entered_once_it_has_one() {
    let mut presence = presence();
    assert!(presence.enter(run("a", 0..3)) && presence.pass_over("a", 1) && presence.pass_over("b", 1));
    assert_eq!((presence.len(), presence.objects()), (0, 2));
    for listing in 2..4 {
        for (name, blocks) in [("a", Some(3)), ("b", None)] {
            assert!(!presence.see(name, blocks, listing) && !presence.pass_over(name, listing), "{name}");
            assert!(presence.refuses_writes(name), "{name}");
        }
    }
    assert!(presence.enter(run("a", 0..3)) && presence.see("a", Some(3), 4) && !presence.refuses_writes("a"));
    assert_eq!(presence.forget_unseen(4, 0), None);
    assert!(!presence.knows("b"), "it is gone");
    presence.forget_object("a");
    assert_eq!((presence.len(), presence.objects(), presence.object_bytes), (0, 0, 0));
}

#[test]
fn a_doubted_object_is_entered_anew_if_its_table_is_another_and_its_block_stays_forgotten_if_not() {
    let (mut presence, other) = (presence(), |checksum| {
        let mut run = run("a", 0..3);
        run.blocks[1].checksum = checksum;
        run
    });
    assert!(presence.enter(other(1)));
    let [first, second] = [1, 7].map(|checksum| other(checksum).blocks[1]);
    presence.doubt("a", &second);
    presence.doubt("b", &first);
    assert!(presence.see("a", Some(3), 2) && presence.contains(&key(1)), "another block than is known");
    presence.doubt("a", &first);
    assert!(!presence.see("a", Some(3), 3) && !presence.contains(&key(1)) && presence.contains(&key(2)));
    assert!(presence.enter(other(1)) && presence.see("a", Some(3), 4) && !presence.contains(&key(1)), "it is damaged");
    presence.doubt("a", &first);
    assert!(presence.enter(other(7)) && presence.see("a", Some(3), 5) && presence.contains(&key(1)), "created anew");
    assert_eq!((presence.len(), presence.objects()), (3, 1));
}

#[test]
fn a_hidden_object_is_offered_again_once_a_listing_finds_its_table_sound_but_for_what_is_forgotten() {
    let mut presence = presence();
    let offered = |presence: &Presence| [0, 1, 2, 3].map(|n| presence.contains(&key(n)));
    assert!(presence.enter(run("a", 0..4)) && presence.enter(run("b", 3..5)));
    presence.forget(&key(0));
    presence.hide_object("a");
    assert_eq!(offered(&presence), [false, false, false, true], "another object has the last");
    presence.forget(&key(1));
    assert!(!presence.offer("a", 1, &key(1), 1) && !presence.offer("a", 2, &key(2), 2));
    let (reads, unknown) = presence.plan(&[key(2), key(3)], ReadLimits { range_blocks: 9, ranges: 9, blocks: 9 });
    assert_eq!((reads.len(), &*reads[0][0].object, unknown), (1, "b", vec![key(2)]));
    for listing in 2..4 {
        assert!(!presence.see("a", Some(4), listing) && !presence.contains(&key(2)), "its table is to be read");
        assert!(presence.enter(run("a", 0..4)) && presence.see("a", Some(4), listing), "it was read");
        assert_eq!(offered(&presence), [false, false, true, true]);
        presence.hide_object("a");
    }
    // Its table is none, another one, or the same after all was removed.
    assert!(presence.pass_over("a", 4) && presence.enter(run("a", 0..4)));
    presence.hide_object("a");
    assert!(presence.enter(run("a", 1..5)) && presence.see("a", Some(4), 5));
    assert_eq!(offered(&presence), [false, true, true, true]);
    presence.hide_object("a");
    presence.forget_all();
    assert!(presence.enter(run("a", 1..5)) && presence.see("a", Some(4), 6));
    assert_eq!((offered(&presence), presence.len()), ([false; 4], 0));
}

#[test]
fn a_block_takes_few_bytes_and_the_map_no_more_than_it_may() {
    for (blocks, objects, most) in [(64, 400u64, 75), (1, 4000, 400)] {
        let mut presence = presence();
        for n in 0..objects {
            let name = format!("kvhoist1/{}/{}", key(0), key(n));
            assert!(presence.enter(run(&name, n * blocks..(n + 1) * blocks)));
        }
        let each = presence.bytes() / presence.len();
        println!("{blocks} blocks an object: {each} bytes a block");
        assert!((48..most).contains(&each), "{each} bytes a block, {blocks} in an object");
    }
    let mut presence = Presence::new(KeyHasher::new(7), 64 << 10);
    let entered = (0..1000).take_while(|n| presence.enter(run(&n.to_string(), n * 8..n * 8 + 8))).count();
    assert!(entered > 50 && presence.bytes() <= 64 << 10, "{entered} objects, {} bytes", presence.bytes());
}
