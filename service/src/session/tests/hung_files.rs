//! Files whose file system hangs.

use std::{
    fs::File,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::Instant,
};

use futures_util::FutureExt;
use kvhoist_files::{Arrival, FileIdentity, SourceFile};

use super::*;
use crate::{
    peers::own_uid,
    spaces::{
        files::WantedFile,
        opens::{HOLDS_MAX, OPENS_MAX, Open},
    },
    system::{System, on_thread},
};

/// More than there are threads that unmap memory.
const HOLDS: u64 = 80;
const SMALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");

fn state_that_opens(open: Open) -> Rc<ServiceState> {
    let mut config = ServerConfig::new("unused");
    config.host_bytes = 16 << 20;
    let mut spaces = Spaces::load(config.clone(), Rc::new(Machine)).expect("no spaces");
    spaces.open_files_by(open);
    Rc::new(ServiceState::new(config, spaces))
}

fn identity(inode: u64) -> FileIdentity {
    FileIdentity { device: 1, inode, size: 4096, changed_s: 1, changed_ns: 1 }
}

/// A client that wants so many files held.
fn wants_files(state: &Rc<ServiceState>, files: u64, identity: impl Fn(u64) -> FileIdentity) -> Arc<Ends> {
    let ends = Arc::new(Ends::default());
    let hold = |id: u64| {
        let FileIdentity { device, inode, size, changed_s, changed_ns } = identity(id);
        let (changed_s, changed_ns) = (changed_s.cast_unsigned(), changed_ns.cast_unsigned());
        Request::Hold { keep: false, device, inode, size, changed_s, changed_ns, path: "/hung".into() }.encode(id)
    };
    ends.change(|stream| {
        stream.takes = true;
        stream.to_service.extend(Hello::ours().encode());
        stream.to_service.extend((1..=files).flat_map(hold));
    });
    spawn_local(serve(Rc::clone(state), state.enter(1, own_uid()), Arc::<Ends>::clone(&ends)));
    ends
}

fn hangs(_: &str) -> kvhoist_files::Result<SourceFile> {
    loop {
        thread::park();
    }
}

async fn wants_files_that_hang() {
    let state = state_that_opens(hangs);
    let client = wants_files(&state, HOLDS, identity);
    client.replies(HOLDS as usize - OPENS_MAX).await;
    for reply in all_replies(&client.lock().to_client) {
        assert!(matches!(&reply, Reply::Failed(failure) if failure.fault == ServiceFault::Busy), "{reply:?}");
    }
    let (done, told) = mpsc::channel();
    on_thread(&Machine, move || done.send(())).await.expect("no panic").expect("the test waits");
    told.recv().expect("work that is no open is done");
    state.drain();
    while !client.lock().over {
        yield_now().await;
    }
    let replies = all_replies(&client.lock().to_client);
    assert_eq!(replies.len(), HOLDS as usize + 1, "every request is answered, and then comes a goodbye");
}

#[tokio::test]
async fn files_that_do_not_open_hold_up_neither_other_work_nor_a_drain() {
    let patience = Duration::from_secs(60);
    LocalSet::new().run_until(timeout(patience, wants_files_that_hang())).await.expect("no hang");
}

/// Holds of clients that have gone are counted too.
async fn wants_more_files_than_may_be_in_flight() {
    let spaces = &state_that_opens(hangs).spaces;
    let hold = |inode| spaces.hold(WantedFile { path: "/hung".into(), identity: identity(inode), keep: false });
    for inode in 0..HOLDS_MAX as u64 {
        assert!(hold(inode).now_or_never().is_none(), "it waits for its turn");
    }
    let refused = hold(HOLDS_MAX as u64).now_or_never().expect("an answer at once").err().expect("a refusal");
    assert!(refused.fault == ServiceFault::Busy && refused.text.contains("holds in flight"), "{refused:?}");
    // Those that had no turn have ended then.
    while hold(0).now_or_never().is_some() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn holds_whose_clients_have_gone_are_bounded() {
    let patience = Duration::from_secs(60);
    LocalSet::new().run_until(timeout(patience, wants_more_files_than_may_be_in_flight())).await.expect("no hang");
}

/// The last close of memory takes long: here it waits for other work.
async fn lets_go_of_a_file() {
    let state = state_that_opens(|path| SourceFile::open(path));
    let identity = SourceFile::open(SMALL).expect("it is there").identity();
    let hold = state.spaces.hold(WantedFile { path: SMALL.into(), identity, keep: false }).await.expect("room");
    // The thread that has read it has dropped it.
    while Arc::strong_count(&hold.memory()) > 2 {
        yield_now().await;
    }
    let name = format!("/proc/self/fd/{}", hold.memory().as_raw_fd());
    let memory = || std::fs::metadata(&name).ok().map(|found| (found.dev(), found.ino()));
    let open = memory();
    let gate = Arc::new(Mutex::new(()));
    let is_shut = gate.lock().expect("nothing panics under it");
    for _ in 0..HOLDS {
        let gate = Arc::clone(&gate);
        Machine.run(Box::new(move || drop(gate.lock())));
    }
    drop(hold);
    assert!(open.is_some() && memory() == open, "the service's thread closed it");
    drop(is_shut);
    while memory() == open {
        yield_now().await;
    }
}

#[tokio::test]
async fn the_memory_of_a_file_is_not_closed_by_the_services_thread() {
    let patience = Duration::from_secs(60);
    LocalSet::new().run_until(timeout(patience, lets_go_of_a_file())).await.expect("no hang");
}

/// The file of a file system whose closes hang until the test has ended.
struct ClosesLate;

static CLOSING: AtomicU32 = AtomicU32::new(0);
static MAY_CLOSE: AtomicBool = AtomicBool::new(false);

impl Arrival for ClosesLate {
    fn wait(&self, _: u64, _: &AtomicBool) -> bool {
        false
    }
}

impl Drop for ClosesLate {
    fn drop(&mut self) {
        CLOSING.fetch_add(1, Ordering::Relaxed);
        let end = Instant::now() + Duration::from_secs(90);
        while !MAY_CLOSE.load(Ordering::Relaxed) && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

fn closes_late(_: &str) -> kvhoist_files::Result<SourceFile> {
    // Neither is held when the other is opened.
    static BOTH: Barrier = Barrier::new(2);
    BOTH.wait();
    let file = SourceFile::open(SMALL)?;
    Ok(file.with_copy(File::open(SMALL).expect("it is there"), ClosesLate))
}

async fn wants_one_file_twice() {
    let state = state_that_opens(closes_late);
    let identity = SourceFile::open(SMALL).expect("it is there").identity();
    let client = wants_files(&state, 2, |_| identity);
    client.replies(2).await;
    assert_eq!(all_replies(&client.lock().to_client), [Reply::Held, Reply::Held]);
    client.change(|stream| stream.to_service.extend(Request::Status.encode(3)));
    client.replies(3).await;
    // That of the second hold, and that of who has read it.
    while CLOSING.load(Ordering::Relaxed) < 2 {
        yield_now().await;
    }
    assert!(!MAY_CLOSE.swap(true, Ordering::Relaxed));
}

#[tokio::test]
async fn a_file_that_does_not_close_holds_up_no_other_request() {
    let begun = Instant::now();
    let patience = Duration::from_secs(60);
    LocalSet::new().run_until(timeout(patience, wants_one_file_twice())).await.expect("no hang");
    assert!(begun.elapsed() < Duration::from_secs(60), "the service's thread closed it: {:?}", begun.elapsed());
}
