//! What the `kvhoist` command reads, apart from the command: so that tests and fuzzing reach it.

pub mod failure;
pub mod shown;
pub mod size;
pub mod trace;
