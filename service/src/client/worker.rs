//! A client's thread: it connects, receives replies, and begins anew when the service is gone.

#[cfg(test)]
mod tests;

use std::{future::pending, io, path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    sync::oneshot::{self, error::TryRecvError},
    time::{Instant, sleep_until},
};

use super::{line::Line, options::ClientOptions, places::Places};
use crate::{
    error::{Error, Result, ServiceFault},
    link::{LinkError, Receiver},
    protocol::{Failure, Reply, SpaceDevice},
    wire::Wire,
};

/// How long to wait before the first new attempt to connect; each further one waits twice as long. Also, always as
/// long, while connections to the service wait to be accepted.
pub(super) const BACKOFF_MIN: Duration = Duration::from_millis(10);

/// Times between two rounds of offers: the first, and the longest.
const OFFER_PAUSE_MIN: Duration = Duration::from_secs(1);
const OFFER_PAUSE_MAX: Duration = Duration::from_secs(60);

/// How a client reaches the service: makes a stream to it.
pub(crate) trait Dial: AsyncFn() -> io::Result<Arc<dyn Wire>> {}

impl<D: AsyncFn() -> io::Result<Arc<dyn Wire>>> Dial for D {}

pub(crate) struct Worker<D> {
    pub(super) dial: D,
    pub(super) socket: PathBuf,
    pub(super) options: ClientOptions,
    /// Whose memory the client registers.
    pub(super) device: SpaceDevice,
    pub(super) line: Arc<Line>,
    pub(super) places: Arc<Places>,
}

impl<D: Dial> Worker<D> {
    /// Runs until the client is closed. `first` gets the result of the first attempt to connect; a failure ends it.
    pub(crate) async fn run(self, first: oneshot::Sender<Result<()>>) {
        let mut first = Some(first);
        let mut backoff = BACKOFF_MIN;
        while !self.line.is_closing() {
            let mut device_end = None;
            let why = match self.connect(&mut device_end).await {
                Ok((receiver, sender, limits)) => {
                    self.line.connected(sender, &limits);
                    if first.take().is_some_and(|first| first.send(Ok(())).is_err()) {
                        break;
                    }
                    backoff = BACKOFF_MIN;
                    self.serve(receiver).await
                }
                Err(error) => match first.take() {
                    Some(first) => {
                        self.line.closed();
                        return drop(first.send(Err(error)));
                    }
                    // What calls meet from now on: none of them has waited.
                    None => match error {
                        Error::Service { fault: ServiceFault::Timeout, text } => {
                            Error::service(ServiceFault::Away, text)
                        }
                        error => error,
                    },
                },
            };
            self.places.clear_refused();
            if let Some(end) = &device_end {
                self.memory_is_free(end.wait(), &why).await;
            }
            if !self.line.lost(&why) {
                self.pause(Instant::now() + backoff).await;
                backoff = (backoff * 2).min(self.options.backoff_max);
            }
        }
        self.line.closed();
    }

    /// Waits for the time of the next attempt, or for the close. Calls fail meanwhile.
    async fn pause(&self, until: Instant) {
        while !self.line.is_closing() {
            tokio::select! { biased;
                () = self.line.woken.notified() => {}
                () = sleep_until(until) => return,
            }
        }
    }

    /// Hands out replies until the connection is lost, or nobody understands them, and the service has hung up; why it
    /// was.
    async fn serve(&self, mut receiver: Receiver) -> Error {
        let mut goodbye = None;
        let mut offers = Offers::new(self.places.all_refused());
        let error = loop {
            if let Err(error) = self.turn(&mut receiver, &mut goodbye, &mut offers).await {
                break error;
            }
        };
        let waits = !error.ends_the_use_of_memory();
        let why = goodbye.unwrap_or_else(|| match error {
            LinkError::Gone(error) => format!("the connection was lost ({error})"),
            LinkError::Nonsense(text) => format!("the service sent nonsense: {text}"),
        });
        let why = away(&self.socket, why);
        if waits {
            self.memory_is_free(receiver.hang_up(), &why).await;
        }
        why
    }

    /// Offers refused memory again, one region after the other; when the next round begins.
    fn offer(&self, offers: &mut Offers) -> Option<Instant> {
        loop {
            if let Some((number, reply)) = &mut offers.asked {
                match reply.try_recv() {
                    Err(TryRecvError::Empty) => return None,
                    Ok(Err(Error::Service { fault, text })) => {
                        self.places.set_refused(*number, &Failure::new(fault, text));
                        offers.refused.push(*number);
                    }
                    _ => self.places.remove_refused(*number),
                }
                offers.asked = None;
            }
            if offers.refused.is_empty() {
                return None;
            }
            if offers.left == 0 {
                let (now, pause) = (Instant::now(), offers.pause);
                let next = *offers.next.get_or_insert_with(|| now + pause);
                if now < next {
                    return Some(next);
                }
                (offers.left, offers.next) = (offers.refused.len(), None);
                offers.pause = (2 * pause).min(OFFER_PAUSE_MAX);
            }
            offers.left -= 1;
            let number = offers.refused.remove(0);
            match self.line.offer(number) {
                Some(reply) => offers.asked = Some((number, reply)),
                None => self.places.remove_refused(number),
            }
        }
    }

    async fn turn(
        &self,
        receiver: &mut Receiver,
        goodbye: &mut Option<String>,
        offers: &mut Offers,
    ) -> std::result::Result<(), LinkError> {
        while let Some((id, reply)) = receiver.next_frame(|header, body| Reply::decode(header.kind, body))? {
            match reply {
                // The hang-up follows, when the service has let go of this process's memory.
                Reply::Goodbye(failure) => {
                    self.places.clear_refused();
                    self.line.parting(away(&self.socket, failure.text.clone()));
                    *goodbye = Some(failure.text);
                }
                reply => self.line.answered(id, reply),
            }
        }
        let offer = if goodbye.is_some() { None } else { self.offer(offers) };
        let wait = self.line.wait();
        let deadline = async {
            match wait.until.into_iter().chain(offer).min() {
                Some(until) => sleep_until(until).await,
                None => pending().await,
            }
        };
        tokio::select! { biased;
            ready = receiver.ready(wait.to_send) => {
                ready?;
                receiver.receive()?;
            }
            () = self.line.woken.notified() => {}
            () = deadline => {
                if self.line.late() {
                    return Err(LinkError::Gone(io::Error::new(io::ErrorKind::TimedOut, "no hang-up after the close")));
                }
            }
        }
        Ok(())
    }
}

/// Memory that a service refused when it was back, and is offered again: the reason may have passed.
struct Offers {
    refused: Vec<u32>,
    /// How many of these are offered yet in this round.
    left: usize,
    /// When the next round begins, and how long after that the one behind it.
    next: Option<Instant>,
    pause: Duration,
    /// The one that is offered now.
    asked: Option<(u32, oneshot::Receiver<Result<Reply>>)>,
}

impl Offers {
    fn new(refused: Vec<u32>) -> Self {
        Offers { refused, left: 0, next: None, pause: OFFER_PAUSE_MIN, asked: None }
    }
}

pub(super) fn away(socket: &std::path::Path, why: impl std::fmt::Display) -> Error {
    let text = format!("{}: {why}; start `kvhoist serve`, or try later: the client connects again", socket.display());
    Error::service(ServiceFault::Away, text)
}

pub(super) fn nonsense(text: &str) -> Error {
    Error::service(ServiceFault::Protocol, text)
}
