//! What is done to a store, and what that may come to.

use kvhoist::internals::disk::format::{RECORD_BYTES, record::Record};

use super::sample::{Image, Sample, Span};

/// What a cache makes of a damaged store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It does not open, and nothing is changed.
    Refused,
    /// It opens, and this many blocks are misses.
    Loses(usize),
    /// One or the other.
    Any,
}

/// What a verification makes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finds {
    /// Faults of these kinds; none: the store is clean.
    Faults(Vec<(&'static str, u64)>),
    /// This is not one store.
    Refusal,
    /// One or the other.
    Any,
}

/// Nothing that a verification looks at is changed.
pub fn clean() -> Finds {
    Finds::Faults(Vec::new())
}

/// Faults of one kind.
pub fn faults(kind: &'static str, count: u64) -> Finds {
    Finds::Faults(vec![(kind, count)])
}

/// One way to damage a store.
pub struct Case {
    /// What kind of place, or of damage, it stands for.
    pub class: &'static str,
    /// Which of them it is.
    pub name: String,
    /// The damaged store.
    pub image: Image,
    pub outcome: Outcome,
    pub finds: Finds,
    /// Sound records that no cache wrote, and their slots.
    pub crafted: Vec<(u32, Record)>,
}

/// Makes the cases of one sample, each of them tried and forgotten before the next.
pub struct Cases<'a> {
    pub sample: &'a Sample,
    attempt: &'a mut dyn FnMut(Case),
}

impl<'a> Cases<'a> {
    pub fn new(sample: &'a Sample, attempt: &'a mut dyn FnMut(Case)) -> Self {
        Cases { sample, attempt }
    }

    /// One case.
    pub fn add(
        &mut self,
        class: &'static str,
        name: impl Into<String>,
        outcome: Outcome,
        finds: Finds,
        damage: impl FnOnce(&mut Image),
    ) {
        self.craft(class, name, outcome, finds, &[], damage);
    }

    /// One with sound records that no cache wrote, in these slots, and then damage.
    pub fn craft(
        &mut self,
        class: &'static str,
        name: impl Into<String>,
        outcome: Outcome,
        finds: Finds,
        crafted: &[(u32, Record)],
        damage: impl FnOnce(&mut Image),
    ) {
        let mut image = self.sample.now.clone();
        for (slot, record) in crafted {
            let bytes = self.sample.encode(*slot, record);
            self.sample.record(*slot).bytes_mut(&mut image).copy_from_slice(&bytes);
        }
        damage(&mut image);
        (self.attempt)(Case { class, name: name.into(), image, outcome, finds, crafted: crafted.to_vec() });
    }

    /// One for each way to spoil a range that changes it.
    pub fn spoil(&mut self, class: &'static str, name: &str, span: &Span, outcome: Outcome, finds: &Finds) {
        let mut seen = vec![span.bytes(&self.sample.now).to_vec()];
        for (how, spoil) in SPOILS {
            let mut bytes = seen[0].clone();
            spoil(&mut bytes);
            if seen.contains(&bytes) {
                continue;
            }
            // A record of zeros is no damage, but a slot that nobody wrote to.
            let finds = if class == "record" && bytes == [0; RECORD_BYTES] { clean() } else { finds.clone() };
            let name = format!("{name} of member {} {how}", span.member);
            self.add(class, name, outcome, finds, |image| span.bytes_mut(image).copy_from_slice(&bytes));
            seen.push(bytes);
        }
    }
}

type Spoil = fn(&mut [u8]);

const SPOILS: [(&str, Spoil); 5] = [
    ("with its first bit flipped", |bytes| bytes[0] ^= 1),
    ("with its last bit flipped", |bytes| *bytes.last_mut().expect("not empty") ^= 0x80),
    ("with a bit in its middle flipped", |bytes| bytes[bytes.len() / 2] ^= 0x08),
    ("zeroed", |bytes| bytes.fill(0)),
    ("filled with 0xff", |bytes| bytes.fill(0xFF)),
];
