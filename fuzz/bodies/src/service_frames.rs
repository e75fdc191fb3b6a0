//! Frames of the service's protocol: bytes from a hostile peer.

use kvhoist_service::internals::protocol::{HEADER_BYTES, Header, Hello, Reply, Request, Welcome};

use crate::memory::bounded;

/// Reads `data` as a handshake, and as a stream of frames in both directions.
pub fn run(data: &[u8]) {
    if let Some(Ok(hello)) = data.first_chunk().map(Hello::decode) {
        assert_eq!(Hello::decode(hello.encode().first_chunk().expect("whole")), Ok(hello));
    }
    if let Some(Ok(welcome)) = data.first_chunk().map(Welcome::decode) {
        assert_eq!(Welcome::decode(welcome.encode().first_chunk().expect("whole")), Ok(welcome));
    }
    let mut rest = data;
    while let Some((header, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = Header::decode(header) else { return };
        let body = &after[..after.len().min(header.body_bytes as usize)];
        // A key takes its bytes and a list of its own; a byte of a result a failure with its text.
        let bytes = 256 * body.len() + (128 << 10);
        if let Ok(request) = bounded(bytes, || Request::decode(header.kind, body)) {
            let frame = request.encode(header.id);
            assert_eq!(Request::decode(header.kind, &frame[HEADER_BYTES..]), Ok(request));
        }
        if let Ok(reply) = bounded(64 * bytes, || Reply::decode(header.kind, body)) {
            let frame = reply.encode(header.id);
            let again = Header::decode(frame.first_chunk().expect("a header")).expect("its own");
            let again = Reply::decode(again.kind, &frame[HEADER_BYTES..]).expect("its own");
            // Seconds are fractions: of the largest ones the last digits are rounded again.
            assert!(matches!(reply, Reply::Stats(_) | Reply::Status(_)) || again == reply, "{reply:?} is {again:?}");
        }
        rest = &after[body.len()..];
    }
}
