//! Damage to records, blocks, and what lies between them.

use kvhoist::{
    BlockKey,
    internals::disk::format::{
        RECORD_BYTES,
        record::{COUNTER_MAX, Record},
    },
};

use super::{
    case::{Cases, Finds, Outcome, clean, faults},
    sample::{BLOCK_BYTES, Image, SLOT_BYTES, Span},
};

/// The fields, as the diagram of `docs/design.md` has them.
const FIELDS: [(&str, usize, usize); 10] = [
    ("flags", 0, 4),
    ("length", 4, 4),
    ("generation", 8, 8),
    ("checksum", 16, 8),
    ("last use", 24, 8),
    ("key", 32, 32),
    ("parent", 64, 32),
    ("zeros", 96, 24),
    ("crc", 120, 8),
    ("all bytes", 0, 128),
];

fn part(span: &Span, offset: usize, len: usize) -> Span {
    Span::new(span.member, span.range.start + offset, len)
}

/// Every field of a record that names a block.
pub fn records(cases: &mut Cases<'_>) {
    let sample = cases.sample;
    for slot in [sample.kept(0, 0), sample.reused(1)] {
        let record = sample.record(slot);
        for (name, offset, len) in FIELDS {
            let span = part(&record, offset, len);
            cases.spoil("record", name, &span, Outcome::Loses(1), &faults("record_crc", 1));
        }
    }
    let page = part(&sample.table_and_gap(0).0, 0, 4096);
    let lost = |member: usize, slots: std::ops::Range<u32>| {
        let locals = slots.map(|local| sample.stripe.slot(kvhoist::internals::io::FileId(member as u16), local));
        locals.filter(|slot| sample.decode(&sample.now, *slot).is_some()).count()
    };
    cases.add("record page", "zeroed", Outcome::Loses(lost(0, 0..32)), clean(), |image| {
        page.bytes_mut(image).fill(0);
    });
    let ones = faults("record_crc", 32);
    cases.add("record page", "filled with 0xff", Outcome::Loses(lost(0, 0..32)), ones, |image| {
        page.bytes_mut(image).fill(0xFF);
    });
    let sectors = lost(0, 4..8);
    cases.add("record page", "a sector torn", Outcome::Loses(sectors), faults("record_crc", 4), |image| {
        part(&page, 512, 512).bytes_mut(image).fill(0x5A);
    });
}

/// The record of a slot that holds nothing.
pub fn free_records(cases: &mut Cases<'_>) {
    let record = cases.sample.record(cases.sample.free(0));
    for (name, offset, len) in FIELDS {
        let span = part(&record, offset, len);
        cases.spoil("free slot's record", name, &span, Outcome::Loses(0), &faults("record_crc", 1));
    }
}

/// Every kind of place in a block.
pub fn payloads(cases: &mut Cases<'_>) {
    let sample = cases.sample;
    let places = [
        ("first byte", 0, 1),
        ("second byte", 1, 1),
        ("first sector", 0, 512),
        ("bytes around a sector's end", 511, 2),
        ("middle byte", BLOCK_BYTES / 2, 1),
        ("bytes around a page's end", 4095, 2),
        ("second page", 4096, BLOCK_BYTES - 4096),
        ("last byte", BLOCK_BYTES - 1, 1),
        ("all bytes", 0, BLOCK_BYTES),
    ];
    for slot in [sample.kept(0, 0), sample.kept(1, 0)] {
        let block = sample.block(slot);
        for (name, offset, len) in places {
            cases.spoil("payload", name, &part(&block, offset, len), Outcome::Loses(1), &faults("payload", 1));
        }
    }
}

/// Bytes that nothing depends on.
pub fn gaps(cases: &mut Cases<'_>) {
    let sample = cases.sample;
    let padding = part(&sample.slot(sample.kept(0, 0)), BLOCK_BYTES, SLOT_BYTES - BLOCK_BYTES);
    cases.spoil("padding of a slot", "padding", &padding, Outcome::Loses(0), &clean());
    cases.spoil("free slot", "slot", &sample.slot(sample.free(0)), Outcome::Loses(0), &clean());
    for member in [0, 1] {
        let (table, gap) = sample.table_and_gap(member);
        cases.spoil("gap before the slots", "gap", &gap, Outcome::Loses(0), &clean());
        let slots = sample.stripe.members()[member].slots as usize;
        let past_end = Span { range: table.range.start + slots * RECORD_BYTES..table.range.end, ..table };
        let finds = faults("records_past_end", 1);
        cases.spoil("records past the last slot", "records", &past_end, Outcome::Loses(0), &finds);
    }
}

fn swap(image: &mut Image, a: &Span, b: &Span) {
    let bytes = a.bytes(image).to_vec();
    copy(image, b, a);
    b.bytes_mut(image).copy_from_slice(&bytes);
}

fn copy(image: &mut Image, from: &Span, to: &Span) {
    let bytes = from.bytes(image).to_vec();
    to.bytes_mut(image).copy_from_slice(&bytes);
}

/// Slots, and parts of them, that got into the place of others.
pub fn astray(cases: &mut Cases<'_>) {
    let sample = cases.sample;
    let (a, b, far, free) = (sample.kept(0, 0), sample.kept(0, 1), sample.kept(1, 0), sample.free(0));
    let class = "astray";
    let (left, right) = sample.side_by_side();
    for (name, a, b) in [("in one member", a, b), ("between members", a, far), ("side by side", left, right)] {
        let (records, blocks) = ((sample.record(a), sample.record(b)), (sample.block(a), sample.block(b)));
        let (misplaced, spoiled) = (faults("record_misplaced", 2), faults("payload", 2));
        let slots = (sample.slot(a), sample.slot(b));
        cases.add(class, format!("payloads swapped {name}"), Outcome::Loses(2), spoiled.clone(), |image| {
            swap(image, &blocks.0, &blocks.1);
        });
        cases.add(class, format!("slots swapped {name}"), Outcome::Loses(2), spoiled, |image| {
            swap(image, &slots.0, &slots.1);
        });
        cases.add(class, format!("records swapped {name}"), Outcome::Loses(2), misplaced.clone(), |image| {
            swap(image, &records.0, &records.1);
        });
        cases.add(class, format!("records and payloads swapped {name}"), Outcome::Loses(2), misplaced, |image| {
            swap(image, &records.0, &records.1);
            swap(image, &blocks.0, &blocks.1);
        });
        let finds = faults("payload", 1);
        cases.add(class, format!("a payload over another {name}"), Outcome::Loses(1), finds, |image| {
            copy(image, &blocks.0, &blocks.1);
        });
        let finds = faults("record_misplaced", 1);
        cases.add(class, format!("a record over another {name}"), Outcome::Loses(1), finds.clone(), |image| {
            copy(image, &records.0, &records.1);
        });
        cases.add(class, format!("record and payload over another's {name}"), Outcome::Loses(1), finds, |image| {
            copy(image, &records.0, &records.1);
            copy(image, &blocks.0, &blocks.1);
        });
    }
    let (from, to) = (sample.record(a), sample.record(free));
    cases.add(class, "a record to a free slot", Outcome::Loses(0), faults("record_misplaced", 1), |image| {
        copy(image, &from, &to);
    });
    let (from, to) = (sample.slot(a), sample.slot(free));
    cases.add(class, "a block to a free slot", Outcome::Loses(0), clean(), |image| copy(image, &from, &to));
    let block = sample.block(a);
    cases.add(class, "a payload, by a sector", Outcome::Loses(1), faults("payload", 1), |image| {
        block.bytes_mut(image).copy_within(512..1024, 0);
    });
    let record = sample.record(a);
    cases.add(class, "a record of another store", Outcome::Loses(1), faults("record_crc", 1), |image| {
        record.bytes_mut(image).copy_from_slice(record.bytes(&sample.other));
    });
}

/// What a slot held earlier.
pub fn older(cases: &mut Cases<'_>) {
    let sample = cases.sample;
    let slot = sample.reused(0);
    let (record, block) = (sample.record(slot), sample.block(slot));
    let (class, finds) = ("older version", faults("payload", 1));
    let old = |image: &mut Image, span: &Span| span.bytes_mut(image).copy_from_slice(span.bytes(&sample.older));
    cases.add(class, "of a payload", Outcome::Loses(1), finds.clone(), |image| old(image, &block));
    cases.add(class, "of a record", Outcome::Loses(1), finds.clone(), |image| old(image, &record));
    // Then it is the block that was there, whole: what it says of itself is true.
    cases.add(class, "of record and payload", Outcome::Loses(1), clean(), |image| {
        old(image, &block);
        old(image, &record);
    });
    for sectors in [1, 5] {
        cases.add(class, format!("of {sectors} sectors of a payload"), Outcome::Loses(1), finds.clone(), |image| {
            old(image, &part(&block, 0, 512 * sectors));
        });
    }
    for bytes in [16, 64, 120] {
        let finds = faults("record_crc", 1);
        cases.add(class, format!("of {bytes} bytes of a record"), Outcome::Loses(1), finds, |image| {
            old(image, &part(&record, 0, bytes));
        });
    }
    let free = sample.record(sample.free(0));
    // The block is still in its slot, but its record comes back.
    cases.add(class, "of a free slot's record", Outcome::Loses(0), clean(), |image| old(image, &free));
}

/// Two records of one block, as a crash between two writes of records leaves them, with and without damage.
pub fn duplicates(cases: &mut Cases<'_>) {
    let sample = cases.sample;
    let (slot, free) = (sample.kept(0, 0), sample.free(0));
    let record = sample.decode(&sample.now, slot).expect("full");
    let twin = |generation: u64| (free, Record { generation, ..record });
    let (payload, its_copy) = (sample.block(slot), sample.block(free));
    let class = "duplicate";
    for (name, generation) in [("older", 0), ("newer", 1 << 40), ("equally new", record.generation)] {
        cases.craft(class, name, Outcome::Loses(0), clean(), &[twin(generation)], |image| {
            copy(image, &payload, &its_copy);
        });
    }
    cases.craft(class, "older, its payload gone", Outcome::Loses(0), clean(), &[twin(0)], |_| ());
    // The newer one counts, and nobody goes back to what it took the place of.
    let finds = faults("payload", 1);
    cases.craft(class, "newer, its payload gone", Outcome::Loses(1), finds, &[twin(1 << 40)], |_| ());
    let finds = faults("record_crc", 1);
    cases.craft(class, "newer, its record damaged", Outcome::Loses(0), finds, &[twin(1 << 40)], |image| {
        copy(image, &payload, &its_copy);
        sample.record(free).bytes_mut(image)[40] ^= 1;
    });
}

/// Fields that are impossible, or as far as they go, under a crc that holds.
pub fn resealed(cases: &mut Cases<'_>) {
    let sample = cases.sample;
    let (slot, other_slot) = (sample.kept(0, 0), sample.kept(0, 1));
    let decode = |slot: u32| sample.decode(&sample.now, slot).expect("full");
    let (record, other) = (decode(slot), decode(other_slot));
    let class = "record, resealed";
    let sound: [(&str, Record); 6] = [
        ("the last generation", Record { generation: COUNTER_MAX, ..record }),
        ("the last last use", Record { last_use: COUNTER_MAX, ..record }),
        ("its own parent", Record { parent: Some(record.key), ..record }),
        ("an unknown parent", Record { parent: Some(BlockKey::new([9; 32])), ..record }),
        ("no parent", Record { parent: None, ..record }),
        ("another parent", Record { parent: Some(other.key), ..record }),
    ];
    for (name, record) in sound {
        cases.craft(class, name, Outcome::Loses(0), clean(), &[(slot, record)], |_| ());
    }
    let ring = [
        (slot, Record { parent: Some(other.key), ..record }),
        (other_slot, Record { parent: Some(record.key), ..other }),
    ];
    cases.craft(class, "each other's parents", Outcome::Loses(0), clean(), &ring, |_| ());
    let crc = faults("payload", 1);
    let wrong: [(&str, usize, &[u8], Finds); 8] = [
        ("flags 2", 0, &[2], faults("record_field", 1)),
        ("flags 2^32 - 1", 0, &[0xFF; 4], faults("record_field", 1)),
        ("length 0", 4, &[0; 4], faults("record_field", 1)),
        ("length 2^32 - 1", 4, &[0xFF; 4], faults("record_field", 1)),
        ("a generation past the last", 8, &[0xFF; 8], faults("record_field", 1)),
        ("a last use past the last", 24, &[0xFF; 8], faults("record_field", 1)),
        ("unused bytes", 96, &[1], faults("record_field", 1)),
        ("another checksum", 16, &[0x5A; 8], crc),
    ];
    for (name, offset, bytes, finds) in wrong {
        let bytes = sample.resealed(slot, &record, |all| all[offset..offset + bytes.len()].copy_from_slice(bytes));
        cases.add(class, name, Outcome::Loses(1), finds, |image| {
            sample.record(slot).bytes_mut(image).copy_from_slice(&bytes);
        });
    }
}

/// Whole files in the place of others.
pub fn files(cases: &mut Cases<'_>) {
    let sample = cases.sample;
    let class = "file";
    // Told apart by their superblocks, so that a look takes them in any order.
    cases.add(class, "in the wrong order", Outcome::Refused, clean(), |image| image.swap(0, 1));
    for member in [0, 1] {
        let name = |what: &str| format!("member {member} {what}");
        cases.add(class, name("of another store"), Outcome::Refused, Finds::Refusal, |image| {
            image[member].clone_from(&sample.other[member]);
        });
        cases.add(class, name("twice"), Outcome::Refused, Finds::Refusal, |image| {
            image[1 - member] = image[member].clone();
        });
        // Its blocks are those of then, whole: only what was stored since is gone.
        let mut older = sample.now.clone();
        older[member].clone_from(&sample.older[member]);
        let served = sample.served(&older, &[]);
        let lost = sample.live().iter().filter(|n| !served.contains(n)).count();
        assert!(lost > 0, "something was stored in it since");
        cases.add(class, name("as it was earlier"), Outcome::Loses(lost), clean(), |image| *image = older);
        let (table, _) = sample.table_and_gap(member);
        let mut mixed = sample.now.clone();
        table.bytes_mut(&mut mixed).copy_from_slice(table.bytes(&sample.older));
        let served = sample.served(&mixed, &[]);
        let lost = sample.live().iter().filter(|n| !served.contains(n)).count();
        let torn = (0..sample.stripe.slots()).filter(|slot| {
            let (now, older) = (sample.decode(&sample.now, *slot), sample.decode(&sample.older, *slot));
            usize::from(sample.stripe.place(*slot).0.0) == member && now.is_some() && now != older
        });
        let finds = faults("payload", torn.count() as u64);
        cases.add(class, name("with its records as they were earlier"), Outcome::Loses(lost), finds, |i| *i = mixed);
    }
    cases.add(class, "both as they were earlier", Outcome::Loses(sample_lost(cases.sample)), clean(), |image| {
        image.clone_from(&sample.older);
    });
}

fn sample_lost(sample: &super::sample::Sample) -> usize {
    let served = sample.served(&sample.older, &[]);
    sample.live().iter().filter(|n| !served.contains(n)).count()
}
