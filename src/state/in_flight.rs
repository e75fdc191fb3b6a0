//! Bytes in flight: a bound, and an order. Reads never wait for writes. Awaited reads go before background reads, and
//! awaited writes before background writes. While an awaited read waits for its permit, only one awaited write starts
//! at a time, so that no store waits for ever.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::Raised;
use crate::{
    block::OpKind,
    sync::Mutex,
    urgency::{Line, Urgency},
};

/// Bounds the bytes in flight of reads and of writes. Its lock may be taken under the state's, never around it.
#[derive(Clone)]
pub(crate) struct InFlight(Arc<Mutex<BytesInFlight>>);

struct BytesInFlight {
    limits: [u64; 2],
    bytes: [u64; 2],
    waiting: [Line<WaitingOperation>; 2],
    /// Permits given so far.
    given: [u64; 2],
}

/// An operation that waits for its permit.
struct WaitingOperation {
    bytes: u64,
    /// It has no flight, whose waiters have deadlines.
    is_call: bool,
    wake: oneshot::Sender<Permit>,
}

/// What counts against a limit. A flush moves no bytes.
const KINDS: [OpKind; 2] = [OpKind::Read, OpKind::Write];

/// Bytes that an operation may have in flight; dropping it gives the bytes back.
pub(crate) struct Permit {
    /// `None` once its bytes are given back.
    in_flight: Option<InFlight>,
    kind: OpKind,
    bytes: u64,
    /// Of its operation, when it was given.
    pub(crate) urgency: Urgency,
}

impl Permit {
    pub(crate) fn kind(&self) -> OpKind {
        self.kind
    }
}

impl InFlight {
    pub(crate) fn new(read_bytes_max: u64, write_bytes_max: u64) -> Self {
        InFlight(Arc::new(Mutex::new(BytesInFlight {
            limits: [read_bytes_max, write_bytes_max],
            bytes: [0; 2],
            waiting: Default::default(),
            given: [0; 2],
        })))
    }

    /// `bytes`, if they can be had at once.
    pub(crate) fn take_now(&self, kind: OpKind, urgency: Urgency, bytes: u64) -> Option<Permit> {
        let bytes = self.0.lock().start(kind, urgency, bytes).ok()?;
        Some(Permit { in_flight: Some(self.clone()), kind, bytes, urgency })
    }

    /// Waits for `bytes`; `None` for a call that was [given up](Self::give_up_calls). Cancel safe: a permit given to a
    /// dropped future goes back.
    pub(crate) async fn take(&self, kind: OpKind, urgency: Urgency, bytes: u64, is_call: bool) -> Option<Permit> {
        let receiver = {
            let mut bytes_in_flight = self.0.lock();
            match bytes_in_flight.start(kind, urgency, bytes) {
                Ok(bytes) => return Some(Permit { in_flight: Some(self.clone()), kind, bytes, urgency }),
                Err(bytes) => {
                    let (wake, receiver) = oneshot::channel();
                    bytes_in_flight.waiting[kind as usize].push(urgency, WaitingOperation { bytes, is_call, wake });
                    receiver
                }
            }
        };
        receiver.await.ok()
    }

    /// The permits given so far.
    pub(crate) fn given(&self) -> [u64; 2] {
        self.0.lock().given
    }

    /// Gives up the calls that wait while no permit of their kind was given since [`given`](Self::given) was `before`.
    pub(crate) fn give_up_calls(&self, before: [u64; 2]) {
        let mut bytes_in_flight = self.0.lock();
        for kind in KINDS {
            if bytes_in_flight.given[kind as usize] == before[kind as usize] {
                bytes_in_flight.waiting[kind as usize].retain(|waiter| !waiter.is_call);
            }
        }
        drop(bytes_in_flight);
        self.start_waiting(None);
    }

    /// These movements are awaited from now on.
    pub(crate) fn raise(&self, raised: &Raised) {
        self.0.lock().waiting.iter_mut().for_each(|line| line.raise(&raised.flights, raised.holders));
        self.start_waiting(None);
    }

    /// Operations that wait for their permit.
    #[cfg(feature = "sim")]
    pub(crate) fn waiting(&self) -> usize {
        let bytes_in_flight = self.0.lock();
        bytes_in_flight.waiting.iter().flat_map(Line::iter).filter(|waiter| !waiter.wake.is_closed()).count()
    }

    /// Bytes in flight of a kind.
    pub(crate) fn bytes(&self, kind: OpKind) -> u64 {
        self.0.lock().bytes[kind as usize]
    }

    /// Gives bytes back, if there are any, and starts what fits now, most urgent first.
    fn start_waiting(&self, back: Option<(OpKind, u64)>) {
        let mut back = back;
        loop {
            let next = self.0.lock().pop_next(back.take());
            let Some((kind, urgency, waiter)) = next else { return };
            let permit = Permit { in_flight: Some(self.clone()), kind, bytes: waiter.bytes, urgency };
            // Its waiter is gone. Only the bytes come back: a drop would begin another loop inside this one, and that
            // one another.
            if let Err(mut permit) = waiter.wake.send(permit) {
                permit.in_flight = None;
                back = Some((kind, permit.bytes));
            }
        }
    }
}

impl BytesInFlight {
    /// Counts `bytes`, at most all that there are, as in flight; an error where they must wait.
    fn start(&mut self, kind: OpKind, urgency: Urgency, bytes: u64) -> Result<u64, u64> {
        let bytes = bytes.min(self.limits[kind as usize]);
        let is_first = self.waiting[kind as usize].would_be_first(urgency);
        if !is_first || !self.allows(kind, urgency == Urgency::Awaited) || !self.fits(kind, bytes) {
            return Err(bytes);
        }
        self.count(kind, bytes);
        Ok(bytes)
    }

    fn fits(&self, kind: OpKind, bytes: u64) -> bool {
        self.bytes[kind as usize] + bytes <= self.limits[kind as usize]
    }

    /// True where no operation of the other kind must go before one of this kind.
    fn allows(&self, kind: OpKind, is_awaited: bool) -> bool {
        let is_sole_write = is_awaited && self.bytes[OpKind::Write as usize] == 0;
        kind == OpKind::Read || is_sole_write || !self.waiting[OpKind::Read as usize].has_awaited()
    }

    fn count(&mut self, kind: OpKind, bytes: u64) {
        self.bytes[kind as usize] += bytes;
        self.given[kind as usize] += 1;
    }

    /// Gives bytes back, takes the next waiter that may start off its queue, and counts its bytes.
    fn pop_next(&mut self, back: Option<(OpKind, u64)>) -> Option<(OpKind, Urgency, WaitingOperation)> {
        if let Some((kind, bytes)) = back {
            self.bytes[kind as usize] -= bytes;
        }
        for kind in KINDS {
            let line = &self.waiting[kind as usize];
            let Some(bytes) = line.first().map(|waiter| waiter.bytes) else { continue };
            if !self.fits(kind, bytes) || !self.allows(kind, line.has_awaited()) {
                continue;
            }
            self.count(kind, bytes);
            return self.waiting[kind as usize].pop().map(|(urgency, waiter)| (kind, urgency, waiter));
        }
        None
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(in_flight) = self.in_flight.take() {
            in_flight.start_waiting(Some((self.kind, self.bytes)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::{
        Urgency::{Awaited, Background},
        *,
    };

    #[test]
    fn an_awaited_read_goes_before_writes_that_waited_longer() {
        let in_flight = InFlight::new(10, 10);
        let mut read_1 = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        let mut write_1 = pin!(in_flight.take(OpKind::Write, Awaited, 5, false));
        let mut write_1b = pin!(in_flight.take(OpKind::Write, Awaited, 5, false));
        let read_share = read_1.as_mut().now_or_never().flatten().expect("fits");
        let write_share = write_1.as_mut().now_or_never().flatten().expect("fits");
        let write_share_b = write_1b.as_mut().now_or_never().flatten().expect("fits");
        let mut background = pin!(in_flight.take(OpKind::Write, Background(1), 5, false));
        let mut write_2 = pin!(in_flight.take(OpKind::Write, Awaited, 5, false));
        let mut read_2 = pin!(in_flight.take(OpKind::Read, Awaited, 5, false));
        assert!(background.as_mut().now_or_never().is_none() && write_2.as_mut().now_or_never().is_none());
        assert!(read_2.as_mut().now_or_never().is_none());
        drop(write_share);
        assert_eq!(in_flight.bytes(OpKind::Write), 5);
        assert!(write_2.as_mut().now_or_never().is_none(), "no second write starts while an awaited read waits");
        drop(read_share);
        let read_2 = read_2.as_mut().now_or_never().expect("the read goes first");
        let write_2 = write_2.as_mut().now_or_never().expect("then the awaited write");
        assert!(background.as_mut().now_or_never().is_none(), "10 of 10 bytes are in flight");
        drop(write_2);
        let background = background.as_mut().now_or_never().expect("then the other");
        drop((background, read_2, write_share_b));
        assert_eq!(in_flight.bytes(OpKind::Write), 0);
    }

    #[test]
    fn calls_are_given_up_where_nothing_moves_and_movements_wait_on() {
        let in_flight = InFlight::new(10, 10);
        let mut first = pin!(in_flight.take(OpKind::Write, Awaited, 10, true));
        let permit = first.as_mut().now_or_never().flatten().expect("fits");
        let before = in_flight.given();
        let mut call = pin!(in_flight.take(OpKind::Write, Awaited, 10, true));
        let mut movement = pin!(in_flight.take(OpKind::Write, Awaited, 10, false));
        assert!(call.as_mut().now_or_never().is_none() && movement.as_mut().now_or_never().is_none());
        in_flight.give_up_calls([before[0], before[1] - 1]);
        assert!(call.as_mut().now_or_never().is_none(), "a write has begun meanwhile");
        in_flight.give_up_calls(before);
        assert!(call.as_mut().now_or_never().is_some_and(|given| given.is_none()));
        assert!(movement.as_mut().now_or_never().is_none());
        drop(permit);
        assert!(movement.as_mut().now_or_never().flatten().is_some());
    }

    #[test]
    fn one_awaited_write_runs_beside_waiting_reads_and_no_background_write_does() {
        let in_flight = InFlight::new(10, 10);
        let mut read = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        let read = read.as_mut().now_or_never().flatten().expect("fits");
        let mut waiting = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        assert!(waiting.as_mut().now_or_never().is_none());
        let mut background = pin!(in_flight.take(OpKind::Write, Background(1), 1, false));
        assert!(background.as_mut().now_or_never().is_none(), "nobody awaits it");
        let mut write_1 = pin!(in_flight.take(OpKind::Write, Awaited, 1, false));
        let mut write_2 = pin!(in_flight.take(OpKind::Write, Awaited, 1, false));
        let write_1 = write_1.as_mut().now_or_never().expect("the only write");
        assert!(write_2.as_mut().now_or_never().is_none(), "the second");
        drop(write_1);
        assert!(write_2.as_mut().now_or_never().is_some(), "now the only one");
        drop(read);
    }

    #[test]
    fn no_read_waits_for_a_write() {
        let in_flight = InFlight::new(10, 10);
        let mut write = pin!(in_flight.take(OpKind::Write, Awaited, 10, false));
        let _write = write.as_mut().now_or_never().flatten().expect("fits");
        let mut awaited = pin!(in_flight.take(OpKind::Write, Awaited, 10, false));
        let mut background = pin!(in_flight.take(OpKind::Write, Background(1), 10, false));
        assert!(awaited.as_mut().now_or_never().is_none() && background.as_mut().now_or_never().is_none());
        let mut prefetch = pin!(in_flight.take(OpKind::Read, Background(2), 5, false));
        let prefetch = prefetch.as_mut().now_or_never().expect("no read is in flight");
        let mut read = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        assert!(read.as_mut().now_or_never().is_none(), "10 bytes do not fit beside 5");
        let mut later = pin!(in_flight.take(OpKind::Read, Background(3), 5, false));
        assert!(later.as_mut().now_or_never().is_none(), "an awaited read goes first");
        drop(prefetch);
        let read = read.as_mut().now_or_never().expect("the writes still wait");
        drop(read);
        assert!(later.as_mut().now_or_never().is_some(), "the writes still wait");
    }

    #[test]
    fn an_operation_that_is_raised_goes_before_those_that_nobody_awaits() {
        let in_flight = InFlight::new(10, 10);
        let mut first = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        let permit = first.as_mut().now_or_never().flatten().expect("fits");
        let mut earlier = pin!(in_flight.take(OpKind::Read, Background(1), 10, false));
        let mut joined = pin!(in_flight.take(OpKind::Read, Background(2), 10, false));
        assert!(earlier.as_mut().now_or_never().is_none() && joined.as_mut().now_or_never().is_none());
        in_flight.raise(&Raised { flights: vec![2, 7], holders: false });
        drop(permit);
        let permit = joined.as_mut().now_or_never().expect("somebody waits for it");
        assert!(earlier.as_mut().now_or_never().is_none(), "nobody waits for it");
        let mut read = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        let mut write_back = pin!(in_flight.take(OpKind::Write, Background(3), 10, false));
        assert!(read.as_mut().now_or_never().is_none() && write_back.as_mut().now_or_never().is_none());
        in_flight.raise(&Raised { flights: vec![], holders: true });
        assert!(write_back.as_mut().now_or_never().is_some(), "the sole write, and somebody waits for it");
        drop(permit);
        drop(read.as_mut().now_or_never().expect("awaited before the other was"));
        assert!(earlier.as_mut().now_or_never().is_some());
    }

    #[test]
    fn a_cancelled_waiter_gives_its_share_to_the_next() {
        let in_flight = InFlight::new(10, 10);
        let mut first = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        let permit = first.as_mut().now_or_never().flatten().expect("fits");
        let mut kept = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        {
            let mut cancelled = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
            assert!(cancelled.as_mut().now_or_never().is_none());
            assert!(kept.as_mut().now_or_never().is_none());
            drop(permit);
            // `cancelled` has been sent the permit and is dropped without being polled again.
        }
        assert!(kept.as_mut().now_or_never().is_some());
    }

    #[test]
    fn any_number_of_waiters_that_are_gone_are_passed_over_on_a_small_stack() {
        let in_flight = InFlight::new(10, 10);
        let mut first = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        let permit = first.as_mut().now_or_never().flatten().expect("fits");
        for _ in 0..200_000 {
            assert!(pin!(in_flight.take(OpKind::Read, Awaited, 10, false)).now_or_never().is_none());
        }
        let mut last = pin!(in_flight.take(OpKind::Read, Awaited, 10, false));
        assert!(last.as_mut().now_or_never().is_none());
        drop(permit);
        drop(last.as_mut().now_or_never().expect("the others are gone"));
        assert_eq!(in_flight.bytes(OpKind::Read), 0, "given back");
    }

    #[test]
    fn more_than_the_whole_budget_waits_for_all_of_it() {
        let in_flight = InFlight::new(10, 10);
        let mut huge = pin!(in_flight.take(OpKind::Read, Awaited, 1000, false));
        assert!(huge.as_mut().now_or_never().is_some());
        assert_eq!(in_flight.bytes(OpKind::Read), 0, "given back");
    }
}
