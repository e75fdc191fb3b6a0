//! Clients that keep to the protocol: each connects, lets some callers make calls, and closes, vanishes or dies.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::{Arc, Mutex},
    time::Duration,
};

use kvhoist::DeviceKind;
use kvhoist_service::{
    Client, ClientOptions,
    internals::seams::{self, Wire},
};
use tokio::{
    task::{JoinHandle, spawn_local},
    time::{sleep, timeout},
};

use super::{
    calls::Caller,
    memory::Memory,
    plan::PATIENCE,
    run::Run,
    stream::{End, Ids, lock},
};
use crate::sim::Rng;

/// A client's end of a connection, and the requests on it.
type Connection = (Arc<End>, Arc<Mutex<Ids>>);

/// The process of a client.
pub struct Process {
    pub client: Client,
    /// The connection that it made last.
    end: Rc<RefCell<Option<Connection>>>,
    worker: Rc<RefCell<Option<JoinHandle<()>>>>,
}

impl Process {
    /// Connects; fails as [`Client::connect`].
    pub async fn connect(
        run: &Rc<Run>,
        space: usize,
        deadline: Duration,
        give_up: Option<Duration>,
        rng: &mut Rng,
    ) -> Result<Self, kvhoist::Error> {
        let wanted = &run.plan.spaces[space];
        let mut options = ClientOptions::new(wanted.namespace, wanted.block_bytes);
        options.shared = wanted.shared;
        (options.capacity_bytes, options.host_bytes) = (wanted.capacity_bytes, wanted.host_bytes);
        options.device = wanted.device.then_some(DeviceKind::Simulated);
        (options.deadline, options.give_up) = (deadline, give_up);
        options.bounce_bytes = wanted.block_bytes * rng.between(1, 4) as usize;
        options.backoff_max = Duration::from_millis(rng.between(10, 300));
        let end: Rc<RefCell<Option<Connection>>> = Rc::default();
        let worker = Rc::new(RefCell::new(None));
        let dial = {
            let (run, end, rng) = (Rc::clone(run), Rc::clone(&end), RefCell::new(rng.fork()));
            async move || {
                let (ours, ids) = run.connect(run.plan.spaces[space].uid, &mut rng.borrow_mut())?;
                *end.borrow_mut() = Some((Arc::clone(&ours), ids));
                Ok(ours as Arc<dyn Wire>)
            }
        };
        let spawn = |work| {
            run.machine.start_thread()?;
            *worker.borrow_mut() = Some(spawn_local(work));
            Ok(())
        };
        let client = seams::connect("simulated", options, dial, spawn).await?;
        Ok(Process { client, end, worker })
    }

    /// The process dies: its end of the connection is closed, and nothing of it runs any more.
    async fn die(self) {
        if let Some((end, _)) = self.end.take() {
            end.hang_up();
        }
        let worker = self.worker.take();
        if let Some(worker) = worker {
            worker.abort();
            drop(worker.await);
        }
    }
}

/// The life of a client's user: some processes, one after the other.
pub async fn live(run: Rc<Run>, number: u64, space: usize, mut rng: Rng) {
    for _ in 0..rng.between(1, 3) {
        sleep(Duration::from_millis(rng.below(30))).await;
        if run.failed() {
            return;
        }
        if let Some(process) = connect(&run, number, space, &mut rng).await {
            use_once(&run, number, space, process, &mut rng).await;
        }
    }
}

async fn connect(run: &Rc<Run>, number: u64, space: usize, rng: &mut Rng) -> Option<Process> {
    for _ in 0..30 {
        let connected = timeout(PATIENCE, Process::connect(run, space, run.plan.deadline, run.plan.give_up, rng)).await;
        run.mix(number << 8 | u64::from(matches!(connected, Ok(Ok(_)))));
        match connected {
            Err(_) => run.fail(format!("client {number} waits for its connection for ever")),
            Ok(Ok(process)) => {
                run.say(|| format!("client {number} has connected to space {space}"));
                return Some(process);
            }
            Ok(Err(error)) => {
                run.say(|| format!("client {number} does not connect: {error}"));
                run.check_error(&format!("the connection of client {number}"), &error);
            }
        }
        if run.failed() {
            return None;
        }
        sleep(Duration::from_millis(rng.between(1, 100))).await;
    }
    None
}

/// Makes calls with a process, and ends it in one way or another.
async fn use_once(run: &Rc<Run>, number: u64, space: usize, process: Process, rng: &mut Rng) {
    let kept: Rc<RefCell<Vec<Memory>>> = Rc::default();
    let callers: Vec<_> = (0..rng.between(1, run.plan.callers_max))
        .map(|at| {
            let client = process.client.clone();
            let caller = Caller::new(Rc::clone(run), client, space, number * 10 + at, rng.fork(), Rc::clone(&kept));
            spawn_local(caller.run())
        })
        .collect();
    if rng.chance(run.plan.die * 4.0) {
        sleep(Duration::from_millis(rng.below(60))).await;
        run.say(|| format!("client {number} dies"));
        callers.iter().for_each(JoinHandle::abort);
        process.die().await;
        for caller in callers {
            drop(caller.await);
        }
        return;
    }
    for caller in callers {
        match timeout(PATIENCE, caller).await {
            Err(_) => return run.fail(format!("a caller of client {number} waits for ever")),
            Ok(Err(error)) if error.is_panic() => return run.fail("a caller panicked"),
            Ok(_) => {}
        }
    }
    all_answered(run, number, &process).await;
    if rng.chance(0.7) {
        run.say(|| format!("client {number} closes"));
        match timeout(PATIENCE, process.client.close()).await {
            Ok(Ok(())) => {}
            // The service may use the memory for as long as it hangs.
            Ok(Err(error)) => return run.check_error(&format!("the close of client {number}"), &error),
            Err(_) => run.fail(format!("client {number} never closed")),
        }
        // The service uses none of it any longer.
        for memory in kept.take() {
            memory.take_back();
            run.given_back.borrow_mut().push(memory);
        }
    } else {
        run.say(|| format!("client {number} vanishes"));
    }
}

/// While the connection stands, every request gets its reply.
async fn all_answered(run: &Rc<Run>, number: u64, process: &Process) {
    let in_flight = || process.end.borrow().as_ref().map_or(0, |(_, ids)| lock(ids).in_flight());
    let answered = async {
        while process.client.is_connected() && in_flight() > 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    if timeout(PATIENCE, answered).await.is_err() {
        run.fail(format!("{} requests of client {number} have no reply", in_flight()));
    }
}
