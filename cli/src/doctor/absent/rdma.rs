//! What the doctor says of RDMA devices if this build has no cargo feature `rdma`.

use crate::doctor::{Finding, Want};

pub fn findings(_ordinal: u32, _has_device: bool) -> Vec<Finding> {
    vec![Finding::left_out("GDR", "rdma", Want::Gdr)]
}
