//! What the doctor says of libcufile if this build has no cargo feature `cufile`.

use std::path::Path;

use crate::doctor::{Finding, Want};

pub fn findings(_ordinal: u32, _path: Option<&Path>, _has_device: bool) -> Vec<Finding> {
    vec![Finding::left_out("cuFile", "cufile", Want::Cufile)]
}
