//! `kvhoist bench copy --engine gdr` of a build without the cargo feature `rdma`.

use super::copy::Args;
use crate::failure::Failure;

pub fn run(_args: &Args) -> Result<(), Failure> {
    Err(Failure::usage("--engine gdr: found a build without the feature `rdma`, expected `--features rdma`"))
}
