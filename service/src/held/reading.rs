//! Threads that read files into the memory that holds them: one file at a time from each drive, in the order in which
//! clients asked for them.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    mem::take,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::Ordering,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use kvhoist_files::{Error, Memory, Options, Range, SourceFile, read};

use super::{
    Fate,
    memory::{Filling, NEVER},
};

/// Requests of one drive at a time, and their bytes: what is read for the caches' clients waits behind no more. A long
/// one keeps a processor in the kernel, which clears pages for it, and whoever is to run there waits.
const THREADS: usize = 4;
const PIECE_BYTES: usize = 512 << 10;
/// What is read to wait for a write that is under way.
const FIRST_BYTES: u64 = 4096;
/// How often those who wait for the other files of a drive are told that it reads: well within a client's patience.
const HEARTBEAT_EVERY: Duration = Duration::from_secs(1);
/// How long they are told so while a file is made to reach its drive: a file system that hangs never says that it has.
const SETTLE_MAX: Duration = Duration::from_secs(60);
/// How soon a file that nobody wants any more is noticed.
const GIVEN_UP_EVERY: Duration = Duration::from_millis(50);

/// A file that is to be read.
pub(super) struct Job {
    pub(super) file: SourceFile,
    pub(super) filling: Filling,
    pub(super) fate: Arc<Fate>,
}

impl Job {
    fn is_given_up(&self) -> bool {
        self.fate.given_up.load(Ordering::Relaxed)
    }
}

/// Files that are being read, by drive. A drive that is listed has a thread.
#[derive(Default)]
pub(super) struct Reads(Mutex<BTreeMap<u64, VecDeque<Job>>>);

impl Reads {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, VecDeque<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads a file after the others of its drive.
    ///
    /// # Errors
    /// Where the system starts no thread. The job comes back: whoever drops it closes its file.
    pub(super) fn add(self: &Arc<Self>, job: Job) -> Result<(), (Job, io::Error)> {
        let drive = job.file.identity().device;
        let mut drives = self.lock();
        if let Some(waiting) = drives.get_mut(&drive) {
            waiting.push_back(job);
            return Ok(());
        }
        drives.insert(drive, VecDeque::from([job]));
        drop(drives);
        let reads = Arc::clone(self);
        let started = thread::Builder::new().name("kvhoist-weights".into()).spawn(move || reads.work(drive));
        let Err(error) = started else { return Ok(()) };
        let job = self.lock().remove(&drive).and_then(|mut waiting| waiting.pop_front());
        Err((job.expect("only the drive's thread takes it"), error))
    }

    #[cfg(test)]
    pub(super) fn set_hung(&self, drive: u64, hangs: bool) {
        if hangs { drop(self.lock().insert(drive, VecDeque::new())) } else { drop(self.lock().remove(&drive)) }
    }

    /// Reads files of a drive until there are none.
    fn work(&self, drive: u64) {
        lower_priority();
        loop {
            let mut drives = self.lock();
            let Some(job) = drives.get_mut(&drive).and_then(VecDeque::pop_front) else {
                drives.remove(&drive);
                return;
            };
            drop(drives);
            if job.is_given_up() {
                continue;
            }
            let Job { file, filling, fate } = job;
            let tend = |gets_on| self.tend(drive, gets_on);
            let result = catch_unwind(AssertUnwindSafe(|| fill(&file, &filling, &fate, tend)));
            fate.stuck.store(false, Ordering::Relaxed);
            let reason = match result {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(_) => "the thread that read it panicked".to_owned(),
            };
            fate.failed.store(true, Ordering::Relaxed);
            filling.tell(NEVER);
            if !fate.given_up.load(Ordering::Relaxed) {
                let path = file.path().display();
                tracing::warn!(reason, %path, "a file could not be read: its clients read it themselves");
            }
        }
    }

    /// Drops the files that wait for a drive and that nobody wants any more. Tells the readers of the others, if the
    /// drive `gets_on`, that it reads. Called by the drive's thread only.
    fn tend(&self, drive: u64, gets_on: bool) {
        let mut drives = self.lock();
        let Some(waiting) = drives.get_mut(&drive) else { return };
        let (given_up, wanted): (VecDeque<_>, _) = take(waiting).into_iter().partition(Job::is_given_up);
        *waiting = wanted;
        if gets_on {
            waiting.iter().for_each(|job| job.filling.heartbeat());
        }
        // The service's thread takes it too, and must not wait for a close.
        drop(drives);
        drop(given_up);
    }
}

/// Has the system run this thread, and those that it starts, after those that serve blocks: filling memory takes
/// processors as well as a drive.
fn lower_priority() {
    const NICE: i32 = 10;
    // Where it is refused, they are equals.
    _ = rustix::process::setpriority_process(None, NICE);
}

/// Does work that may take long on a thread of its own, and says meanwhile, each second, whether it gets on: for
/// `patience` it is taken to.
fn beating<T: Send>(work: impl FnOnce() -> T + Send, patience: Duration, each_second: impl Fn(bool)) -> T {
    let begun = Instant::now();
    thread::scope(|scope| {
        let (ended, end) = mpsc::channel::<()>();
        let worker = scope.spawn(move || {
            // Dropped at the end, also by a panic.
            let _ended = ended;
            work()
        });
        while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(HEARTBEAT_EVERY) {
            each_second(begun.elapsed() < patience);
        }
        worker.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Reads all of a file, and tells how far it is, and `tend`, each second, whether it gets on. One that changes
/// meanwhile is an error: its readers look too. A change after that gives the file another identity, whoever makes it.
fn fill(file: &SourceFile, filling: &Filling, fate: &Fate, tend: impl Fn(bool)) -> Result<(), Error> {
    let (size, start) = (file.size(), filling.start().as_ptr() as usize);
    let ranges = (0..size).step_by(PIECE_BYTES).map(|offset| {
        let len = PIECE_BYTES.min((size - offset) as usize);
        Range { file: 0, offset, len, address: start + offset as usize }
    });
    let ranges: Vec<Range> = ranges.collect();
    let mut options = Options::default();
    (options.threads, options.piece_bytes) = (Some(THREADS), Some(PIECE_BYTES));
    // SAFETY: the mapping, which readers of its memory look at only as far as they were told, and which outlives the
    // transfer: that is dropped before `filling`, also by a panic.
    let begin = |ranges, options: &Options| unsafe { read(vec![file.clone()], ranges, Memory::Host, options) };
    let (mut past_cache, len) = (options.clone(), size.min(FIRST_BYTES) as usize);
    past_cache.page_cache = false;
    let settle = || -> Result<(), Error> {
        // A store into a page that is dirty has no time of its own.
        file.sync()?;
        // A write has the time of its begin: one that is under way is over when a direct read is.
        begin(vec![Range { file: 0, offset: 0, len, address: start }], &past_cache)?.wait().map(drop)
    };
    // A file that was just written has to reach its drive first.
    beating(settle, SETTLE_MAX, |gets_on| {
        // However long it is taken to get on, nothing ends it.
        fate.stuck.store(true, Ordering::Relaxed);
        if gets_on {
            filling.heartbeat();
        }
        tend(gets_on);
    })?;
    fate.stuck.store(false, Ordering::Relaxed);
    tend(true);
    let transfer = begin(ranges, &options)?;
    let mut there = vec![false; size.div_ceil(PIECE_BYTES as u64) as usize];
    let mut first_missing = 0;
    let (mut tended, mut gets_on) = (Instant::now(), false);
    while let Some(ranges) = transfer.next_ranges(GIVEN_UP_EVERY) {
        if fate.given_up.load(Ordering::Relaxed) {
            transfer.cancel();
        }
        ranges.into_iter().for_each(|range| there[range] = true);
        let before = first_missing;
        while there.get(first_missing) == Some(&true) {
            first_missing += 1;
        }
        if first_missing > before {
            filling.tell(size.min((first_missing * PIECE_BYTES) as u64));
            gets_on = true;
        }
        if tended.elapsed() > HEARTBEAT_EVERY {
            tended = Instant::now();
            fate.stuck.store(!gets_on, Ordering::Relaxed);
            tend(take(&mut gets_on));
        }
    }
    transfer.wait().map(drop)
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, fs::File, os::unix::fs::FileExt, path::Path, ptr::null_mut, slice};

    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    use super::{
        super::memory::{HEARTBEAT_BYTES, arrived_at},
        *,
    };

    const BYTES: u64 = 3 * PIECE_BYTES as u64 + 5;

    fn number(memory: &File, at: u64) -> u64 {
        let mut number = [0; 8];
        memory.read_exact_at(&mut number, arrived_at(BYTES) + at).expect("there is a page behind it");
        u64::from_ne_bytes(number)
    }

    fn arrived(memory: &File) -> u64 {
        number(memory, 0)
    }

    /// A file of its name's first byte.
    fn made(folder: &Path, name: &str) -> SourceFile {
        let path = folder.join(name);
        std::fs::write(&path, vec![name.as_bytes()[0]; BYTES as usize]).expect("room");
        SourceFile::open(path).expect("it is there")
    }

    fn job(file: SourceFile) -> (Job, File, Arc<Fate>) {
        let (filling, _) = Filling::new(file.size()).expect("a memfd");
        let (fate, memory) = (Arc::<Fate>::default(), filling.readable().try_clone().expect("a descriptor"));
        (Job { file, filling, fate: Arc::clone(&fate) }, File::from(memory), fate)
    }

    #[test]
    fn work_that_takes_long_gets_on_for_a_time_and_its_panic_is_its_callers() {
        let beats = RefCell::new(Vec::new());
        let (go_on, told) = mpsc::channel();
        let work = move || told.recv_timeout(Duration::from_secs(60));
        let ended = beating(work, HEARTBEAT_EVERY * 4, |gets_on| {
            beats.borrow_mut().push(gets_on);
            if !gets_on {
                go_on.send(7).expect("it waits");
            }
        });
        let beats = beats.take();
        let (last, before) = beats.split_last().expect("it took longer than that");
        assert!(ended == Ok(7) && !before.is_empty() && before.iter().all(|beat| *beat) && !last, "{beats:?}");
        let panicked = catch_unwind(AssertUnwindSafe(|| beating(|| panic!("on purpose"), SETTLE_MAX, |_| {})));
        assert!(panicked.is_err());
    }

    #[test]
    fn a_file_that_nobody_wants_any_more_is_neither_read_nor_kept() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let jobs = ["wanted", "given up", "late"].map(|name| job(made(folder.path(), name)));
        let drive = jobs[0].0.file.identity().device;
        let [(wanted, memory, _), (given_up, _, fate), (late, late_memory, late_fate)] = jobs;
        let reads = Arc::<Reads>::default();
        reads.lock().insert(drive, VecDeque::from([wanted, given_up, late]));
        fate.given_up.store(true, Ordering::Relaxed);
        let waiting = || reads.lock().get(&drive).map_or(0, VecDeque::len);
        reads.tend(drive, true);
        assert_eq!((waiting(), Arc::strong_count(&fate)), (2, 1), "it is dropped");
        reads.tend(drive, false);
        assert_eq!(number(&memory, HEARTBEAT_BYTES), 1, "a drive that hangs has no heartbeat");
        late_fate.given_up.store(true, Ordering::Relaxed);
        thread::scope(|scope| scope.spawn(|| reads.work(drive)).join()).expect("no panic");
        assert_eq!((arrived(&memory), arrived(&late_memory)), (BYTES, 0));
        let is_done = !late_fate.failed.load(Ordering::Relaxed) && Arc::strong_count(&late_fate) == 1;
        assert!(is_done && waiting() == 0, "it is dropped");
    }

    #[test]
    fn readers_of_a_file_that_waits_for_its_drive_are_told() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let (jobs, memories): (VecDeque<_>, Vec<_>) = ["first", "second"]
            .map(|name| {
                let (job, memory, _) = job(made(folder.path(), name));
                (job, memory)
            })
            .into_iter()
            .unzip();
        let (reads, drive) = (Arc::<Reads>::default(), jobs[0].file.identity().device);
        reads.lock().insert(drive, jobs);
        thread::spawn(move || reads.work(drive)).join().expect("no panic");
        assert_eq!([0, 1].map(|at| number(&memories[at], HEARTBEAT_BYTES)), [0, 1]);
        assert_eq!([0, 1].map(|at| arrived(&memories[at])), [BYTES; 2]);
    }

    #[test]
    fn threads_that_read_and_those_that_they_start_have_a_lower_priority_and_no_others() {
        let nice = || rustix::process::getpriority_process(None).expect("this thread's");
        let before = nice();
        let read = move || {
            lower_priority();
            thread::spawn(nice).join().expect("it ends")
        };
        assert_eq!(thread::spawn(read).join().expect("it ends"), before.max(10));
        assert_eq!(nice(), before);
    }

    /// A file that ends sooner than it did is told as one that never comes; the others of its drive are read.
    #[test]
    fn a_file_that_fails_in_the_middle_holds_up_no_other() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let (bad, good) = (made(folder.path(), "bad"), made(folder.path(), "good"));
        File::options().write(true).open(bad.path()).and_then(|file| file.set_len(BYTES - 6)).expect("in place");
        let reads = Arc::<Reads>::default();
        let begin = |file: SourceFile| {
            let (job, memory, fate) = job(file);
            assert!(reads.add(job).is_ok(), "a thread");
            (memory, fate)
        };
        let ((bad, bad_fate), (good, good_fate)) = (begin(bad), begin(good));
        let hang = Instant::now() + Duration::from_secs(60);
        while arrived(&bad) != NEVER || arrived(&good) != BYTES {
            assert!(Instant::now() < hang, "{} and {}", arrived(&bad), arrived(&good));
            thread::yield_now();
        }
        assert!(bad_fate.failed.load(Ordering::Relaxed) && !good_fate.failed.load(Ordering::Relaxed));
        let mut found = vec![0; BYTES as usize];
        good.read_exact_at(&mut found, 0).expect("the memory stays");
        assert!(found.iter().all(|byte| *byte == b'g'));
    }

    /// Reads a file as a service does, has it changed, and sees that its next readers are given no other bytes than it
    /// has. Returns whether it was read.
    fn serve(path: &Path, change: impl FnOnce()) -> bool {
        let source = SourceFile::open(path).expect("it is there");
        let (Job { file, filling, fate }, memory, _) = job(source.clone());
        let is_read = fill(&file, &filling, &fate, |_| ()).is_ok();
        change();
        if is_read && SourceFile::open(path).expect("it is there").identity() == source.identity() {
            let mut found = vec![0; source.size() as usize];
            memory.read_exact_at(&mut found, 0).expect("the memory stays");
            assert!(found == std::fs::read(path).expect("it is there"), "bytes that the file has no more");
        }
        is_read
    }

    /// A mapping whose pages are dirty, and a file that its system keeps in memory.
    #[test]
    fn a_store_through_a_mapping_makes_another_version_of_the_file() {
        for (parent, can_be_read) in [(env!("CARGO_MANIFEST_DIR"), true), ("/dev/shm", false)] {
            let folder = tempfile::tempdir_in(parent).expect("a folder");
            let path = made(folder.path(), "mapped").path().to_owned();
            let file = File::options().read(true).write(true).open(&path).expect("it is there");
            let (len, prot) = (BYTES as usize, ProtFlags::READ | ProtFlags::WRITE);
            // SAFETY: a new mapping at an address of the kernel's choice.
            let start = unsafe { mmap(null_mut(), len, prot, MapFlags::SHARED, &file, 0) }.expect("a mapping");
            // SAFETY: the mapping, which only this test writes to.
            let mapped = unsafe { slice::from_raw_parts_mut(start.cast::<u8>(), len) };
            mapped.fill(1);
            assert_eq!(serve(&path, || mapped.fill(2)), can_be_read, "{parent}");
            // SAFETY: the mapping, which nobody uses any more.
            unsafe { munmap(start, len) }.expect("a mapping");
        }
    }

    /// The time of a write is that of its begin.
    #[test]
    fn a_file_in_the_middle_of_a_long_write_is_read_after_it() {
        const LEN: usize = 96 << 20;
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder");
        let path = folder.path().join("file");
        std::fs::write(&path, vec![1; LEN]).expect("room");
        let file = File::options().write(true).open(&path).expect("it is there");
        file.sync_all().expect("room");
        let modified = || std::fs::metadata(&path).and_then(|found| found.modified()).expect("a time");
        let new = vec![2; LEN];
        let before = modified();
        let writer = thread::spawn(move || file.write_all_at(&new, 0));
        while modified() == before {
            thread::yield_now();
        }
        assert!(serve(&path, || writer.join().expect("no panic").expect("room")));
    }
}
