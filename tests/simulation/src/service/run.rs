//! What everything in a run shares.

use std::{
    cell::{Cell, RefCell},
    io,
    rc::Rc,
    sync::{Arc, Mutex},
};

use kvhoist::{Error, ServiceFault};
use kvhoist_service::internals::seams::{Peer, Wire};
use tokio::time::Instant;

use super::{
    door::Door,
    machine::Machine,
    memory::Memory,
    plan::Plan,
    stream::{self, End, Ids},
};
use crate::{
    model::{Claims, Model},
    report::Report,
    sim::Rng,
};

/// One run.
pub struct Run {
    pub plan: Plan,
    /// What each space must answer.
    pub models: Vec<RefCell<Model>>,
    pub machine: Rc<Machine>,
    /// Where clients reach the service, while it runs.
    pub door: RefCell<Option<Rc<Door>>>,
    /// The service's ends of its connections, which the kernel keeps open until the last transfer has ended.
    pub ends: RefCell<Vec<Arc<End>>>,
    /// Memory that no call uses any longer: nobody writes to it.
    pub given_back: RefCell<Vec<Memory>>,
    /// The requests of every connection.
    pub ids: RefCell<Vec<Arc<Mutex<Ids>>>>,
    /// Counts the processes of the service: an answer of an earlier one says nothing of the present.
    pub life: Cell<u32>,
    pub report: RefCell<Report>,
    pub failure: Rc<RefCell<Option<String>>>,
    pub digest: Cell<u64>,
    pub began: Instant,
    pub verbose: bool,
}

impl Run {
    /// Connects a process of a user to the service, if it runs; the client's end, and the requests on the connection.
    pub fn connect(&self, uid: u32, rng: &mut Rng) -> io::Result<(Arc<End>, Arc<Mutex<Ids>>)> {
        let Some(door) = self.door.borrow().clone() else { return Err(io::ErrorKind::ConnectionRefused.into()) };
        let (ours, theirs, ids) = stream::pair(rng, self.plan.delivery);
        self.ids.borrow_mut().push(Arc::clone(&ids));
        let mut ends = self.ends.borrow_mut();
        ends.retain(|end| Arc::strong_count(end) > 1);
        ends.push(Arc::clone(&theirs));
        door.knock((theirs as Arc<dyn Wire>, Ok(Peer { pid: 1, uid })));
        Ok((ours, ids))
    }

    pub fn say(&self, line: impl FnOnce() -> String) {
        if self.verbose {
            eprintln!("{:>8} ms  {}", self.began.elapsed().as_millis(), line());
        }
    }

    /// Notes the first thing that is wrong; the run ends as soon as it can.
    pub fn fail(&self, what: impl Into<String>) {
        let what = what.into();
        self.say(|| format!("WRONG: {what}"));
        self.failure.borrow_mut().get_or_insert(what);
    }

    pub fn check(&self, result: Result<(), String>) {
        if let Err(what) = result {
            self.fail(what);
        }
    }

    pub fn failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// Takes an answer, and when it came, into the digest of the run.
    pub fn mix(&self, word: u64) {
        let word = word ^ (self.began.elapsed().as_millis() as u64) << 32;
        self.digest.set((self.digest.get() ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23));
    }

    /// What a space must keep, given what has gone wrong in this life of the service.
    pub fn claims(&self, space: usize) -> Claims {
        self.machine.claims(space).unwrap_or(Claims { keeps: false, keeps_synced: false, honest: true })
    }

    /// Whether this run explains that a call of a client that keeps to the protocol ends like this.
    pub fn check_error(&self, what: &str, error: &Error) {
        let plan = &self.plan;
        let rates = &plan.rates;
        let mut report = self.report.borrow_mut();
        // A flipped bit among the zeros of a store that is being made: the space is refused until it is read as it is.
        let is_flipped = |text: &str| rates.bit_flip > 0.0 && text.contains("found data that kvhoist did not write");
        // Of the cache of a space, in the service's words, or of a client.
        let is_thread = |text: &str| text.contains("start the") && text.contains("thread");
        let allowed = match error {
            Error::Service { text, .. } if is_flipped(text) => true,
            Error::Service { fault: ServiceFault::Io, text } if is_thread(text) => {
                report.threads_refused += 1;
                plan.thread_refused > 0.0
            }
            Error::Io { op, .. } if is_thread(op) => {
                report.threads_refused += 1;
                plan.thread_refused > 0.0
            }
            Error::Service { fault, .. } => match fault {
                ServiceFault::Busy => {
                    report.busy += 1;
                    plan.is_tight
                }
                ServiceFault::Timeout => {
                    report.timeouts += 1;
                    plan.may_time_out()
                }
                ServiceFault::Away | ServiceFault::Draining => plan.may_lose_connections(),
                ServiceFault::Canceled => plan.may_time_out(),
                ServiceFault::Abandoned => {
                    report.abandoned += 1;
                    plan.give_up.is_some() && plan.may_time_out()
                }
                // Of the bounce buffer: memory that callers register is copied then.
                ServiceFault::Memory => {
                    report.maps_refused += 1;
                    plan.map_refused > 0.0
                }
                // Also of blocks that were on their way when failed reads took the disk out of service.
                ServiceFault::Refused => {
                    plan.by_value() || rates.read_error + rates.write_error + rates.no_space + rates.sync_error > 0.0
                }
                ServiceFault::Io => plan.has_faults() || plan.copy_failure > 0.0,
                ServiceFault::Unavailable => plan.has_faults(),
                ServiceFault::Capacity => plan.may_lack_memory(),
                _ => false,
            },
            _ => false,
        };
        report.failed += 1;
        drop(report);
        if !allowed {
            self.fail(format!("{what} failed, and nothing in this run explains it: {error}"));
        }
    }
}
