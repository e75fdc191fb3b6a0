//! The loads of a call that the reactor carries out.
//!
//! Blocks that go by way of host memory are planned a few under each lock. Those in host memory, or on their way there,
//! need nothing. The others wait together: the call itself waits for what the next read needs, in the place of them
//! all, in their order, while those that arrive are copied to their caller, some together. So a block has no task of
//! its own, unless it takes another way.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::Pin as Pinned,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::{FutureExt, StreamExt, future::LocalBoxFuture, stream::FuturesUnordered};
use tokio::{
    sync::oneshot,
    time::{Instant, Sleep, sleep_until},
};

use super::{
    Active, Mover,
    caller_memory::{BEGUN_PER_TURN, BegunLoad},
    load::{Numbered, PLANNED_PER_LOCK},
    load_copies::Arrived,
    plan::{Flight, Read, Step},
    region::Job,
    results::CallResults,
    route::is_through_host,
};
use crate::{
    device::CopyEngine,
    error::{Error, Result},
    io::Storage,
    state::{Need, Outcome, Purpose, Taken, Use},
};

/// A block that is to be planned.
pub(crate) struct Unplanned {
    number: usize,
    job: Job,
    usage: Use,
}

/// A block on its way to host memory, by a movement that another one may have begun.
pub(crate) struct Coming {
    /// `None` once it has arrived.
    block: Option<Unplanned>,
    is_joined: bool,
    outcome: oneshot::Receiver<Outcome>,
}

impl Coming {
    /// One whose movement has begun for this call.
    pub(super) fn new(number: usize, job: Job, outcome: oneshot::Receiver<Outcome>) -> Self {
        Coming { block: Some(Unplanned { number, job, usage: Use::Counted }), is_joined: false, outcome }
    }
}

impl Future for Coming {
    type Output = (Unplanned, bool, Outcome);

    fn poll(mut self: Pinned<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(Pinned::new(&mut self.outcome).poll(cx)).unwrap_or(Err(Error::Closed));
        Poll::Ready((self.block.take().expect("it arrives once"), self.is_joined, outcome))
    }
}

/// A wait for what a read needs: what the call has of it then.
type Wait = LocalBoxFuture<'static, (Taken, Result<()>)>;

/// What a call has come to.
pub(super) struct LoadCall<A> {
    pub(super) results: Arc<CallResults>,
    /// One movement, until all of its parts have ended.
    pub(super) active: Rc<A>,
    pub(super) began: Instant,
    /// Not looked at yet.
    unplanned: VecDeque<Unplanned>,
    /// Blocks that have to be read, as soon as one of them has what that needs.
    waiting: VecDeque<Unplanned>,
    /// What the next read needs, as far as the call has it.
    taken: Taken,
    wait: Option<Wait>,
    /// Ends the call's wait for everything. Only a call that has to wait has it: other movements have their own.
    deadline: Option<Pinned<Box<Sleep>>>,
    /// Why a wait failed: what would have to wait fails too.
    refused: Option<Error>,
    coming: FuturesUnordered<Coming>,
    pub(super) arrived: Vec<Arrived>,
    ended: Vec<(usize, Result<bool>)>,
    /// More blocks may have arrived than there was time for.
    is_behind: bool,
    /// As how many blocks it counts among those that are loaded.
    counted: usize,
}

impl<A> LoadCall<A> {
    fn new(results: Arc<CallResults>, active: A) -> Self {
        LoadCall {
            results,
            active: Rc::new(active),
            began: Instant::now(),
            unplanned: VecDeque::new(),
            waiting: VecDeque::new(),
            taken: Taken::default(),
            wait: None,
            deadline: None,
            refused: None,
            coming: FuturesUnordered::new(),
            arrived: Vec::new(),
            ended: Vec::new(),
            is_behind: false,
            counted: 0,
        }
    }

    /// Whether a block can be planned now: its read, or whether it needs one.
    fn may_plan(&self) -> bool {
        !self.unplanned.is_empty() || (self.wait.is_none() && !self.waiting.is_empty())
    }

    /// The next block to be planned, and whether to be read.
    fn next(&mut self) -> Option<(Unplanned, bool)> {
        if self.wait.is_some() {
            return self.unplanned.pop_front().map(|block| (block, false));
        }
        let next = self.waiting.pop_front().or_else(|| self.unplanned.pop_front());
        next.map(|block| (block, true))
    }

    /// Takes blocks that have arrived, as many as there is time for, and notes what it has waited for.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut arrivals = 0;
        while arrivals < BEGUN_PER_TURN
            && let Poll::Ready(Some(arrival)) = self.coming.poll_next_unpin(cx)
        {
            arrivals += 1;
            self.arrive(arrival);
        }
        self.is_behind = arrivals == BEGUN_PER_TURN;
        match self.has_waited(cx) || arrivals > 0 {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }

    fn arrive(&mut self, (mut block, is_joined, outcome): (Unplanned, bool, Outcome)) {
        match outcome {
            Ok(Some(pin)) => self.arrived.push((block.number, pin, block.job)),
            // The joined flight may have begun before the block was removed and stored again: look it up again. Its use
            // is counted, as it is by another way.
            Ok(None) if is_joined => {
                block.job.through_host = true;
                self.unplanned.push_back(block);
            }
            Ok(None) => self.ended.push((block.number, Ok(false))),
            Err(error) => self.ended.push((block.number, Err(error))),
        }
    }

    fn has_waited(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(Poll::Ready((taken, result))) = self.wait.as_mut().map(|wait| wait.as_mut().poll(cx)) else {
            return false;
        };
        (self.wait, self.taken) = (None, taken);
        if let Err(error) = result {
            self.refuse(error);
        }
        true
    }

    /// Fails what has to wait, now and later.
    fn refuse(&mut self, error: Error) {
        let refused = self.waiting.drain(..).map(|block| (block.number, Err(error.clone())));
        self.ended.extend(refused);
        (self.wait, self.refused) = (None, Some(error));
    }

    /// Has a block wait for its read, with the others: behind them, or as the next one, whose plan was tried.
    fn set_aside(&mut self, mut block: Unplanned, is_next: bool) {
        match &self.refused {
            Some(error) => self.ended.push((block.number, Err(error.clone()))),
            None if is_next => {
                block.usage = Use::Counted;
                self.waiting.push_front(block);
            }
            None => self.waiting.push_back(block),
        }
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies blocks of a call into their segments; `false` for a block that is resident nowhere.
    pub(super) fn load(self: &Rc<Self>, jobs: Vec<Numbered>, results: Arc<CallResults>) {
        let unplanned = |(number, job)| Unplanned { number, job, usage: Use::Now };
        let mut call = LoadCall::new(results, Active::new(self));
        call.unplanned.extend(jobs.into_iter().map(unplanned));
        self.spawn_part(Rc::clone(self).carry_out(call));
    }

    /// As [`load`](Self::load), of blocks that are on their way.
    pub(super) fn load_arriving(self: &Rc<Self>, blocks: Vec<Coming>, results: Arc<CallResults>) {
        let mut call = LoadCall::new(results, Active::new(self));
        call.coming.extend(blocks);
        self.spawn_part(Rc::clone(self).carry_out(call));
    }

    async fn carry_out(self: Rc<Self>, mut call: LoadCall<Active<S, C>>) {
        loop {
            for _ in 0..BEGUN_PER_TURN / PLANNED_PER_LOCK {
                if call.may_plan() {
                    self.plan_some(&mut call);
                }
            }
            if call.unplanned.is_empty() && call.waiting.is_empty() {
                call.taken = Taken::default();
            }
            self.copy_arrived(&mut call);
            if !call.ended.is_empty() {
                call.results.settle(call.ended.drain(..));
            }
            self.count_blocks(&mut call);
            if call.counted == 0 {
                return;
            }
            if call.may_plan() || call.is_behind {
                crate::io::yield_now().await;
            }
            poll_fn(|cx| match call.poll(cx) {
                Poll::Pending if call.may_plan() => Poll::Ready(()),
                Poll::Pending => self.poll_deadline(&mut call, cx),
                ready => ready,
            })
            .await;
        }
    }

    /// Counts the blocks of a call that are not in host memory yet: commands wait while there are too many.
    fn count_blocks(&self, call: &mut LoadCall<Active<S, C>>) {
        let counted = call.unplanned.len() + call.waiting.len() + call.coming.len();
        self.loading.set(self.loading.get() + counted - call.counted);
        if counted < call.counted {
            self.settled.notify_one();
        }
        call.counted = counted;
    }

    /// Ends a call that has waited too long. What is being read is read to its end.
    fn poll_deadline(&self, call: &mut LoadCall<Active<S, C>>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = &mut call.deadline else { return Poll::Pending };
        ready!(deadline.as_mut().poll(cx));
        call.deadline = None;
        let error = self.shared.timeout("blocks of a call");
        let late = std::mem::take(&mut call.coming).into_iter().filter_map(|coming| coming.block);
        call.ended.extend(late.map(|block| (block.number, Err(error.clone()))));
        call.refuse(error);
        Poll::Ready(())
    }

    /// Plans the next blocks of a call under one lock.
    fn plan_some(self: &Rc<Self>, call: &mut LoadCall<Active<S, C>>) {
        let mut begun = Vec::with_capacity(PLANNED_PER_LOCK);
        let mut missing = None;
        {
            let mut state = self.shared.lock();
            while begun.len() < PLANNED_PER_LOCK
                && missing.is_none()
                && let Some((block, reads)) = call.next()
            {
                let read = if reads { Read::Now(&mut call.taken) } else { Read::Later };
                let load = self.begin_load(&mut state, &block.job, block.usage, read);
                missing = match &load {
                    (trip, Ok(Step::Wait(need))) if reads && is_through_host(trip.route()) => Some(*need),
                    _ => None,
                };
                begun.push((block, load));
            }
        }
        let last = begun.len() - 1;
        for (at, (block, (trip, step))) in begun.into_iter().enumerate() {
            match step {
                Ok(Step::Pinned(pin)) => call.arrived.push((block.number, pin, block.job)),
                Ok(Step::Flight(Flight { outcome, is_joined, begun })) => {
                    call.coming.push(Coming { is_joined, ..Coming::new(block.number, block.job, outcome) });
                    begun.into_iter().for_each(|fill| self.begin_fill(fill, None));
                }
                Ok(Step::Wait(_)) if is_through_host(trip.route()) => {
                    call.set_aside(block, at == last && missing.is_some());
                }
                Ok(Step::Gone) => call.ended.push((block.number, Ok(false))),
                Err(error) => call.ended.push((block.number, Err(error))),
                step => self.load_otherwise(call, block, (trip, step)),
            }
        }
        if let Some(need) = missing.filter(|_| call.refused.is_none()) {
            self.wait_with(call, need);
        }
    }

    /// Has a call wait for what its next read needs.
    fn wait_with(self: &Rc<Self>, call: &mut LoadCall<Active<S, C>>, need: Need) {
        let (this, mut taken) = (Rc::clone(self), std::mem::take(&mut call.taken));
        let wait = async move {
            let waited = this.wait_for(need, &mut taken, Purpose::Call).await;
            (taken, waited)
        };
        call.wait = Some(wait.boxed_local());
        // A quarter later, as of movements: their errors say more.
        let until = || call.began + self.shared.deadline() * 5 / 4;
        call.deadline.get_or_insert_with(|| Box::pin(sleep_until(until())));
    }

    /// Loads a block by another way, in a task of its own.
    fn load_otherwise(self: &Rc<Self>, call: &LoadCall<Active<S, C>>, block: Unplanned, begun: BegunLoad) {
        let Unplanned { number, job, .. } = block;
        let (this, results, active) = (Rc::clone(self), Arc::clone(&call.results), Rc::clone(&call.active));
        self.spawn_part(async move {
            let result = this.load_begun(Box::new(job), begun).await;
            results.settle([(number, result)]);
            drop(active);
        });
    }
}
