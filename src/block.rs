//! Blocks, and the route of their bytes.

mod route;

pub use kvhoist_base::block::*;
pub use route::Route;
