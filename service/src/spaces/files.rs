//! Whole files beside the spaces, in the same host memory.
//!
//! Their memory is a tenant's like that of a space, by the name [`NAME`]: what no space has, then what spaces have
//! beyond what they reserved. A file stays while a client holds it; one that is to be kept stays until a space or
//! another file needs its memory.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use kvhoist_files::{FileIdentity, SourceFile};
use tokio::{
    sync::{Notify, oneshot},
    task::spawn_local,
    time::timeout,
};

use super::{Spaces, ending};
use crate::{
    error::ServiceFault,
    held::{
        HeldFile, NewMemory,
        memory::{PAGE_BYTES, memory_bytes},
    },
    peers::own_uid,
    protocol::Failure,
    shares::SpaceOf,
    wire::Descriptor,
};

/// What a share calls the memory of held files.
const NAME: &str = "files";

/// Files held at a time: each is a descriptor of the service.
const FILES_MAX: u32 = 4096;
/// How long others wait for the memory of a file that nobody holds and that is being read: a drive may hang.
const READ_MAX: Duration = Duration::from_secs(2);

/// The file that a client wants held.
pub(crate) struct WantedFile {
    pub(crate) path: String,
    pub(crate) identity: FileIdentity,
    pub(crate) keep: bool,
}

/// A client's hold of a file. Dropped when the client lets go of it, or is gone.
pub(crate) struct Hold {
    file: Rc<HeldFile>,
    spaces: Rc<Spaces>,
}

impl Hold {
    /// The descriptor for the client.
    pub(crate) fn memory(&self) -> Arc<Descriptor> {
        self.file.memory()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.spaces.files.end_hold(&self.file) {
            self.spaces.forget(&self.file);
        }
    }
}

/// Files whose memory is being freed, and who waits for that.
#[derive(Default)]
pub(super) struct Freeing {
    begun: Cell<u64>,
    /// In the order in which clients let go of them.
    turns: RefCell<BTreeSet<u64>>,
    ended: Notify,
}

impl Freeing {
    fn begin(&self) -> u64 {
        let turn = self.begun.get() + 1;
        self.begun.set(turn);
        self.turns.borrow_mut().insert(turn);
        turn
    }

    fn end(&self, turn: u64) {
        self.turns.borrow_mut().remove(&turn);
        self.ended.notify_waiters();
    }

    /// Waits for those that have begun, and not for later ones: clients may let go of files all the time.
    async fn ended(&self) {
        let last = self.begun.get();
        while self.turns.borrow().first().is_some_and(|turn| *turn <= last) {
            self.ended.notified().await;
        }
    }
}

/// Whom the memory of files belongs to.
pub(super) fn tenant() -> SpaceOf<'static> {
    SpaceOf { uid: own_uid(), name: NAME }
}

pub(super) fn refused(fault: ServiceFault, text: String) -> Failure {
    Failure::new(fault, format!("file: {text}"))
}

impl Spaces {
    /// Holds a file: one that is held already, or is read now.
    ///
    /// # Cancel safety
    /// The file is let go of once it is held.
    pub(crate) async fn hold(self: &Rc<Self>, wanted: WantedFile) -> Result<Hold, Failure> {
        let (tell, told) = oneshot::channel();
        let (spaces, begun) = (Rc::clone(self), self.opens.begin_hold()?);
        // A task of its own: memory that moves between spaces has to arrive.
        spawn_local(async move {
            let held = spaces.hold_now(wanted).await;
            drop(begun);
            drop(tell.send(held));
        });
        told.await.unwrap_or_else(|_| Err(ending()))
    }

    async fn hold_now(self: Rc<Self>, WantedFile { path, identity, keep }: WantedFile) -> Result<Hold, Failure> {
        if let Some(hold) = self.held_already(&identity, keep) {
            return Ok(hold);
        }
        let check = move |found: &SourceFile| {
            if found.identity() != identity {
                let path = found.path().display();
                let text = format!("found another file than the client's, or another version of it, at {path}");
                return Err(refused(ServiceFault::Argument, text));
            }
            found.check_stamped().map_err(|error| refused(ServiceFault::Argument, error.to_string()))
        };
        let opened = self.opens.run(path.clone(), check).await?;
        let _one_at_a_time = self.file_turn.acquire().await.expect("nobody closes it");
        // Whoever had the turn before may have wanted the same.
        if let Some(hold) = self.held_already(&identity, keep) {
            return Ok(hold);
        }
        let full = || refused(ServiceFault::Busy, format!("busy: found {FILES_MAX} held, expected fewer"));
        let is_full = || self.files.totals().0 >= FILES_MAX;
        if is_full() && self.files.oldest_spare().is_none() {
            return Err(full());
        }
        let memory = self.take_for_file(identity.size).await?;
        let give_back = || self.host.give_back(tenant(), memory_bytes(identity.size));
        // Nothing is given up before it is known that there is memory.
        if is_full() && !self.give_up_oldest() {
            give_back();
            return Err(full());
        }
        opened.give(|file| self.files.begin(file, memory)).map_err(|error| {
            give_back();
            refused(ServiceFault::Unavailable, format!("found no thread to read it ({error})"))
        })?;
        tracing::info!(path, bytes = identity.size, keep, "a file is read for all clients");
        self.held_already(&identity, keep).ok_or_else(|| refused(ServiceFault::Io, format!("{path} cannot be read")))
    }

    fn held_already(self: &Rc<Self>, identity: &FileIdentity, keep: bool) -> Option<Hold> {
        let file = self.files.find(identity)?;
        if file.has_failed() {
            // Those who hold it read it themselves.
            self.forget(&file);
            return None;
        }
        file.add_hold(keep);
        Some(Hold { file, spaces: Rc::clone(self) })
    }

    /// Takes host memory for a file of `size` bytes as the opening of a space does.
    async fn take_for_file(&self, size: u64) -> Result<NewMemory, Failure> {
        let bytes = memory_bytes(size);
        self.freed().await;
        let grant = self.reserve_host(tenant(), PAGE_BYTES, bytes)?;
        // Spaces and files give up theirs only for memory that the system has.
        let memory = NewMemory::new(size).map_err(|error| {
            self.host.give_back(tenant(), grant.bytes);
            refused(ServiceFault::Unavailable, format!("found no memory or descriptor for it ({error})"))
        })?;
        let claimed = self.claim_host(tenant(), &grant).await;
        let taken = grant.bytes + claimed.as_ref().map_or(0, |claimed| *claimed);
        if taken < bytes {
            self.host.give_back(tenant(), taken);
            return Err(claimed.err().unwrap_or_else(|| self.host.refusal(taken, bytes)));
        }
        Ok(memory)
    }

    /// Gives up kept files that no client holds, the ones that were used longest ago first, until `space` may have
    /// `more` bytes than it may now.
    pub(super) async fn give_up_files(&self, space: SpaceOf<'_>, more: u64) {
        let enough = self.host.available(space) + more;
        while self.host.available(space) < enough && self.give_up_oldest() {
            self.freed().await;
        }
    }

    /// Gives up the kept file that was used longest ago; false if there is none without a client.
    fn give_up_oldest(&self) -> bool {
        let Some(file) = self.files.oldest_spare() else { return false };
        let (path, bytes) = (file.path().display(), file.bytes());
        tracing::info!(%path, bytes, "a kept file is given up: a space or another file needs its room");
        self.forget(&file);
        true
    }

    /// Holds a file no longer. Its memory is free some time after no client has it: one that failed may have clients
    /// still, the last of which forgets it again.
    fn forget(&self, file: &Rc<HeldFile>) {
        self.files.forget(file);
        if !file.is_idle() {
            return;
        }
        let Some((memory, mut freed)) = file.take_memory() else { return };
        let (memory, bytes) = (Arc::downgrade(&memory), file.bytes());
        let (host, freeing, turn) = (Rc::clone(&self.host), Rc::clone(&self.freeing), self.freeing.begin());
        let end = move || freeing.end(turn);
        spawn_local(async move {
            let is_late = timeout(READ_MAX, &mut freed).await.is_err();
            // Its close ends, once it has begun: the last to have it has dropped it.
            let hangs = is_late && memory.strong_count() > 0;
            if hangs {
                end();
            }
            if is_late {
                _ = freed.await;
            }
            host.give_back(tenant(), bytes);
            if !hangs {
                end();
            }
        });
    }

    /// Waits until the memory of all files that nobody holds now is free, but that of files whose drive hangs.
    pub(super) async fn freed(&self) {
        self.freeing.ended().await;
    }

    /// Files that are held, and their bytes.
    pub(crate) fn held_files(&self) -> (u32, u64) {
        self.files.totals()
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, time::Instant};

    use futures_util::FutureExt;
    use tempfile::TempDir;
    use tokio::task::{LocalSet, yield_now};

    use super::*;
    use crate::{config::ServerConfig, system::Machine};

    #[test]
    fn a_wait_for_memory_ends_before_that_of_files_that_are_let_go_of_later() {
        let freeing = Freeing::default();
        let first = freeing.begin();
        let mut wait = pin!(freeing.ended());
        assert!(wait.as_mut().now_or_never().is_none());
        freeing.begin();
        freeing.end(first);
        wait.now_or_never().expect("all are free that were let go of before");
        assert!(freeing.ended().now_or_never().is_none(), "another is not");
    }

    /// A file in a folder of its own, and spaces without disk.
    fn load() -> (TempDir, WantedFile, Rc<Spaces>) {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
        let path = folder.path().join("weights");
        std::fs::write(&path, [7; 100_000]).expect("written");
        let identity = SourceFile::open(&path).expect("there").identity();
        let mut config = ServerConfig::new("unused");
        config.host_bytes = 1 << 20;
        let spaces = Rc::new(Spaces::load(config, Rc::new(Machine)).expect("no spaces"));
        (folder, WantedFile { path: path.display().to_string(), identity, keep: false }, spaces)
    }

    async fn until_left_is(spaces: &Spaces, bytes: u64) {
        let hang = Instant::now() + Duration::from_secs(60);
        while spaces.left().1 != bytes {
            assert!(Instant::now() < hang, "it is free");
            yield_now().await;
        }
    }

    /// The thread that reads it writes to it until then.
    #[tokio::test(start_paused = true)]
    async fn the_memory_of_a_file_whose_drive_hangs_is_counted_and_nobody_waits_for_it() {
        let (_folder, wanted, spaces) = load();
        let identity = wanted.identity;
        let run = async {
            let (before, bytes) = (spaces.left().1, memory_bytes(identity.size));
            spaces.files.set_hung(identity.device, true);
            drop(spaces.hold(wanted).await.expect("room"));
            spaces.freed().await;
            assert_eq!((spaces.held_files().0, spaces.left().1), (0, before - bytes));
            spaces.files.set_hung(identity.device, false);
            until_left_is(&spaces, before).await;
        };
        LocalSet::new().run_until(run).await;
    }

    /// Its memory would not be free, whoever waits for it.
    #[tokio::test(start_paused = true)]
    async fn a_kept_file_whose_drive_hangs_is_not_given_up_for_its_memory() {
        let (folder, wanted, spaces) = load();
        let path = folder.path().join("other");
        std::fs::write(&path, [7; 50_000]).expect("written");
        let (hung, other) = (wanted.identity, SourceFile::open(&path).expect("there").identity());
        let run = async {
            // Nothing is read: the marks stay as they are.
            spaces.files.set_hung(hung.device, true);
            drop(spaces.hold(WantedFile { keep: true, ..wanted }).await.expect("room"));
            let wanted = WantedFile { path: path.display().to_string(), identity: other, keep: true };
            drop(spaces.hold(wanted).await.expect("room"));
            let file = spaces.files.find(&hung).expect("kept");
            file.set_stuck(true);
            assert_eq!(spaces.files.spare_bytes(), memory_bytes(other.size));
            let held = || [&hung, &other].map(|identity| spaces.files.find(identity).is_some());
            assert_eq!((spaces.give_up_oldest(), held()), (true, [true, false]), "it is the older one");
            assert!(!spaces.give_up_oldest());
            file.set_stuck(false);
            assert_eq!((spaces.give_up_oldest(), held()), (true, [false, false]), "its drive reads again");
            drop(file);
            spaces.files.set_hung(hung.device, false);
        };
        LocalSet::new().run_until(run).await;
    }

    /// A file that could not be read is read anew for the next client; those before have its memory still.
    #[tokio::test]
    async fn the_memory_of_a_failed_file_is_counted_until_its_last_client_lets_go() {
        let (_folder, wanted, spaces) = load();
        let (identity, path) = (wanted.identity, wanted.path.clone());
        let run = async {
            let (before, bytes) = (spaces.left().1, memory_bytes(identity.size));
            let first = spaces.hold(wanted).await.expect("room");
            spaces.files.find(&identity).expect("held").fail();
            let second = spaces.hold(WantedFile { path, identity, keep: false }).await.expect("room for two");
            assert_eq!(spaces.left().1, before - 2 * bytes);
            drop(first);
            until_left_is(&spaces, before - bytes).await;
            drop(second);
            assert_eq!(spaces.left().1, before - bytes, "it is not free yet");
            until_left_is(&spaces, before).await;
        };
        LocalSet::new().run_until(run).await;
    }
}
