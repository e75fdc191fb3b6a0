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
        link::{Link, LinkError},
        protocol::{Hello, RegionKind, Reply, Request, Welcome},
        query::check,
    },
};

impl Worker {
    /// Connects, attaches, and registers all regions again. Calls that come meanwhile wait for the end of the
    /// attempt, which has a deadline.
    pub(super) async fn connect(&mut self) -> Result<Link> {
        let deadline = self.options.deadline;
        match timeout(deadline, self.try_to_connect()).await {
            Ok(connected) => connected,
            Err(_) => Err(away(&self.socket, format!("it did not answer for {deadline:?}"))),
        }
    }

    async fn try_to_connect(&mut self) -> Result<Link> {
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
        self.requests_max = (welcome.limits.requests as usize).max(1);
        self.request_bytes_max = welcome.limits.request_bytes as usize;
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
        for lent in self.lent.values().cloned().collect::<Vec<_>>() {
            match self.ask(&mut link, &register(&lent), Some(Arc::clone(&lent.fd))).await? {
                Reply::Registered { .. } => {}
                Reply::Failed(failure) => {
                    tracing::warn!(reason = %failure.text, "the service refused memory that it had before");
                    return Err(failure.into());
                }
                other => return Err(nonsense(&format!("{other:?} to a register request"))),
            }
        }
        Ok(link)
    }

    /// Asks, and waits for the reply, on a connection without calls.
    async fn ask(&mut self, link: &mut Link, request: &Request, fd: Option<Arc<OwnedFd>>) -> Result<Reply> {
        let id = self.own_id();
        link.push(request.encode(id), fd);
        loop {
            match link.next_frame(|header, body| Reply::decode(header.kind, body)).map_err(|e| self.broken(e))? {
                Some((found, reply)) if found == id => return Ok(reply),
                Some((_, Reply::Goodbye(failure))) => return Err(failure.into()),
                Some((found, _)) => return Err(nonsense(&format!("a reply to request {found}, expected {id}"))),
                None => self.transfer(link).await?,
            }
        }
    }

    pub(super) fn own_id(&mut self) -> u64 {
        self.next_own_id += 2;
        self.next_own_id
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
