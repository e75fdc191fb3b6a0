//! Calls that are late: what ends at the deadline, and what waits for the service.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, mpsc},
    task::Poll,
    thread,
    time::Duration,
};

use kvhoist::{Error, Segment, ServiceFault, SharedMemory, block_on};
use kvhoist_service::{Client, ClientOptions};

use crate::{
    common::{key, payload},
    node::{BLOCK_BYTES, HANG, Node, Stopped, options},
    pool_client::PoolClient,
};

const DEADLINE: Duration = Duration::from_secs(2);

/// A client with a short deadline. Its block 0 is stored.
fn hasty(node: &Node, bounce_bytes: usize) -> PoolClient {
    let mut options = options();
    (options.deadline, options.bounce_bytes) = (HANG, bounce_bytes);
    let patient = PoolClient::of(block_on(Client::connect(&node.socket(), options.clone())).expect("a service"));
    assert!(patient.store(0, 1).expect("a service").remove(0).expect("stored"));
    options.deadline = DEADLINE;
    connect(node, &options)
}

/// A client whose calls have a short deadline. Attaching may take longer than that.
fn connect(node: &Node, options: &ClientOptions) -> PoolClient {
    loop {
        match block_on(Client::connect(&node.socket(), options.clone())).and_then(PoolClient::try_of) {
            Ok(pool_client) => return pool_client,
            Err(error) => assert!(is_late(&error) || is_away(&error) || is_abandoned(&error), "{error}"),
        }
    }
}

fn is_late(error: &Error) -> bool {
    matches!(error, Error::Service { fault: ServiceFault::Timeout, .. })
}

fn is_away(error: &Error) -> bool {
    matches!(error, Error::Service { fault: ServiceFault::Away, .. })
}

/// Polls a call once; whether it goes on.
async fn waits<F: Future>(call: &mut Pin<Box<F>>) -> bool {
    poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_pending())).await
}

/// Callers use their memory again when a call has ended. A slow service must not write to it then, or store what is
/// there then.
#[test]
fn a_late_call_ends_when_the_service_no_longer_uses_its_memory() {
    let node = Node::new();
    let pool_client = hasty(&node, 1 << 20);
    pool_client.pool.write(0, &vec![0xa5; BLOCK_BYTES]);
    pool_client.pool.write(BLOCK_BYTES, &payload(1, BLOCK_BYTES));
    let (load, store) = ([pool_client.place(0)], [pool_client.place(1)]);
    let stopped = Stopped::new(node.process.pid());
    let moved: [Result<Vec<Result<bool, Error>>, Error>; 2] = block_on(async {
        let keys = [key(0), key(1)];
        let mut load = Box::pin(pool_client.client.load_into(&keys[..1], &load));
        let mut store = Box::pin(pool_client.client.store_from(&keys[1..], None, &store));
        assert!(waits(&mut load).await && waits(&mut store).await);
        // Its deadline is later than theirs, and it has no memory.
        assert!(is_late(&pool_client.client.contains(&[key(0)]).await.expect_err("the service is stopped")));
        assert!(waits(&mut load).await && waits(&mut store).await, "the service has their memory");
        drop(stopped);
        [load.await, store.await]
    });
    let [loaded, stored] = moved.map(|results| results.expect("answered").remove(0));
    match loaded {
        Ok(found) => {
            let mut bytes = vec![0; BLOCK_BYTES];
            pool_client.pool.read(0, &mut bytes);
            assert!(found && bytes == payload(0, BLOCK_BYTES), "WRONG BYTES");
        }
        Err(error) => assert!(is_late(&error), "{error}"),
    }
    assert!(stored.unwrap_or_else(|error| is_late(&error)));
    // From now on it is the caller's: what the caller writes there stays, and is not stored.
    pool_client.pool.write(0, &vec![0x5a; 2 * BLOCK_BYTES]);
    let patient = PoolClient::new(&node.socket());
    if patient.load(1, 1).expect("a service") == [true] {
        let mut bytes = vec![0; BLOCK_BYTES];
        patient.pool.read(0, &mut bytes);
        assert!(bytes == payload(1, BLOCK_BYTES), "WRONG BYTES");
    }
    let mut bytes = vec![0; 2 * BLOCK_BYTES];
    pool_client.pool.read(0, &mut bytes);
    assert!(bytes == vec![0x5a; 2 * BLOCK_BYTES], "the service wrote after the call");
}

/// The slots of late calls are the service's until it replies; the next call waits for them until its deadline.
#[test]
fn a_call_waits_for_slots_to_copy_through_until_its_deadline() {
    let node = Node::new();
    let pool_client = hasty(&node, BLOCK_BYTES);
    let mut memory = vec![0; BLOCK_BYTES];
    let place = [vec![Segment { ptr: memory.as_mut_ptr(), len: BLOCK_BYTES }]];
    // SAFETY: it outlives the region, and nobody else uses it.
    let region = Arc::new(unsafe { pool_client.client.lend(&place[0]) }.expect("it is lent"));
    // The buffer is there from the first call on.
    while block_on(region.load_into(&[key(0)], &place)).is_err() {}
    let stopped = Stopped::new(node.process.pid());
    assert!(is_late(&block_on(region.load_into(&[key(0)], &place)).expect_err("the service is stopped")));
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| tell.send(block_on(region.load_into(&[key(0)], &place))).expect("wanted"));
        let second = told.recv_timeout(HANG);
        drop(stopped);
        assert!(is_late(&second.expect("it has a deadline").expect_err("no slot is free")));
    });
}

/// A service that hangs for good ends no call by itself, and may still use memory when it goes on.
#[test]
fn a_service_that_hangs_holds_up_no_call_and_is_given_its_memory() {
    let node = Node::new();
    let mut options = options();
    (options.deadline, options.give_up) = (DEADLINE, Some(Duration::from_millis(300)));
    let pool_client = connect(&node, &options);
    let stopped = Stopped::new(node.process.pid());
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (client, place) = (&pool_client.client, [pool_client.place(0)]);
            let keys = [key(0)];
            let calls = block_on(async {
                let load = client.load_into(&keys, &place).await.map(drop);
                let store = client.store_from(&keys, None, &place).await.map(drop);
                let more = std::sync::Arc::new(SharedMemory::new(4096)?);
                // SAFETY: nothing else uses it.
                let register = client.register(unsafe { kvhoist::Memory::shared(more) }).await.map(drop);
                let unregister = client.unregister(&pool_client.region).await;
                let close = client.close().await;
                Ok::<_, Error>([load, store, register, unregister, close])
            });
            tell.send(calls).expect("wanted");
        });
        let calls = told.recv_timeout(HANG);
        drop(stopped);
        let [load, store, register, unregister, close] = calls.expect("every call ends").expect("memory");
        for given_up in [load, unregister, close] {
            let error = given_up.expect_err("the service hangs");
            assert!(is_abandoned(&error) && error.to_string().contains("may still read and write"), "{error}");
        }
        let error = store.expect_err("the region is the service's");
        assert!(is_abandoned(&error) && error.to_string().contains("was given up"), "{error}");
        assert!(is_late(&register.expect_err("the service hangs")));
    });
}

fn is_abandoned(error: &Error) -> bool {
    matches!(error, Error::Service { fault: ServiceFault::Abandoned, .. })
}
