//! What an input can ask for.

use std::{future::Future, pin::pin, task::Poll};

use arbitrary::Arbitrary;
use kvhoist::io::OpKind;
use kvhoist_simulation::sim;

/// When a call's future is dropped: after so many polls.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub struct Cancel(Option<u8>);

impl Cancel {
    /// It runs to its end.
    pub const NEVER: Self = Cancel(None);

    /// Polls the future to its end, or as often as it may be polled: then `None`.
    pub async fn run<F: Future>(self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        let polls_max = self.0.map(|polls| 1 + u64::from(polls % 6));
        let mut polls = 0;
        std::future::poll_fn(|context| {
            if Some(polls) == polls_max {
                return Poll::Ready(None);
            }
            polls += 1;
            let poll = future.as_mut().poll(context).map(Some);
            if poll.is_pending() && Some(polls) == polls_max {
                // Others that are ready have their turn first.
                context.waker().wake_by_ref();
            }
            poll
        })
        .await
    }
}

#[derive(Debug, Clone, Copy, Arbitrary)]
pub enum Op {
    Store {
        block: u8,
        cancel: Cancel,
    },
    Commit {
        block: u8,
        clear: bool,
        cancel: Cancel,
    },
    /// A reservation that is dropped.
    Abandon,
    StoreWrong {
        block: u8,
    },
    Fetch {
        block: u8,
        keep: bool,
        cancel: Cancel,
    },
    FetchAtOnce {
        blocks: [u8; 3],
    },
    FetchToDevice {
        block: u8,
        keep: bool,
        cancel: Cancel,
    },
    LetGo {
        pick: u8,
    },
    Prefetch {
        first: u8,
        len: u8,
    },
    Remove {
        block: u8,
        cancel: Cancel,
    },
    Match {
        block: u8,
    },
    LoadInto {
        first: u8,
        len: u8,
        cut: u16,
        device: bool,
        cancel: Cancel,
    },
    StoreFrom {
        first: u8,
        len: u8,
        cut: u16,
        device: bool,
    },
    Sync {
        cancel: Cancel,
    },
    /// Lets what is in flight go on for a while.
    Wait {
        ms: u8,
    },
    Fault(FaultPlan),
    CopiesFail(bool),
    Rot {
        disk: u8,
        at: u32,
        mask: u8,
    },
    /// Lets stalled operations go on.
    Release,
    Exit(Exit),
}

/// How a life ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Arbitrary)]
pub enum Exit {
    Close,
    Drop,
    Kill,
    PowerCut,
}

/// A fault of the disk: which, and of which operation from now on.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub struct FaultPlan {
    kind: u8,
    after: u8,
    count: u8,
    fault: u8,
    sectors: u8,
}

impl FaultPlan {
    /// Makes it happen.
    pub fn script(self, storage: &sim::Sim) {
        let kind = [OpKind::Read, OpKind::Write, OpKind::Sync][usize::from(self.kind % 3)];
        let short = sim::Fault::Short(usize::from(self.sectors % 10) * sim::SECTOR_BYTES);
        let faults: &[sim::Fault] = match kind {
            OpKind::Read => &[sim::Fault::Error(5), short, sim::Fault::Stall, sim::Fault::BitFlip],
            OpKind::Write => &[
                sim::Fault::Error(5),
                sim::Fault::Error(28),
                short,
                sim::Fault::Stall,
                sim::Fault::Lost,
                sim::Fault::Misdirected,
            ],
            OpKind::Sync => &[sim::Fault::Error(5), sim::Fault::Stall, sim::Fault::Lost],
        };
        let first = storage.counts().started[kind as usize] + u64::from(self.after % 32);
        for nth in first..=first + u64::from(self.count % 4) {
            storage.script(kind, nth, faults[usize::from(self.fault) % faults.len()]);
        }
    }
}
