//! libcufile's statistics: which path its transfers took.

use std::{
    ffi::c_void,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    driver::Driver,
    library::{CufileError, Library, check},
};

/// Level 3: everything, per GPU. Lower levels do not distinguish the paths.
const LEVEL: i32 = 3;

/// Room for the answer: several times what any version has filled so far.
const ANSWER_WORDS: usize = 4096;

/// Index of the GPU count in the answer, in words of 8 bytes, by version: level 1 has grown.
const GPU_COUNT_AT: [(u32, usize); 2] = [(0, 128), (1190, 142)];

/// Number of GPU entries in the answer.
const GPUS_MAX: usize = 16;

/// Words per GPU entry, and the indices of its counters of reads; the first two words are its id.
const GPU_WORDS: usize = 31;
const READ_BYTES: usize = 2;
const READS_P2P: usize = 7;
const READS_NVFS: usize = 8;
const READS_POSIX: usize = 9;

/// Reads so far in this process, over all GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes read.
    pub read_bytes: u64,
    /// Reads from the drive into device memory, by PCI peer-to-peer.
    pub reads_p2p: u64,
    /// Reads from the drive into device memory, by nvidia-fs.
    pub reads_nvfs: u64,
    /// Reads into host memory with a copy to the device (compat mode).
    pub reads_posix: u64,
}

impl Counters {
    /// The difference from `earlier`.
    #[must_use]
    pub fn since(self, earlier: Counters) -> Counters {
        Counters {
            read_bytes: self.read_bytes.wrapping_sub(earlier.read_bytes),
            reads_p2p: self.reads_p2p.wrapping_sub(earlier.reads_p2p),
            reads_nvfs: self.reads_nvfs.wrapping_sub(earlier.reads_nvfs),
            reads_posix: self.reads_posix.wrapping_sub(earlier.reads_posix),
        }
    }

    /// True if there were reads and all of them went from the drive into device memory.
    pub fn proves_reads(&self) -> bool {
        self.reads_p2p + self.reads_nvfs > 0 && self.reads_posix == 0
    }

    fn decode(answer: &[u64; ANSWER_WORDS], version: Option<u32>) -> Counters {
        let version = version.unwrap_or(0);
        let &(_, at) = GPU_COUNT_AT.iter().rev().find(|(since, _)| version >= *since).expect("the first is since 0");
        // A 32-bit number, then padding.
        let gpus = (answer[at] as u32 as usize).min(GPUS_MAX);
        let mut counters = Counters::default();
        for gpu in answer[at + 1..].chunks_exact(GPU_WORDS).take(gpus) {
            counters.read_bytes += gpu[READ_BYTES];
            counters.reads_p2p += gpu[READS_P2P];
            counters.reads_nvfs += gpu[READS_NVFS];
            counters.reads_posix += gpu[READS_POSIX];
        }
        counters
    }
}

/// Exclusive use of the counters: there is one set per process. Reads that are not to be counted share it.
static TURN: Mutex<Turn> = Mutex::new(Turn { is_counting: false, reads: 0 });
static TURN_ENDED: Condvar = Condvar::new();

/// How long a count waits for reads under way: one of them may never return, and no more begin meanwhile.
const READS_WAIT_MAX: Duration = Duration::from_secs(1);

struct Turn {
    /// A count has begun, or waits for the reads to end.
    is_counting: bool,
    /// Reads under way that are not to be counted.
    reads: usize,
}

fn turn() -> MutexGuard<'static, Turn> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lives the counters are one caller's. Transfers of a batch do not wait for it, and are counted too.
pub(crate) struct Counting(());

impl Counting {
    /// # Errors
    /// What does not end: another count within the limit, or reads that are not to be counted.
    fn begin(limit: Duration) -> Result<Self, String> {
        let wait = |turn, limit, what, is_awaited: fn(&mut Turn) -> bool| {
            let waited = TURN_ENDED.wait_timeout_while(turn, limit, is_awaited);
            let (turn, found) = waited.unwrap_or_else(PoisonError::into_inner);
            match found.timed_out() {
                false => Ok(turn),
                true => Err(format!(
                    "found {what} of this process under way for {limit:?}, expected an end of it: libcufile has one \
                     set of counters, and would count it too; try again when it has ended"
                )),
            }
        };
        wait(turn(), limit, "another test of libcufile", |turn| turn.is_counting)?.is_counting = true;
        // Dropped if the reads do not end. No more of them begin meanwhile.
        let counting = Counting(());
        drop(wait(turn(), READS_WAIT_MAX, "a read", |turn| turn.reads > 0)?);
        Ok(counting)
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        turn().is_counting = false;
        TURN_ENDED.notify_all();
    }
}

/// While it lives no count begins.
pub(crate) struct Uncounted(());

impl Drop for Uncounted {
    fn drop(&mut self) {
        let mut turn = turn();
        turn.reads -= 1;
        if turn.is_counting && turn.reads == 0 {
            TURN_ENDED.notify_all();
        }
    }
}

/// Whether libcufile counts. 1.15 crashes in its own exit handler if it still does.
static COUNTS: Mutex<bool> = Mutex::new(false);

/// Set when the process exits: a call of libcufile that returns only then must not start the counters.
static EXITING: AtomicBool = AtomicBool::new(false);

/// Stops the counters when the process exits, before the exit handlers that are registered so far.
pub(super) fn stop_counting_at_exit() {
    // SAFETY: the handler takes nothing and does not unwind. It is refused once all handlers have run.
    unsafe { libc::atexit(stop_counting) };
}

/// The exit handler: stops the counters if libcufile counts, and refuses to start them from now on.
extern "C" fn stop_counting() {
    EXITING.store(true, Ordering::SeqCst);
    // Not for ever: a thread that libcufile holds up in its first calls may have the lock, and stops the counters then.
    for _ in 0..100 {
        let Ok(mut counts) = COUNTS.try_lock() else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        if std::mem::take(&mut *counts)
            && let Ok(Library { statistics: Some(statistics), .. }) = Library::get()
        {
            // SAFETY: takes no arguments; the driver is open, or counting would not have started.
            unsafe { (statistics.stop)() };
        }
        return;
    }
}

impl Driver {
    /// Enables the statistics until the process ends: stopping and restarting them crashes libcufile. One caller at a
    /// time; others wait so long at most. `None` before libcufile 1.15, which has no statistics.
    ///
    /// # Errors
    /// Why nothing can be counted now.
    pub(crate) fn start_counting(&self, limit: Duration) -> Result<Option<Counting>, String> {
        let Some(statistics) = &self.library().statistics else { return Ok(None) };
        let counting = Counting::begin(limit)?;
        let text = |fault: CufileError| fault.to_string();
        let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
        if !*counts && !EXITING.load(Ordering::SeqCst) {
            // SAFETY: the functions take an integer and nothing; the driver is open.
            unsafe {
                check("cuFileSetStatsLevel", (statistics.set_level)(LEVEL)).map_err(text)?;
                check("cuFileStatsStart", (statistics.start)()).map_err(text)?;
            }
            *counts = true;
            // Once more: handlers run from the last registered to the first, and libcufile's calls may register some.
            stop_counting_at_exit();
        }
        drop(counts);
        if EXITING.load(Ordering::SeqCst) {
            stop_counting();
            return Err("the process exits".into());
        }
        Ok(Some(counting))
    }

    /// Lets no count begin while a read is under way; `None` if one has begun. Nobody waits here: a count may be of a
    /// read that never returns.
    pub(crate) fn read_uncounted(&self) -> Option<Uncounted> {
        let mut turn = turn();
        if turn.is_counting {
            return None;
        }
        turn.reads += 1;
        Some(Uncounted(()))
    }

    /// The counters so far; `None` without statistics.
    ///
    /// # Errors
    /// libcufile's error.
    pub fn counters(&self) -> Result<Option<Counters>, CufileError> {
        let Some(statistics) = &self.library().statistics else { return Ok(None) };
        let mut answer = Box::new([0_u64; ANSWER_WORDS]);
        let place: *mut c_void = answer.as_mut_ptr().cast();
        // SAFETY: the function writes one structure, for which there is more than enough room.
        check("cuFileGetStatsL3", unsafe { (statistics.level_3)(place) })?;
        Ok(Some(Counters::decode(&answer, self.library().version())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_all_gpus_are_added_up_at_the_offsets_of_the_version() {
        for (version, at) in [(None, 128), (Some(1150), 128), (Some(1180), 128), (Some(1190), 142), (Some(1200), 142)] {
            let mut answer = [0; ANSWER_WORDS];
            answer[at] = 2 | (7 << 32);
            for gpu in 0..3 {
                let start = at + 1 + gpu * GPU_WORDS;
                answer[start + 2] = 4096;
                answer[start + 7] = 1;
                answer[start + 9] = 10;
            }
            let counters = Counters::decode(&answer, version);
            let expected = Counters { read_bytes: 8192, reads_p2p: 2, reads_nvfs: 0, reads_posix: 20 };
            assert_eq!(counters, expected, "version {version:?}");
            assert!(!counters.proves_reads());
        }
    }

    #[test]
    fn the_path_is_direct_only_if_all_reads_were() {
        let posix = Counters { reads_posix: 1, ..Counters::default() };
        let direct = Counters { reads_nvfs: 1, ..Counters::default() };
        let mixed = Counters { reads_nvfs: 2, ..posix };
        assert!(!Counters::default().proves_reads() && !posix.proves_reads() && !mixed.proves_reads());
        assert!(direct.proves_reads() && mixed.since(posix).proves_reads());
    }
}
