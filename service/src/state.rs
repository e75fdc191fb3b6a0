//! The state that all sessions of a service share: its settings, its spaces and its connections.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

use tokio::{
    sync::{Notify, Semaphore},
    task::yield_now,
};

use super::{
    budget::{Account, Budget},
    config::ServerConfig,
    inbox::Unread,
    peers::own_uid,
    protocol::{ClientStatus, Failure, Limits, ServiceStatus},
    report::ServiceReport,
    spaces::Spaces,
    status_frames::StatusFrames,
    transfers::ClientTransfers,
};
use crate::error::ServiceFault;

/// Connections beyond the limit, for the service's own user: for its status and the removal of spaces.
const OPERATOR_CONNECTIONS: u32 = 8;

/// The state of a connection that others see.
pub(super) struct Connection {
    id: u64,
    /// It came when there were as many as there may be.
    is_beyond: bool,
    pub(super) pid: u32,
    pub(super) uid: u32,
    pub(super) namespace: RefCell<String>,
    pub(super) transfers: RefCell<Option<Rc<ClientTransfers>>>,
    pub(super) requests: Cell<u32>,
    /// What its regions take.
    pub(super) account: Rc<Account>,
    state: Rc<ServiceState>,
}

impl Connection {
    /// The service's number for the connection.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Whether it may attach to a space or hold a file: as long as there are more than there may be, one that came
    /// beyond the limit may not.
    ///
    /// # Errors
    /// [`ServiceFault::Busy`].
    pub(super) fn may_be_client(&self) -> Result<(), Failure> {
        let state = &self.state;
        match self.is_beyond && state.connections() > state.config.connections_max {
            true => Err(state.crowded()),
            false => Ok(()),
        }
    }

    fn status(&self) -> ClientStatus {
        let transfers = self.transfers.borrow();
        let transfers = transfers.as_deref();
        ClientStatus {
            id: self.id,
            pid: self.pid,
            uid: self.uid,
            namespace: self.namespace.borrow().clone(),
            regions: transfers.map_or(0, |transfers| transfers.regions.count() as u32),
            requests: self.requests.get(),
            region_bytes: transfers.map_or(0, |transfers| transfers.regions.bytes()),
            bytes_in_flight: transfers.map_or(0, ClientTransfers::bytes_in_flight),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.state.open.borrow_mut().remove(&self.id);
        let mut users = self.state.users.borrow_mut();
        if let Some(count) = users.get_mut(&self.uid) {
            *count -= 1;
        }
        users.retain(|_, count| *count > 0);
    }
}

pub(super) struct ServiceState {
    pub(super) config: ServerConfig,
    pub(super) spaces: Rc<Spaces>,
    pub(super) cut_off: Cell<u64>,
    /// Frames that have come in part.
    pub(super) unread: Unread,
    pub(super) status_frames: StatusFrames,
    budget: Rc<Budget>,
    /// The service takes no more work.
    draining: Cell<bool>,
    /// Wakes the sessions when that begins.
    drain_began: Notify,
    /// Those that are alive.
    open: RefCell<BTreeMap<u64, std::rc::Weak<Connection>>>,
    /// How many of them each user has.
    users: RefCell<BTreeMap<u32, u32>>,
    next_id: Cell<u64>,
    /// Lets one connection come or go at a time.
    turns: Semaphore,
}

impl ServiceState {
    pub(super) fn new(config: ServerConfig, spaces: Spaces) -> Self {
        ServiceState {
            budget: Rc::new(Budget::new(&config)),
            config,
            spaces: Rc::new(spaces),
            cut_off: Cell::new(0),
            unread: Unread::default(),
            status_frames: StatusFrames::new(),
            draining: Cell::new(false),
            drain_began: Notify::new(),
            open: RefCell::default(),
            users: RefCell::default(),
            next_id: Cell::new(1),
            turns: Semaphore::new(1),
        }
    }

    /// The service takes no more work.
    pub(super) fn drain(&self) {
        self.draining.set(true);
        self.drain_began.notify_waiters();
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// Resolves when the service takes no more work.
    pub(super) async fn drains(&self) {
        while !self.draining.get() {
            self.drain_began.notified().await;
        }
    }

    /// Whether there is room for a connection of this user.
    ///
    /// # Errors
    /// [`ServiceFault::Busy`].
    pub(super) fn has_room(&self, uid: u32) -> Result<(), Failure> {
        let beyond = if uid == own_uid() { OPERATOR_CONNECTIONS } else { 0 };
        if self.connections() < self.config.connections_max + beyond { Ok(()) } else { Err(self.crowded()) }
    }

    /// Why there is no room for a connection.
    fn crowded(&self) -> Failure {
        let most = self.users.borrow().iter().max_by_key(|(_, count)| **count).map(|(uid, count)| (*uid, *count));
        let (uid, count) = most.unwrap_or_default();
        let text = format!(
            "busy: found {} connections, expected {} at most; user {uid} has {count} of them, the most of all users: \
             end some of its processes, or try later",
            self.connections(),
            self.config.connections_max
        );
        Failure::new(ServiceFault::Busy, text)
    }

    /// Admits a connection.
    pub(super) fn enter(self: &Rc<Self>, pid: u32, uid: u32) -> Rc<Connection> {
        let id = self.next_id.replace(self.next_id.get() + 1);
        let connection = Rc::new(Connection {
            id,
            is_beyond: self.connections() >= self.config.connections_max,
            pid,
            uid,
            namespace: RefCell::default(),
            transfers: RefCell::default(),
            requests: Cell::new(0),
            account: self.budget.account(uid),
            state: Rc::clone(self),
        });
        self.open.borrow_mut().insert(id, Rc::downgrade(&connection));
        *self.users.borrow_mut().entry(uid).or_default() += 1;
        connection
    }

    /// Waits for the turn of a connection that comes or goes. However many there are, the service's thread looks at its
    /// other sockets in between: requests do not wait for a crowd.
    pub(super) async fn turn(&self) {
        let _others_wait = self.turns.acquire().await.expect("nobody closes it");
        yield_now().await;
    }

    /// The number of connections.
    pub(super) fn connections(&self) -> u32 {
        self.open.borrow().len() as u32
    }

    /// The limits of one connection.
    pub(super) fn limits(&self) -> Limits {
        Limits::new(self.config.requests_max, self.config.regions_max, self.config.region_bytes_max)
    }

    pub(super) fn report(&self) -> ServiceReport {
        ServiceReport { status: self.status(), spaces: self.spaces.opened() }
    }

    pub(super) fn status(&self) -> ServiceStatus {
        let (capacity_left, host_left) = self.spaces.left();
        let (files, file_bytes) = self.spaces.held_files();
        ServiceStatus {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            draining: self.is_draining(),
            trouble: self.spaces.trouble(),
            capacity_bytes: if self.config.paths.is_empty() { 0 } else { self.config.capacity_bytes },
            capacity_left,
            host_bytes: self.config.host_bytes,
            host_left,
            files,
            file_bytes,
            cut_off: self.cut_off.get(),
            paths: self.config.paths.iter().map(|path| path.display().to_string()).collect(),
            spaces: self.spaces.status(),
            clients: self
                .open
                .borrow()
                .values()
                .filter_map(|connection| Some(connection.upgrade()?.status()))
                .collect(),
        }
    }
}
