//! Ranges of settings.

use std::fmt::Display;

use crate::error::{Error, Result};

/// Refuses a value out of a range; `None` is in every range.
pub(super) fn check<T: PartialOrd + Display>(
    field: &'static str,
    found: impl Into<Option<T>>,
    min: T,
    max: T,
    unit: &str,
) -> Result<()> {
    match found.into() {
        Some(found) if found < min || found > max => Err(Error::config(field, found, format!("{min} to {max} {unit}"))),
        _ => Ok(()),
    }
}
