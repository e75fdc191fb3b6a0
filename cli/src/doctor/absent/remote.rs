//! What the doctor says of a store beyond the node if this build has no cargo feature `remote`: such settings are
//! refused before.

use crate::{
    doctor::{Finding, plan::RemotePlan},
    failure::Failure,
};

#[allow(clippy::unnecessary_wraps, reason = "as in a build that opens stores")]
pub fn findings(_plan: &RemotePlan) -> Result<Vec<Finding>, Failure> {
    Ok(Vec::new())
}
