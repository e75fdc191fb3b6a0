//! Situations that seeds reach by chance only, made to happen.

mod closes;
mod flights;
mod loads;
mod records;
mod remote;
mod removals;
#[path = "../scene/mod.rs"]
mod scene;
mod service;
mod slots;
mod stalls;
