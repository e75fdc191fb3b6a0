//! I/O buffers that an operation owns.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    any::Any,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    sync::Arc,
};

use super::Guard;
use crate::block::IO_ALIGN;

/// A range of memory owned by an operation.
///
/// It travels by value into a storage engine, stays there until the kernel is done with it, and comes back with the
/// result. The `owner` keeps the memory alive as long as the `Lent` lives, even if the awaiting future is dropped while
/// the kernel still writes.
pub struct Lent {
    ptr: NonNull<u8>,
    len: usize,
    /// Bytes before `ptr` that belong to the range and were skipped.
    skipped: usize,
    /// Index of the registered buffer that contains the range, if there is one.
    fixed: Option<u16>,
    guard: Option<Guard>,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: by the constructor's contract nothing else accesses the range in conflict while the `Lent` lives, on any
// thread.
unsafe impl Send for Lent {}

impl Lent {
    /// Lends `len` bytes at `ptr`. `fixed` is the index of the registered buffer around them.
    ///
    /// # Safety
    /// While `owner` lives the range must stay mapped. Until the `Lent` is dropped nothing else may write to it, and
    /// during a read from storage nothing else may read it either.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, fixed: Option<u16>, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Lent { ptr, len, skipped: 0, fixed, guard: None, owner }
    }

    /// No memory, for a flush.
    pub fn empty() -> Self {
        // SAFETY: no byte is lent.
        unsafe { Lent::new(NonNull::dangling(), 0, None, Arc::new(())) }
    }

    /// Start of the range.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a range of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Index of the registered buffer around the range.
    pub fn fixed(&self) -> Option<u16> {
        self.fixed
    }

    /// Whether the memory was taken away, and zeros are in its place.
    pub fn is_spoiled(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_spoiled)
    }

    /// Skips the first `start` bytes: the rest of a short operation.
    ///
    /// # Panics
    /// If `start` is past the end.
    #[must_use]
    pub fn skip(self, start: usize) -> Self {
        assert!(start <= self.len, "skip {start} of {} bytes", self.len);
        // SAFETY: `start` is within the range, so the sum stays inside it or one past its end.
        let ptr = unsafe { self.ptr.add(start) };
        Lent { ptr, len: self.len - start, skipped: self.skipped + start, ..self }
    }

    /// Undoes all [skips](Self::skip).
    #[must_use]
    pub fn rewind(self) -> Self {
        // SAFETY: `skipped` bytes before `ptr` belong to the range that `new` was given: only
        // `skip` moves `ptr`, and it counts what it moves.
        let ptr = unsafe { self.ptr.sub(self.skipped) };
        Lent { ptr, len: self.len + self.skipped, skipped: 0, ..self }
    }

    /// Bytes [skipped](Self::skip) at the start of the range.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// The owner, which keeps the memory alive.
    pub fn into_owner(self) -> Arc<dyn Any + Send + Sync> {
        self.owner
    }
}

/// Memory for an operation, with the owner that keeps it mapped. The owner is returned with its type after the
/// operation; storage engines see the memory as a [`Lent`], whose owner is untyped.
pub struct IoBuf<O> {
    ptr: NonNull<u8>,
    len: usize,
    fixed: Option<u16>,
    guard: Option<Guard>,
    owner: Arc<O>,
}

// SAFETY: by the constructor's contract nothing else accesses the range in conflict while the buffer lives, on any
// thread; the owner is `Send` and `Sync` itself.
unsafe impl<O: Send + Sync> Send for IoBuf<O> {}

impl<O: Send + Sync + 'static> IoBuf<O> {
    /// A buffer of `len` bytes at `ptr`, which `owner` keeps mapped. `fixed` is the index of the registered buffer
    /// around them.
    ///
    /// # Safety
    /// While `owner` lives the range must stay mapped. Until the buffer and every [`Lent`] of it are dropped, nothing
    /// else may write to the range, and during a read from storage nothing else may read it either.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, fixed: Option<u16>, owner: O) -> Self {
        IoBuf { ptr, len, fixed, guard: None, owner: Arc::new(owner) }
    }

    /// With the guard of memory that may be taken away.
    pub fn guarded(self, guard: Option<Guard>) -> Self {
        IoBuf { guard, ..self }
    }

    /// Length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Lends the memory to a storage engine.
    ///
    /// # Safety
    /// Every earlier [`Lent`] of this buffer must have been dropped.
    pub unsafe fn lend(&self) -> Lent {
        // SAFETY: the contract of `new`; the caller has no other `Lent` of the range.
        let lent = unsafe { Lent::new(self.ptr, self.len, self.fixed, Arc::clone(&self.owner) as _) };
        Lent { guard: self.guard.clone(), ..lent }
    }

    /// Returns the owner.
    ///
    /// # Panics
    /// If the memory is still lent; an engine drops it before it reports the result.
    pub fn into_owner(self) -> O {
        Arc::into_inner(self.owner).expect("every engine drops the memory before it reports the result")
    }
}

debug_fields!(Lent, lent => len: lent.len, fixed: lent.fixed);

/// Zeroed heap memory aligned for direct I/O: superblocks, record pages, start-up reads.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer is owned and has no interior mutability.
unsafe impl Send for AlignedBuf {}
// SAFETY: the buffer is owned, and shared access is read-only.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zeroed bytes; `len` must be a positive multiple of [`IO_ALIGN`].
    ///
    /// # Panics
    /// If it is not: lengths are constants of this crate, never from users or files.
    pub fn zeroed(len: usize) -> Self {
        Self::try_zeroed(len).unwrap_or_else(|| handle_alloc_error(Self::layout(len)))
    }

    /// As [`zeroed`](Self::zeroed); `None` where the system has no memory for it.
    pub fn try_zeroed(len: usize) -> Option<Self> {
        // SAFETY: the layout has a non-zero size, asserted in `layout`.
        let ptr = unsafe { alloc_zeroed(Self::layout(len)) };
        NonNull::new(ptr).map(|ptr| AlignedBuf { ptr, len })
    }

    fn layout(len: usize) -> Layout {
        assert!(len > 0 && len.is_multiple_of(IO_ALIGN), "{len} bytes is no positive multiple of {IO_ALIGN}");
        Layout::from_size_align(len, IO_ALIGN).expect("a power-of-two alignment and a length far below isize::MAX")
    }

    /// The buffer, to be read into or written from.
    pub fn into_io(self) -> IoBuf<Self> {
        let (ptr, len) = (self.ptr, self.len);
        // SAFETY: the buffer is moved into the `IoBuf`, so no other code can reach it until `into_owner` returns it.
        unsafe { IoBuf::new(ptr, len, None, self) }
    }

    /// Lends the whole buffer.
    pub fn lend(self) -> Lent {
        let (ptr, len) = (self.ptr, self.len);
        // SAFETY: the buffer is moved into the `Lent`, so it is unreachable until `from_lent` takes it out.
        unsafe { Lent::new(ptr, len, None, Arc::new(self)) }
    }

    /// Takes back a [lent](Self::lend) buffer, whatever part of it was skipped.
    ///
    /// # Panics
    /// If `lent` was not made by [`AlignedBuf::lend`].
    pub fn from_lent(lent: Lent) -> Self {
        let owner = lent.into_owner().downcast::<AlignedBuf>().expect("lent by an AlignedBuf");
        Arc::into_inner(owner).expect("a lent AlignedBuf has one owner")
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialized bytes and `&self` excludes writers.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `ptr` is valid for `len` initialized bytes, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with the same layout.
        unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.len)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipping_and_rewinding_keep_the_range() {
        let lent = AlignedBuf::zeroed(2 * IO_ALIGN).lend();
        let start = lent.as_ptr() as usize;
        let lent = lent.skip(100).skip(IO_ALIGN);
        assert_eq!((lent.as_ptr() as usize, lent.len()), (start + IO_ALIGN + 100, IO_ALIGN - 100));
        let lent = lent.skip(IO_ALIGN - 100);
        assert!(lent.is_empty());
        let lent = lent.rewind();
        assert_eq!((lent.as_ptr() as usize, lent.len()), (start, 2 * IO_ALIGN));
        assert_eq!(AlignedBuf::from_lent(lent.skip(7)).len(), 2 * IO_ALIGN);
    }

    #[test]
    #[should_panic(expected = "skip 4097 of 4096 bytes")]
    fn skipping_past_the_end_is_refused() {
        let _ = AlignedBuf::zeroed(IO_ALIGN).lend().skip(IO_ALIGN + 1);
    }
}
