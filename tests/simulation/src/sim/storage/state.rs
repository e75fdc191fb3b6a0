//! The simulated storage itself: what starts, what ends, and with what effect.

use std::{collections::BTreeMap, fs::File, io, ops::Range, sync::Arc, time::Duration};

use kvhoist::internals::{
    io::{FileId, IO_ALIGN, Lent, OpKind},
    seams::Table,
};
use tokio::{sync::oneshot, time::Instant};

use super::{
    Fault, FaultRates, SECTOR_BYTES, SimOptions,
    disk::{Disk, SyncPoint},
    faults::Faults,
    log::{Counts, Event, Log, LogEntry},
    pins::Pins,
    rng::Rng,
};

/// What memory under a read holds until the read is done.
const GARBAGE: u8 = 0xdb;

/// Everything decided about an operation when it starts.
pub(super) struct Plan {
    op: u64,
    pub latency: Duration,
    pub fault: Option<Fault>,
    /// For what is decided when it ends.
    rng: Rng,
}

struct InFlight {
    kind: OpKind,
    file: FileId,
    offset: u64,
    len: usize,
    /// The address of its memory.
    memory: usize,
    /// What a write writes, as it was when it started.
    data: Vec<u8>,
    /// What a sync will have made durable.
    sync_point: Option<SyncPoint>,
}

pub(super) struct State {
    disks: Vec<Disk>,
    options: SimOptions,
    faults: Faults,
    rng: Rng,
    crash_rng: Rng,
    started_at: Option<Instant>,
    op_next: u64,
    in_flight: BTreeMap<u64, InFlight>,
    stalled: Vec<oneshot::Sender<()>>,
    locked: bool,
    /// The kind of operation that panics next.
    pub(super) panics_at: Option<OpKind>,
    /// What workers are given in the place of a file.
    pub(super) stand_in: Arc<File>,
    seed: u64,
    /// Tables pinned so far.
    tables: u64,
    /// What the kernel has registered for the cache that has the files open.
    pub(super) table: Table<Pins>,
    log: Log,
    counts: Counts,
}

impl State {
    pub(super) fn new(seed: u64, files: Vec<Vec<u8>>, options: SimOptions) -> Self {
        let mut rng = Rng::new(seed);
        State {
            disks: files.into_iter().map(Disk::new).collect(),
            faults: Faults::new(options.rates),
            crash_rng: rng.fork(),
            rng,
            started_at: None,
            op_next: 0,
            in_flight: BTreeMap::new(),
            stalled: Vec::new(),
            locked: false,
            panics_at: None,
            stand_in: Arc::new(File::open("/dev/null").expect("every system has it")),
            seed,
            tables: 0,
            table: Table::new(Vec::new(), Pins::new(seed, &options)),
            log: Log::new(options.log_entries_max),
            counts: Counts::default(),
            options,
        }
    }

    pub(super) fn script(&mut self, kind: OpKind, nth: u64, fault: Fault) {
        self.faults.script(kind, nth, fault);
    }

    pub(super) fn break_place(&mut self, kind: OpKind, file: FileId, place: Range<u64>) {
        self.faults.break_place(kind, file, place);
    }

    pub(super) fn set_rates(&mut self, rates: FaultRates) {
        self.faults.set_rates(rates);
    }

    pub(super) fn stall(&mut self, go: oneshot::Sender<()>) {
        self.stalled.push(go);
    }

    pub(super) fn take_stalled(&mut self) -> Vec<oneshot::Sender<()>> {
        std::mem::take(&mut self.stalled)
    }

    pub(super) fn stalled(&self) -> usize {
        self.stalled.len()
    }

    /// Takes or gives back the lock that a cache has on its files; what it was.
    pub(super) fn set_locked(&mut self, locked: bool) -> bool {
        std::mem::replace(&mut self.locked, locked)
    }

    /// A kernel that has nothing pinned.
    pub(super) fn new_pins(&mut self) -> Pins {
        self.tables += 1;
        Pins::new(self.seed.wrapping_add(self.tables), &self.options)
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// True if an operation in flight uses a part of the range.
    pub(super) fn uses(&self, start: usize, len: usize) -> bool {
        self.in_flight.values().any(|op| op.memory < start + len && start < op.memory + op.len)
    }

    /// The reads in flight into the range: the place of each in the range, and the bytes that it brings.
    pub(super) fn reads_in_flight(&self, start: usize, len: usize) -> Vec<(usize, Vec<u8>)> {
        let reads = self.in_flight.values().filter(|op| op.kind == OpKind::Read);
        let into = reads.filter(|op| op.memory >= start && op.memory + op.len <= start + len);
        into.map(|op| (op.memory - start, self.disk(op.file).read(op.offset, op.len).to_vec())).collect()
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    pub(super) fn memory_align_bytes(&self) -> usize {
        self.options.memory_align_bytes
    }

    pub(super) fn log(&self) -> &Log {
        &self.log
    }

    pub(super) fn disk(&self, file: FileId) -> &Disk {
        &self.disks[usize::from(file.0)]
    }

    pub(super) fn disk_mut(&mut self, file: FileId) -> &mut Disk {
        &mut self.disks[usize::from(file.0)]
    }

    /// Admits an operation and decides its fate.
    pub(super) fn start(&mut self, kind: OpKind, file: FileId, offset: u64, buf: Option<&Lent>) -> io::Result<Plan> {
        let len = buf.map_or(0, Lent::len);
        check_place(file, offset, len, self.disks.len())?;
        self.check_aligned(offset, buf)?;

        let nth = self.counts.started[kind as usize];
        let drawn = self.faults.draw(kind, nth, len, &mut self.rng);
        let fault = self.faults.of_place(kind, file, &(offset..offset + len as u64)).or(drawn);
        let (min, max) = (self.options.latency.start().as_nanos() as u64, self.options.latency.end().as_nanos() as u64);
        let latency = Duration::from_nanos(self.rng.between(min, max));
        let plan = Plan { op: self.op_next, latency, fault, rng: self.rng.fork() };

        self.op_next += 1;
        self.counts.started[kind as usize] += 1;
        if let Some(fault) = fault {
            self.counts.faults += 1;
            self.counts.faults_by_kind[kind as usize][fault.kind() as usize] += 1;
        }
        let memory = buf.map_or(0, |buf| buf.as_ptr().addr());
        let mut in_flight = InFlight { kind, file, offset, len, memory, data: Vec::new(), sync_point: None };
        match (kind, buf) {
            (OpKind::Read, Some(buf)) => fill(buf, GARBAGE),
            (OpKind::Write, Some(buf)) => in_flight.data = bytes_of(buf).to_vec(),
            _ => in_flight.sync_point = Some(self.disk(file).sync_point()),
        }
        self.counts.conflicts += u64::from(self.in_flight.values().any(|other| other.conflicts(&in_flight)));
        self.note(plan.op, &in_flight, Event::Started);
        self.in_flight.insert(plan.op, in_flight);
        self.counts.in_flight_max = self.counts.in_flight_max.max(self.in_flight.len());
        Ok(plan)
    }

    fn check_aligned(&self, offset: u64, buf: Option<&Lent>) -> io::Result<()> {
        let align = self.options.align_bytes.max(1);
        let Some(buf) = buf else { return Ok(()) };
        let aligned = offset.is_multiple_of(align as u64)
            && buf.len().is_multiple_of(align)
            && (buf.as_ptr() as usize).is_multiple_of(self.options.memory_align_bytes.max(1));
        if aligned { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
    }

    /// Lets an operation take effect, at its end.
    pub(super) fn finish(&mut self, plan: Plan, buf: Option<&Lent>) -> io::Result<usize> {
        let mut in_flight = self.in_flight.remove(&plan.op).expect("started once and finished once");
        let Plan { op, fault, mut rng, .. } = plan;
        let result = match (in_flight.kind, buf) {
            (OpKind::Read, Some(buf)) => Self::finish_read(self.disk(in_flight.file), &in_flight, buf, fault, &mut rng),
            (OpKind::Write, Some(buf)) => {
                let is_same = self.options.memory_may_change || bytes_of(buf) == in_flight.data;
                assert!(is_same, "memory lent to a write changed while it was in flight");
                self.finish_write(&in_flight, fault, &mut rng)
            }
            _ => self.finish_sync(&mut in_flight, fault),
        };
        let kind = in_flight.kind as usize;
        match result {
            Ok(bytes) => {
                self.counts.done[kind] += 1;
                self.counts.bytes[kind] += bytes as u64;
                self.note(op, &in_flight, Event::Done(bytes));
            }
            Err(errno) => {
                self.counts.failed[kind] += 1;
                self.note(op, &in_flight, Event::Failed(errno));
            }
        }
        result.map_err(io::Error::from_raw_os_error)
    }

    fn finish_read(
        disk: &Disk,
        read: &InFlight,
        buf: &Lent,
        fault: Option<Fault>,
        rng: &mut Rng,
    ) -> Result<usize, i32> {
        let data = disk.read(read.offset, read.len);
        match fault {
            Some(Fault::Error(errno) | Fault::StalledError(errno)) => Err(errno),
            Some(Fault::Short(bytes)) => Ok(copy_in(&data[..bytes.min(data.len())], buf)),
            Some(Fault::BitFlip) if !data.is_empty() => {
                let mut wrong = data.to_vec();
                let bit = rng.below(8 * data.len() as u64) as usize;
                wrong[bit / 8] ^= 1 << (bit % 8);
                Ok(copy_in(&wrong, buf))
            }
            _ => Ok(copy_in(data, buf)),
        }
    }

    fn finish_write(&mut self, write: &InFlight, fault: Option<Fault>, rng: &mut Rng) -> Result<usize, i32> {
        let end = write.offset + write.len as u64;
        if end > self.options.file_bytes_max || fault == Some(Fault::Error(libc::ENOSPC)) {
            return Err(libc::ENOSPC);
        }
        let offset = usize::try_from(write.offset).expect("below file_bytes_max, which is in memory");
        let disk = &mut self.disks[usize::from(write.file.0)];
        match fault {
            Some(Fault::Misdirected) => {
                let places = (disk.contents().len().saturating_sub(write.len) / IO_ALIGN) as u64;
                disk.write(rng.between(0, places) as usize * IO_ALIGN, &write.data);
                Ok(write.len)
            }
            Some(Fault::Error(errno) | Fault::StalledError(errno)) => {
                for (index, sector) in write.data.chunks(SECTOR_BYTES).enumerate() {
                    if rng.chance(0.5) {
                        disk.write(offset + index * SECTOR_BYTES, sector);
                    }
                }
                Err(errno)
            }
            Some(Fault::Lost) => Ok(write.len),
            Some(Fault::Short(bytes)) => {
                let bytes = bytes.min(write.len);
                disk.write(offset, &write.data[..bytes]);
                Ok(bytes)
            }
            _ => {
                disk.write(offset, &write.data);
                Ok(write.len)
            }
        }
    }

    fn finish_sync(&mut self, sync: &mut InFlight, fault: Option<Fault>) -> Result<usize, i32> {
        match (fault, sync.sync_point.take()) {
            // It did not begin.
            (Some(Fault::Error(libc::EAGAIN)), _) => Err(libc::EAGAIN),
            (Some(Fault::Error(errno) | Fault::StalledError(errno)), point) => {
                point.into_iter().for_each(|point| self.disk_mut(sync.file).sync_failed(&point));
                Err(errno)
            }
            // A device that lies: success is reported, and nothing became durable.
            (Some(Fault::Lost), _) | (_, None) => Ok(0),
            (_, Some(point)) => {
                self.disk_mut(sync.file).synced(point);
                Ok(0)
            }
        }
    }

    pub(super) fn crash(&mut self) -> Vec<Vec<u8>> {
        let mut rng = self.crash_rng.fork();
        let writes = |index| writes_in_flight(&self.in_flight, index, self.options.file_bytes_max);
        let disks = self.disks.iter().enumerate();
        disks.map(|(index, disk)| disk.after_power_cut(&writes(index), &mut rng)).collect()
    }

    pub(super) fn end(&mut self, power_cut: bool) -> Vec<Vec<u8>> {
        if !power_cut {
            return self.disks.iter_mut().map(Disk::take_contents).collect();
        }
        let mut rng = self.crash_rng.fork();
        let writes = |index| writes_in_flight(&self.in_flight, index, self.options.file_bytes_max);
        let disks = self.disks.iter_mut().enumerate();
        disks.map(|(index, disk)| disk.take_power_cut(&writes(index), &mut rng)).collect()
    }

    fn note(&mut self, op: u64, what: &InFlight, event: Event) {
        let now = Instant::now();
        let at = now.duration_since(*self.started_at.get_or_insert(now));
        let InFlight { kind, file, offset, len, .. } = *what;
        self.log.push(LogEntry { op, kind, file, offset, len, at, event });
    }
}

impl InFlight {
    fn end(&self) -> u64 {
        self.offset + self.len as u64
    }

    /// True where the result depends on which of the two comes first.
    fn conflicts(&self, other: &InFlight) -> bool {
        let one_writes = self.kind == OpKind::Write || other.kind == OpKind::Write;
        one_writes && self.file == other.file && self.offset < other.end() && other.offset < self.end()
    }
}

/// Offset and data of what is being written to a file.
fn writes_in_flight(in_flight: &BTreeMap<u64, InFlight>, file: usize, end_max: u64) -> Vec<(usize, &[u8])> {
    let of_file = |op: &&InFlight| op.kind == OpKind::Write && usize::from(op.file.0) == file && op.end() <= end_max;
    in_flight.values().filter(of_file).map(|op| (op.offset as usize, &op.data[..])).collect()
}

/// Refuses what no engine accepts: offsets past the largest one of a file, and files that do not exist.
fn check_place(file: FileId, offset: u64, len: usize, files: usize) -> io::Result<()> {
    let end = offset.checked_add(len as u64).and_then(|end| i64::try_from(end).ok());
    if end.is_none() || usize::from(file.0) >= files {
        let text = format!("{len} bytes at offset {offset} of file {} of {files}", file.0);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(())
}

fn fill(buf: &Lent, byte: u8) {
    // SAFETY: the `Lent` says that the range is mapped and, lent to a read, accessed by us alone.
    unsafe { buf.as_ptr().write_bytes(byte, buf.len()) }
}

/// What a write writes.
pub(super) fn bytes_of(buf: &Lent) -> &[u8] {
    // SAFETY: the `Lent` says that the range is mapped and that nothing else writes to it; `Lent`s are
    // made from initialized memory.
    unsafe { std::slice::from_raw_parts(buf.as_ptr(), buf.len()) }
}

fn copy_in(data: &[u8], buf: &Lent) -> usize {
    assert!(data.len() <= buf.len(), "no more is read than was asked for");
    // SAFETY: as for `fill`, the length is checked above, and the simulated disk owns its bytes, so
    // the ranges do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), buf.as_ptr(), data.len()) }
    data.len()
}
