//! A network link with a delay and a bandwidth: a proxy that delivers each byte so much later, and no faster.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// Bytes that go out at once.
const PIECE_BYTES: usize = 64 << 10;
/// Pieces on their way at most, on each connection: more than the link holds.
const PIECES: usize = 1024;

/// When the link is free again, in each direction.
type Free = Arc<Mutex<Instant>>;

/// Starts a link to `target`; returns the port of its near end. The delay is the round trip's. While it
/// is cut, connections end.
pub fn start(target: &str, delay: Duration, bytes_per_s: u64, is_cut: Arc<AtomicBool>) -> io::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (port, target) = (listener.local_addr()?.port(), target.to_owned());
    let free = [(); 2].map(|()| Arc::new(Mutex::new(Instant::now())));
    thread::spawn(move || {
        for near in listener.incoming().flatten() {
            if is_cut.load(Ordering::Relaxed) {
                continue;
            }
            let Ok(far) = TcpStream::connect(&target) else { continue };
            if connect(&near, &far, delay / 2, bytes_per_s, &free, &is_cut).is_err() {
                break;
            }
        }
    });
    Ok(port)
}

fn connect(
    near: &TcpStream,
    far: &TcpStream,
    delay: Duration,
    bytes_per_s: u64,
    free: &[Free; 2],
    is_cut: &Arc<AtomicBool>,
) -> io::Result<()> {
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    for (from, to, free) in [(near, far, &free[0]), (far, near, &free[1])] {
        let (from, to, free, is_cut) = (from.try_clone()?, to.try_clone()?, Arc::clone(free), Arc::clone(is_cut));
        let (send, pieces) = mpsc::sync_channel(PIECES);
        thread::spawn(move || take_in(from, delay, &send));
        thread::spawn(move || let_out(to, &pieces, bytes_per_s, &free, &is_cut));
    }
    Ok(())
}

/// Notes when each piece goes out.
fn take_in(mut from: TcpStream, delay: Duration, pieces: &mpsc::SyncSender<(Instant, Vec<u8>)>) {
    loop {
        let mut piece = vec![0; PIECE_BYTES];
        let Ok(length @ 1..) = from.read(&mut piece) else { return };
        piece.truncate(length);
        if pieces.send((Instant::now() + delay, piece)).is_err() {
            return;
        }
    }
}

/// Sends each piece when it has come and the link is free.
fn let_out(
    mut to: TcpStream,
    pieces: &mpsc::Receiver<(Instant, Vec<u8>)>,
    bytes_per_s: u64,
    free: &Mutex<Instant>,
    is_cut: &AtomicBool,
) {
    while let Ok((at, piece)) = pieces.recv() {
        let takes = Duration::from_secs_f64(piece.len() as f64 / bytes_per_s as f64);
        let goes = {
            let mut free = free.lock().expect("nothing panics under it");
            let goes = at.max(*free);
            *free = goes + takes;
            goes + takes
        };
        thread::sleep(goes.saturating_duration_since(Instant::now()));
        if is_cut.load(Ordering::Relaxed) || to.write_all(&piece).is_err() {
            break;
        }
    }
    _ = to.shutdown(Shutdown::Both);
}
