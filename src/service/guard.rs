//! Clients' memory that cannot be sealed: a page that is taken away under its mapping hurts its client alone.
//!
//! An access to a mapping whose file has shrunk raises SIGBUS. The handler maps a page of
//! zeros in that place and marks the range as spoiled; the thread goes on. libwayland guards compositors against their
//! clients' pools in the same way. The kernel's own accesses fail with EFAULT.

use std::{
    io,
    mem::zeroed,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

/// A guarded range. Never freed, for a handler may be reading it; a range that has ended lends its node to the next.
struct Node {
    taken: AtomicBool,
    start: AtomicUsize,
    /// 0 while nothing is guarded.
    len: AtomicUsize,
    spoiled: AtomicBool,
    next: *mut Node,
}

// SAFETY: `next` is written once, before the node is published, and nodes are never freed.
unsafe impl Sync for Node {}

static NODES: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(4096);
/// The previous handler of SIGBUS.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

fn nodes() -> impl Iterator<Item = &'static Node> {
    let mut next = NODES.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: null, or a node, which is never freed.
        let node = unsafe { next.as_ref() }?;
        next = node.next;
        Some(node)
    })
}

/// Guards a range of memory for as long as it lives.
pub(super) struct Guard(&'static Node);

impl Guard {
    /// Guards `len` bytes at `start`.
    ///
    /// # Errors
    /// Where the system takes no handler.
    pub(super) fn new(start: *mut u8, len: usize) -> io::Result<Self> {
        install()?;
        let free =
            nodes().find(|node| node.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok());
        let node = free.unwrap_or_else(add_node);
        node.spoiled.store(false, Ordering::Relaxed);
        node.start.store(start.expose_provenance(), Ordering::Relaxed);
        node.len.store(len, Ordering::Release);
        Ok(Guard(node))
    }

    /// Whether a page of the range was taken away while it was touched here.
    pub(super) fn is_spoiled(&self) -> bool {
        self.0.spoiled.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.len.store(0, Ordering::Release);
        self.0.taken.store(false, Ordering::Release);
    }
}

/// A node more, taken.
fn add_node() -> &'static Node {
    let node = Box::leak(Box::new(Node {
        taken: AtomicBool::new(true),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        spoiled: AtomicBool::new(false),
        next: NODES.load(Ordering::Acquire),
    }));
    while let Err(next) = NODES.compare_exchange_weak(node.next, node, Ordering::AcqRel, Ordering::Acquire) {
        node.next = next;
    }
    node
}

/// Handles SIGBUS from now on, once in a process.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let refused = INSTALLED.get_or_init(|| {
        PAGE_BYTES.store(rustix::param::page_size(), Ordering::Relaxed);
        // SAFETY: all zero is a valid value; the call fills it in.
        let mut before: libc::sigaction = unsafe { zeroed() };
        // SAFETY: `before` outlives the call, which changes nothing.
        if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut before) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
        }
        // Before the handler may need it.
        let _first = BEFORE.set(before);
        // SAFETY: all zero is a valid value.
        let mut action: libc::sigaction = unsafe { zeroed() };
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler is async-signal-safe: it uses atomics and mmap, and calls the previous handler.
        if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
        }
        Ok(())
    });
    refused.map_err(io::Error::from_raw_os_error)
}

/// # Safety
/// The handler; the kernel passes the cause of the signal.
unsafe extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid record; for this code it holds the address of the access.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    const BUS_ADRERR: libc::c_int = 2;
    if code == BUS_ADRERR && mend(address) {
        return;
    }
    // SAFETY: as this function.
    unsafe { as_before(signal, info, context) };
}

/// Maps zeros in the place of a missing page; false if the address is in no guarded range.
fn mend(address: usize) -> bool {
    let holds = |node: &&Node| {
        let (len, start) = (node.len.load(Ordering::Acquire), node.start.load(Ordering::Relaxed));
        address.wrapping_sub(start) < len
    };
    let Some(node) = nodes().find(holds) else { return false };
    let page_bytes = PAGE_BYTES.load(Ordering::Relaxed);
    let page = ptr::with_exposed_provenance_mut(address - address % page_bytes);
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: the page lies in a mapping that the guard's owner made and has not unmapped; its file has no such page.
    let mapped = unsafe { libc::mmap(page, page_bytes, access, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    node.spoiled.store(true, Ordering::Release);
    true
}

/// Does what the previous handler would have done.
///
/// # Safety
/// As of a handler of the signal.
unsafe fn as_before(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get().filter(|before| ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction));
    let Some(before) = before else {
        // The access is made again, and ends the process.
        // SAFETY: plain system call, allowed in a handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    };
    if before.sa_flags & libc::SA_SIGINFO != 0 {
        type Handler = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
        // SAFETY: the flag says that it is such a function.
        unsafe { std::mem::transmute::<usize, Handler>(before.sa_sigaction)(signal, info, context) };
    } else {
        // SAFETY: without the flag it is such a function.
        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(libc::c_int)>(before.sa_sigaction)(signal) };
    }
}
