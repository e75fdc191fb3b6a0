//! The engine's status, readable from any thread.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

/// Whether copies go through an RDMA device, with details or the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GdrState {
    /// Never in service.
    Off(String),
    /// In service.
    On(String),
    /// Failed; the connection is being reset and tested again.
    Recovering(String),
    /// Failed for good.
    Retired(String),
}

impl GdrState {
    /// True while copies go through the engine.
    pub fn is_on(&self) -> bool {
        matches!(self, GdrState::On(_))
    }

    /// Value of the metric `kvhoist_gdr_in_use`.
    pub fn in_use(&self) -> f64 {
        match self {
            GdrState::On(_) => 1.0,
            GdrState::Recovering(_) => 0.5,
            GdrState::Off(_) | GdrState::Retired(_) => 0.0,
        }
    }

    /// Details while in service, the reason otherwise.
    pub fn detail(&self) -> &str {
        match self {
            GdrState::Off(detail) | GdrState::On(detail) | GdrState::Recovering(detail) | GdrState::Retired(detail) => {
                detail
            }
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
        write!(f, "{name}: {}", self.detail())
    }
}

/// Shared handle to the state of an engine.
#[derive(Clone)]
pub struct GdrStatus(Arc<Mutex<GdrState>>);

impl GdrStatus {
    /// A handle to this state.
    pub fn new(state: GdrState) -> Self {
        GdrStatus(Arc::new(Mutex::new(state)))
    }

    /// The current state.
    pub fn get(&self) -> GdrState {
        self.0.lock().expect("nothing panics under it").clone()
    }

    /// Changes the state.
    pub fn set(&self, state: GdrState) {
        *self.0.lock().expect("nothing panics under it") = state;
    }
}

debug_fields!(GdrStatus, status => state: status.get());
