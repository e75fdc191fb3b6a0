//! The slot table against a simple model, and its pages.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::{
    config::{Config, DiskPath},
    disk::format::is_zero,
};

const UUID: [u8; 16] = [3; 16];

fn slots_of(blocks: &[u32]) -> DiskSlots {
    let disk = |(at, &blocks): (usize, &u32)| DiskPath::with_blocks(format!("d{at}"), blocks);
    let config = Config::default().disks(blocks.iter().enumerate().map(disk).collect());
    DiskSlots::new(Stripe::new(&config), UUID, true).expect("memory for a few slots")
}

fn describe(entry: u32) -> (BlockKey, Option<BlockKey>, u64, u8) {
    let key = |n: u32| BlockKey::new([n as u8; 32]);
    (key(entry), (entry % 2 == 1).then(|| key(entry - 1)), u64::from(entry) * 10, entry as u8 % 4)
}

/// The records of a page, by slot.
fn decode(slots: &DiskSlots, page: PageId, bytes: &[u8; PAGE_BYTES]) -> BTreeMap<u32, Record> {
    let (file, first, count) = slots.stripe.page_slots(page);
    let seal = RecordSeal::new(&UUID, file.0);
    let (records, _) = bytes.as_chunks::<RECORD_BYTES>();
    assert!(records[count as usize..].iter().all(|record| is_zero(record)), "nothing past the last slot");
    (first..first + count)
        .zip(records)
        .filter_map(|(local, bytes)| {
            let record = seal.decode(local, slots.stripe.block_bytes(), bytes).expect("a sound record")?;
            Some((slots.stripe.slot(file, local), record))
        })
        .collect()
}

#[test]
fn a_slot_costs_less_than_32_bytes() {
    let slots = slots_of(&[1_000_000]);
    let heap = slots.slots.capacity() * size_of::<SlotMeta>() + slots.free.heap_bytes() + slots.stale.heap_bytes();
    assert!(heap <= 24_200_000, "{heap} bytes for a million slots");
}

#[test]
fn slots_are_allocated_from_a_few_pages_in_turn_and_each_once() {
    let mut slots = slots_of(&[200]);
    let first: Vec<u32> = std::iter::from_fn(|| slots.alloc()).collect();
    let start: Vec<u32> = (0..32).flat_map(|i| [i, 32 + i, 64 + i, 96 + i]).collect();
    assert_eq!(first[..128], start, "four pages at once");
    let mut all = first.clone();
    all.sort_unstable();
    assert!(all.iter().copied().eq(0..200), "every slot once");
    [70, 3, 71, 2].into_iter().for_each(|slot| slots.release(slot));
    let mut again: Vec<u32> = std::iter::from_fn(|| slots.alloc()).collect();
    again.sort_unstable();
    assert_eq!(again, [2, 3, 70, 71]);
    slots.validate().expect("valid");
    let mut slots = slots_of(&[64; 8]);
    assert!((0..8 * 32).map(|_| slots.alloc()).eq((0..8 * 32).map(Some)), "one page of each of many members");
}

#[test]
fn a_page_that_changes_while_it_is_written_stays_stale() {
    let mut slots = slots_of(&[32]);
    let (a, b) = (slots.alloc().expect("free"), slots.alloc().expect("free"));
    slots.commit(a, 1, 2, 3);
    let page = slots.page_of(a);
    let mut bytes = [0xFF; PAGE_BYTES];
    slots.encode_page(page, &mut bytes, describe).seal();
    assert_eq!(slots.stale_pages(PageId(0)).next(), None);
    slots.commit(b, 2, 2, 4);
    assert!(slots.stale_pages(PageId(0)).eq([page]), "the image in flight does not know of b");
    slots.encode_page(page, &mut bytes, describe).seal();
    slots.page_failed(page);
    assert!(slots.stale_pages(PageId(0)).eq([page]), "the write failed");
}

#[test]
fn a_removed_block_is_named_by_its_page_until_an_image_without_it_is_written() {
    let mut slots = slots_of(&[32]);
    let slot = slots.alloc().expect("free");
    slots.commit(slot, 1, 2, 3);
    let (page, key) = (slots.page_of(slot), describe(1).0);
    let mut bytes = [0; PAGE_BYTES];
    slots.encode_page(page, &mut bytes, describe).seal();
    slots.page_written(page);
    slots.clear(slot, &key);
    for _ in 0..2 {
        assert!(slots.pages_naming(&key).eq([page]), "another write is needed");
        slots.encode_page(page, &mut bytes, describe).seal();
        assert!(slots.pages_naming(&key).eq([page]), "it is in flight");
        slots.page_failed(page);
    }
    slots.encode_page(page, &mut bytes, describe).seal();
    slots.page_written(page);
    assert_eq!(slots.pages_naming(&key).next(), None);
}

#[test]
fn records_of_a_store_without_use_counts_have_none() {
    for (records_uses, uses) in [(true, 3), (false, 0)] {
        let mut slots = slots_of(&[32]);
        slots.records_uses = records_uses;
        let slot = slots.alloc().expect("free");
        slots.commit(slot, 3, 2, 3);
        let mut bytes = [0; PAGE_BYTES];
        slots.encode_page(slots.page_of(slot), &mut bytes, describe).seal();
        assert_eq!(decode(&slots, PageId(0), &bytes)[&slot].uses, uses);
    }
}

#[test]
fn a_quarantined_slot_is_never_used_again_and_its_record_is_cleared() {
    let mut slots = slots_of(&[1]);
    let slot = slots.alloc().expect("free");
    slots.commit(slot, 1, 2, 3);
    slots.quarantine(slot, &describe(1).0);
    let mut bytes = [0xFF; PAGE_BYTES];
    slots.encode_page(PageId(0), &mut bytes, describe).seal();
    assert!(is_zero(&bytes));
    // A reader may have held it until now.
    slots.release(slot);
    assert_eq!((slots.alloc(), slots.meta(slot), slots.quarantined_count()), (None, None, 1));
    slots.validate().expect("valid");
}

#[test]
#[should_panic(expected = "slot 0")]
fn a_slot_is_not_released_twice() {
    let mut slots = slots_of(&[2]);
    let slot = slots.alloc().expect("free");
    slots.release(slot);
    slots.release(slot);
}

#[test]
#[should_panic(expected = "slot 2 of 2")]
fn a_slot_out_of_range_is_asserted() {
    slots_of(&[2]).locate(2);
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Alloc,
    Release,
    Commit,
    Clear,
    Quarantine,
    Write,
}

fn op() -> impl Strategy<Value = Op> {
    use Op::{Alloc, Clear, Commit, Quarantine, Release, Write};
    prop_oneof![4 => Just(Alloc), 1 => Just(Release), 4 => Just(Commit), 2 => Just(Clear), 1 => Just(Quarantine),
        2 => Just(Write)]
}

/// Every slot is full, filling, quarantined or free, as many of each as in the model.
fn check_counts(
    slots: &DiskSlots,
    full: &BTreeMap<u32, u32>,
    (filling, quarantined): (usize, u32),
) -> Result<(), TestCaseError> {
    prop_assert_eq!(slots.full_count() as usize, full.len());
    prop_assert_eq!(slots.quarantined_count(), quarantined);
    prop_assert_eq!(slots.free_count() + filling as u32 + full.len() as u32 + quarantined, slots.stripe.slots());
    Ok(())
}

/// The medium names no block that is gone, except on pages for which the table reports it. Once all stale pages are
/// written, the medium has exactly the model's blocks.
fn check_medium(
    slots: &mut DiskSlots,
    full: &BTreeMap<u32, u32>,
    mut medium: Vec<[u8; PAGE_BYTES]>,
) -> Result<(), TestCaseError> {
    for (page, bytes) in (0..).map(PageId).zip(&medium) {
        for (slot, record) in decode(slots, page, bytes) {
            let is_there = full.get(&slot).is_some_and(|at| describe(*at).0 == record.key);
            prop_assert!(is_there || slots.pages_naming(&record.key).any(|other| other == page));
        }
    }
    for page in slots.stale_pages(PageId(0)).collect::<Vec<_>>() {
        slots.encode_page(page, &mut medium[page.0 as usize], describe).seal();
    }
    let mut found = BTreeMap::new();
    for (page, bytes) in (0..).map(PageId).zip(&medium) {
        found.extend(decode(slots, page, bytes));
    }
    prop_assert!(found.keys().eq(full.keys()));
    for (slot, record) in found {
        let at = full[&slot];
        let (key, parent, last_use, uses) = describe(at);
        let (length, generation, checksum) = (slots.stripe.block_bytes(), u64::from(at), u64::from(at) << 32);
        prop_assert_eq!(record, Record { key, parent, length, generation, checksum, last_use, uses });
    }
    Ok(())
}

proptest! {
    #[test]
    fn the_medium_agrees_with_the_model(
        blocks in prop::collection::vec(1u32..80, 1..4),
        ops in prop::collection::vec((op(), any::<prop::sample::Index>()), 0..300),
    ) {
        let mut slots = slots_of(&blocks);
        let (mut filling, mut full, mut quarantined) = (BTreeSet::new(), BTreeMap::new(), 0);
        let mut medium = vec![[0; PAGE_BYTES]; slots.stripe.pages() as usize];
        for (at, (op, pick)) in (0..).zip(ops) {
            let one_of = |count: usize| (count > 0).then(|| pick.index(count));
            let some_filling = one_of(filling.len()).and_then(|n| filling.iter().nth(n).copied());
            let some_full = one_of(full.len()).and_then(|n| full.keys().nth(n).copied());
            match (op, some_filling, some_full) {
                (Op::Alloc, ..) => match slots.alloc() {
                    Some(slot) => prop_assert!(filling.insert(slot) && !full.contains_key(&slot)),
                    None => prop_assert_eq!(slots.free_count(), 0),
                },
                (Op::Release, Some(slot), _) => {
                    slots.release(slot);
                    filling.remove(&slot);
                }
                (Op::Commit, Some(slot), _) => {
                    slots.commit(slot, at, u64::from(at) << 32, u64::from(at));
                    filling.remove(&slot);
                    full.insert(slot, at);
                }
                (Op::Clear, _, Some(slot)) => {
                    slots.clear(slot, &describe(full[&slot]).0);
                    full.remove(&slot);
                    filling.insert(slot);
                }
                (Op::Quarantine, some_filling, Some(slot)) => {
                    let slot = if at % 2 == 0 { slot } else { some_filling.unwrap_or(slot) };
                    slots.quarantine(slot, &describe(full.get(&slot).copied().unwrap_or(0)).0);
                    full.remove(&slot);
                    filling.remove(&slot);
                    quarantined += 1;
                }
                (Op::Write, ..) => {
                    let page = slots.stale_pages(PageId(0)).next();
                    if let Some(page) = page {
                        let mut image = medium[page.0 as usize];
                        slots.encode_page(page, &mut image, describe).seal();
                        if at % 3 == 0 {
                            slots.page_failed(page);
                        } else {
                            slots.page_written(page);
                            medium[page.0 as usize] = image;
                        }
                    }
                }
                _ => {}
            }
        }
        slots.validate().expect("valid");
        let counts = (filling.len(), quarantined);
        check_counts(&slots, &full, counts)?;
        check_medium(&mut slots, &full, medium)?;
    }
}
