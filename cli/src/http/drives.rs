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
    /// The drive's answer, or why there is none, in words.
    pub wear: Result<DriveWear, String>,
}

impl Drive {
    /// What the drives of some paths say now.
    pub fn of(paths: &[PathBuf]) -> Vec<Drive> {
        let drive = |path: &PathBuf| Drive {
            path: shown(path),
            name: drive_name(path).unwrap_or_default(),
            wear: machine::drive_wear(path),
        };
        paths.iter().map(drive).collect()
    }

    /// The answer, or why there is none, for people.
    pub fn words(&self) -> String {
        self.wear.as_ref().map_or_else(Clone::clone, ToString::to_string)
    }

    /// An object for programs.
    pub fn object(&self) -> Value {
        let wear = self.wear.as_ref().ok();
        json!({
            "path": self.path,
            "drive": self.name,
            "used": wear.map(DriveWear::used),
            "years_left": wear.and_then(DriveWear::years_left),
            "written_bytes": wear.map(|wear| wear.bytes_written),
            "wear": self.words(),
        })
    }
}
