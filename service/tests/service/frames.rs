//! Frames that are announced and do not come.

use kvhoist_service::internals::protocol::{FRAME_BYTES_MAX, Header};

use crate::{node::Node, pool_client::PoolClient, raw::Raw};

fn header(body_bytes: usize) -> [u8; 16] {
    Header { body_bytes: body_bytes as u32, kind: 4, id: 9 }.encode()
}

#[test]
fn an_announced_frame_costs_the_service_nothing() {
    const CONNECTIONS: usize = 200;
    let node = Node::with("120000 1000");
    let pool_client = PoolClient::new(&node.socket());
    let before = node.held();
    let mut raws: Vec<Raw> = (0..CONNECTIONS).map(|_| Raw::attached(&node.socket())).collect();
    for raw in &mut raws {
        raw.send(&[&header(FRAME_BYTES_MAX)[..], &[0; 3]].concat());
    }
    // One that is served behind them.
    node.wait_for_clients(1 + CONNECTIONS);
    let own = node.held().own_bytes;
    let most = before.own_bytes + ((CONNECTIONS as u64 * 128) << 10);
    assert!(own < most, "{own} bytes with {CONNECTIONS} announcements, {} without", before.own_bytes);
    assert_eq!(pool_client.load(0, 1).expect("a service").len(), 1);
    drop(raws);
    node.wait_for_clients(1);
}

#[test]
fn a_client_without_a_space_announces_little() {
    let node = Node::new();
    let mut raw = Raw::greeted(&node.socket());
    raw.send(&header(FRAME_BYTES_MAX));
    let why = raw.goodbye();
    assert!(why.contains("attach first"), "{why}");
}

#[test]
fn bytes_of_incomplete_frames_have_a_limit_for_all_connections() {
    const CONNECTIONS: usize = 150;
    let node = Node::with("120000 1000");
    let before = node.held().own_bytes;
    let part = [&header(FRAME_BYTES_MAX)[..], &vec![0; FRAME_BYTES_MAX - 1]].concat();
    let mut raws: Vec<Raw> = (0..CONNECTIONS).map(|_| Raw::attached(&node.socket())).collect();
    raws.iter_mut().for_each(|raw| raw.send(&part));
    let why = raws[0].goodbye();
    assert!(why.starts_with("Busy: busy: long frames"), "{why}");
    let own = node.held().own_bytes - before;
    assert!(own < 160 << 20, "{own} bytes for incomplete frames of 300 MiB");
    // A frame that comes whole is served, however many do not.
    let mut raw = Raw::attached(&node.socket());
    let keys: Vec<_> = (0..4096).map(crate::common::key).collect();
    raw.ask(2, &kvhoist_service::internals::protocol::Request::Contains { keys });
}
