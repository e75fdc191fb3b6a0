//! Chooses the copy method by measurement.

use std::time::Duration;

use crate::{
    CopyMethod,
    cost::{Kept, Times},
};

/// The calibrations of this process.
pub(super) static KEPT: Kept<Calibration> = Kept::new();

/// Measured duration of each method on a device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Calibration {
    /// By direction (to the device, from it), then by method.
    times: [[Times; 3]; 2],
}

impl Calibration {
    /// Records that `count` copies of `bytes` each took `time`. Called with ascending counts of ascending lengths.
    pub(super) fn note(&mut self, to_device: bool, method: CopyMethod, bytes: usize, count: usize, time: Duration) {
        self.times[usize::from(!to_device)][method as usize].note(bytes, count, time);
    }

    /// Drops what was recorded of a method that has failed.
    pub(super) fn forget(&mut self, to_device: bool, method: CopyMethod) {
        self.times[usize::from(!to_device)][method as usize] = Times::default();
    }

    /// Expected duration of `count` copies of `bytes` each. `None` for a method that this device does not support.
    pub fn estimate(&self, to_device: bool, method: CopyMethod, bytes: usize, count: usize) -> Option<Duration> {
        self.times[usize::from(!to_device)][method as usize].estimate(bytes, count)
    }

    /// The method expected to be fastest for `count` copies of `bytes` each.
    pub fn quickest(&self, to_device: bool, bytes: usize, count: usize) -> CopyMethod {
        let timed = |method| Some((self.estimate(to_device, method, bytes, count)?, method));
        CopyMethod::ALL.into_iter().filter_map(timed).min().map_or(CopyMethod::Loop, |(_, method)| method)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quickest_depends_on_size_and_count() {
        let mut calibration = Calibration::default();
        for (bytes, count, kernel, batch) in
            [(4096, 1, 9, 8), (4096, 1024, 90, 400), (1 << 20, 1, 30, 25), (1 << 20, 16, 400, 320)]
        {
            calibration.note(true, CopyMethod::Kernel, bytes, count, Duration::from_micros(kernel));
            calibration.note(true, CopyMethod::Batch, bytes, count, Duration::from_micros(batch));
        }
        assert_eq!(calibration.quickest(true, 4096, 1), CopyMethod::Batch);
        assert_eq!(calibration.quickest(true, 4096, 1000), CopyMethod::Kernel);
        assert_eq!(calibration.quickest(true, 1 << 20, 16), CopyMethod::Batch);
        assert_eq!(calibration.quickest(false, 4096, 1), CopyMethod::Loop, "nothing was measured");
    }

    #[test]
    fn each_method_has_the_name_that_files_of_settings_have() {
        for method in CopyMethod::ALL {
            assert_eq!(serde_json::to_value(method).expect("a name"), method.name());
        }
    }
}
