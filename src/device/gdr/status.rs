//! What can be told of the engine from any thread.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use crate::metrics::{self, Gauge};

/// Whether copies go through an RDMA device, and the evidence or the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GdrState {
    /// They do not, and never did.
    Off(String),
    /// They do.
    On(String),
    /// They did until a failure; the connection is being proven anew.
    Recovering(String),
    /// They did, and do no more.
    Retired(String),
}

impl GdrState {
    /// True while copies go through it.
    pub fn is_on(&self) -> bool {
        matches!(self, GdrState::On(_))
    }

    /// The evidence, or the reason.
    pub fn told(&self) -> &str {
        match self {
            GdrState::Off(told) | GdrState::On(told) | GdrState::Recovering(told) | GdrState::Retired(told) => told,
        }
    }
}

impl fmt::Display for GdrState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            GdrState::Off(_) => "off",
            GdrState::On(_) => "on",
            GdrState::Recovering(_) => "recovering",
            GdrState::Retired(_) => "retired",
        };
        write!(f, "{name}: {}", self.told())
    }
}

/// The state of an engine, for whoever reports it.
#[derive(Clone)]
pub struct GdrStatus(Arc<Mutex<GdrState>>, Gauge);

impl GdrStatus {
    pub(crate) fn new(state: GdrState) -> Self {
        let status = GdrStatus(Arc::new(Mutex::new(state.clone())), metrics::gdr_in_use());
        status.set(state);
        status
    }

    /// What it is now.
    pub fn get(&self) -> GdrState {
        self.0.lock().expect("nothing panics under it").clone()
    }

    pub(crate) fn set(&self, state: GdrState) {
        self.1.set(match state {
            GdrState::On(_) => 1.0,
            GdrState::Recovering(_) => 0.5,
            GdrState::Off(_) | GdrState::Retired(_) => 0.0,
        });
        *self.0.lock().expect("nothing panics under it") = state;
    }
}

impl fmt::Debug for GdrStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GdrStatus").field(&self.get()).finish()
    }
}
