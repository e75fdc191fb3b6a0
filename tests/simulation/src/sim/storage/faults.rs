//! What may go wrong, by chance and by script.

use std::{
    collections::BTreeMap,
    ops::{Range, RangeInclusive},
    time::Duration,
};

use kvhoist::internals::io::{FileId, IO_ALIGN, OpKind};

use super::{SECTOR_BYTES, rng::Rng};

/// How the simulated storage behaves. The default is slow and free of faults.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// Virtual time that an operation takes. Tokio's timer counts whole milliseconds, so shorter
    /// differences make no difference.
    pub latency: RangeInclusive<Duration>,
    /// Faults by chance.
    pub rates: FaultRates,
    /// Offsets and lengths of reads and writes must be multiples of this, or they fail
    /// with `EINVAL` like direct I/O. 1: anything goes.
    pub align_bytes: usize,
    /// The same for addresses.
    pub memory_align_bytes: usize,
    /// A write that ends past this fails with `ENOSPC`.
    pub file_bytes_max: u64,
    /// The chance that the kernel refuses to pin a table of buffers: there is too little memory, for a moment.
    pub pin_refusals: f64,
    /// It never pins more than this: `RLIMIT_MEMLOCK`.
    pub pinned_bytes_max: u64,
    /// Memory under a write may change: its owner is another process. Otherwise that is a panic.
    pub memory_may_change: bool,
    /// Entries of the operation log that are kept; older ones only count in its digest.
    pub log_entries_max: usize,
}

impl Default for SimOptions {
    fn default() -> Self {
        SimOptions {
            latency: Duration::from_millis(1)..=Duration::from_millis(20),
            rates: FaultRates::default(),
            align_bytes: IO_ALIGN,
            memory_align_bytes: IO_ALIGN,
            file_bytes_max: 1 << 30,
            pin_refusals: 0.0,
            pinned_bytes_max: u64::MAX,
            memory_may_change: false,
            log_entries_max: 1 << 16,
        }
    }
}

/// The probability of each fault for each operation that can have it, 0.0 to 1.0.
#[derive(Debug, Clone, Copy, Default)]
pub struct FaultRates {
    /// A read fails with `EIO`; the buffer is garbage.
    pub read_error: f64,
    /// A write fails with `EIO`; any of its sectors may have been written.
    pub write_error: f64,
    /// A sync fails with `EIO`; nothing became durable.
    pub sync_error: f64,
    /// A read or write moves only some of its sectors.
    pub short: f64,
    /// A read returns one wrong bit; what is stored stays right.
    pub bit_flip: f64,
    /// A write reports success and is gone.
    pub lost_write: f64,
    /// A write fails with `ENOSPC` and writes nothing.
    pub no_space: f64,
    /// A write reports success and went to another place of the same file.
    pub misdirected_write: f64,
    /// A read, write or sync is held until [`Sim::release`](super::Sim::release).
    pub stall: f64,
}

/// What goes wrong with one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this `errno`. A write may then have been written in part, except for `ENOSPC`.
    Error(i32),
    /// It moves at most this many bytes.
    Short(usize),
    /// A read returns one wrong bit.
    BitFlip,
    /// A write reports success and is gone; a sync reports success and made nothing durable.
    Lost,
    /// A write reports success and went to another place of the same file, a multiple of [`IO_ALIGN`].
    Misdirected,
    /// It is held until [`Sim::release`](super::Sim::release), then goes on without a fault.
    Stall,
    /// It is held until [`Sim::release`](super::Sim::release), then fails with this `errno`.
    StalledError(i32),
}

/// The sorts of [`Fault`], to count them by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// [`Fault::Error`], but for `ENOSPC`, and [`Fault::StalledError`].
    Error,
    /// [`Fault::Error`] of `ENOSPC`.
    NoSpace,
    /// [`Fault::Short`].
    Short,
    /// [`Fault::BitFlip`].
    BitFlip,
    /// [`Fault::Lost`].
    Lost,
    /// [`Fault::Misdirected`].
    Misdirected,
    /// [`Fault::Stall`].
    Stall,
}

impl FaultKind {
    /// How many there are.
    pub const COUNT: usize = 7;
}

impl Fault {
    /// Its sort.
    pub fn kind(self) -> FaultKind {
        match self {
            Fault::Error(libc::ENOSPC) => FaultKind::NoSpace,
            Fault::Error(_) => FaultKind::Error,
            Fault::Short(_) => FaultKind::Short,
            Fault::BitFlip => FaultKind::BitFlip,
            Fault::Lost => FaultKind::Lost,
            Fault::Misdirected => FaultKind::Misdirected,
            Fault::Stall => FaultKind::Stall,
            Fault::StalledError(_) => FaultKind::Error,
        }
    }
}

/// Decides what goes wrong with the operations to come.
pub(super) struct Faults {
    rates: FaultRates,
    script: BTreeMap<(OpKind, u64), Fault>,
    broken: Vec<(OpKind, FileId, Range<u64>)>,
}

impl Faults {
    pub(super) fn new(rates: FaultRates) -> Self {
        Faults { rates, script: BTreeMap::new(), broken: Vec::new() }
    }

    pub(super) fn set_rates(&mut self, rates: FaultRates) {
        self.rates = rates;
    }

    pub(super) fn script(&mut self, kind: OpKind, nth: u64, fault: Fault) {
        self.script.insert((kind, nth), fault);
    }

    pub(super) fn break_place(&mut self, kind: OpKind, file: FileId, place: Range<u64>) {
        self.broken.push((kind, file, place));
    }

    /// The fault of an operation of this kind on a place that is broken.
    pub(super) fn of_place(&self, kind: OpKind, file: FileId, place: &Range<u64>) -> Option<Fault> {
        let overlaps = |broken: &Range<u64>| broken.start < place.end && place.start < broken.end;
        let mut broken = self.broken.iter().filter(|(of, at, _)| (*of, *at) == (kind, file));
        broken.any(|(.., broken)| overlaps(broken)).then_some(Fault::Error(libc::EIO))
    }

    /// The fault of the `nth` operation of this kind. Takes the same number of draws whatever the
    /// rates and the script are, so that changing one fault leaves all others as they were.
    pub(super) fn draw(&mut self, kind: OpKind, nth: u64, len: usize, rng: &mut Rng) -> Option<Fault> {
        let rates = self.rates;
        let (error, wrong_bytes, no_space, misdirected) = match kind {
            OpKind::Read => (rates.read_error, rates.bit_flip, 0.0, 0.0),
            OpKind::Write => (rates.write_error, rates.lost_write, rates.no_space, rates.misdirected_write),
            OpKind::Sync => (rates.sync_error, 0.0, 0.0, 0.0),
        };
        let hits = [rng.chance(error), rng.chance(no_space), rng.chance(wrong_bytes), rng.chance(rates.short)];
        let short_sectors = rng.below((len / SECTOR_BYTES) as u64) as usize;
        let (misdirected, stalled) = (rng.chance(misdirected), rng.chance(rates.stall));
        if let Some(fault) = self.script.remove(&(kind, nth)) {
            return Some(fault);
        }
        match hits {
            [true, ..] => Some(Fault::Error(libc::EIO)),
            [_, true, ..] => Some(Fault::Error(libc::ENOSPC)),
            [_, _, true, _] if kind == OpKind::Read => Some(Fault::BitFlip),
            [_, _, true, _] => Some(Fault::Lost),
            _ if misdirected => Some(Fault::Misdirected),
            [.., true] if short_sectors > 0 => Some(Fault::Short(short_sectors * SECTOR_BYTES)),
            _ if stalled => Some(Fault::Stall),
            _ => None,
        }
    }
}
