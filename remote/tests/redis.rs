//! Redis: against Debian's server, and Valkey's where the caller asks for it.

mod common;
#[path = "../../tests/common/skip.rs"]
mod skip;

use std::{
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Barrier},
    time::Duration,
};

use common::{Server, check_store, is_asked_for};
use futures_util::future::join_all;
use kvhoist::remote::{Created, ReadBuffer, RemoteError, RemoteStore};
use kvhoist_remote::open;
use pollster::block_on;

/// A database of a server on this machine. `parameters` begin with a question mark.
fn store(port: u16, parameters: &str) -> Arc<dyn RemoteStore> {
    open(&format!("redis://127.0.0.1:{port}/1{parameters}")).expect("opened")
}

const QUICK: &str = "?timeout_ms=500&connect_timeout_ms=500";
/// More than an answer takes on a busy machine.
const PATIENT: &str = "?timeout_ms=60000&connect_timeout_ms=60000";

fn start(program: &str, more: &[&str]) -> Option<Server> {
    let arguments =
        [&["--port", "{port}", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"][..], more].concat();
    let server = Server::start(program, &arguments);
    if server.is_none() {
        skip::skipped(format_args!("found no {program}; install it (Debian's package redis-server)"));
    }
    server
}

#[test]
fn redis_is_a_store() {
    let Some(server) = start("redis-server", &[]) else { return };
    check_store(&store(server.port, PATIENT));
}

#[test]
fn valkey_is_a_store() {
    if !is_asked_for("valkey-server") {
        return;
    }
    let server = start("valkey-server", &[]).expect("valkey-server is installed, and starts");
    check_store(&store(server.port, PATIENT));
}

#[test]
fn a_user_without_a_password_is_not_the_default_user() {
    let users = ["--requirepass", "hunter2", "--user", "reader", "on", "nopass", "~*", "+@all"];
    let Some(server) = start("redis-server", &users) else { return };
    let of = |user: &str| open(&format!("redis://{user}127.0.0.1:{}/1{PATIENT}", server.port)).expect("opened");
    let objects = ["a".to_owned()];
    assert!(
        matches!(block_on(of("").delete(&objects)), Err(RemoteError::Refused(_))),
        "the default user has a password"
    );
    block_on(of("reader@").delete(&objects)).expect("logged in");
}

#[test]
fn a_password_is_asked_for_and_told_to_nobody() {
    let Some(server) = start("redis-server", &["--requirepass", "hunter2"]) else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let with = |password: &str| {
        let file = folder.path().join(password);
        std::fs::write(&file, password).expect("written");
        format!("{PATIENT}&password_file={}", file.display())
    };
    assert_eq!(block_on(store(server.port, &with("hunter2")).create("a", vec![vec![1].into()])), Ok(Created::Now));
    for parameters in [PATIENT.to_owned(), with("wrong-one")] {
        let error = block_on(store(server.port, &parameters).read("a", 0..1)).expect_err("no password");
        assert!(matches!(error, RemoteError::Refused(_)), "{error}");
        assert!(!error.to_string().contains("wrong-one") && error.to_string().contains("password"), "{error}");
    }
}

#[test]
fn values_end_with_their_time() {
    let Some(server) = start("redis-server", &[]) else { return };
    let store = store(server.port, &format!("{PATIENT}&ttl_s=1"));
    assert_eq!(block_on(store.create("a", vec![vec![1].into()])), Ok(Created::Now));
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while block_on(store.read("a", 0..1)) != Err(RemoteError::NotFound) {
        assert!(std::time::Instant::now() < until, "the value stays");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_server_that_comes_back_is_found() {
    let Some(server) = start("redis-server", &[]) else { return };
    let store_port = server.port;
    let store = store(store_port, PATIENT);
    let calls: Vec<_> = (0..8).map(|n| store.create(&format!("a{n}"), vec![vec![1; 1 << 20].into()])).collect();
    block_on(join_all(calls)).into_iter().for_each(|created| assert_eq!(created, Ok(Created::Now)));
    drop(server);
    let arguments = ["--port", "{port}", "--bind", "127.0.0.1", "--save", ""];
    let again = Server::start_at(store_port, "redis-server", &arguments).expect("as before").expect("its port is free");
    // The first call finds a connection that has ended; the next one tries none of the others.
    let error = block_on(store.read("a0", 0..1)).expect_err("a connection of the other server");
    assert!(matches!(error, RemoteError::Unavailable(_)), "{error}");
    assert_eq!(block_on(store.create("b", vec![vec![1].into()])), Ok(Created::Now));
    drop(again);
}

#[test]
fn an_error_amid_answers_is_of_no_other_call() {
    let Some(server) = start("redis-server", &[]) else { return };
    let store = store(server.port, &format!("{PATIENT}&requests_in_flight=1"));
    for name in ["a", "b"] {
        assert_eq!(block_on(store.create(name, vec![name.as_bytes().to_vec().into()])), Ok(Created::Now));
    }
    let mut other = TcpStream::connect(("127.0.0.1", server.port)).expect("connected");
    other.write_all(b"SELECT 1\r\nRPUSH list x\r\n").expect("sent");
    let lines: Vec<String> = BufReader::new(&other).lines().take(2).map_while(Result::ok).collect();
    assert_eq!(lines, ["+OK", ":1"]);
    let read = |names: &[&str]| {
        let reads = names.iter().map(|name| ((*name).to_owned(), 0, ReadBuffer::new(1))).collect();
        let answers = block_on(store.read_each(reads))?;
        Ok(answers.into_iter().map(|answer| answer.and_then(ReadBuffer::into_bytes)).collect::<Vec<_>>())
    };
    for _ in 0..3 {
        let error = read(&["a", "list", "b"]).expect_err("a list");
        assert!(matches!(error, RemoteError::Refused(_)), "{error}");
        let expected = vec![Ok(b"b".to_vec()), Err(RemoteError::NotFound), Ok(b"a".to_vec())];
        assert_eq!(read(&["b", "gone", "a"]), Ok(expected));
    }
}

#[test]
fn names_that_are_longer_than_any_of_ours_are_not_listed() {
    let Some(server) = start("redis-server", &[]) else { return };
    let store = store(server.port, PATIENT);
    for length in [138, 256, 257, 1 << 20] {
        let created = block_on(store.create(&"x".repeat(length), vec![vec![1].into()]));
        assert_eq!(created, Ok(Created::Now), "{length} bytes");
    }
    let listed = block_on(store.list("x", None)).expect("listed").objects;
    assert_eq!(listed.iter().map(|object| object.name.len()).collect::<Vec<_>>(), [138, 256]);
}

#[test]
fn one_that_never_answers_is_unavailable_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a port").port();
    let store = store(port, QUICK);
    let began = std::time::Instant::now();
    let error = block_on(store.read("a", 0..1)).expect_err("silence");
    assert!(matches!(error, RemoteError::Unavailable(_)) && began.elapsed() < Duration::from_secs(50), "{error}");
}

#[test]
fn one_that_speaks_something_else_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a port").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            drop((&stream).write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
        }
    });
    let store = store(port, QUICK);
    let error = block_on(store.read("a", 0..1)).expect_err("another protocol");
    assert!(matches!(error, RemoteError::Unavailable(_) | RemoteError::Refused(_)), "{error}");
}

/// Serves so many connections, and answers the read of each only once all of them have one.
fn serve_together(listener: &TcpListener, connections: usize) {
    let all_came = Arc::new(Barrier::new(connections));
    for stream in listener.incoming().flatten() {
        let all_came = Arc::clone(&all_came);
        std::thread::spawn(move || {
            // A command is an array of strings, a line each; its name says how it is answered.
            for line in BufReader::new(&stream).lines().map_while(Result::ok) {
                match line.as_str() {
                    "SELECT" => (&stream).write_all(b"+OK\r\n").expect("sent"),
                    "GETRANGE" => {
                        all_came.wait();
                        (&stream).write_all(b"$1\r\nx\r\n").expect("sent");
                    }
                    _ => {}
                }
            }
        });
    }
}

/// Has no value at the first read of a connection, and one of four bytes from then on.
fn serve_created_since(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || {
            for line in BufReader::new(&stream).lines().map_while(Result::ok) {
                let answer: &[u8] = match line.as_str() {
                    "SELECT" => b"+OK\r\n",
                    "GETRANGE" => b"$0\r\n\r\n",
                    "STRLEN" => b":4\r\n",
                    _ => continue,
                };
                (&stream).write_all(answer).expect("sent");
            }
        });
    }
}

/// Evicted, and created anew by another node: what it has is sound.
#[test]
fn a_value_that_was_not_there_and_is_created_meanwhile_was_not_there() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a port").port();
    std::thread::spawn(move || serve_created_since(&listener));
    let store = store(port, PATIENT);
    assert_eq!(block_on(store.read("a", 1..3)), Err(RemoteError::NotFound));
    let error = block_on(store.read("a", 4..6)).expect_err("it ends there");
    assert!(matches!(error, RemoteError::Invalid { .. }), "{error}");
}

#[test]
fn reads_do_not_wait_for_the_answers_of_others() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("a port").port();
    std::thread::spawn(move || serve_together(&listener, 16));
    let store = store(port, PATIENT);
    let reads: Vec<_> = (0..16).map(|_| store.read("a", 0..1)).collect();
    for read in block_on(join_all(reads)) {
        assert_eq!(read.expect("answered"), b"x");
    }
}
