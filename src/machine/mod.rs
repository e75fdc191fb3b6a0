//! The drives under paths: how many, near which processors, how worn. What is good for a cache there is the doctor's
//! part, in the crate `kvhoist-doctor`.

mod drives;
mod kernel;
mod numa;
mod wear;

pub use drives::drive_folder;
pub(crate) use drives::drives;
pub use kernel::{Kernel, shown};
pub(crate) use numa::near_node;
pub use numa::near_node_at;
pub use wear::{DriveWear, drive_wear};
