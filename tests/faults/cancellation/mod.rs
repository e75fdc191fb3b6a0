//! A future may be dropped after any poll, and a cache closed at any time: nothing leaks, nothing hangs, no other call
//! is affected.

use crate::common;

mod calls;
mod opens;
mod points;
mod scene;
mod shutdown;
