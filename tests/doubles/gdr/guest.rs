//! The host's side of the guest with an RDMA device of software: real verbs, with the kernel's own checks of keys,
//! bounds and states.

use std::{fs::File, time::Duration};

use super::{
    common::{directory, seed},
    machine::{BOOTS, Guest, guest_run},
};

#[test]
fn copies_through_a_device_of_software() {
    let Some(program) = guest_run() else { return };
    let dir = directory();
    let image = dir.path().join("nvme.img");
    File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("an image");
    let job = format!("all\nseed={}\n", seed());
    let ended = (0..BOOTS).find_map(|_| Guest::boot(&program, &image, &job, Duration::from_secs(600)).ended());
    let (status, printed) = ended.expect("a guest that boots");
    println!("{printed}");
    assert!(status.success(), "{status}");
    assert!(printed.contains("all of it: ok"), "it came to its end");
}
