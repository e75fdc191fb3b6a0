//! What the doctor says of the GPU if this build has no cargo feature `cuda`.

use crate::doctor::{Finding, Want};

pub fn findings(_ordinal: u32) -> Vec<Finding> {
    vec![Finding::left_out("device", "cuda", Want::Cuda)]
}
