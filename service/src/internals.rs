//! What only this project's programs, tests, fuzzers and benches use. No promise holds for it: anything here may
//! change in any release.

pub use crate::report::{OpenSpace, ServiceReport};

#[cfg(feature = "sim")]
pub mod seams {
    pub use crate::seams::*;
}

pub mod protocol {
    pub use crate::protocol::*;
}
