//! Clients that ask for figures: little of the service's thread goes into them, and little memory.

use tokio::time::sleep;

use super::{
    super::requests::{FRAMES_PER_TURN, OUTBOX_BYTES_MAX},
    *,
};
use crate::state::Connection;

/// So many clients ask at a time.
const CLIENTS: usize = 60;
const ROWS: usize = 500;

/// Connections for a status of so many rows.
fn crowd(state: &Rc<ServiceState>, rows: usize) -> Vec<Rc<Connection>> {
    (0..rows).map(|_| state.enter(1, 1)).collect()
}

/// Asks so many times in one piece.
fn ask_for_status(ends: &Ends, times: u64) {
    ends.change(|stream| stream.to_service.extend((1..=times).flat_map(|id| Request::Status.encode(id))));
}

/// A client without a space asks again and again, and reads nothing.
async fn asks_and_does_not_read() {
    let state = state();
    let _crowd = crowd(&state, 4000);
    let client = come(&state);
    client.change(|stream| stream.takes = false);
    ask_for_status(&client, 8);
    // Until every task waits: the clock moves then only.
    sleep(Duration::from_secs(1)).await;
    let frame = Reply::Status(Box::new(state.status())).encode(1).len();
    assert!(frame > OUTBOX_BYTES_MAX / 4, "{frame} bytes a status");
    let made = state.status_frames.made() as usize;
    assert!(made * frame <= OUTBOX_BYTES_MAX + frame, "{made} frames were made for a client that reads none");
    client.change(|stream| stream.takes = true);
    client.replies(8).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_no_status_is_sent_no_more() {
    LocalSet::new().run_until(timeout(HANG, asks_and_does_not_read())).await.expect("no hang");
}

/// Many clients ask at once, and each gets its own id, and figures from after its request.
async fn ask_at_once() {
    let state = state();
    let _crowd = crowd(&state, ROWS);
    let clients: Vec<_> = (0..CLIENTS).map(|_| come(&state)).collect();
    while clients.iter().any(|client| client.lock().to_client.len() < Welcome::BYTES) {
        yield_now().await;
    }
    clients.iter().for_each(|client| ask_for_status(client, 1));
    state.cut_off.set(7);
    for client in &clients {
        client.replies(1).await;
        let to_client = &client.lock().to_client;
        let header = to_client[Welcome::BYTES..].first_chunk::<HEADER_BYTES>().expect("a header");
        assert_eq!(Header::decode(header).expect("a header").id, 1);
        let Some(Reply::Status(status)) = all_replies(to_client).pop() else { panic!("no status") };
        assert_eq!((status.cut_off, status.clients.len()), (7, ROWS + CLIENTS));
    }
    let made = state.status_frames.made();
    assert!(made <= 2, "{made} frames for {CLIENTS} clients that ask at a time");
}

#[tokio::test(start_paused = true)]
async fn clients_that_ask_at_a_time_share_a_status() {
    LocalSet::new().run_until(timeout(HANG, ask_at_once())).await.expect("no hang");
}

/// A client asks for the figures of its space again and again, and another is answered after one turn of it.
async fn asks_behind_figures() {
    let state = state();
    let (figures, client) = (attached(&state).await, come(&state));
    while client.lock().waker.is_none() {
        yield_now().await;
    }
    figures.change(|stream| stream.to_service.extend((2..130).flat_map(|id| Request::Stats.encode(id))));
    client.change(|stream| stream.to_service.extend(Request::Sync.encode(1)));
    client.replies(1).await;
    let before = replies(&figures.lock().to_client) - 1;
    assert!(before < FRAMES_PER_TURN, "{before} replies with figures came before another client's");
    figures.replies(129).await;
    state.spaces.close().await.expect("in memory only");
}

#[tokio::test]
async fn replies_with_figures_count_for_more_than_a_frame() {
    LocalSet::new().run_until(asks_behind_figures()).await;
}
