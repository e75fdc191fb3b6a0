//! Damage to superblocks, and sizes.

use kvhoist::internals::{
    checksum::checksum,
    disk::format::{PAGE_BYTES, RECORD_BYTES, SUPERBLOCK_OFFSETS, TABLE_OFFSET, superblock::SEQUENCE_MAX},
};

use super::{
    case::{Cases, Finds, Outcome, clean, faults},
    sample::{Image, SLOT_BYTES, Span},
};

/// The fields, as the diagram of `docs/design.md` has them.
const FIELDS: [(&str, usize, usize); 18] = [
    ("magic", 0, 8),
    ("version", 8, 4),
    ("state", 12, 4),
    ("uuid", 16, 16),
    ("sequence", 32, 8),
    ("block_bytes", 40, 8),
    ("slot_bytes", 48, 8),
    ("slots", 56, 8),
    ("slots of all", 64, 8),
    ("fingerprint", 72, 8),
    ("member", 80, 2),
    ("members", 82, 2),
    ("namespace length", 84, 2),
    ("zeros", 86, 2),
    ("namespace", 88, 255),
    ("zeros after the namespace", 343, 161),
    ("crc", 504, 8),
    ("rest of the page", 512, 3584),
];
const CRC: usize = 504;

/// One copy is enough, whichever field of the other is gone.
pub fn one_copy(cases: &mut Cases<'_>) {
    for copy in SUPERBLOCK_OFFSETS {
        for (name, offset, len) in FIELDS {
            let member = usize::from(copy > 0);
            let span = Span::new(member, copy as usize + offset, len);
            let name = format!("{name} at {copy}");
            cases.spoil("superblock, one copy", &name, &span, Outcome::Loses(0), &faults("superblock_copy", 1));
        }
        let whole = Span::new(0, copy as usize, PAGE_BYTES);
        let finds = faults("superblock_copy", 1);
        cases.spoil("superblock, one copy", "all bytes", &whole, Outcome::Loses(0), &finds);
    }
    let finds = faults("superblock_copy", 2);
    cases.add("superblock, one copy", "A of one member and B of the other", Outcome::Loses(0), finds, |image| {
        image[0][100] ^= 1;
        image[1][PAGE_BYTES + 100] ^= 1;
    });
    let finds = faults("superblock_copy", 1);
    cases.add("superblock, one copy", "B of one member over B of the other", Outcome::Loses(0), finds, |image| {
        let b: Vec<u8> = image[1][PAGE_BYTES..2 * PAGE_BYTES].to_vec();
        image[0][PAGE_BYTES..2 * PAGE_BYTES].copy_from_slice(&b);
    });
    let class = "superblock, copies swapped";
    cases.add(class, "A and B", Outcome::Loses(0), clean(), |image| {
        let (a, rest) = image[0].split_at_mut(PAGE_BYTES);
        a.swap_with_slice(&mut rest[..PAGE_BYTES]);
    });
}

/// Without a copy that counts there is no store.
pub fn both_copies(cases: &mut Cases<'_>) {
    for (name, offset, len) in FIELDS {
        for at in [0, len - 1] {
            let finds = if name == "magic" { Finds::Refusal } else { faults("superblocks", 1) };
            cases.add("superblock, both copies", format!("{name} + {at}"), Outcome::Refused, finds, |image| {
                SUPERBLOCK_OFFSETS.iter().for_each(|copy| image[1][*copy as usize + offset + at] ^= 0x20);
            });
        }
    }
    for (name, byte) in [("zeroed", 0), ("filled with 0xff", 0xFF)] {
        cases.add("superblock, both copies", name, Outcome::Refused, Finds::Refusal, |image| {
            image[0][..2 * PAGE_BYTES].fill(byte);
        });
    }
    // As a creation that was cut off, were this the only member.
    let finds = faults("superblocks", 1);
    cases.add("superblock, both copies", "A damaged and B zeroed", Outcome::Refused, finds, |image| {
        image[0][100] ^= 1;
        image[0][PAGE_BYTES..2 * PAGE_BYTES].fill(0);
    });
}

/// A store of one member, whose only superblocks these are.
pub fn only_member(cases: &mut Cases<'_>) {
    let all = cases.sample.live().len();
    let finds = faults("superblocks", 1);
    cases.add("superblock, only member", "both damaged", Outcome::Refused, finds.clone(), |image| {
        image[0][100] ^= 1;
        image[0][PAGE_BYTES + 100] ^= 1;
    });
    cases.add("superblock, only member", "both zeroed", Outcome::Refused, Finds::Refusal, |image| {
        image[0][..2 * PAGE_BYTES].fill(0);
    });
    let damage = |image: &mut Image| {
        image[0][100] ^= 1;
        image[0][PAGE_BYTES..2 * PAGE_BYTES].fill(0);
    };
    cases.add("superblock, only member", "A damaged, B zeroed", Outcome::Refused, finds.clone(), damage);
    let last = cases.sample.stripe.members()[0].table_bytes() as usize + TABLE_OFFSET as usize;
    cases.add("superblock, only member", "and one record left", Outcome::Refused, finds.clone(), |image| {
        damage(image);
        image[0][TABLE_OFFSET as usize..last - 1].fill(0);
        image[0][last - 1] = 1;
    });
    // What a creation that was cut off leaves, but for the payloads: the next start begins anew.
    cases.add("superblock, only member", "and no record left", Outcome::Loses(all), finds, |image| {
        damage(image);
        image[0][TABLE_OFFSET as usize..last].fill(0);
    });
    cases.add("size", "an only member emptied", Outcome::Loses(all), Finds::Refusal, |image| image[0].clear());
    let forming = |image: &mut Image| {
        for copy in SUPERBLOCK_OFFSETS {
            image[0][copy as usize + 12] = 1;
            reseal(image, 0, copy as usize);
        }
    };
    let finds = faults("superblocks", 1);
    cases.add("superblock, resealed", "forming, only member", Outcome::Refused, finds, forming);
}

/// Fields that are impossible, or of another store, under a crc that holds.
pub fn resealed(cases: &mut Cases<'_>) {
    use Outcome::{Loses, Refused};
    let damaged = || faults("superblocks", 1);
    let fields: [(&str, usize, &[u8], Outcome, Finds); 28] = [
        ("version 0", 8, &[0; 4], Refused, damaged()),
        ("version 3", 8, &[3], Refused, Finds::Refusal),
        ("version 2^32 - 1", 8, &[0xFF; 4], Refused, Finds::Refusal),
        // A creation that got that far is finished.
        ("forming", 12, &[1], Loses(0), clean()),
        ("state 3", 12, &[3], Refused, damaged()),
        ("another uuid", 16, &[0xAB; 16], Refused, Finds::Refusal),
        ("sequence 0", 32, &[0; 8], Refused, damaged()),
        ("sequence 2^64 - 1", 32, &[0xFF; 8], Refused, damaged()),
        ("block_bytes 0", 40, &[0; 8], Refused, damaged()),
        ("block_bytes, one more", 40, &[0x89], Refused, Finds::Refusal),
        ("block_bytes 2^64 - 1", 40, &[0xFF; 8], Refused, damaged()),
        ("slot_bytes 4096", 48, &[0, 0x10], Refused, damaged()),
        ("slot_bytes 0", 48, &[0; 8], Refused, damaged()),
        ("slots 0", 56, &[0; 8], Refused, damaged()),
        ("slots, one less", 56, &[33], Refused, Finds::Refusal),
        ("slots 2^64 - 1", 56, &[0xFF; 8], Refused, damaged()),
        ("slots of all, one more", 64, &[47], Refused, Finds::Refusal),
        ("slots of all 2^31", 64, &[0, 0, 0, 0x80], Refused, damaged()),
        ("slots of all 0", 64, &[0; 8], Refused, damaged()),
        ("fingerprint", 72, &[0; 8], Refused, Finds::Refusal),
        ("member 1", 80, &[1], Refused, Finds::Refusal),
        ("member 2", 80, &[2], Refused, damaged()),
        ("3 members", 82, &[3], Refused, Finds::Refusal),
        ("65535 members", 82, &[0xFF; 2], Refused, damaged()),
        ("namespace of 65535 bytes", 84, &[0xFF; 2], Refused, damaged()),
        ("another namespace", 88, b"d\xc3\xa9faul", Refused, Finds::Refusal),
        ("a namespace that is no text", 88, &[0xFF], Refused, damaged()),
        ("unused bytes", 400, &[1], Refused, damaged()),
    ];
    for (name, offset, bytes, outcome, finds) in fields {
        cases.add("superblock, resealed", name, outcome, finds, |image| {
            for copy in SUPERBLOCK_OFFSETS {
                let at = copy as usize + offset;
                image[0][at..at + bytes.len()].copy_from_slice(bytes);
                reseal(image, 0, copy as usize);
            }
        });
    }
    let finds = faults("superblock_copy", 1);
    cases.add("superblock, resealed", "the last sequence, twin damaged", Outcome::Loses(0), finds, |image| {
        image[0][32..40].copy_from_slice(&SEQUENCE_MAX.to_le_bytes());
        reseal(image, 0, 0);
        image[0][PAGE_BYTES + 100] ^= 1;
    });
}

/// Gives a superblock a crc that holds.
fn reseal(image: &mut Image, member: usize, copy: usize) {
    let crc = checksum(&image[member][copy..copy + CRC]);
    image[member][copy + CRC..copy + CRC + 8].copy_from_slice(&crc.to_le_bytes());
}

/// Cut off and grown.
pub fn sizes(cases: &mut Cases<'_>) {
    let geometry = cases.sample.stripe.members()[0];
    let (table, data, end) = (TABLE_OFFSET as usize, geometry.data_offset as usize, geometry.bytes as usize);
    let table_end = table + geometry.pages as usize * PAGE_BYTES;
    let without_b = Finds::Faults(vec![("cut_short", 1), ("superblock_copy", 1)]);
    let lengths = [
        ("all", 0, Finds::Refusal),
        ("all but a byte", 1, faults("superblocks", 1)),
        ("in the magic", 7, faults("superblocks", 1)),
        ("after the magic", 8, faults("superblocks", 1)),
        ("in superblock A", 300, faults("superblocks", 1)),
        ("after its crc", 512, without_b.clone()),
        ("before superblock B", PAGE_BYTES, without_b.clone()),
        ("in superblock B", PAGE_BYTES + 300, without_b.clone()),
        ("before the records", table, faults("cut_short", 1)),
        ("in a record", table + RECORD_BYTES * 3 + 64, faults("cut_short", 1)),
        ("between records", table + RECORD_BYTES * 3, faults("cut_short", 1)),
        ("between record pages", table + PAGE_BYTES, faults("cut_short", 1)),
        ("after the records", table_end, faults("cut_short", 1)),
        ("between records and blocks", table_end + 1000, faults("cut_short", 1)),
        ("before the first slot", data, faults("cut_short", 1)),
        ("in the first slot", data + 1, faults("cut_short", 1)),
        ("after the first slot", data + SLOT_BYTES, faults("cut_short", 1)),
        ("in the last slot", end - SLOT_BYTES + 100, faults("cut_short", 1)),
        ("in the last padding", end - 1, faults("cut_short", 1)),
    ];
    for (name, len, finds) in lengths {
        cases.add("size", format!("cut off: {name}"), Outcome::Refused, finds, |image| image[0].truncate(len));
    }
    for len in [1, 512, PAGE_BYTES, 1 << 20] {
        cases.add("size", format!("grown by {len}"), Outcome::Loses(0), clean(), |image| {
            image[0].extend(std::iter::repeat_n(0xEE, len));
        });
    }
}
