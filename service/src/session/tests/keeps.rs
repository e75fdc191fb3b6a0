//! Chains that clients keep: however long they are, others are served.

use kvhoist::Tier;

use super::*;
use crate::spaces::Wanted;

/// Blocks of the chain.
const BLOCKS: u64 = 2048;
/// Requests to keep it, each for longer than the one before, so that each goes through the whole chain.
const KEEPS: u64 = 64;

/// A client has a long chain kept again and again, and asks something else behind each of these requests; so does
/// another client.
async fn ask_behind_keeps() {
    let state = state();
    let (keeps, client) = (attached_with(&state, 12 << 20).await, attached(&state).await);
    let space = state.spaces.attach(Wanted::of_tests(4096)).await.expect("the same one");
    for at in 0..BLOCKS {
        let parent = at.checked_sub(1).map(key);
        space.cache.store(&key(at), parent.as_ref(), &[7; 4096]).await.expect("stored");
    }
    let look_up = Request::MatchLen { keys: vec![key(0)] };
    let frames = (1..=KEEPS).flat_map(|n| {
        let keep = Request::Keep { ms: 3_600_000 * n, keys: vec![key(BLOCKS - 1)] };
        [keep.encode(2 * n), look_up.encode(2 * n + 1)].concat()
    });
    keeps.change(|stream| stream.to_service.extend(frames));
    client.change(|stream| stream.to_service.extend(look_up.encode(2)));
    client.replies(2).await;
    assert!(replies(&keeps.lock().to_client) <= 1 + KEEPS as usize, "a turn is of 32 frames");
    keeps.replies(1 + 2 * KEEPS as usize).await;
    let answered = replies_with_ids(&keeps.lock().to_client);
    assert!(answered[1..].iter().all(|(_, reply)| *reply == Reply::Count(1)), "{answered:?}");
    let first = answered[1..].iter().position(|(id, _)| id % 2 == 0).expect("answered");
    assert_eq!(first, KEEPS as usize, "look-ups that were answered before the long chain was kept once");
    assert_eq!(space.cache.stats().tier(Tier::Host).kept, BLOCKS);
    drop(space);
    state.spaces.close().await.expect("in memory only");
}

#[tokio::test]
async fn requests_do_not_wait_for_long_chains_to_be_kept() {
    LocalSet::new().run_until(ask_behind_keeps()).await;
}
