//! Spaces whose cache ends by a defect, and their clients.

use super::*;
use crate::spaces::Wanted;

/// The last reply of a connection once the service has hung up.
async fn end_of(ends: &Ends) -> Reply {
    timeout(Duration::from_secs(60), async {
        while !ends.lock().over {
            yield_now().await;
        }
    })
    .await
    .expect("it hangs up");
    all_replies(&ends.lock().to_client).pop().expect("a goodbye")
}

#[tokio::test]
async fn all_clients_of_a_cache_that_has_ended_are_cut_off_and_come_back() {
    let run = async {
        let state = state();
        let clients = [attached(&state).await, attached(&state).await];
        let space = state.spaces.attach(Wanted::of_tests(4096)).await.expect("the same one");
        space.cache.close().await.expect("in memory only");
        drop(space);
        for ends in &clients {
            let Reply::Goodbye(failure) = end_of(ends).await else { panic!("expected a goodbye") };
            assert!(failure.text.contains("ended by a defect"), "{}", failure.text);
        }
        let replies = all_replies(&attached(&state).await.lock().to_client);
        assert!(matches!(replies[..], [Reply::Attached { .. }]), "the space is opened anew: {replies:?}");
    };
    LocalSet::new().run_until(run).await;
}

/// A look into the cache is a panic then, on the session's own task.
#[cfg(feature = "sim")]
#[tokio::test]
async fn a_panic_in_a_sessions_own_task_ends_it_as_any_other_end_does() {
    let run = async {
        let state = state();
        let client = attached(&state).await;
        kvhoist::internals::seams::panic_under_lock(1);
        let keys = vec![BlockKey::new([1; 32])];
        client.change(|stream| stream.to_service.extend(Request::MatchLen { keys }.encode(2)));
        let Reply::Goodbye(failure) = end_of(&client).await else { panic!("expected a goodbye") };
        assert_eq!(failure.text, "the service failed in the middle of a request");
        assert_eq!(state.connections(), 0);
    };
    LocalSet::new().run_until(run).await;
}

/// The panic is on the service's thread: nothing of the reactor that the other client waits for finds out by itself.
#[cfg(feature = "sim")]
#[tokio::test]
async fn a_client_without_requests_is_cut_off_when_another_ones_request_ends_the_cache() {
    let run = async {
        let state = state();
        let clients = [attached(&state).await, attached(&state).await];
        kvhoist::internals::seams::panic_under_lock(1);
        let keys = vec![BlockKey::new([1; 32])];
        clients[0].change(|stream| stream.to_service.extend(Request::MatchLen { keys }.encode(2)));
        for ends in &clients {
            assert!(matches!(end_of(ends).await, Reply::Goodbye(_)));
        }
        let replies = all_replies(&attached(&state).await.lock().to_client);
        assert!(matches!(replies[..], [Reply::Attached { .. }]), "the space is opened anew: {replies:?}");
    };
    LocalSet::new().run_until(run).await;
}
