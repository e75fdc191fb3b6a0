//! Clients that pin blocks.

use super::{super::pins::UNPINNED_PER_TURN, *};
use crate::spaces::{Space, Wanted};

const BLOCKS: u64 = 1000;

/// A space with blocks; how many of them may be pinned.
async fn stored(state: &ServiceState) -> (Rc<Space>, usize) {
    let wanted = Wanted { host_bytes: 16 << 20, ..Wanted::of_tests(4096) };
    let space = state.spaces.attach(wanted).await.expect("opened");
    for number in 0..BLOCKS {
        space.cache.store(&key(number), None, &[7; 4096]).await.expect("stored");
    }
    let most = space.room_for_pins();
    assert!(most >= BLOCKS as usize, "{most} pins");
    (space, most)
}

/// A client hangs up with many blocks pinned.
async fn hangs_up_with_pins() {
    let state = state();
    let (space, most) = stored(&state).await;
    let client = attached(&state).await;
    // Each block once.
    let keys: Vec<BlockKey> = (0..BLOCKS).chain(0..BLOCKS).map(key).collect();
    client.change(|stream| stream.to_service.extend(Request::Pin { most: u32::MAX, keys }.encode(2)));
    client.replies(2).await;
    assert_eq!(all_replies(&client.lock().to_client)[1], Reply::Count(BLOCKS as u32));
    client.change(|stream| stream.hung_up = true);
    let mut pinned = BLOCKS as usize;
    while pinned > 0 {
        yield_now().await;
        let left = most - space.room_for_pins();
        assert!(pinned - left <= UNPINNED_PER_TURN, "{pinned} pins, then {left}");
        pinned = left;
    }
    while !client.lock().over {
        yield_now().await;
    }
    assert_eq!(space.room_for_pins(), most);
    drop(space);
    state.spaces.close().await.expect("in memory only");
}

/// A client pins blocks in many requests, and lets go of all in one piece.
async fn lets_go_of_pins() {
    const REQUESTS: u64 = 16;
    let state = state();
    let (space, most) = stored(&state).await;
    let client = attached(&state).await;
    let of_request = |n: u64| (n * BLOCKS / REQUESTS..(n + 1) * BLOCKS / REQUESTS).map(key).collect();
    let pins = (0..REQUESTS).flat_map(|n| Request::Pin { most: u32::MAX, keys: of_request(n) }.encode(n + 2));
    client.change(|stream| stream.to_service.extend(pins));
    client.replies(1 + REQUESTS as usize).await;
    assert_eq!(space.room_for_pins(), most - BLOCKS as usize);
    let let_go = (0..REQUESTS).flat_map(|n| Request::LetGo { hold: n + 2 }.encode(0));
    client.change(|stream| stream.to_service.extend(let_go));
    let mut pinned = BLOCKS as usize;
    while pinned > 0 {
        yield_now().await;
        let left = most - space.room_for_pins();
        assert!(pinned - left < UNPINNED_PER_TURN + (BLOCKS / REQUESTS) as usize + 1, "{pinned} pins, then {left}");
        pinned = left;
    }
    drop(space);
    state.spaces.close().await.expect("in memory only");
}

#[tokio::test]
async fn pins_that_a_client_lets_go_of_count_for_its_turn() {
    LocalSet::new().run_until(timeout(HANG, lets_go_of_pins())).await.expect("no hang");
}

#[tokio::test]
async fn the_pins_of_a_client_that_has_gone_end_turn_by_turn() {
    LocalSet::new().run_until(timeout(HANG, hangs_up_with_pins())).await.expect("no hang");
}
