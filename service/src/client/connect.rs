//! How a client's thread connects: the handshake, the space, and all memory that it had lent before.

use std::{cell::Cell, io, sync::Arc};

use tokio::time::{sleep, timeout};

use super::{
    device_end::DeviceEnd,
    options::ClientOptions,
    worker::{BACKOFF_MIN, Dial, Worker, away, nonsense},
};
use crate::{
    error::{Error, Result},
    link::{Link, LinkError, Receiver, Sender},
    protocol::{Hello, Limits, Reply, Request, SpaceDevice, Welcome},
    query::{cannot_connect, found, not_accepted, refused},
    wire::{Shared, Wire},
};

/// A request's id, on a connection that has no other request.
const ONLY_ID: u64 = 1;

impl<D: Dial> Worker<D> {
    /// Connects, attaches, and registers memory that was registered before. It has a deadline. `device_end`: what says
    /// when the service has let go of device memory, also if this fails.
    pub(super) async fn connect(&self, device_end: &mut Option<DeviceEnd>) -> Result<(Receiver, Sender, Limits)> {
        let (deadline, dialed) = (self.options.deadline, Cell::new(false));
        match timeout(deadline, self.try_to_connect(device_end, &dialed)).await {
            Ok(connected) => connected,
            Err(_) if !dialed.get() => Err(not_accepted(&self.socket, deadline)),
            Err(_) => Err(away(&self.socket, format!("it did not answer for {deadline:?}"))),
        }
    }

    /// A stream to the service. Where as many as there is room for wait to be accepted, the kernel refuses one that
    /// does not block, and wakes nobody later. A client that is being closed does not wait.
    async fn dialed(&self) -> io::Result<Arc<dyn Wire>> {
        loop {
            match (self.dial)().await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.line.is_closing() => {
                    sleep(BACKOFF_MIN).await;
                }
                dialed => return dialed,
            }
        }
    }

    async fn try_to_connect(
        &self,
        device_end: &mut Option<DeviceEnd>,
        dialed: &Cell<bool>,
    ) -> Result<(Receiver, Sender, Limits)> {
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::PermissionDenied => cannot_connect(&self.socket, &error),
            _ => away(&self.socket, found(&self.socket, &error)),
        };
        let mut link = Link::new(self.dialed().await.map_err(failed)?);
        dialed.set(true);
        link.sender.push(Hello::ours().encode(), None);
        let welcome = loop {
            if let Some(bytes) = link.receiver.take_bytes::<{ Welcome::BYTES }>() {
                break Welcome::decode(&bytes).map_err(|error| nonsense(&error.to_string()))?;
            }
            self.transfer(&mut link).await?;
        };
        if welcome.answer.is_err() {
            return Err(refused(&welcome, self.reply(&mut link).await.ok().map(|(_, reply)| Ok(reply))));
        }
        let ClientOptions { namespace, block_bytes, capacity_bytes, host_bytes, shared, .. } = &self.options;
        let attach = Request::Attach {
            namespace: namespace.clone(),
            block_bytes: *block_bytes as u64,
            capacity_bytes: *capacity_bytes,
            host_bytes: *host_bytes,
            shared: *shared,
            device: self.device,
        };
        match self.ask(&mut link, &attach, None).await? {
            Reply::Attached { block_bytes, .. } if block_bytes == self.options.block_bytes as u64 => {}
            Reply::Failed(failure) => return Err(failure.into()),
            other => return Err(nonsense(&format!("{other:?} to an attach request"))),
        }
        *device_end = DeviceEnd::new(link.receiver.descriptors())?;
        if matches!(self.device, SpaceDevice::Cuda(_)) && device_end.is_none() {
            return Err(nonsense("no descriptors that say when device memory is free again"));
        }
        // Not before: memory that is taken back while no service answers is free at once.
        for lent in &self.line.connect().ok_or(Error::Closed)? {
            match self.ask(&mut link, &lent.request(), lent.fd()).await? {
                Reply::Registered { .. } => {}
                // It is offered again, to this service and to the next.
                Reply::Failed(failure) => {
                    tracing::warn!(reason = %failure.text, "the service refused memory that it had before");
                    self.places.set_refused(lent.number, &failure);
                }
                other => return Err(nonsense(&format!("{other:?} to a register request"))),
            }
        }
        let Link { receiver, sender } = link;
        Ok((receiver, sender, welcome.limits))
    }

    /// Asks, and waits for the reply, on a connection without calls.
    async fn ask(&self, link: &mut Link, request: &Request, fd: Option<Shared>) -> Result<Reply> {
        link.sender.push(request.encode(ONLY_ID), fd);
        match self.reply(link).await? {
            (ONLY_ID, reply) => Ok(reply),
            (_, Reply::Goodbye(failure)) => Err(failure.into()),
            (found, _) => Err(nonsense(&format!("a reply to request {found}, expected {ONLY_ID}"))),
        }
    }

    /// The next reply, with its id.
    async fn reply(&self, link: &mut Link) -> Result<(u64, Reply)> {
        loop {
            let reply = link.receiver.next_frame(|header, body| Reply::decode(header.kind, body));
            match reply.map_err(|error| self.broken(error))? {
                Some(reply) => return Ok(reply),
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
            // A service that has hung up may have said why: that is read first.
            let _found_by_receive = link.sender.flush();
            link.ready(true).await?;
            link.receiver.receive().map(drop)
        };
        moved.await.map_err(|error| self.broken(error))
    }
}
