//! Sorts a million words in a few linear passes, where comparing would miss the caches and the branch predictor.

use super::Restored;

const DIGIT_BITS: u32 = 11;
const BUCKETS: usize = 1 << DIGIT_BITS;

/// The entries by ascending last use; equal ones stay in their order.
pub(super) fn sort(mut entries: Vec<Restored>) -> Vec<Restored> {
    let last = |entry: &Restored| entry.used().last;
    if entries.len() < BUCKETS {
        entries.sort_by_key(last);
        return entries;
    }
    let bounds = entries.iter().map(last).fold((u64::MAX, 0), |(min, max), last| (min.min(last), max.max(last)));
    let (first, range_bits) = (bounds.0, u64::BITS - (bounds.1 - bounds.0).leading_zeros());
    let mut other = Vec::new();
    // Digit by digit, the lowest first: each pass keeps the order of the one before.
    for shift in (0..range_bits).step_by(DIGIT_BITS as usize) {
        let digit = |entry: &Restored| ((last(entry) - first) >> shift) as usize % BUCKETS;
        let mut places = [0u32; BUCKETS];
        for entry in &entries {
            places[digit(entry)] += 1;
        }
        let mut start = 0;
        for place in &mut places {
            (*place, start) = (start, start + *place);
        }
        other.resize(entries.len(), entries[0]);
        for entry in &entries {
            let place = &mut places[digit(entry)];
            other[*place as usize] = *entry;
            *place += 1;
        }
        std::mem::swap(&mut entries, &mut other);
    }
    entries
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{EntryId, Used},
        *,
    };

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn agrees_with_the_stable_sort(
            // Few and many, equal and different, in one digit and in all.
            last_uses in prop_oneof![
                prop::collection::vec(any::<u64>(), 0..100),
                prop::collection::vec(any::<u64>(), BUCKETS - 2..BUCKETS * 3),
                prop::collection::vec(0u64..50, BUCKETS..BUCKETS * 2),
                prop::collection::vec(0u64..5, BUCKETS..BUCKETS * 2).prop_map(|v| v.iter().map(|n| n << 61).collect()),
                prop::collection::vec(u64::MAX - 5000..=u64::MAX, BUCKETS..BUCKETS * 2),
                Just(vec![7; BUCKETS + 1]),
            ],
        ) {
            // Ids that descend would give away a sort that is not stable.
            let ids = (0..last_uses.len() as u32).rev();
            let entry = |(id, last)| Restored::new(EntryId(id), Used { last, uses: id as u8 });
            let entries: Vec<_> = ids.zip(last_uses).map(entry).collect();
            let mut expected = entries.clone();
            expected.sort_by_key(|entry| entry.used().last);
            prop_assert_eq!(sort(entries), expected);
        }
    }
}
