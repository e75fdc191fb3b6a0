//! What a client is told at the end of its connection.

use std::{rc::Rc, sync::Arc, time::Duration};

use tokio::time::timeout;

use crate::{
    link::Link,
    protocol::{Failure, Reply, Welcome},
    state::ServiceState,
    wire::Wire,
};

/// How long a client that is cut off has to read the reason.
const GOODBYE: Duration = Duration::from_millis(100);

/// Sends a connection the reason why it is refused. False, as of [`serve`](super::serve).
pub(crate) async fn refuse(state: Rc<ServiceState>, wire: Arc<dyn Wire>, failure: Failure) -> bool {
    let mut link = Link::new(wire);
    link.sender.push(refusal(&state, failure), None);
    tell(&mut link).await;
    link.hang_up();
    false
}

/// The answer to a client that is not admitted: a welcome with the fault, and a goodbye with the reason.
pub(super) fn refusal(state: &ServiceState, failure: Failure) -> Vec<u8> {
    let mut bytes = Welcome::new(Err(failure.fault), state.limits()).encode();
    bytes.extend(Reply::Goodbye(failure).encode(0));
    bytes
}

/// Sends the outbox, for at most [`GOODBYE`].
pub(super) async fn tell(link: &mut Link) {
    let sent = timeout(GOODBYE, async {
        while link.sender.flush().is_ok() && link.sender.bytes() > 0 {
            if link.ready(false).await.is_err() {
                break;
            }
        }
    });
    drop(sent.await);
}
