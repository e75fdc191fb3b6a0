//! A line of the report, and the features that can be required.

use std::borrow::Cow;

use clap::ValueEnum;

/// Features that --want can require.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Want {
    /// io_uring may be used.
    Ring,
    /// The path takes direct I/O.
    DirectIo,
    /// Host memory can be registered with the ring.
    LockedMemory,
    /// There is a CUDA device that works.
    Cuda,
    /// libcufile moves blocks between the path and the device, without host memory.
    Cufile,
    /// Copies between host memory and a CUDA device go through an RDMA device.
    Gdr,
}

impl Want {
    pub fn is_of_device(self) -> bool {
        matches!(self, Want::Cuda | Want::Cufile | Want::Gdr)
    }
}

/// One line of the report.
#[derive(Clone)]
pub struct Finding {
    pub what: Cow<'static, str>,
    pub found: String,
    /// How to fix or improve it.
    pub fix: Option<String>,
    /// The feature that this finding decides, and whether it is available.
    pub decides: Option<(Want, bool)>,
    /// The configuration will not work.
    pub is_trouble: bool,
}

impl Finding {
    /// A finding.
    pub fn note(what: &'static str, found: impl Into<String>) -> Self {
        Finding { what: what.into(), found: found.into(), fix: None, decides: None, is_trouble: false }
    }

    /// What a caller has found out about its engine.
    pub fn of_engine(what: String, found: String, fix: Option<String>, is_trouble: bool) -> Self {
        Finding { what: what.into(), found, fix, decides: None, is_trouble }
    }

    /// An engine that this build left out, by the cargo feature that has it.
    #[allow(dead_code, reason = "a build with all engines has none to report")]
    pub fn left_out(what: &'static str, feature: &str, want: Want) -> Self {
        Finding::note(what, format!("not in this build, which has no cargo feature `{feature}`"))
            .decides(want, false)
            .fix(format!("none needed without it; else build the command with `--features {feature}`"))
    }

    /// Adds a fix.
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// A finding about the machine.
    pub fn of_machine(finding: kvhoist_doctor::Finding) -> Self {
        let kvhoist_doctor::Finding { what, found, fix, is_trouble, .. } = finding;
        Finding { what: what.into(), found, fix, decides: None, is_trouble }
    }

    pub fn decides(mut self, want: Want, is_there: bool) -> Self {
        self.decides = Some((want, is_there));
        self
    }
}
