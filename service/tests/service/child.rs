//! What the tests run as processes of their own.

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    files, hung, killed, limits,
    node::{self, ROLE},
    pool_client, twins, users,
};

/// By itself it does nothing.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["service", ..] => node::run(&words[1..]),
        ["holds", socket] => files::run(socket),
        ["rank", socket, path, seed] => files::rank(socket, path, seed.parse().expect("a number")),
        ["direct", ..] => killed::run(&words[1..]),
        #[cfg(feature = "cuda")]
        ["cuda", ..] => cuda::run(&words[1..]),
        #[cfg(feature = "cuda")]
        ["cuda-load", socket] => cuda::ends::load_for_ever(socket),
        ["twin", ..] => twins::run(&words[1..]),
        ["limited", ..] => limits::run(&words[1..]),
        ["store", socket] => pool_client::store_all(socket),
        ["load", socket] => pool_client::load_all(socket),
        ["linger", socket, pid, how] => hung::linger(socket.as_ref(), pid.parse().expect("a number"), how),
        ["as", ..] => users::run(&words[1..]),
        ["busy", socket, seed] => pool_client::run(socket, seed.parse().expect("a number"), false),
        ["busy-or-away", socket, seed] => pool_client::run(socket, seed.parse().expect("a number"), true),
        _ => panic!("{role} is no role"),
    }
}
