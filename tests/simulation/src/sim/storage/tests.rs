//! The simulated storage does what it says, the same way for the same seed.

use std::{future::poll_fn, pin::pin, ptr::NonNull, sync::Arc, task::Poll, time::Duration};

use kvhoist::internals::io::{AlignedBuf, IO_ALIGN};

use super::*;

const FILE: FileId = FileId(0);

fn simulate<T>(future: impl Future<Output = T>) -> T {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
    tokio::task::LocalSet::new().block_on(&runtime, future)
}

fn quick() -> SimOptions {
    SimOptions { latency: Duration::from_millis(1)..=Duration::from_millis(1), ..SimOptions::default() }
}

fn sim(options: SimOptions) -> Sim {
    Sim::new(1, vec![vec![1; 16 * IO_ALIGN]], options)
}

fn filled(byte: u8, len: usize) -> Lent {
    shifted(byte, 0, len)
}

/// Memory that begins `shift` bytes into a page.
fn shifted(byte: u8, shift: usize, len: usize) -> Lent {
    let mut buf = AlignedBuf::zeroed(len.next_multiple_of(IO_ALIGN) + IO_ALIGN);
    buf.fill(byte);
    let start = NonNull::new(buf[shift..][..len].as_mut_ptr()).expect("in the buffer");
    // SAFETY: the range lies in the buffer, which is the owner and reached through nothing else.
    unsafe { Lent::new(start, len, None, Arc::new(buf)) }
}

async fn sync(sim: &Sim) -> io::Result<()> {
    sim.transfer(OpKind::Sync, FILE, 0, Lent::empty()).await
}

/// Polls once: the operation starts.
async fn start<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) {
    let mut future = future;
    poll_fn(|context| {
        assert!(future.as_mut().poll(context).is_pending(), "operations take time");
        Poll::Ready(())
    })
    .await;
}

/// What a run can be told by.
#[derive(PartialEq)]
struct Trace {
    digest: u64,
    log: Vec<LogEntry>,
    contents: Vec<u8>,
    crashes: [Vec<Vec<u8>>; 2],
}

/// A run with every fault.
fn busy_run(seed: u64) -> Trace {
    simulate(async {
        let rates = FaultRates {
            read_error: 0.1,
            write_error: 0.1,
            sync_error: 0.1,
            short: 0.2,
            bit_flip: 0.1,
            lost_write: 0.1,
            no_space: 0.1,
            misdirected_write: 0.1,
            stall: 0.0,
        };
        let sim = Sim::new(seed, vec![vec![0; 64 * IO_ALIGN]], SimOptions { rates, ..SimOptions::default() });
        let tasks = (0..64_u64).map(|block| {
            let sim = sim.clone();
            tokio::task::spawn_local(async move {
                let offset = block * IO_ALIGN as u64;
                let (_, buf) = sim.transfer_lent(OpKind::Write, FILE, offset, filled(block as u8, IO_ALIGN)).await;
                let _ = sync(&sim).await;
                let _ = sim.transfer_lent(OpKind::Read, FILE, offset, buf).await;
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.expect("no panic");
        }
        let counts = sim.counts();
        assert!(counts.faults > 20 && counts.failed.iter().all(|count| *count > 0), "{counts:?}");
        assert_eq!(counts.in_flight_max, 64);
        assert_eq!(counts.conflicts, 0);
        Trace {
            digest: sim.log_digest(),
            log: sim.log(),
            contents: sim.contents(FILE),
            crashes: [sim.crash(), sim.crash()],
        }
    })
}

#[test]
fn the_same_seed_gives_the_same_run() {
    assert!(busy_run(42) == busy_run(42));
    assert!(busy_run(42).digest != busy_run(43).digest);
}

#[test]
fn scripted_faults_hit_the_operation_they_name() {
    simulate(async {
        let sim = sim(quick());
        sim.script(OpKind::Write, 1, Fault::Error(libc::EIO));
        for nth in 0..3 {
            let (result, _) = sim.operate(OpKind::Write, FILE, 0, filled(nth, IO_ALIGN)).await;
            assert_eq!(result.err().and_then(|error| error.raw_os_error()), (nth == 1).then_some(libc::EIO));
        }
        sim.script_next(OpKind::Write, Fault::Lost);
        sim.operate(OpKind::Write, FILE, 0, filled(9, IO_ALIGN)).await.0.expect("it says");
        assert_eq!(sim.contents(FILE)[0], 2, "the write before it is still there");

        sim.script_next(OpKind::Read, Fault::BitFlip);
        let (result, buf) = sim.operate(OpKind::Read, FILE, 0, filled(0, IO_ALIGN)).await;
        assert_eq!(result.expect("it says"), IO_ALIGN);
        let wrong_bits: u32 = state::bytes_of(&buf).iter().map(|byte| (byte ^ 2).count_ones()).sum();
        assert_eq!(wrong_bits, 1);

        sim.script_next(OpKind::Write, Fault::Error(libc::ENOSPC));
        let (result, _) = sim.operate(OpKind::Write, FILE, 0, filled(9, IO_ALIGN)).await;
        assert_eq!(result.expect_err("full").raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(sim.contents(FILE)[0], 2);
        assert_eq!(sim.counts().faults, 4);
        let of_writes = sim.counts().faults_by_kind[OpKind::Write as usize];
        assert_eq!((of_writes[FaultKind::Lost as usize], of_writes[FaultKind::NoSpace as usize]), (1, 1));
    });
}

#[test]
fn a_misdirected_write_reports_success_and_lands_elsewhere_in_the_file() {
    simulate(async {
        let sim = Sim::new(7, vec![vec![0; 16 * IO_ALIGN]], quick());
        let mut places = std::collections::BTreeSet::new();
        for _ in 0..100 {
            sim.script_next(OpKind::Write, Fault::Misdirected);
            let (result, _) = sim.operate(OpKind::Write, FILE, 0, filled(9, IO_ALIGN)).await;
            assert_eq!(result.expect("it says"), IO_ALIGN);
            let contents = sim.contents(FILE);
            assert_eq!(contents.len(), 16 * IO_ALIGN, "the file does not grow");
            places.extend((0..16).filter(|place| contents[place * IO_ALIGN..][..IO_ALIGN] == [9; IO_ALIGN]));
        }
        assert_eq!(places.len(), 16, "any place will do");
    });
}

#[test]
fn operations_stall_by_chance_until_they_are_released() {
    simulate(async {
        let sim = sim(quick());
        sim.set_rates(FaultRates { stall: 1.0, ..FaultRates::default() });
        let write = tokio::task::spawn_local({
            let sim = sim.clone();
            async move { sim.operate(OpKind::Write, FILE, 0, filled(9, IO_ALIGN)).await.0 }
        });
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!((sim.stalled(), sim.in_flight(), write.is_finished()), (1, 1, false));
        assert_eq!(sim.release(), 1);
        assert_eq!(write.await.expect("no panic").expect("no fault but the delay"), IO_ALIGN);
        assert_eq!(sim.contents(FILE)[0], 9);
    });
}

#[test]
fn short_transfers_are_short_and_resumed() {
    simulate(async {
        let sim = sim(quick());
        sim.script(OpKind::Write, 0, Fault::Short(IO_ALIGN + 512));
        sim.script(OpKind::Read, 0, Fault::Short(2 * IO_ALIGN));
        let (result, buf) = sim.transfer_lent(OpKind::Write, FILE, 0, filled(7, 3 * IO_ALIGN)).await;
        result.expect("resumed");
        let (result, buf) = sim.transfer_lent(OpKind::Read, FILE, 0, buf).await;
        result.expect("resumed");
        assert!(state::bytes_of(&buf).iter().all(|byte| *byte == 7));
        assert_eq!(sim.counts().started, [2, 2, 0]);
        assert_eq!(sim.log()[2].offset, IO_ALIGN as u64, "from the last boundary");
    });
}

#[test]
fn a_transfer_of_memory_that_begins_within_a_page_is_resumed_at_a_boundary_of_the_file() {
    simulate(async {
        let sim = sim(SimOptions { memory_align_bytes: 64, ..quick() });
        sim.script(OpKind::Write, 0, Fault::Short(IO_ALIGN + 512));
        sim.script(OpKind::Read, 0, Fault::Short(512));
        let (result, _) = sim.transfer_lent(OpKind::Write, FILE, 0, shifted(7, 64, 3 * IO_ALIGN)).await;
        result.expect("resumed");
        assert!(sim.contents(FILE)[..3 * IO_ALIGN].iter().all(|byte| *byte == 7));
        let (result, buf) = sim.transfer_lent(OpKind::Read, FILE, 0, shifted(0, 192, 3 * IO_ALIGN)).await;
        result.expect("resumed");
        let buf = buf.into_owner().downcast::<AlignedBuf>().expect("lent by `shifted`");
        assert!(buf[192..][..3 * IO_ALIGN].iter().all(|byte| *byte == 7));
        assert!(buf[..192].iter().chain(&buf[192 + 3 * IO_ALIGN..]).all(|byte| *byte == 0), "and no byte more");
        assert_eq!(sim.counts().failed, [0, 0, 0]);
    });
}

#[test]
fn memory_has_a_rule_of_its_own() {
    simulate(async {
        let sim = sim(SimOptions { memory_align_bytes: 64, ..quick() });
        for (offset, shift, len, right) in
            [(0, 64, IO_ALIGN, true), (0, 32, IO_ALIGN, false), (64, 0, IO_ALIGN, false), (0, 0, IO_ALIGN + 64, false)]
        {
            let (read, _) = sim.operate(OpKind::Read, FILE, offset, shifted(0, shift, len)).await;
            let (wrote, _) = sim.operate(OpKind::Write, FILE, offset, shifted(0, shift, len)).await;
            assert_eq!((read.is_ok(), wrote.is_ok()), (right, right), "{len} bytes at {offset}, memory at {shift}");
        }
    });
}

#[test]
fn direct_io_must_be_aligned_and_files_have_a_limit() {
    simulate(async {
        let sim = sim(SimOptions { file_bytes_max: 16 * IO_ALIGN as u64, ..quick() });
        for (offset, skip) in [(512, 0), (0, 512)] {
            let (result, _) = sim.operate(OpKind::Read, FILE, offset, filled(0, IO_ALIGN).skip(skip)).await;
            assert_eq!(result.expect_err("unaligned").raw_os_error(), Some(libc::EINVAL));
        }
        let (result, _) = sim.operate(OpKind::Write, FILE, 16 * IO_ALIGN as u64, filled(0, IO_ALIGN)).await;
        assert_eq!(result.expect_err("past the limit").raw_os_error(), Some(libc::ENOSPC));
    });
}

#[test]
fn stalled_operations_wait_for_release() {
    simulate(async {
        let sim = sim(quick());
        sim.script_next(OpKind::Write, Fault::Stall);
        let mut stalled = pin!(sim.operate(OpKind::Write, FILE, 0, filled(5, IO_ALIGN)));
        start(stalled.as_mut()).await;
        // Virtual time passes, an hour of it.
        tokio::time::sleep(Duration::from_secs(3600)).await;
        start(stalled.as_mut()).await;
        assert_eq!((sim.in_flight(), sim.stalled(), sim.contents(FILE)[0]), (1, 1, 1));
        assert_eq!(sim.release(), 1);
        stalled.await.0.expect("written");
        assert_eq!((sim.in_flight(), sim.stalled(), sim.contents(FILE)[0]), (0, 0, 5));
    });
}

#[test]
fn memory_of_a_dropped_future_lives_until_the_operation_ends() {
    simulate(async {
        let sim = sim(quick());
        sim.script_next(OpKind::Write, Fault::Stall);
        let owner = std::sync::Arc::new(AlignedBuf::zeroed(IO_ALIGN));
        let ptr = std::ptr::NonNull::from(&owner[0]);
        // SAFETY: the owner keeps the memory, and nothing writes to it.
        let buf = unsafe { Lent::new(ptr, IO_ALIGN, None, owner.clone()) };
        {
            let mut dropped = pin!(sim.operate(OpKind::Write, FILE, 0, buf));
            start(dropped.as_mut()).await;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(std::sync::Arc::strong_count(&owner), 2);
        sim.release();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(std::sync::Arc::strong_count(&owner), 1);
        assert_eq!(sim.contents(FILE)[0], 0, "the write went through");
    });
}

#[test]
fn memory_under_a_read_is_garbage_until_it_is_done() {
    simulate(async {
        let sim = sim(quick());
        let buf = filled(3, IO_ALIGN);
        let ptr = buf.as_ptr();
        let mut read = pin!(sim.operate(OpKind::Read, FILE, 0, buf));
        start(read.as_mut()).await;
        // SAFETY: the read is held up by virtual time, and the memory lives in its future.
        assert_eq!(unsafe { ptr.read() }, 0xdb);
        let (result, buf) = read.await;
        assert_eq!(result.expect("read"), IO_ALIGN);
        assert_eq!(state::bytes_of(&buf)[0], 1);
    });
}

#[test]
fn a_crash_keeps_what_was_synced_and_tears_what_was_not() {
    simulate(async {
        let sim = sim(quick());
        sim.operate(OpKind::Write, FILE, 0, filled(2, IO_ALIGN)).await.0.expect("written");
        assert!(!sim.is_durable(FILE));
        sync(&sim).await.expect("synced");
        assert!(sim.is_durable(FILE));
        // A device that lies about a sync, and one that fails it, make nothing durable.
        sim.operate(OpKind::Write, FILE, IO_ALIGN as u64, filled(3, IO_ALIGN)).await.0.expect("written");
        sim.script_next(OpKind::Sync, Fault::Lost);
        sync(&sim).await.expect("it says");
        sim.script_next(OpKind::Sync, Fault::Error(libc::EIO));
        sync(&sim).await.expect_err("scripted");
        let mut in_flight = pin!(sim.operate(OpKind::Write, FILE, 2 * IO_ALIGN as u64, filled(4, IO_ALIGN)));
        start(in_flight.as_mut()).await;

        let mut mixed = [false; 2];
        for _ in 0..20 {
            let medium = &sim.crash()[0];
            assert_eq!(medium.len(), 16 * IO_ALIGN);
            assert!(medium[..IO_ALIGN].iter().all(|byte| *byte == 2), "synced");
            assert!(medium[3 * IO_ALIGN..].iter().all(|byte| *byte == 1), "never written");
            for (block, new) in [(1, 3), (2, 4)] {
                let bytes = &medium[block * IO_ALIGN..][..IO_ALIGN];
                assert!(bytes.iter().all(|byte| [1, new].contains(byte)));
                mixed[block - 1] |= bytes.contains(&1) && bytes.contains(&new);
            }
        }
        assert_eq!(mixed, [true; 2], "sectors are kept and lost one by one");
        in_flight.await.0.expect("the simulation goes on");
    });
}

#[test]
fn conflicting_operations_are_counted() {
    simulate(async {
        let sim = sim(quick());
        let mut reads = [
            pin!(sim.operate(OpKind::Read, FILE, 0, filled(0, IO_ALIGN))),
            pin!(sim.operate(OpKind::Read, FILE, 0, filled(0, IO_ALIGN))),
        ];
        for read in &mut reads {
            start(read.as_mut()).await;
        }
        assert_eq!(sim.counts().conflicts, 0, "two readers do no harm");
        let mut write = pin!(sim.operate(OpKind::Write, FILE, 0, filled(0, IO_ALIGN)));
        start(write.as_mut()).await;
        assert_eq!(sim.counts().conflicts, 1);
    });
}
