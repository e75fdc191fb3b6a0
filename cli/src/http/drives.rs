//! The drives of a service: its status does not name them, the command's flags do.

use std::path::PathBuf;

use kvhoist::internals::machine::{self, DriveWear};
use serde_json::{Value, json};

use crate::{doctor::drive_name, shown::shown};

/// A path of the service and the drive below it.
#[derive(Debug)]
pub struct Drive {
    pub path: String,
    /// As the kernel names it: `nvme0n1`. Empty where it names none.
    pub name: String,
    /// The share of its life that is used, 0 to 1 and more. `None` where the drive does not say, or may not be asked.
    pub used: Option<f64>,
    /// Years until all of its life is used, at the pace so far. `None` as above, and where too little of it is used.
    pub years_left: Option<f64>,
    /// Bytes written to it in its whole life, by everybody. `None` as above.
    pub written: Option<u64>,
    /// The drive's answer in words, or why there is none.
    pub wear: String,
}

impl Drive {
    /// What the drives of some paths say now.
    pub fn of(paths: &[PathBuf]) -> Vec<Drive> {
        let drive = |path: &PathBuf| {
            let wear = machine::drive_wear(path);
            Drive {
                path: shown(path),
                name: drive_name(path).unwrap_or_default(),
                years_left: wear.as_ref().ok().and_then(DriveWear::years_left),
                written: wear.as_ref().ok().map(|wear| wear.bytes_written),
                used: wear.as_ref().ok().map(|wear| f64::from(wear.used_percent) / 100.0),
                wear: wear.map_or_else(|why| why, |wear| wear.to_string()),
            }
        };
        paths.iter().map(drive).collect()
    }

    /// An object for programs.
    pub fn object(&self) -> Value {
        json!({
            "path": self.path,
            "drive": self.name,
            "used": self.used,
            "years_left": self.years_left,
            "written_bytes": self.written,
            "wear": self.wear,
        })
    }
}
