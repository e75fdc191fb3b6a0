//! Files whose file system hangs.

use std::{sync::mpsc, thread};

use kvhoist_files::SourceFile;

use super::*;
use crate::{
    peers::own_uid,
    spaces::opens::{OPENS_MAX, Open},
    system::on_thread,
};

/// More than there are threads that unmap memory.
const HOLDS: u64 = 80;

fn state_that_opens(open: Open) -> Rc<ServiceState> {
    let config = ServerConfig::new("unused");
    let mut spaces = Spaces::load(config.clone(), Rc::new(Machine)).expect("no spaces");
    spaces.open_files_by(open);
    Rc::new(ServiceState::new(config, spaces))
}

/// A client that wants so many files held.
fn wants_files(state: &Rc<ServiceState>, files: u64) -> Arc<Ends> {
    let ends = Arc::new(Ends::default());
    let hold = |id: u64| {
        let (device, inode, size, changed_s, changed_ns) = (1, id, 4096, 1, 1);
        Request::Hold { keep: false, device, inode, size, changed_s, changed_ns, path: "/hung".into() }.encode(id)
    };
    ends.change(|stream| {
        stream.takes = true;
        stream.to_service.extend(Hello::ours().encode());
        stream.to_service.extend((1..=files).flat_map(hold));
    });
    spawn_local(serve(Rc::clone(state), state.enter(1, own_uid()), Arc::<Ends>::clone(&ends)));
    ends
}

fn hangs(_: &str) -> kvhoist_files::Result<SourceFile> {
    loop {
        thread::park();
    }
}

async fn wants_files_that_hang() {
    let state = state_that_opens(hangs);
    let client = wants_files(&state, HOLDS);
    client.replies(HOLDS as usize - OPENS_MAX).await;
    for reply in all_replies(&client.lock().to_client) {
        assert!(matches!(&reply, Reply::Failed(failure) if failure.fault == ServiceFault::Busy), "{reply:?}");
    }
    let (done, told) = mpsc::channel();
    on_thread(&Machine, move || done.send(())).await.expect("no panic").expect("the test waits");
    told.recv().expect("work that is no open is done");
    state.drain();
    while !client.lock().over {
        yield_now().await;
    }
    let replies = all_replies(&client.lock().to_client);
    assert_eq!(replies.len(), HOLDS as usize + 1, "every request is answered, and then comes a goodbye");
}

#[tokio::test]
async fn files_that_do_not_open_hold_up_neither_other_work_nor_a_drain() {
    let patience = Duration::from_secs(60);
    LocalSet::new().run_until(timeout(patience, wants_files_that_hang())).await.expect("no hang");
}
