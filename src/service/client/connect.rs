//! How a client's thread connects: the handshake, the space, and all memory that it had lent before.

use std::{os::fd::OwnedFd, sync::Arc};

use tokio::{net::UnixStream, time::timeout};

use super::{
    options::ClientOptions,
    places::Lent,
    worker::{Worker, away, nonsense},
};
use crate::{
    error::{Error, Result},
    service::{
        link::{Link, LinkError, Receiver, Sender},
        protocol::{Hello, Limits, RegionKind, Reply, Request, Welcome},
        query::check,
    },
};

/// A request's id, on a connection that has no other request.
const ONLY_ID: u64 = 1;

impl Worker {
    /// Connects, attaches, and registers memory that was registered before. It has a deadline.
    pub(super) async fn connect(&self, lent: &[Lent]) -> Result<(Receiver, Sender, Limits)> {
        let deadline = self.options.deadline;
        match timeout(deadline, self.try_to_connect(lent)).await {
            Ok(connected) => connected,
            Err(_) => Err(away(&self.socket, format!("it did not answer for {deadline:?}"))),
        }
    }

    async fn try_to_connect(&self, lent: &[Lent]) -> Result<(Receiver, Sender, Limits)> {
        let failed = |error: std::io::Error| away(&self.socket, error.to_string());
        let mut link = Link::new(UnixStream::connect(&self.socket).await.map_err(failed)?);
        link.push(Hello::ours().encode(), None);
        let welcome = loop {
            if let Some(bytes) = link.take_bytes::<{ Welcome::BYTES }>() {
                break Welcome::decode(&bytes).map_err(|error| nonsense(&error.to_string()))?;
            }
            self.transfer(&mut link).await?;
        };
        check(&welcome)?;
        let ClientOptions { namespace, block_bytes, capacity_bytes, host_bytes, .. } = &self.options;
        let attach = Request::Attach {
            namespace: namespace.clone(),
            block_bytes: *block_bytes as u64,
            capacity_bytes: *capacity_bytes,
            host_bytes: *host_bytes,
        };
        match self.ask(&mut link, &attach, None).await? {
            Reply::Attached { block_bytes, .. } if block_bytes == self.options.block_bytes as u64 => {}
            Reply::Failed(failure) => return Err(failure.into()),
            other => return Err(nonsense(&format!("{other:?} to an attach request"))),
        }
        for lent in lent {
            match self.ask(&mut link, &register(lent), Some(Arc::clone(&lent.fd))).await? {
                Reply::Registered { .. } => {}
                Reply::Failed(failure) => {
                    tracing::warn!(reason = %failure.text, "the service refused memory that it had before");
                    return Err(failure.into());
                }
                other => return Err(nonsense(&format!("{other:?} to a register request"))),
            }
        }
        let (receiver, sender) = link.split();
        Ok((receiver, sender, welcome.limits))
    }

    /// Asks, and waits for the reply, on a connection without calls.
    async fn ask(&self, link: &mut Link, request: &Request, fd: Option<Arc<OwnedFd>>) -> Result<Reply> {
        link.push(request.encode(ONLY_ID), fd);
        loop {
            match link.next_frame(|header, body| Reply::decode(header.kind, body)).map_err(|e| self.broken(e))? {
                Some((ONLY_ID, reply)) => return Ok(reply),
                Some((_, Reply::Goodbye(failure))) => return Err(failure.into()),
                Some((found, _)) => return Err(nonsense(&format!("a reply to request {found}, expected {ONLY_ID}"))),
                None => self.transfer(link).await?,
            }
        }
    }

    fn broken(&self, error: LinkError) -> Error {
        match error {
            LinkError::Gone(error) => away(&self.socket, error.to_string()),
            LinkError::Nonsense(text) => nonsense(&text),
        }
    }

    /// Waits until the socket can send or has received, and does both.
    async fn transfer(&self, link: &mut Link) -> Result<()> {
        let moved = async {
            link.flush()?;
            link.ready(true).await?;
            link.receive().map(drop)
        };
        moved.await.map_err(|error| self.broken(error))
    }
}

/// How memory is registered.
pub(super) fn register(lent: &Lent) -> Request {
    Request::Register {
        region: lent.number,
        kind: RegionKind::Host,
        pin: lent.pin,
        offset: lent.offset,
        len: lent.len as u64,
    }
}
