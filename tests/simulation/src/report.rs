//! What a run was, in numbers.

use std::fmt;

use crate::sim::{CopyCounts, Counts, FaultKind};
use kvhoist::{Route, Stats, internals::io::OpKind};

use crate::plan::Call;

/// What was done and what went wrong, in one run or in many.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Seeds run.
    pub runs: u64,
    /// Lives of caches.
    pub lives: u64,
    /// Calls, in the order in which they are printed.
    pub calls: [u64; Call::COUNT],
    /// Futures dropped before they ended.
    pub dropped: u64,
    /// Blocks found.
    pub hits: u64,
    /// Blocks not found.
    pub misses: u64,
    /// Blocks found that had to be found.
    pub hits_promised: u64,
    /// Blocks not found that must not be found.
    pub misses_promised: u64,
    /// Answers that were `Error::Busy`.
    pub busy: u64,
    /// Answers that were `Error::Timeout`.
    pub timeouts: u64,
    /// Answers that were other errors.
    pub failed: u64,
    /// Of these, calls whose memory was left to a service that hangs.
    pub abandoned: u64,
    /// Of these, memory that could not be mapped.
    pub maps_refused: u64,
    /// Of these, threads that could not be started.
    pub threads_refused: u64,
    /// Lives that a power cut ended.
    pub power_cuts: u64,
    /// Lives that ended with their process.
    pub kills: u64,
    /// Of these, services with reads in flight into their clients' memory.
    pub kills_amid_reads: u64,
    /// And with copies of it in flight.
    pub kills_amid_copies: u64,
    /// Layers of which a service told that some of their blocks are in place.
    pub layers_told: u64,
    /// Blocks that clients of a service pinned.
    pub blocks_pinned: u64,
    /// Lives that ended by `close`.
    pub closes: u64,
    /// Closes beside another one.
    pub second_closes: u64,
    /// Opens beside another one.
    pub second_openers: u64,
    /// Lives that ended with the last handle.
    pub drops: u64,
    /// Stores that were refused because of what lying disks had done to them, and wiped.
    pub wipes: u64,
    /// Lives in which the disk tier took no more blocks.
    pub read_only: u64,
    /// Lives in which the disk tier was out of service.
    pub retired: u64,
    /// Slots quarantined.
    pub quarantined: u64,
    /// Tables of buffers that the kernel refused to pin, in lives that came to their end.
    pub pins_refused: u64,
    /// Blocks evicted, in all tiers.
    pub evictions: u64,
    /// Blocks read from disk that were not what they should be.
    pub checksum_failures: u64,
    /// Requests to stores beyond the node.
    pub remote_requests: u64,
    /// Of these, answers that were wrong.
    pub remote_lies: u64,
    /// Blocks that they brought.
    pub remote_brought: u64,
    /// Blocks and tables that were found to be wrong.
    pub remote_invalid: u64,
    /// Objects that were found to be gone.
    pub remote_stale: u64,
    /// Lives in which such a store was asked no more for a time.
    pub remote_away: u64,
    /// Operations that the disks began.
    pub disk_operations: u64,
    /// Copies begun.
    pub copies: u64,
    /// Copies that failed.
    pub copy_failures: u64,
    /// Checksums that the device computed.
    pub device_checksums: u64,
    /// Faults injected, by `OpKind as usize` and `FaultKind as usize`.
    pub faults: [[u64; FaultKind::COUNT]; 3],
    /// Of every answer and every operation, in order.
    pub digest: u64,
}

impl Report {
    pub(crate) fn add_world(&mut self, storage: &Counts, copies: &CopyCounts) {
        self.disk_operations += storage.started.iter().sum::<u64>();
        self.copies += copies.started;
        self.copy_failures += copies.failed;
        self.device_checksums += copies.sums;
        for (sum, counts) in self.faults.iter_mut().zip(storage.faults_by_kind) {
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
    }

    /// Adds what a cache found of a store beyond the node.
    pub(crate) fn found_remote(&mut self, stats: &Stats) {
        self.remote_brought += stats.route_blocks(Route::RemoteToHost);
        self.remote_invalid += stats.remote_invalid;
        self.remote_stale += stats.remote_stale;
        self.remote_away += u64::from(stats.remote_standing_down.is_some());
    }

    /// Adds another run's numbers.
    pub fn add(&mut self, other: &Report) {
        for (mine, theirs) in self.numbers_mut().into_iter().zip(other.clone().numbers_mut()) {
            *mine += *theirs;
        }
        self.calls.iter_mut().zip(other.calls).for_each(|(sum, count)| *sum += count);
        for (sum, counts) in self.faults.iter_mut().zip(other.faults) {
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        self.digest = self.digest.rotate_left(1) ^ other.digest;
    }

    fn numbers_mut(&mut self) -> [&mut u64; 40] {
        [
            &mut self.runs,
            &mut self.lives,
            &mut self.dropped,
            &mut self.hits,
            &mut self.misses,
            &mut self.hits_promised,
            &mut self.misses_promised,
            &mut self.busy,
            &mut self.timeouts,
            &mut self.failed,
            &mut self.abandoned,
            &mut self.maps_refused,
            &mut self.threads_refused,
            &mut self.power_cuts,
            &mut self.kills,
            &mut self.kills_amid_reads,
            &mut self.kills_amid_copies,
            &mut self.layers_told,
            &mut self.blocks_pinned,
            &mut self.closes,
            &mut self.drops,
            &mut self.second_closes,
            &mut self.second_openers,
            &mut self.wipes,
            &mut self.read_only,
            &mut self.retired,
            &mut self.quarantined,
            &mut self.pins_refused,
            &mut self.evictions,
            &mut self.checksum_failures,
            &mut self.remote_requests,
            &mut self.remote_lies,
            &mut self.remote_brought,
            &mut self.remote_invalid,
            &mut self.remote_stale,
            &mut self.remote_away,
            &mut self.disk_operations,
            &mut self.copies,
            &mut self.copy_failures,
            &mut self.device_checksums,
        ]
    }
}

impl Report {
    fn fmt_remote(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "stores beyond the node: {} requests, {} lies, {} blocks brought, {} found wrong, {} objects gone, away in \
             {} lives",
            self.remote_requests,
            self.remote_lies,
            self.remote_brought,
            self.remote_invalid,
            self.remote_stale,
            self.remote_away
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let calls: u64 = self.calls.iter().sum();
        writeln!(
            f,
            "{} runs of {} lives, {calls} calls ({} dropped in mid-work)",
            self.runs, self.lives, self.dropped
        )?;
        for call in Call::ALL {
            write!(f, "  {} {}", call.name(), self.calls[call as usize])?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "answers: {} hits ({} of them promised), {} misses ({} promised), {} busy, {} timeouts, {} other errors \
             ({} with memory given up, {} mappings and {} threads refused)",
            self.hits,
            self.hits_promised,
            self.misses,
            self.misses_promised,
            self.busy,
            self.timeouts,
            self.failed,
            self.abandoned,
            self.maps_refused,
            self.threads_refused
        )?;
        writeln!(
            f,
            "lives ended by: {} power cuts, {} kills ({} amid reads into clients' memory, {} amid copies of it), \
             {} closes ({} of them twice), {} drops; {} stores wiped, {} opened by two",
            self.power_cuts,
            self.kills,
            self.kills_amid_reads,
            self.kills_amid_copies,
            self.closes,
            self.second_closes,
            self.drops,
            self.wipes,
            self.second_openers
        )?;
        writeln!(f, "clients of a service: {} layers told of, {} blocks pinned", self.layers_told, self.blocks_pinned)?;
        writeln!(
            f,
            "disk tiers: {} took no more blocks, {} out of service; {} slots quarantined, {} checksum failures, \
             {} evictions in all tiers, {} tables of buffers not pinned",
            self.read_only, self.retired, self.quarantined, self.checksum_failures, self.evictions, self.pins_refused
        )?;
        self.fmt_remote(f)?;
        write!(f, "{} disk operations, faults:", self.disk_operations)?;
        const KINDS: [&str; FaultKind::COUNT] = ["error", "no space", "short", "bit flip", "lost", "astray", "stall"];
        for kind in [OpKind::Read, OpKind::Write, OpKind::Sync] {
            for (name, count) in KINDS.iter().zip(self.faults[kind as usize]).filter(|(_, count)| *count > 0) {
                write!(f, " {} {name} {count},", kind.name())?;
            }
        }
        write!(f, " copy {} of {}; {} checksums by the device", self.copy_failures, self.copies, self.device_checksums)
    }
}
