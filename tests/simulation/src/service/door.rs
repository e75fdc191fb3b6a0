//! Where clients reach the service.

use std::{cell::RefCell, collections::VecDeque, io};

use kvhoist_service::internals::seams::Caller;
use tokio::sync::Notify;

/// Connections that wait to be accepted.
#[derive(Default)]
pub struct Door {
    waiting: RefCell<VecDeque<Caller>>,
    knocked: Notify,
}

impl Door {
    /// A connection waits to be accepted.
    pub fn knock(&self, caller: Caller) {
        self.waiting.borrow_mut().push_back(caller);
        self.knocked.notify_one();
    }

    pub async fn accept(&self) -> io::Result<Caller> {
        loop {
            if let Some(caller) = self.waiting.borrow_mut().pop_front() {
                return Ok(caller);
            }
            self.knocked.notified().await;
        }
    }
}
