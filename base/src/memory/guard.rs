//! Memory of another process, whose file may shrink under its mapping: that hurts its owner alone.
//!
//! An access to a mapping whose file has shrunk, or that the system has no page for, raises SIGBUS. The handler maps
//! zeros in the place of the whole range and marks it as spoiled; the thread goes on. libwayland guards compositors
//! against their clients' pools in the same way. The range costs one mapping before and after, however many of its
//! pages are gone: with a mapping a page, a client that takes every second page away would use up the mappings that a
//! process may have. The kernel's own accesses fail with EFAULT.

use std::{
    io,
    mem::zeroed,
    ptr,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering, fence},
    },
};

/// The file has the range's pages, as far as anybody knows here.
const SOUND: u8 = 0;
/// A thread maps zeros in the place of the range.
const MENDING: u8 = 1;
/// There are zeros in the place of the range.
const SPOILED: u8 = 2;
/// There are zeros in the places of some pages.
const SPOILED_IN_PAGES: u8 = 3;

/// A guarded range. Never freed, for a handler may be reading it; a range that has ended lends its node to the next.
struct Node {
    /// Odd while `start` and `len` change.
    version: AtomicUsize,
    start: AtomicUsize,
    /// 0 while nothing is guarded.
    len: AtomicUsize,
    state: AtomicU8,
    next: *mut Node,
}

// SAFETY: `next` is written once, before the node is published, and nodes are never freed.
unsafe impl Sync for Node {}

static NODES: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());
/// Nodes that guard nothing. No handler looks here.
static FREE: Mutex<Vec<&'static Node>> = Mutex::new(Vec::new());
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

impl Node {
    /// Guards another range from now on, or none. One thread has the node.
    fn set(&self, start: usize, len: usize) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// The range, if it contains the address. A range that is in use does not change.
    fn range_of(&self, address: usize) -> Option<(usize, usize)> {
        let version = self.version.load(Ordering::Acquire);
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let whole = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        (whole && address.wrapping_sub(start) < len).then_some((start, len))
    }
}

/// Guards a range of memory until it [ends](Self::end), and knows what became of it for as long as anybody has it.
#[derive(Clone)]
pub struct Guard(Arc<Guarded>);

/// A node that is in use.
struct Guarded(&'static Node);

debug_fields!(Guard, guard => is_spoiled: guard.is_spoiled());

impl Guard {
    /// Guards `len` bytes at `start`: a whole mapping.
    ///
    /// # Errors
    /// Where the system takes no handler.
    pub fn new(start: *mut u8, len: usize) -> io::Result<Self> {
        install()?;
        let free = FREE.lock().expect("nothing panics under it").pop();
        let node = free.unwrap_or_else(add_node);
        node.state.store(SOUND, Ordering::Relaxed);
        node.set(start.expose_provenance(), len);
        Ok(Guard(Arc::new(Guarded(node))))
    }

    /// Whether a page of the range was taken away while it was touched here. Before anybody reads a zero in its place.
    pub fn is_spoiled(&self) -> bool {
        self.0.0.state.load(Ordering::Acquire) != SOUND
    }

    /// Guards nothing from now on. Before the memory is unmapped: the addresses may soon be another's.
    pub fn end(&self) {
        self.0.0.set(0, 0);
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        self.0.set(0, 0);
        FREE.lock().expect("nothing panics under it").push(self.0);
    }
}

/// A node more.
fn add_node() -> &'static Node {
    let node = Box::leak(Box::new(Node {
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        state: AtomicU8::new(SOUND),
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

/// Maps zeros in the place of the guarded range that contains the address; false if there is none, or the system
/// refuses.
fn mend(address: usize) -> bool {
    let Some((node, (start, len))) = nodes().find_map(|node| Some((node, node.range_of(address)?))) else {
        return false;
    };
    let page_bytes = PAGE_BYTES.load(Ordering::Relaxed);
    let page = address - address % page_bytes;
    match node.state.compare_exchange(SOUND, MENDING, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let whole = map_zeros(start, len);
            // A system that promises no memory that it may lack (`vm.overcommit_memory` 2) can refuse the range, but
            // not a page.
            let mended = whole || map_zeros(page, page_bytes);
            node.state.store(if whole { SPOILED } else { SPOILED_IN_PAGES }, Ordering::Release);
            mended
        }
        Err(SPOILED_IN_PAGES) => map_zeros(page, page_bytes),
        // Another thread mends it, or has: the access is made again.
        Err(_) => true,
    }
}

/// Maps zeros in the place of a mapping, or of a page of one.
fn map_zeros(start: usize, len: usize) -> bool {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range lies in a mapping that the guard's owner made and has not unmapped: it is in use. Whoever reads
    // zeros there is told so by `is_spoiled`.
    unsafe { libc::mmap(ptr::with_exposed_provenance_mut(start), len, access, flags, -1, 0) != libc::MAP_FAILED }
}

/// Does what the previous handler would have done.
///
/// # Safety
/// As of a handler of the signal.
unsafe fn as_before(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    const BUS_MCEERR_AO: libc::c_int = 5;
    // Of the kernel, for an access (SI_KERNEL too, on x86 for a stack segment): it is made again when the handler has
    // returned. Processes' signals, and those of memory that failed and nobody has touched, come once.
    // SAFETY: the kernel passes a valid record.
    let code = unsafe { (*info).si_code };
    let is_access = code > 0 && code != BUS_MCEERR_AO;
    match BEFORE.get().map_or((libc::SIG_DFL, 0), |before| (before.sa_sigaction, before.sa_flags)) {
        (libc::SIG_IGN, _) if !is_access => {}
        (libc::SIG_DFL | libc::SIG_IGN, _) => {
            // SAFETY: plain system call, allowed in a handler.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        (handler, flags) if flags & libc::SA_SIGINFO != 0 => {
            type Handler = unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: the flag says that it is such a function.
            unsafe { std::mem::transmute::<usize, Handler>(handler)(signal, info, context) };
        }
        (handler, _) => {
            // SAFETY: without the flag it is such a function.
            unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(libc::c_int)>(handler)(signal) };
        }
    }
    // Rust's own handler sets the default and returns, too: the process would go on, and guard nothing.
    // SAFETY: all zero is a valid value; the call fills it in, and is allowed in a handler.
    let now = unsafe {
        let mut now: libc::sigaction = zeroed();
        libc::sigaction(signal, ptr::null(), &raw mut now);
        now.sa_sigaction
    };
    if !is_access && now == libc::SIG_DFL {
        // SAFETY: plain system call, allowed in a handler; the signal is blocked until this one returns.
        unsafe { libc::raise(signal) };
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::ExitStatusExt, process::Command, sync::Barrier, thread};

    use super::*;
    use crate::memory::guarded::{Memory, PAGES};

    /// Lines of /proc/self/maps that lie in a range.
    fn mappings(of: &Memory) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("there");
        let start = |line: &str| usize::from_str_radix(line.split('-').next().unwrap_or_default(), 16).unwrap_or(0);
        let range = of.page(0).addr()..of.page(PAGES).addr();
        maps.lines().filter(|line| range.contains(&start(line))).count()
    }

    #[test]
    fn a_range_that_is_taken_away_in_every_second_page_costs_one_mapping() {
        let memory = Memory::new();
        memory.file.set_len(0).expect("it takes no seal");
        for page in (0..PAGES).step_by(2) {
            // SAFETY: mapped, if not by the file any more.
            unsafe { memory.page(page).write_volatile(7) };
        }
        assert!(memory.guard.is_spoiled());
        assert!(mappings(&memory) <= 1, "{} mappings", mappings(&memory));
        // SAFETY: mapped memory of this test.
        let read = |page| unsafe { memory.page(page).read_volatile() };
        assert_eq!((read(0), read(1), read(PAGES - 1)), (7, 0, 0), "what is written there stays");
    }

    #[test]
    fn threads_that_find_one_range_taken_away_all_go_on_and_a_neighbor_keeps_its_bytes() {
        for _ in 0..50 {
            let (memory, neighbor) = (Memory::new(), Memory::new());
            // SAFETY: mapped memory of this test.
            unsafe { neighbor.page(1).write_volatile(9) };
            memory.file.set_len(0).expect("it takes no seal");
            let (threads, together) = (8, Barrier::new(8));
            thread::scope(|scope| {
                for thread in 0..threads {
                    let page = memory.page(thread * PAGES / threads).expose_provenance();
                    let (guard, together) = (&memory.guard, &together);
                    scope.spawn(move || {
                        together.wait();
                        // SAFETY: mapped, if not by the file any more.
                        let read = unsafe { ptr::with_exposed_provenance::<u8>(page).read_volatile() };
                        assert_eq!(read, 0);
                        assert!(guard.is_spoiled(), "zeros are told from bytes");
                    });
                }
            });
            assert!(!neighbor.guard.is_spoiled());
            // SAFETY: mapped memory of this test.
            assert_eq!(unsafe { neighbor.page(1).read_volatile() }, 9);
        }
    }

    /// In a process of its own: the handler that was there before the first guard is kept for good.
    #[test]
    fn a_signal_that_is_no_access_does_what_it_would_without_a_guard() {
        const CASE: &str = "KVHOIST_SIGBUS";
        extern "C" fn returns(_: libc::c_int) {}
        let actions =
            [("default", libc::SIG_DFL), ("ignored", libc::SIG_IGN), ("handled", returns as *const () as usize)];
        if let Ok(case) = std::env::var(CASE) {
            if let Some((_, action)) = actions.iter().find(|(name, _)| *name == case) {
                // SAFETY: plain system call; the handler does nothing.
                unsafe { libc::signal(libc::SIGBUS, *action) };
            }
            let memory = Memory::new();
            // SAFETY: takes a number.
            unsafe { libc::raise(libc::SIGBUS) };
            assert!(["ignored", "handled"].contains(&&*case), "the process goes on");
            memory.file.set_len(0).expect("it takes no seal");
            // SAFETY: mapped, if not by the file any more.
            unsafe { memory.page(0).write_volatile(7) };
            return assert!(memory.guard.is_spoiled());
        }
        // As Rust sets it up for programs.
        let ends = [("rust", true), ("default", true), ("ignored", false), ("handled", false)];
        for (case, is_end) in ends {
            let mut command = Command::new(std::env::current_exe().expect("this test"));
            let name = "memory::guard::tests::a_signal_that_is_no_access_does_what_it_would_without_a_guard";
            let output = command.args(["--exact", name]).env(CASE, case).output().expect("it starts again");
            let said = String::from_utf8_lossy(&output.stdout);
            assert_eq!(output.status.signal(), is_end.then_some(libc::SIGBUS), "{case}: {said}");
            assert!(is_end || said.contains("1 passed"), "{case}: {said}");
        }
    }

    /// As above. An address that no pointer can have, by the stack's segment: SI_KERNEL, and no address.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn an_access_that_the_processor_refuses_ends_a_process_that_ignores_the_signal() {
        const CASE: &str = "KVHOIST_SIGBUS_STACK";
        if std::env::var_os(CASE).is_some() {
            // SAFETY: plain system calls. A process that goes round in circles is ended by the alarm.
            unsafe {
                libc::alarm(20);
                libc::signal(libc::SIGBUS, libc::SIG_IGN);
            }
            let _memory = Memory::new();
            // SAFETY: the access ends the process.
            unsafe {
                let at = 1_u64 << 63;
                std::arch::asm!("push rbp", "mov rbp, {at}", "mov {at}, [rbp]", "pop rbp", at = inout(reg) at => _);
            }
            unreachable!("the access was made");
        }
        let mut command = Command::new(std::env::current_exe().expect("this test"));
        let name = "memory::guard::tests::an_access_that_the_processor_refuses_ends_a_process_that_ignores_the_signal";
        let output = command.args(["--exact", name]).env(CASE, "1").output().expect("it starts again");
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{}", String::from_utf8_lossy(&output.stdout));
    }

    /// In a child: other tests need mappings too.
    #[test]
    fn a_range_is_mended_by_a_process_that_has_no_mapping_to_spare() {
        let memory = Memory::new();
        memory.file.set_len(0).expect("it takes no seal");
        // SAFETY: the child calls what a signal handler may call, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: plain system calls; each mapping is new, and the last one is given back.
            unsafe {
                let mut last = ptr::null_mut();
                loop {
                    // Of a file of its own: mappings of one kind would be one.
                    let (flags, page) = (libc::MAP_SHARED | libc::MAP_ANONYMOUS, 4096);
                    let mapped = libc::mmap(ptr::null_mut(), page, libc::PROT_READ, flags, -1, 0);
                    if mapped == libc::MAP_FAILED {
                        break;
                    }
                    last = mapped;
                }
                libc::munmap(last, 4096);
                for page in (0..PAGES).step_by(2) {
                    memory.page(page).write_volatile(7);
                }
                libc::_exit(if memory.guard.is_spoiled() { 0 } else { 1 });
            }
        }
        let mut status = 0;
        // SAFETY: the child is this test's own.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child ended with status {status:#x}");
    }
}
