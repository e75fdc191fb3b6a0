//! Movements that meet another movement of the same key.

use kvhoist::{
    Error, Tier, WritePolicy,
    internals::{disk::format::DATA_ALIGN, io::OpKind},
};
use kvhoist_simulation::sim::{self, Event, Fault, LogEntry};

use crate::scene::*;

/// A block comes from the device, and is to be written to disk once it is in host memory. Meanwhile it is removed and
/// stored anew, and the new one is being written.
#[test]
fn a_write_that_is_to_follow_a_movement_joins_the_write_of_the_block_that_was_stored_anew() {
    sim::block_on(async {
        let config = config().device_blocks(1).write_policy(WritePolicy::WriteThroughSelective).selective_hits(3);
        let (cache, reactor, disk) = open_with(config.clone(), 200, 60).await;
        let to_device = async || drop(cache.fetch_to_device(&key(0)).await.expect("served").expect("resident"));
        store(&cache, 0).await.expect("stored");
        to_device().await;
        // Others take its slot in host memory.
        for n in 1..9 {
            store(&cache, n).await.expect("stored");
        }
        assert_eq!(cache.match_prefix(&[key(0)]), [Tier::Device]);
        let fetching = spawn(&cache, async |cache| fetch(&cache, 0).await);
        a_while().await;
        // The third use: it is to be written.
        to_device().await;
        let removal = spawn_remove(&cache, 0);
        a_while().await;
        store(&cache, 0).await.expect("stored anew");
        for _ in 0..3 {
            assert!(fetch(&cache, 0).await.expect("served"));
        }
        a_while().await;
        assert!(!fetching.is_finished() && disk.in_flight() > 0, "the copy is under way, and the new block's write");
        fetching.await.expect("no panic").expect("served");
        assert!(disk.in_flight() > 0, "the write goes on");
        assert!(removal.await.expect("no panic").expect("removed"));
        finish(cache, reactor).await;
        let is_payload = |entry: &&LogEntry| entry.event == Event::Started && entry.offset >= DATA_ALIGN;
        assert_eq!(disk.log().iter().filter(is_payload).count(), 1, "it is written once");
        let (later, end, _) = open_killed(config, &disk).await;
        assert!(fetch(&later, 0).await.expect("served"), "the new block is on disk");
        finish(later, end).await;
    });
}

#[test]
fn a_block_stored_while_its_computation_failed_is_not_computed_by_the_next_caller() {
    sim::block_on(async {
        let (cache, reactor, _) = open(config()).await;
        let failing = spawn(&cache, async |cache| {
            let compute = async || -> Result<Vec<u8>, Error> {
                a_while().await;
                Err(Error::Closed)
            };
            cache.get_or_fetch_with(&key(0), None, compute).await
        });
        tokio::task::yield_now().await;
        let waiting = spawn(&cache, async |cache| {
            let compute = async || -> Result<Vec<u8>, Error> { panic!("the block is in the cache") };
            cache.get_or_fetch_with(&key(0), None, compute).await
        });
        tokio::task::yield_now().await;
        store(&cache, 0).await.expect("stored");
        assert!(!failing.is_finished() && !waiting.is_finished(), "one computes, and the other waits for that");
        assert!(matches!(failing.await.expect("no panic"), Err(Error::Closed)), "what its computation returned");
        assert_eq!(waiting.await.expect("it computes nothing").expect("found"), payload(0));
        finish(cache, reactor).await;
    });
}

/// The read in flight is one of a block that was removed: its end says nothing of the block that was stored anew.
#[test]
fn a_fetch_that_joins_the_read_of_a_removed_block_finds_the_one_that_was_stored_anew() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        disk.script_next(OpKind::Read, Fault::Stall);
        let first = spawn(&cache, async |cache| fetch(&cache, 0).await);
        a_while().await;
        assert_eq!(disk.stalled(), 1, "the block is being read");
        assert!(cache.remove(&key(0)).await.expect("removed"), "it was there");
        store(&cache, 0).await.expect("stored anew");
        for n in 20..24 {
            store(&cache, n).await.expect("others take its slot in host memory");
        }
        assert_eq!(cache.match_prefix(&[key(0)]), [Tier::Disk]);
        let second = spawn(&cache, async |cache| fetch(&cache, 0).await);
        a_while().await;
        assert_eq!((disk.in_flight(), second.is_finished()), (1, false), "it waits for the read that is in flight");
        // The other one is alone with what was read.
        first.abort();
        a_while().await;
        disk.release();
        assert!(second.await.expect("no panic").expect("served"), "it is on disk");
        finish(cache, reactor).await;
    });
}

#[test]
fn a_block_that_was_stored_anew_while_the_removed_one_was_read_is_not_computed() {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config()).await;
        fill(&cache).await;
        disk.script_next(OpKind::Read, Fault::Stall);
        let asking = spawn(&cache, async |cache| {
            let compute = async || -> Result<Vec<u8>, Error> { panic!("the block is in the cache") };
            cache.get_or_fetch_with(&key(0), None, compute).await
        });
        a_while().await;
        assert_eq!(disk.stalled(), 1, "the block is being read");
        assert!(cache.remove(&key(0)).await.expect("removed"), "it was there");
        store(&cache, 0).await.expect("stored anew");
        disk.release();
        assert_eq!(asking.await.expect("it computes nothing").expect("found"), payload(0));
        finish(cache, reactor).await;
    });
}
