//! What the records on the medium say when the process ends at the worst instant.

use kvhoist::{
    Cache, Config, DiskPath, Error,
    internals::{
        disk::{
            PageId,
            format::{
                PAGE_BYTES, RECORD_BYTES, SUPERBLOCK_OFFSETS, TABLE_OFFSET,
                stripe::Stripe,
                superblock::{StoreState, Superblock},
            },
        },
        io::{FileId, OpKind},
    },
};
use kvhoist_simulation::sim::{self, Fault, FaultRates, Reactor, Sim, Simulated, World};

use crate::scene::*;

/// The number of the write that begins after so many more.
fn write_after(disk: &Sim, more: u64) -> u64 {
    disk.counts().started[OpKind::Write as usize] + more
}

#[test]
fn a_removal_waits_for_an_image_of_its_page_that_was_made_after_it() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        // The payload of block 1 is written; the image with its record still has block 0.
        disk.script(OpKind::Write, write_after(&disk, 1), Fault::Stall);
        let storing = spawn(&cache, async |cache| store(&cache, 1).await);
        a_while().await;
        assert_eq!(disk.stalled(), 1, "the image is being written");
        let removal = spawn_remove(&cache, 0);
        a_while().await;
        disk.script(OpKind::Write, write_after(&disk, 0), Fault::Stall);
        assert_eq!(disk.release(), 1);
        storing.await.expect("no panic").expect("stored");
        a_while().await;
        assert!(!removal.is_finished(), "the medium has block 0 until another image is written");
        assert_eq!(disk.stalled(), 1, "that image is being written");
        disk.release();
        assert!(removal.await.expect("no panic").expect("removed"));
        let (later, end, _) = open_killed(config(), &disk).await;
        assert!(!fetch(&later, 0).await.expect("served"), "its removal had returned before the kill");
        assert!(fetch(&later, 1).await.expect("served"));
        finish(later, end).await;
        finish(cache, reactor).await;
    });
}

/// A block's slot is given to another one, whose record is not written; the block is stored anew, in a slot whose
/// record is on the other page. Before the kill `evicted` blocks were evicted: which page has the older record.
async fn killed_with_two_records(evicted: u8) -> (Cache, Reactor, Sim, Config) {
    // Two pages of records; the blocks alternate between them.
    let config = config().disks(vec![DiskPath::with_blocks("simulated", 33)]);
    let (cache, reactor, disk) = open(config.clone()).await;
    for n in 0..33 + evicted {
        store(&cache, n).await.expect("a sound disk");
    }
    disk.script(OpKind::Write, write_after(&disk, 1), Fault::Stall);
    let storing = spawn(&cache, async move |cache| store(&cache, 33 + evicted).await);
    a_while().await;
    assert_eq!((disk.stalled(), cache.contains(&key(evicted))), (1, false));
    store(&cache, evicted).await.expect("stored anew");
    let (later, end, medium) = open_killed(config.clone(), &disk).await;
    disk.release();
    storing.await.expect("no panic").expect("stored");
    finish(cache, reactor).await;
    (later, end, medium, config)
}

#[test]
fn of_two_records_of_a_block_the_later_one_counts() {
    sim::block_on(async {
        for evicted in [0, 1] {
            let (cache, reactor, ..) = killed_with_two_records(evicted).await;
            assert!(fetch(&cache, evicted).await.expect("served"), "the older record names another block's slot");
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn a_removal_clears_every_record_of_its_block() {
    sim::block_on(async {
        for evicted in [0, 1] {
            let (cache, reactor, disk, config) = killed_with_two_records(evicted).await;
            assert!(cache.remove(&key(evicted)).await.expect("removed"));
            let (later, end, _) = open_killed(config, &disk).await;
            assert!(!later.contains(&key(evicted)), "its removal had returned before the kill");
            finish(later, end).await;
            finish(cache, reactor).await;
        }
    });
}

#[test]
fn a_block_whose_record_was_read_wrong_is_not_back_after_its_removal() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        finish(cache, reactor).await;
        let (file, in_key) = (FileId(0), TABLE_OFFSET as usize + 40);
        disk.flip(file, in_key, 1);
        let (cache, reactor, disk) = open_killed(config(), &disk).await;
        assert_eq!((cache.stats().records_bad, cache.len()), (1, 0));
        assert!(!cache.remove(&key(0)).await.expect("removed"), "nobody knows of the block");
        disk.flip(file, in_key, 1);
        let (later, end, _) = open_killed(config(), &disk).await;
        assert!(!later.contains(&key(0)), "its removal had returned before the kill");
        finish(later, end).await;
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_whose_record_could_not_be_read_is_not_back_after_its_removal() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        finish(cache, reactor).await;
        let world = World::new(2, vec![disk.contents(FileId(0))]);
        // Read 0 is the superblocks, 1 the whole table, 2 its only page.
        world.storage.script(OpKind::Read, 1, Fault::Error(libc::EIO));
        world.storage.script(OpKind::Read, 2, Fault::Error(libc::EIO));
        let Simulated { cache, reactor } = sim::open(config(), &world).await.expect("a page may be unreadable");
        assert_eq!((cache.stats().records_bad, cache.len()), (16, 0), "its page could not be read");
        assert!(!cache.remove(&key(0)).await.expect("removed"), "nobody knows of the block");
        let (later, end, _) = open_killed(config(), &world.storage).await;
        assert!(!fetch(&later, 0).await.expect("served"), "its removal had returned before the kill");
        finish(later, end).await;
        finish(cache, reactor).await;
    });
}

#[test]
fn a_sync_writes_a_page_whose_write_failed_during_a_removal() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        cache.sync().await.expect("flushed");
        disk.script_next(OpKind::Write, Fault::Error(libc::EIO));
        cache.remove(&key(0)).await.expect_err("its record could not be cleared");
        assert!(!fetch(&cache, 0).await.expect("served"), "it is forgotten all the same");
        cache.sync().await.expect("the page is written, and flushed");
        assert_eq!(found_after_power_cuts(&config(), &disk, 0).await, 0);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_sync_waits_for_the_page_of_a_removal_that_is_being_written() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        disk.script_next(OpKind::Write, Fault::Stall);
        let removal = spawn_remove(&cache, 0);
        a_while().await;
        assert_eq!(disk.stalled(), 1, "the page without the block is being written");
        let syncing = spawn(&cache, async |cache| cache.sync().await);
        a_while().await;
        assert!(!syncing.is_finished(), "a flush before the end of that write would not cover it");
        disk.release();
        removal.await.expect("no panic").expect("removed");
        syncing.await.expect("no panic").expect("flushed");
        assert_eq!(found_after_power_cuts(&config(), &disk, 0).await, 0);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_removal_of_what_no_record_names_writes_nothing() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        assert!(cache.remove(&key(0)).await.expect("removed"));
        let writes = write_after(&disk, 0);
        assert!(!cache.remove(&key(0)).await.expect("removed before"));
        assert_eq!(write_after(&disk, 0), writes, "its page has been written since");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_clear_says_that_a_record_could_not_be_cleared_and_forgets_the_blocks_all_the_same() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        disk.script_next(OpKind::Write, Fault::Error(libc::EIO));
        cache.clear().await.expect_err("a page of records could not be written");
        assert_eq!(cache.keys().count(), 0);
        cache.sync().await.expect("the page is written, and flushed");
        assert_eq!(found_after_power_cuts(&config(), &disk, 0).await, 0);
        finish(cache, reactor).await;
    });
}

#[test]
fn a_page_that_cannot_be_written_keeps_no_other_from_being_written_and_flushed() {
    sim::block_on(async {
        // More pages than are written at once, one of each path.
        let paths = (0..40).map(|n| DiskPath::with_blocks(format!("simulated{n}"), 1)).collect();
        let config = config().disks(paths);
        let (cache, reactor, disk) = open(config.clone()).await;
        for n in 0..40 {
            store(&cache, n).await.expect("a sound disk");
        }
        let (bad, offset) = Stripe::new(&config).page_location(PageId(0));
        disk.break_place(OpKind::Write, bad, offset..offset + 512);
        cache.clear().await.expect_err("a page of records cannot be written");
        let files = || (0..40).map(FileId).filter(|&file| file != bad);
        for file in files() {
            let contents = disk.contents(file);
            let records = &contents[TABLE_OFFSET as usize..][..RECORD_BYTES];
            assert!(records.iter().all(|&byte| byte == 0), "{file:?} has a record of a removed block");
            assert!(!disk.is_durable(file), "a clear flushes nothing");
        }
        let synced = cache.sync().await;
        assert!(matches!(&synced, Err(Error::Io { op: "write", .. })), "{synced:?}");
        assert!(files().all(|file| disk.is_durable(file)), "all files are flushed");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_disk_that_hangs_is_waited_for_once_also_behind_a_page_that_cannot_be_written() {
    sim::block_on(async {
        let paths = (0..64).map(|n| DiskPath::with_blocks(format!("simulated{n}"), 1)).collect();
        let config = config().disks(paths);
        let (cache, reactor, disk) = open(config.clone()).await;
        for n in 0..64 {
            store(&cache, n).await.expect("a sound disk");
        }
        let (bad, offset) = Stripe::new(&config).page_location(PageId(0));
        disk.break_place(OpKind::Write, bad, offset..offset + 512);
        disk.set_rates(FaultRates { stall: 1.0, ..FaultRates::default() });
        let (cleared, took) = elapsed(cache.clear()).await;
        assert!(matches!(&cleared, Err(Error::Timeout { .. })), "{cleared:?}");
        assert!(took < DEADLINE * 3 / 2, "{took:?} for two batches of pages");
        disk.set_rates(FaultRates::default());
        disk.release();
        finish(cache, reactor).await;
    });
}

#[test]
fn a_superblock_that_cannot_be_read_is_rewritten_from_the_other() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        finish(cache, reactor).await;
        let (file, sound) = (FileId(0), disk.contents(FileId(0)));
        for copy in 0..2 {
            let broken = |contents: Vec<u8>| with_bad_superblock(&[contents], file, copy, &[OpKind::Read]);
            let world = broken(sound.clone());
            let Simulated { cache, reactor } = sim::open(config(), &world).await.expect("one copy is sound");
            assert!(fetch(&cache, 0).await.expect("served"));
            finish(cache, reactor).await;
            let log = world.storage.log();
            let first = log.iter().find(|entry| entry.kind == OpKind::Write).expect("the unreadable copy is written");
            assert_eq!((first.offset, first.len), (SUPERBLOCK_OFFSETS[copy], PAGE_BYTES));
            // Where the other one is none either, nobody knows what is there.
            let mut zeroed = sound.clone();
            zeroed[(1 - copy) * PAGE_BYTES..][..PAGE_BYTES].fill(0);
            let world = broken(zeroed);
            let error = sim::open(config(), &world).await.map(drop).expect_err("no copy is sound").to_string();
            assert!(error.starts_with("read the superblocks of"), "{error}");
            assert_eq!(world.storage.counts().started[OpKind::Write as usize], 0);
        }
        let world = World::new(2, vec![sound]);
        world.storage.script(OpKind::Read, 0, Fault::Error(libc::EIO));
        world.storage.script(OpKind::Read, 1, Fault::Error(libc::ENOMEM));
        sim::open(config(), &world).await.map(drop).expect_err("a shortage says nothing of a copy");
        assert_eq!(world.storage.counts().started[OpKind::Write as usize], 0);
    });
}

const BOTH: [OpKind; 2] = [OpKind::Read, OpKind::Write];

/// A world over these files, in which operations of these kinds on one superblock fail.
fn with_bad_superblock(files: &[Vec<u8>], file: FileId, copy: usize, kinds: &[OpKind]) -> World {
    let world = World::new(2, files.to_vec());
    let start = SUPERBLOCK_OFFSETS[copy];
    kinds.iter().for_each(|&kind| world.storage.break_place(kind, file, start..start + PAGE_BYTES as u64));
    world
}

#[test]
fn a_store_opens_while_one_superblock_can_be_neither_read_nor_written() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        store(&cache, 0).await.expect("stored");
        finish(cache, reactor).await;
        let (file, mut files) = (FileId(0), vec![disk.contents(FileId(0))]);
        for copy in [0, 1, 1, 0] {
            let world = with_bad_superblock(&files, file, copy, &BOTH);
            let Simulated { cache, reactor } = sim::open(config(), &world).await.expect("the other copy is whole");
            assert!(fetch(&cache, 0).await.expect("served"));
            store(&cache, 1 + copy as u8).await.expect("stored");
            cache.close().await.expect("records and blocks are written");
            reactor.ended().await;
            files = vec![world.storage.contents(file)];
        }
        for (kind, errno) in [(OpKind::Write, libc::ENOMEM), (OpKind::Sync, libc::EIO)] {
            let world = with_bad_superblock(&files, file, 0, &[OpKind::Read]);
            world.storage.script(kind, 0, Fault::Error(errno));
            sim::open(config(), &world).await.map(drop).expect_err("that says nothing of the copy");
        }
    });
}

#[test]
fn a_superblock_that_is_not_whole_is_not_written_over_while_the_other_cannot_be_written() {
    sim::block_on(async {
        let disks = ["a", "b"].map(|path| DiskPath::with_blocks(path, 4));
        let config = config().disks(disks.into());
        let (cache, reactor, disk) = open(config.clone()).await;
        finish(cache, reactor).await;
        let mut files = [FileId(0), FileId(1)].map(|file| disk.contents(file));
        // A creation that has not come to the last step.
        let page: &mut [u8; PAGE_BYTES] = files[1].first_chunk_mut().expect("a superblock");
        let sound = Superblock::decode(page).expect("sound");
        *page = Superblock { state: StoreState::Forming, sequence: 1, ..sound }.encode();
        let world = with_bad_superblock(&files, FileId(1), 1, &BOTH);
        let error = sim::open(config, &world).await.map(drop).expect_err("it is not whole").to_string();
        assert!(error.starts_with("write the superblocks and record table of b"), "{error}");
        assert!(world.storage.contents(FileId(1))[..PAGE_BYTES] == files[1][..PAGE_BYTES], "it is as it was");
    });
}

/// A cache with three pages of records, all of which are out of date; the disk does not write the first `bad` of them.
async fn open_with_bad_pages(bad: u32) -> (Cache, Reactor, Sim) {
    let config = config().disks(vec![DiskPath::with_blocks("simulated", 96)]);
    let (cache, reactor, disk) = open(config.clone()).await;
    for n in 0..96 {
        store(&cache, n).await.expect("a sound disk");
    }
    for page in 0..bad {
        let (file, offset) = Stripe::new(&config).page_location(PageId(page));
        disk.break_place(OpKind::Write, file, offset..offset + 512);
    }
    cache.clear().await.expect_err("a page of records cannot be written");
    (cache, reactor, disk)
}

#[test]
fn one_page_that_cannot_be_written_makes_no_idle_disk_read_only() {
    sim::block_on(async {
        let (cache, reactor, disk) = open_with_bad_pages(1).await;
        let writes = disk.counts().started[OpKind::Write as usize];
        for _ in 0..8 {
            cache.sync().await.expect_err("the page cannot be written");
        }
        assert!(disk.counts().started[OpKind::Write as usize] >= writes + 8, "each sync tries");
        assert_eq!(cache.stats().disk_read_only, None, "the limit is {}", config().disk.failures_max);
        finish(cache, reactor).await;

        let (cache, reactor, _disk) = open_with_bad_pages(3).await;
        let reason = cache.stats().disk_read_only.expect("as many pages as the limit cannot be written");
        assert!(reason.starts_with("3 writes of simulated failed in a row"), "{reason}");
        finish(cache, reactor).await;
    });
}
