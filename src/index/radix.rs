//! Sorts a million words in a few linear passes, where comparing would miss the caches and the branch predictor.

/// Places by ascending last use, then place.
pub(super) fn order(last_uses: &[u64]) -> Vec<u32> {
    let order: Vec<u32> = (0..last_uses.len() as u32).collect();
    let first = last_uses.iter().copied().min().unwrap_or(0);
    // Digit by digit, the lowest first: a stable sort by the low half, then one by the high half where any differs.
    let age = |at: u32| last_uses[at as usize] - first;
    let sort_by = |order: Vec<u32>, half: &dyn Fn(u32) -> u64| -> Vec<u32> {
        let words = order.into_iter().map(|at| half(at) << 32 | u64::from(at)).collect();
        sort_by_high_half(words).into_iter().map(|word| word as u32).collect()
    };
    let order = sort_by(order, &|at| age(at) & u64::from(u32::MAX));
    match last_uses.iter().all(|last_use| last_use - first <= u64::from(u32::MAX)) {
        true => order,
        false => sort_by(order, &|at| age(at) >> 32),
    }
}

const DIGIT_BITS: [u32; 3] = [11, 11, 10];
const BUCKETS: usize = 1 << 11;

/// The words, sorted by their high half; equal ones stay in their order.
fn sort_by_high_half(mut words: Vec<u64>) -> Vec<u64> {
    if words.len() < BUCKETS {
        words.sort_by_key(|word| word >> 32);
        return words;
    }
    let mut counts = [[0u32; BUCKETS]; DIGIT_BITS.len()];
    for &word in &words {
        for (pass, counts) in counts.iter_mut().enumerate() {
            counts[digit(word, pass)] += 1;
        }
    }
    let mut other = vec![0; words.len()];
    for (pass, counts) in counts.iter_mut().enumerate() {
        if counts.iter().any(|&count| count as usize == words.len()) {
            continue; // all have the same digit
        }
        let mut start = 0;
        for count in counts.iter_mut() {
            (*count, start) = (start, start + *count);
        }
        for &word in &words {
            let place = &mut counts[digit(word, pass)];
            other[*place as usize] = word;
            *place += 1;
        }
        std::mem::swap(&mut words, &mut other);
    }
    words
}

fn digit(word: u64, pass: usize) -> usize {
    let shift = 32 + DIGIT_BITS[..pass].iter().sum::<u32>();
    (word >> shift) as usize & ((1 << DIGIT_BITS[pass]) - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn agrees_with_the_stable_sort(
            // Few and many, equal and different, in one digit and in all.
            halves in prop_oneof![
                prop::collection::vec(any::<u32>(), 0..100),
                prop::collection::vec(any::<u32>(), BUCKETS - 2..BUCKETS * 3),
                prop::collection::vec(0u32..50, BUCKETS..BUCKETS * 2),
                prop::collection::vec(0u32..5, BUCKETS..BUCKETS * 2).prop_map(|v| v.iter().map(|n| n << 29).collect()),
            ],
        ) {
            // Low halves that descend would give away a sort that is not stable.
            let places = (0..halves.len() as u64).rev();
            let words: Vec<u64> = places.zip(&halves).map(|(at, &half)| u64::from(half) << 32 | at).collect();
            let mut expected = words.clone();
            expected.sort_by_key(|word| word >> 32);
            prop_assert_eq!(sort_by_high_half(words), expected);
        }

        #[test]
        fn orders_by_all_64_bits(
            last_uses in prop::collection::vec(0u64..50, 0..200),
            far in prop_oneof![Just(1), Just(1u64 << 40)],
            more in 0usize..4,
        ) {
            let last_uses: Vec<u64> = last_uses.repeat(more * 16).iter().map(|n| n * far).collect();
            let mut expected: Vec<u32> = (0..last_uses.len() as u32).collect();
            expected.sort_by_key(|&at| last_uses[at as usize]);
            prop_assert_eq!(order(&last_uses), expected);
        }
    }
}
