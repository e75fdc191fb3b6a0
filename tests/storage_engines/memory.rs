//! Memory that is lent to operations, and a random number generator.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::{any::Any, io, ptr::NonNull, sync::Arc};

use kvhoist::internals::io::{AlignedBuf, FileId, Lent, OpKind, Storage};

/// Opened with `O_DIRECT`.
pub const DIRECT: FileId = FileId(0);
/// Goes through the page cache, and takes any offset and length.
pub const BUFFERED: FileId = FileId(1);
/// Opened for reading only (real engines).
pub const READ_ONLY: FileId = FileId(2);

/// A user may lock 8 MiB where nobody has raised it, and the kernel gives those of a ring that has ended back later.
pub const ARENA_BYTES: usize = 2 << 20;

/// Each kind of transfer by its name.
pub trait Operations: Storage {
    async fn read(&self, file: FileId, offset: u64, buf: Lent) -> io::Result<()> {
        self.transfer(OpKind::Read, file, offset, buf).await
    }

    async fn write(&self, file: FileId, offset: u64, buf: Lent) -> io::Result<()> {
        self.transfer(OpKind::Write, file, offset, buf).await
    }

    async fn sync(&self, file: FileId) -> io::Result<()> {
        self.transfer(OpKind::Sync, file, 0, Lent::empty()).await
    }
}

impl<S: Storage> Operations for S {}

/// Memory that ranges are lent from, and the registered region 0 of a ring.
pub struct Arena {
    pub ptr: NonNull<u8>,
    _memory: AlignedBuf,
}

// SAFETY: the tests lend each range to one operation at a time and look at it in between only.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    pub fn new() -> Arc<Self> {
        let mut memory = AlignedBuf::zeroed(ARENA_BYTES);
        let ptr = NonNull::new(memory.as_mut_ptr()).expect("allocated");
        Arc::new(Arena { ptr, _memory: memory })
    }

    pub fn lend(self: &Arc<Self>, start: usize, len: usize, fixed: Option<u16>) -> Lent {
        self.lend_owned(start, len, fixed, Arc::clone(self) as Arc<dyn Any + Send + Sync>)
    }

    /// As `lend`; `owner` must keep the arena alive.
    pub fn lend_owned(&self, start: usize, len: usize, fixed: Option<u16>, owner: Arc<dyn Any + Send + Sync>) -> Lent {
        assert!(start + len <= ARENA_BYTES);
        // SAFETY: within the arena, which `owner` keeps; each test lends a range once at a time.
        unsafe { Lent::new(self.ptr.add(start), len, fixed, owner) }
    }

    #[allow(clippy::mut_from_ref)]
    pub fn bytes(&self, start: usize, len: usize) -> &mut [u8] {
        assert!(start + len <= ARENA_BYTES);
        // SAFETY: within the arena; the tests look at ranges only while these are not lent.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().add(start), len) }
    }
}

/// Keeps an arena and calls back when nobody needs the memory any more.
pub struct Owner {
    _arena: Arc<Arena>,
    on_drop: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Owner {
    pub fn lend(arena: &Arc<Arena>, start: usize, len: usize, on_drop: impl FnOnce() + Send + Sync + 'static) -> Lent {
        let owner = Owner { _arena: Arc::clone(arena), on_drop: Some(Box::new(on_drop)) };
        arena.lend_owned(start, len, None, Arc::new(owner))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.on_drop.take().expect("dropped once")();
    }
}

/// A small seeded generator; the seed of a failed run is in the assertion messages.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}
