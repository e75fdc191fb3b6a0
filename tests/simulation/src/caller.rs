//! One caller: what it has, and the leases that it keeps.

use std::{pin::Pin, rc::Rc};

use crate::sim::{Rng, World};
use kvhoist::{Cache, DeviceLease, Error, Lease};

use crate::{
    cancel::{Cancel, late, until},
    context::{Context, error_code},
    foreign::Memory,
    stranger::Stranger,
    submissions::Submissions,
};

/// Leases that a caller keeps at once.
pub const LEASES_MAX: usize = 3;

/// What a caller keeps while it does other things.
pub enum Kept {
    Host { lease: Lease, block: usize },
    Device { lease: DeviceLease, block: usize },
}

pub struct Caller {
    pub context: Rc<Context>,
    pub cache: Cache,
    pub world: World,
    pub number: u64,
    pub rng: Rng,
    /// For hints: the draws of other calls do not depend on them.
    pub hints: Rng,
    /// For the calls that are made between the others, in the place of `rng`.
    pub extras: Rng,
    pub memory: Memory,
    /// More of it, for the calls that register regions.
    pub spares: Vec<Memory>,
    pub stranger: Option<Rc<Stranger>>,
    pub kept: Vec<Kept>,
    /// Calls that are not polled any longer, and not dropped either.
    pub parked: Vec<Pin<Box<dyn Future<Output = ()>>>>,
    pub submissions: Submissions,
}

impl Caller {
    /// Drops all but `keep` leases, in any order, after a last look at what they hold.
    pub fn let_go(&mut self, keep: usize) {
        while self.kept.len() > keep {
            let at = self.rng.below(self.kept.len() as u64) as usize;
            let kept = self.kept.swap_remove(at);
            self.context.check(kept.check(&self.context));
        }
    }

    /// Keeps a lease, or lets it go at once.
    pub fn keep(&mut self, kept: Kept) {
        self.context.check(kept.check(&self.context));
        if self.rng.chance(self.context.plan.habits.keep) {
            self.let_go(LEASES_MAX - 1);
            self.kept.push(kept);
        }
    }

    /// Runs a call, unless it is given up.
    pub async fn run_call<T>(&self, cancel: Cancel, call: impl Future<Output = T>) -> Option<T> {
        let rng = self.context.late.borrow_mut().fork();
        until(late(call, rng), cancel).await
    }

    /// One block's error in a call on many.
    pub fn check_one(&self, what: &str, error: &Error) {
        let closing = self.context.closing.get();
        self.context.check_error(&format_args!("caller {}: {what} of one block", self.number), error, closing);
        self.context.mix(error_code(error));
    }

    pub fn draw_block(&mut self) -> usize {
        let blocks = self.context.plan.universe.len() as u64;
        // Some blocks are asked for more often than others.
        let limit = if self.rng.chance(0.5) { blocks } else { blocks.div_ceil(4) };
        self.rng.below(limit) as usize
    }
}

/// How a call ended.
#[derive(Debug)]
pub enum End {
    /// With a number that tells answers apart.
    Done(u64),
    Error(Error),
    Dropped,
}

impl End {
    pub fn code(&self) -> u64 {
        match self {
            End::Done(code) => *code,
            End::Error(error) => error_code(error),
            End::Dropped => 100,
        }
    }
}

impl Kept {
    /// A lease shows the bytes that its key names, for as long as it lives.
    fn check(&self, context: &Context) -> Result<(), String> {
        let (block, right) = match self {
            Kept::Host { lease, block } => (*block, **lease == *context.plan.universe.block(*block).payload),
            Kept::Device { lease, block } => {
                (*block, device_holds(lease, &context.plan.universe.block(*block).payload))
            }
        };
        if right { Ok(()) } else { Err(format!("a lease on block {block} shows wrong bytes")) }
    }
}

fn device_holds(lease: &DeviceLease, payload: &[u8]) -> bool {
    let mut rest = payload;
    for segment in lease.segments() {
        let (here, next) = rest.split_at(segment.len);
        // SAFETY: the lease keeps the segment valid and unchanged; a simulated device is host memory.
        if unsafe { std::slice::from_raw_parts(segment.ptr, segment.len) } != here {
            return false;
        }
        rest = next;
    }
    rest.is_empty()
}
