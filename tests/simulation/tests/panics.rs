//! A movement that panics: its waiters are answered, and the cache serves on and closes.

mod scene;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use kvhoist::{Error, WritePolicy, internals::io::OpKind};
use kvhoist_simulation::sim::{self, Fault};
use scene::*;
use tokio::time::timeout;
use tracing::{Event, Level, Metadata, Subscriber, span};

const PATIENCE: Duration = Duration::from_secs(600);

/// A log whose first warning cannot be written, as where standard error is a pipe that nobody reads.
#[derive(Default)]
struct ClosedPipe(AtomicBool);

impl Subscriber for ClosedPipe {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        assert!(self.0.swap(true, Ordering::Relaxed), "a warning cannot be written");
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// What a store, a fetch and a sync come to where the first warning panics, and the disk fails an operation of `kind`.
fn with_a_panic(write_policy: WritePolicy, kind: OpKind) -> [Result<(), Error>; 3] {
    sim::block_on(async {
        let (cache, reactor, disk) = open(config().write_policy(write_policy)).await;
        fill(&cache).await;
        let _log = tracing::subscriber::set_default(ClosedPipe::default());
        disk.script_next(kind, Fault::Error(5));
        let (stored, stored_after) = elapsed(store(&cache, 30)).await;
        let (fetched, fetched_after) = elapsed(fetch(&cache, 5)).await;
        assert!(stored_after < DEADLINE && fetched_after < DEADLINE, "told after {stored_after:?}, {fetched_after:?}");
        let synced = timeout(PATIENCE, cache.sync()).await.expect("a sync ends");
        // What the movement was at is whole.
        assert!(fetch(&cache, 30).await.expect("host memory serves it"), "stored and visible");
        let served = fetch(&cache, 5).await;
        assert!(served.is_ok(), "served, or a miss: {served:?}");
        timeout(PATIENCE, store(&cache, 30)).await.expect("a store ends").expect("the disk is sound again");
        timeout(PATIENCE, cache.sync()).await.expect("a sync ends").expect("the disk is sound again");
        reactor.settle(PATIENCE).await.expect("balanced");
        timeout(PATIENCE, cache.close()).await.expect("a close ends").expect("the disk is sound again");
        reactor.ended().await;
        [stored, fetched.map(|_| ()), synced]
    })
}

#[test]
fn who_waits_for_a_movement_that_panics_is_told() {
    let [stored, fetched, synced] = with_a_panic(WritePolicy::WriteThrough, OpKind::Write);
    assert!(matches!(&stored, Err(Error::Io { op: "move", .. })), "{stored:?}");
    assert!(fetched.is_ok() && synced.is_ok(), "only one movement panicked: {fetched:?}, {synced:?}");

    let [stored, fetched, synced] = with_a_panic(WritePolicy::WriteThrough, OpKind::Read);
    assert!(matches!(&fetched, Err(Error::Io { op: "move", .. })), "{fetched:?}");
    assert!(stored.is_ok() && synced.is_ok(), "only one movement panicked: {stored:?}, {synced:?}");
}

#[test]
fn a_write_back_that_panics_is_a_refusal() {
    let [stored, fetched, synced] = with_a_panic(WritePolicy::WriteBack, OpKind::Write);
    assert!(stored.is_ok() && fetched.is_ok(), "nobody waits for it: {stored:?}, {fetched:?}");
    assert!(matches!(&synced, Err(Error::Refused { .. })), "it is on no disk: {synced:?}");
}
