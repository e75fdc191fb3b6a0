//! What the doctor says of libcufile if this build has no cargo feature `cufile`.

use std::path::Path;

use crate::{
    doctor::{Finding, Want},
    failure::Failure,
};

pub fn findings(_ordinal: u32, _path: Option<&Path>, _has_device: bool) -> Result<Vec<Finding>, Failure> {
    Ok(vec![Finding::left_out("cuFile", "cufile", Want::Cufile)])
}
