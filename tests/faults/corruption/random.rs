//! Damage that nobody thought of.

use super::{
    common::Rng,
    sample::{Image, Sample, Span},
};

/// Up to six damages at random places, and what they are.
pub fn damage(sample: &Sample, rng: &mut Rng) -> (Image, Vec<String>) {
    let mut image = sample.now.clone();
    let mut told = Vec::new();
    for _ in 0..=rng.below(6) {
        told.push(one(sample, rng, &mut image));
    }
    (image, told)
}

fn one(sample: &Sample, rng: &mut Rng, image: &mut Image) -> String {
    let span = place(sample, rng);
    match rng.below(5) {
        0 => {
            let at = rng.below(span.range.len() as u64) as usize;
            span.bytes_mut(image)[at] ^= 1 << rng.below(8);
            format!("byte {at} of {span:?} flipped")
        }
        1 => {
            let (start, end) = (rng.below(span.range.len() as u64), rng.below(span.range.len() as u64));
            let part = start.min(end) as usize..start.max(end) as usize + 1;
            let byte = [0, 0xFF, rng.next() as u8][rng.below(3) as usize];
            span.bytes_mut(image)[part.clone()].fill(byte);
            format!("{part:?} of {span:?} filled with {byte}")
        }
        2 => {
            // A torn or lost write: a part, or all, is what it was earlier.
            let part = rng.below(span.range.len() as u64) as usize + 1;
            span.bytes_mut(image)[..part].copy_from_slice(&span.bytes(&sample.older)[..part]);
            format!("{part} bytes of {span:?} as they were earlier")
        }
        3 => {
            // A write that went astray.
            let from = place(sample, rng);
            let bytes = from.bytes(image).to_vec();
            let len = bytes.len().min(span.range.len());
            span.bytes_mut(image)[..len].copy_from_slice(&bytes[..len]);
            format!("{from:?} over {span:?}")
        }
        _ => {
            let rubbish = |_| rng.next() as u8;
            let bytes: Vec<u8> = span.range.clone().map(rubbish).collect();
            span.bytes_mut(image).copy_from_slice(&bytes);
            format!("{span:?} random")
        }
    }
}

/// A superblock, a record, a block, a slot, or a page of records.
fn place(sample: &Sample, rng: &mut Rng) -> Span {
    let slot = rng.below(sample.stripe.slots().into()) as u32;
    match rng.below(16) {
        0 => Span::new(rng.below(2) as usize, rng.below(2) as usize * 4096, 4096),
        1 => Span { range: 8192..12288, ..sample.table_and_gap(rng.below(2) as usize).0 },
        2..8 => sample.record(slot),
        8..12 => sample.block(slot),
        _ => sample.slot(slot),
    }
}
