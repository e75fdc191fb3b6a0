//! The results of work and of tasks that may have panicked.

use tokio::task::JoinError;

use super::command::Reply;
use crate::{
    error::{Error, Result},
    shield::caught_future,
    state::verify::panicked,
    sync::Mutex,
};

/// The results of a call, one of each block, and who gets them.
pub(crate) struct CallResults(Mutex<Unanswered>);

struct Unanswered {
    results: Vec<Option<Result<bool>>>,
    /// Blocks without a result.
    left: usize,
    /// `None` once the call is answered.
    reply: Option<Reply>,
}

impl CallResults {
    pub(super) fn new(blocks: usize, reply: Reply) -> Self {
        let results = std::iter::repeat_with(|| None).take(blocks).collect();
        CallResults(Mutex::new(Unanswered { results, left: blocks, reply: Some(reply) }))
    }

    /// Notes results of blocks with their numbers. The last one answers the call.
    pub(super) fn settle(&self, results: impl IntoIterator<Item = (usize, Result<bool>)>) {
        let mut unanswered = self.0.lock();
        for (number, result) in results {
            let earlier = unanswered.results[number].replace(result);
            assert!(earlier.is_none(), "a block has one result");
            unanswered.left -= 1;
        }
        let reply = if unanswered.left == 0 { unanswered.reply.take() } else { None };
        let Some(reply) = reply else { return };
        let results = std::mem::take(&mut unanswered.results);
        drop(unanswered);
        reply(results.into_iter().map(|result| result.expect("none is left")).collect());
    }
}

/// The result of `work`, or the error of a panic: it calls subscribers of the log, which are users' code. Without an
/// answer its caller would take the cache for closed.
pub(super) async fn or_panicked<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    caught_future(work).await.unwrap_or_else(|| Err(panicked()))
}

/// The result of a task that may have panicked, or ended with the reactor.
pub(super) fn of_task<T>(ended: std::result::Result<Result<T>, JoinError>) -> Result<T> {
    ended.unwrap_or_else(|lost| match lost.try_into_panic() {
        Ok(payload) => {
            // Its drop may panic: it is users' code that has thrown it.
            std::mem::forget(payload);
            Err(panicked())
        }
        Err(_) => Err(Error::Closed),
    })
}
