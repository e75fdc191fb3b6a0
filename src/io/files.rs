//! The files of a store in production: what the reactor awaits on them, by its ring or by workers.

use std::{any::Any, fs::File, io, ptr::NonNull, rc::Rc, sync::Arc};

use super::{
    Storage, in_parts,
    transfer::{OpenFile, Transfer},
    uring::{Uring, is_in_memory},
    workers::{ThreadPlan, Workers},
};
use crate::{
    block::{FileId, OpKind},
    memory::Lent,
    metrics::Count,
    urgency::Urgency,
};

/// The files, and who reads and writes them.
///
/// The reactor's ring does, but for files in memory while workers transfer. Without a ring, workers do it all by system
/// calls.
pub struct Files {
    files: Vec<OpenFile>,
    ring: Option<Uring>,
    workers: Rc<Workers>,
}

impl Files {
    /// On the ring of the current [`Runtime`](super::uring::Runtime), which registers `regions`: region `i` has the
    /// [`Lent::fixed`] number `Some(i)`.
    ///
    /// # Errors
    /// Called outside of a runtime with a ring.
    ///
    /// # Safety
    /// Every region must stay mapped, and to the same memory, while `keep_alive` lives. The files and the runtime keep
    /// it until both are dropped.
    pub unsafe fn on_ring(
        files: Vec<Arc<File>>,
        regions: Vec<(NonNull<u8>, usize)>,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> io::Result<Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::on_ring_with(files, regions, keep_alive, Workers::none()) }
    }

    /// As [`on_ring`](Self::on_ring), with workers for files in memory.
    ///
    /// # Safety
    /// As of it.
    pub(crate) unsafe fn on_ring_with(
        files: Vec<Arc<File>>,
        regions: Vec<(NonNull<u8>, usize)>,
        keep_alive: Arc<dyn Any + Send + Sync>,
        workers: Rc<Workers>,
    ) -> io::Result<Self> {
        // SAFETY: the caller's promise.
        let ring = unsafe { Uring::new(regions, keep_alive) }?;
        let by_calls = workers.pool().is_some();
        Ok(Files { files: open_files(files, |file| by_calls && is_in_memory(file)), ring: Some(ring), workers })
    }

    /// By system calls of so many threads (1 at least). Call inside a [`LocalSet`](tokio::task::LocalSet).
    ///
    /// # Errors
    /// The error of a thread that could not be started.
    pub fn by_calls(files: Vec<Arc<File>>, threads: usize) -> io::Result<Self> {
        let plan = ThreadPlan { callers: u32::try_from(threads).unwrap_or(u32::MAX).max(1), ..ThreadPlan::default() };
        Ok(Self::by_calls_of(files, Workers::start(plan, Arc::new(Count::unexported()))?))
    }

    /// By system calls of these workers, some of which transfer by them.
    pub(crate) fn by_calls_of(files: Vec<Arc<File>>, workers: Rc<Workers>) -> Self {
        Files { files: open_files(files, |_| true), ring: None, workers }
    }

    /// The file with this id.
    ///
    /// # Errors
    /// Names the id and the number of files.
    fn find(&self, id: FileId) -> io::Result<&OpenFile> {
        let (id, files) = (usize::from(id.0), self.files.len());
        let text = || format!("found an operation on file {id}, expected one of the {files} files of the store");
        self.files.get(id).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, text()))
    }
}

fn open_files(files: Vec<Arc<File>>, by_calls: impl Fn(&File) -> bool) -> Vec<OpenFile> {
    let open = |(file, id): (Arc<File>, u16)| OpenFile { by_calls: by_calls(&file), file, id: FileId(id) };
    files.into_iter().zip(0..).map(open).collect()
}

impl Storage for Files {
    fn name(&self) -> &'static str {
        if self.ring.is_some() { "uring" } else { "blocking" }
    }

    async fn transfer(&self, kind: OpKind, id: FileId, offset: u64, buf: Lent) -> io::Result<()> {
        let file = self.find(id)?;
        match &self.ring {
            Some(ring) if !file.by_calls => match kind {
                OpKind::Sync => ring.sync(&file.file).await,
                _ => {
                    let operate = async |at, buf| ring.operate(kind, &file.file, at, buf).await;
                    in_parts(kind, id, offset, buf, operate).await.0
                }
            },
            _ => {
                let transfer = Transfer { kind, file: file.clone(), offset, buf };
                match self.workers.transfer(Urgency::Awaited, transfer, 0).await {
                    Some(transferred) => transferred.map(drop),
                    // The operation may succeed later: it is no fault of the disk.
                    None => Err(io::Error::from_raw_os_error(libc::EINTR)),
                }
            }
        }
    }

    fn file(&self, file: FileId) -> Option<OpenFile> {
        self.files.get(usize::from(file.0)).cloned()
    }

    unsafe fn register(&self, start: NonNull<u8>, len: usize) -> Option<u16> {
        // SAFETY: the caller's promise.
        self.ring.as_ref().and_then(|ring| unsafe { ring.register(start, len) })
    }

    fn unregister(&self, first: u16, len: usize) {
        if let Some(ring) = &self.ring {
            ring.unregister(first, len);
        }
    }

    fn registered(&self) -> bool {
        self.ring.as_ref().is_some_and(Uring::registered)
    }
}
