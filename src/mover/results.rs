//! The results of calls, and of what was tried in turn.

use super::command::Reply;
use crate::{
    error::{Error, Result},
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

/// Of two results of what was tried in turn, the one to go by: a deadline, or the end of the cache, before an error of
/// the disk, and else the first error.
pub(super) fn worse_of(first: Result<()>, second: Result<()>) -> Result<()> {
    match (&first, &second) {
        (Ok(()), _) => second,
        (Err(_), Err(Error::Timeout { .. } | Error::Closed)) if is_of_part(&first) => second,
        _ => first,
    }
}

/// Whether it is an error of a part of the disk, which says nothing of the others.
pub(super) fn is_of_part(result: &Result<()>) -> bool {
    matches!(result, Err(Error::Io { .. }))
}
