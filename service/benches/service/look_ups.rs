//! Look-ups, and what the service costs while nobody asks anything.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    sync::Arc,
    thread,
    time::Duration,
};

use kvhoist::{BlockKey, Segment, SharedMemory, block_on};
use kvhoist_service::{Client, ClientOptions};

use crate::{
    node::Service,
    options::{Options, Outcome},
    pool::{all_done, key, median, timed},
};

const LOOKED_UP: usize = 4096;

/// Look-ups of many keys and of one, beside bare round trips.
pub fn look_ups(socket: &Path, small: u64) -> Outcome<()> {
    const BLOCK_BYTES: usize = 4096;
    let mut wanted = ClientOptions::new("small", BLOCK_BYTES);
    (wanted.capacity_bytes, wanted.host_bytes) = (small, small);
    let client = block_on(Client::connect(socket, wanted))?;
    let keys: Vec<BlockKey> = (0..LOOKED_UP as u64).map(key).collect();
    let block = Arc::new(SharedMemory::new(BLOCK_BYTES)?);
    // SAFETY: nobody touches a block of it while the block is on its way.
    let lent = unsafe { kvhoist::Memory::shared(Arc::clone(&block)) };
    block_on(client.register(lent.pinned(true)))?;
    let places = vec![vec![Segment { ptr: block.as_ptr(), len: BLOCK_BYTES }]; LOOKED_UP];
    all_done(&block_on(client.store_from(&keys, None, &places))?)?;
    let mut times = Vec::new();
    for _ in 0..300 {
        times.push(timed(|| match block_on(client.match_len(&keys))? {
            LOOKED_UP => Ok(()),
            other => Err(format!("{other} keys found").into()),
        })?);
    }
    println!("exists of {LOOKED_UP} keys: p50 {:.0} us", median(&mut times) * 1e6);
    let (mut ours, mut theirs) = UnixStream::pair()?;
    // As many bytes as a look-up of one key has, each way.
    let echo = thread::spawn(move || {
        let mut frame = [0; 52];
        while theirs.read_exact(&mut frame).is_ok() && theirs.write_all(&frame[..20]).is_ok() {}
    });
    let (mut bare, mut asked) = (Vec::new(), Vec::new());
    for _ in 0..5_000 {
        bare.push(timed(|| {
            ours.write_all(&[0; 52])?;
            Ok(ours.read_exact(&mut [0; 20])?)
        })?);
        asked.push(timed(|| match block_on(client.match_len(&keys[..1]))? {
            1 => Ok(()),
            other => Err(format!("{other} keys found, expected 1").into()),
        })?);
    }
    drop(ours);
    drop(echo.join());
    let (bare, asked) = (median(&mut bare) * 1e6, median(&mut asked) * 1e6);
    println!("small request: p50 {asked:.1} us, bare round trip {bare:.1} us, {:.2} times", asked / bare);
    Ok(())
}

/// What the service costs while nobody asks anything.
pub fn idle(options: &Options, service: &Service) -> Outcome<()> {
    let mut wanted = ClientOptions::new("small", 4096);
    wanted.host_bytes = 0;
    let connect = |_| block_on(Client::connect(&service.socket, wanted.clone()));
    let clients: Vec<Client> = (0..64).map(connect).collect::<Result<_, _>>()?;
    let before = service.ran()?;
    // The measurement: nothing happens for so long.
    thread::sleep(Duration::from_secs(options.idle_s));
    let ran = service.ran()?.saturating_sub(before);
    println!(
        "{} idle clients: {:.2} ms of the service in {} s",
        clients.len(),
        ran.as_secs_f64() * 1e3,
        options.idle_s
    );
    Ok(())
}
