//! The `kvhoist` command.
fn main() {}
