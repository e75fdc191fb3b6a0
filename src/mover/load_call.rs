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
    time::{Instant, Sleep, sleep},
};

use super::{
    Active, Mover,
    caller_memory::{BEGUN_PER_TURN, BegunLoad},
    load::{Numbered, PLANNED_PER_LOCK},
    load_copies::Arrived,
    plan::{Flight, Read, Step, Trip},
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

/// A block on its way to host memory, by a movement that another one may have begun.
pub(crate) struct Coming {
    /// `None` once it has arrived.
    block: Option<Numbered>,
    is_joined: bool,
    outcome: oneshot::Receiver<Outcome>,
}

impl Coming {
    /// One whose movement has begun for this call.
    pub(super) fn new((number, job): Numbered, outcome: oneshot::Receiver<Outcome>) -> Self {
        Coming { block: Some((number, Job { is_counted: true, ..job })), is_joined: false, outcome }
    }
}

impl Future for Coming {
    type Output = (Numbered, bool, Outcome);

    fn poll(mut self: Pinned<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = ready!(Pinned::new(&mut self.outcome).poll(cx)).unwrap_or(Err(Error::Closed));
        Poll::Ready((self.block.take().expect("it arrives once"), self.is_joined, outcome))
    }
}

/// A wait for what a read needs: what the call has of it then.
type Wait = LocalBoxFuture<'static, (Taken, Result<()>)>;

/// What a call has come to.
struct LoadCall<A> {
    results: Arc<CallResults>,
    /// One movement, until all of its parts have ended.
    active: Rc<A>,
    began: Instant,
    /// Not looked at yet.
    unplanned: VecDeque<Numbered>,
    /// Blocks that have to be read, as soon as the first of them has what that needs.
    waiting: VecDeque<Numbered>,
    /// What the next read needs, as far as the call has it.
    taken: Taken,
    wait: Option<Wait>,
    /// Ends the call's wait for everything. Only a call that has to wait has it: movements have their own.
    deadline: Option<Pinned<Box<Sleep>>>,
    /// Why a wait failed: what has to be read fails too.
    refused: Option<Error>,
    coming: FuturesUnordered<Coming>,
    arrived: Vec<Arrived>,
    ended: Vec<(usize, Result<bool>)>,
    /// More blocks may have arrived than there was time for.
    is_behind: bool,
    /// As how many blocks it counts among those that wait.
    counted: usize,
}

impl<A> LoadCall<A> {
    fn new(jobs: Vec<Numbered>, coming: Vec<Coming>, results: Arc<CallResults>, active: A) -> Self {
        LoadCall {
            results,
            active: Rc::new(active),
            began: Instant::now(),
            unplanned: jobs.into(),
            waiting: VecDeque::new(),
            taken: Taken::default(),
            wait: None,
            deadline: None,
            refused: None,
            coming: coming.into_iter().collect(),
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

    /// The next block to be planned.
    fn next(&mut self) -> Option<Numbered> {
        let waiting = if self.wait.is_none() { self.waiting.pop_front() } else { None };
        waiting.or_else(|| self.unplanned.pop_front())
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

    fn arrive(&mut self, ((number, mut job), is_joined, outcome): (Numbered, bool, Outcome)) {
        match outcome {
            Ok(Some(pin)) => self.arrived.push((number, pin, job)),
            // The joined flight may have begun before the block was removed and stored again: look it up again. Its use
            // is counted, as it is by another way.
            Ok(None) if is_joined => {
                job.through_host = true;
                self.unplanned.push_back((number, job));
            }
            Ok(None) => self.ended.push((number, Ok(false))),
            Err(error) => self.ended.push((number, Err(error))),
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

    /// Fails what has to be read: once it is clear that it is not in host memory by now.
    fn refuse(&mut self, error: Error) {
        (self.wait, self.deadline, self.refused) = (None, None, Some(error));
    }
}

impl<S: Storage, C: CopyEngine> Mover<S, C> {
    /// Copies blocks of a call into their segments, also those that are on their way; `false` for a block that is
    /// resident nowhere.
    pub(super) fn load(self: &Rc<Self>, jobs: Vec<Numbered>, coming: Vec<Coming>, results: Arc<CallResults>) {
        let call = LoadCall::new(jobs, coming, results, Active::new(self));
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
            let arrived = std::mem::take(&mut call.arrived);
            self.copy_arrived(arrived, (&call.results, &call.active), call.began);
            if !call.ended.is_empty() {
                call.results.settle(call.ended.drain(..));
            }
            self.count_waiting(&mut call);
            if call.counted == 0 && call.coming.is_empty() {
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

    /// Counts the blocks of a call that are not in flight yet: commands wait while there are too many.
    fn count_waiting(&self, call: &mut LoadCall<Active<S, C>>) {
        let counted = call.unplanned.len() + call.waiting.len();
        self.waiting.set(self.waiting.get() + counted - call.counted);
        if counted < call.counted {
            self.settled.notify_one();
        }
        call.counted = counted;
    }

    /// Ends a call that has waited too long. What is being read is read to its end.
    fn poll_deadline(&self, call: &mut LoadCall<Active<S, C>>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = &mut call.deadline else { return Poll::Pending };
        ready!(deadline.as_mut().poll(cx));
        let error = self.shared.timeout("blocks of a call");
        let late = std::mem::take(&mut call.coming).into_iter().filter_map(|coming| coming.block);
        call.ended.extend(late.map(|(number, _)| (number, Err(error.clone()))));
        call.refuse(error);
        Poll::Ready(())
    }

    /// Plans the next blocks of a call under one lock, up to one whose read has to wait.
    fn plan_some(self: &Rc<Self>, call: &mut LoadCall<Active<S, C>>) {
        let (mut begun, mut missing) = (Vec::with_capacity(PLANNED_PER_LOCK), None);
        let reads = call.wait.is_none() && call.refused.is_none();
        {
            let mut state = self.shared.lock();
            while begun.len() < PLANNED_PER_LOCK
                && missing.is_none()
                && let Some((number, job)) = call.next()
            {
                let read = if reads { Read::Now(&mut call.taken) } else { Read::Later };
                let usage = if job.is_counted { Use::Counted } else { Use::Now };
                let mut trip = Trip::load(&job.key, job.shape(&self.shared), usage);
                let step = self.plan_with(&mut state, &mut trip, read);
                missing = match &step {
                    Ok(Step::Wait(need)) if reads && is_through_host(trip.route()) => Some(*need),
                    _ => None,
                };
                begun.push(((number, job), (trip, step)));
            }
        }
        if let Some(need) = missing
            && let Some(((number, job), _)) = begun.pop()
        {
            // Its plan was tried.
            call.waiting.push_front((number, Job { is_counted: true, ..job }));
            self.wait_with(call, need);
        }
        for (block, (trip, step)) in begun {
            match step {
                Ok(Step::Pinned(pin)) => call.arrived.push((block.0, pin, block.1)),
                Ok(Step::Flight(Flight { outcome, is_joined, begun })) => {
                    call.coming.push(Coming { is_joined, ..Coming::new(block, outcome) });
                    begun.into_iter().for_each(|fill| self.begin_fill(fill, None));
                }
                Ok(Step::Wait(_)) if is_through_host(trip.route()) => match &call.refused {
                    Some(error) => call.ended.push((block.0, Err(error.clone()))),
                    None => {
                        // In one piece: growing would move what is there.
                        call.waiting.reserve(if call.waiting.len() < 2 { call.unplanned.len() + 1 } else { 0 });
                        call.waiting.push_back(block);
                    }
                },
                Ok(Step::Gone) => call.ended.push((block.0, Ok(false))),
                Err(error) => call.ended.push((block.0, Err(error))),
                step => self.load_otherwise(call, block, (trip, step)),
            }
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
        // A quarter more, as movements have: an error of what is waited for says more.
        call.deadline.get_or_insert_with(|| Box::pin(sleep(self.shared.deadline() * 5 / 4)));
    }

    /// Loads a block by another way, in a task of its own.
    fn load_otherwise(self: &Rc<Self>, call: &LoadCall<Active<S, C>>, (number, job): Numbered, begun: BegunLoad) {
        let (this, results, active) = (Rc::clone(self), Arc::clone(&call.results), Rc::clone(&call.active));
        self.spawn_part(async move {
            let result = this.load_begun(Box::new(job), begun).await;
            results.settle([(number, result)]);
            drop(active);
        });
    }
}
