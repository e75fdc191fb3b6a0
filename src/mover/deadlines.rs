//! Deadlines. A movement takes as long as the disk takes, and holds its slots until then; its waiters do not wait that
//! long. When it has been in flight for longer than [`Config::deadline_ms`](crate::Config::deadline_ms), its waiters
//! get an error, and so does, at once, every later caller for the same block until it ends. Calls that move blocks
//! between disk and their own memory get an error if they wait for bytes in flight while none were given for as long;
//! those that load by way of host memory, if they wait as long in all, a quarter more. Who waits as long for the remote
//! tier has a miss.

use std::{collections::VecDeque, future::Future, rc::Rc, sync::atomic::Ordering};

use tokio::time::{sleep, timeout};

use super::{Command, Mover, busy_poll::expected};
use crate::{
    device::CopyEngine,
    error::{Error, Result},
    io::Storage,
    state::LOOKS_PER_DEADLINE,
};

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Watches the clock while a movement is in flight or a request waits for a slot; sleeps otherwise.
    ///
    /// No other part of a movement, and no caller, reads a clock for this: what was begun before one look and is not
    /// done [`LOOKS_PER_DEADLINE`] looks later is overdue.
    pub(super) async fn deadline_loop(self: Rc<Self>) {
        loop {
            self.shared.watch.notified().await;
            let mut begun = VecDeque::new();
            loop {
                let queued = (self.shared.commands.in_use().0 > 0).then(|| self.taken.get());
                begun.push_back((self.shared.begun.load(Ordering::Relaxed), self.shared.in_flight.given(), queued));
                sleep(self.shared.deadline() / LOOKS_PER_DEADLINE).await;
                self.shared.looks.fetch_add(1, Ordering::Relaxed);
                if begun.len() >= LOOKS_PER_DEADLINE as usize {
                    let (begun, given, queued) = begun.pop_front().expect("not empty");
                    self.shared.in_flight.give_up_calls(given);
                    // Movements without a flight, such as flushes, take all turns.
                    let is_stuck = queued == Some(self.taken.get());
                    let overdue = self.shared.give_up_overdue(begun).await || is_stuck;
                    if self.overdue.replace(overdue) != overdue {
                        // Commands may be refused now, or started again.
                        self.settled.notify_one();
                    }
                }
                self.shared.give_up_overdue_slots();
                self.shared.give_up_overdue_rooms();
                self.shared.give_up_overdue_remote();
                if !self.shared.is_watched(self.active.get() > 0) {
                    break;
                }
            }
            self.overdue.set(false);
        }
    }

    /// Answers a command that cannot be started: all movements are taken, and the disk does not end them.
    pub(super) fn refuse(self: &Rc<Self>, command: Command) {
        let error = self.shared.timeout("a free movement");
        match command {
            Command::Promote { key, to, .. } => {
                if self.shared.lock().flights.start(&key, to) {
                    self.end_flight(&key, to, Err(error));
                }
            }
            Command::Register { .. } | Command::AddGpu { .. } => self.start(command),
            // Its caller may be making it at this moment.
            Command::LoadLayers(load) => {
                drop(self.spawn_part(async move { expected(load).await.map(|load| load.refuse(&error)) }));
            }
            command => command.refuse(error),
        }
    }

    /// Waits no longer than the deadline for something that goes on without us.
    pub(super) async fn within_deadline<T>(
        &self,
        what: &'static str,
        future: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        timeout(self.shared.deadline(), future).await.unwrap_or_else(|_| Err(self.shared.timeout(what)))
    }
}

impl Command {
    /// Ends a call that has not begun, or what is left of it to the reactor, by an error.
    pub(crate) fn refuse(self, error: Error) {
        match self {
            Command::Load { jobs, results } => {
                results.settle(jobs.iter().map(|&(number, _)| (number, Err(error.clone()))));
            }
            Command::StoreFrom { jobs, call } => {
                call.results.settle(jobs.iter().map(|&(number, _)| (number, Err(error.clone()))));
            }
            Command::Forget { reply, .. } | Command::Flush { reply } | Command::Sync { reply } => {
                drop(reply.send(Err(error)));
            }
            Command::Promote { .. } | Command::LoadLayers(_) | Command::Register { .. } | Command::AddGpu { .. } => {}
        }
    }
}
