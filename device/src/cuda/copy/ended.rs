//! When a launch has ended, so that its memory may be used by others.
//!
//! It has when the driver says so, and when the device has stopped. No other error means that: a query fails, for
//! example, while any thread captures a stream, and the device copies on.

use std::time::{Duration, Instant};

use crate::cuda::CudaError;

/// How long the driver is asked again after such errors.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The end of a launch.
pub(super) enum Ended {
    /// It no longer uses memory. The error is that of a device that has stopped.
    Yes(Result<(), CudaError>),
    /// The driver has not said for [`SILENCE_MAX`]. The launch may still run.
    Unknown(CudaError),
}

/// Since when the driver has not said whether a launch has ended.
#[derive(Default)]
pub(super) struct Silence(Option<Instant>);

impl Silence {
    /// What the result of a query means. `None`: the launch may still run, and the driver is to be asked again.
    pub(super) fn judge(&mut self, queried: Result<bool, CudaError>) -> Option<Ended> {
        match queried {
            Ok(has_ended) => {
                self.0 = None;
                has_ended.then_some(Ended::Yes(Ok(())))
            }
            Err(fault) if fault.is_sticky() => Some(Ended::Yes(Err(fault))),
            Err(fault) => {
                let since = self.0.get_or_insert_with(Instant::now);
                (since.elapsed() > SILENCE_MAX).then_some(Ended::Unknown(fault))
            }
        }
    }
}

/// Why a device that has stopped is out of service.
pub(super) fn stopped(fault: &CudaError) -> String {
    format!("the device stopped: {fault}")
}

/// Why a device that no longer says what has ended is out of service.
pub(super) fn silent(fault: &CudaError) -> String {
    format!("the driver did not say for {SILENCE_MAX:?} whether copies had ended: {fault}")
}
