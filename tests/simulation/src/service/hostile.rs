//! Clients that do not keep to the protocol. Nothing is expected of their own calls.

use std::{future::poll_fn, os::fd::BorrowedFd, rc::Rc, sync::Arc, time::Duration};

use kvhoist::{BlockKey, SharedMemory};
use kvhoist_service::internals::{
    protocol::{Blocks, Hello, Place, RegionKind, Request, SpaceDevice},
    seams::{Came, Wire},
};
use tokio::{task::spawn_local, time::sleep};

use super::{plan::Space, run::Run, stream::End};
use crate::{plan::pick, sim::Rng};

/// Bytes of the memory that a hostile client lends.
const LENT_BYTES: usize = 64 << 10;

struct Hostile {
    run: Rc<Run>,
    space: usize,
    end: Arc<End>,
    memory: SharedMemory,
    next_id: u64,
    rng: Rng,
}

/// The life of a hostile user: some connections, one after the other.
pub async fn live(run: Rc<Run>, number: u64, space: usize, mut rng: Rng) {
    for _ in 0..rng.between(1, 4) {
        sleep(Duration::from_millis(rng.below(60))).await;
        let Ok((end, _)) = run.connect(run.plan.spaces[space].uid, &mut rng) else { continue };
        run.say(|| format!("hostile client {number} has connected to space {space}"));
        // One in four reads nothing.
        if rng.chance(0.75) {
            spawn_local(read(Arc::clone(&end)));
        }
        let memory = SharedMemory::new(LENT_BYTES).expect("a memfd of some pages");
        let hostile =
            Hostile { run: Rc::clone(&run), space, end: Arc::clone(&end), memory, next_id: 1, rng: rng.fork() };
        // A peer that takes nothing is given up.
        drop(tokio::time::timeout(Duration::from_millis(rng.between(1, 15_000)), hostile.attack()).await);
        if rng.chance(0.5) {
            sleep(Duration::from_millis(rng.below(40))).await;
        }
        end.hang_up();
    }
}

/// Reads and forgets.
async fn read(end: Arc<End>) {
    let mut buf = vec![0; 4096];
    loop {
        if poll_fn(|context| end.poll_ready(context, true, false)).await.is_err() {
            return;
        }
        match end.receive(&mut buf) {
            Ok(Came::Bytes(0)) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

impl Hostile {
    /// `None` once the service has hung up.
    async fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Option<()> {
        let (mut sent, mut fd) = (0, fd);
        while sent < bytes.len() {
            poll_fn(|context| self.end.poll_ready(context, false, true)).await.ok()?;
            match self.end.send(&bytes[sent..], fd.as_slice()) {
                Ok(len) => (sent, fd) = (sent + len, None),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
        Some(())
    }

    async fn ask(&mut self, request: &Request) -> Option<()> {
        self.next_id += 1;
        self.send(&request.encode(self.next_id), None).await
    }

    async fn attack(mut self) -> Option<()> {
        self.send(&Hello::ours().encode(), None).await?;
        let (block_bytes, request) = {
            let Space { namespace, block_bytes, capacity_bytes, host_bytes, shared, device, .. } =
                &self.run.plan.spaces[self.space];
            let request = Request::Attach {
                namespace: (*namespace).into(),
                block_bytes: *block_bytes as u64,
                capacity_bytes: *capacity_bytes,
                host_bytes: *host_bytes,
                shared: *shared,
                device: if *device { SpaceDevice::Simulated } else { SpaceDevice::None },
            };
            (*block_bytes as u32, request)
        };
        if self.rng.chance(0.9) {
            self.ask(&request).await?;
            // The attach takes a while; what comes before its end is refused.
            sleep(Duration::from_millis(self.rng.below(80))).await;
        }
        let device = self.run.plan.spaces[self.space].device && self.rng.chance(0.8);
        let register = Request::Register {
            region: 1,
            kind: if device { RegionKind::Simulated } else { RegionKind::Host },
            pin: self.rng.chance(0.3),
            offset: 0,
            len: LENT_BYTES as u64,
        };
        self.next_id += 1;
        self.send(&register.encode(self.next_id), Some(self.memory.as_fd())).await?;
        for _ in 0..self.rng.between(3, 30) {
            match self.run.plan.by_layer && self.rng.chance(0.5) {
                true => self.misbehave_by_layer(block_bytes).await?,
                false => self.misbehave(block_bytes).await?,
            }
            if self.rng.chance(0.3) {
                sleep(Duration::from_millis(self.rng.below(10))).await;
            }
        }
        Some(())
    }

    /// A key of the space, for a load; of nothing, for a store.
    fn key(&mut self, of_space: bool) -> BlockKey {
        let universe = &self.run.plan.spaces[self.space].universe;
        let block = self.rng.below(universe.len() as u64) as usize;
        if of_space { universe.key(block) } else { BlockKey::new([self.rng.below(4) as u8; 32]) }
    }

    fn blocks(&mut self, of_space: bool, block_bytes: u32) -> Blocks {
        let count = self.rng.between(1, 6) as usize;
        let keys = (0..count).map(|_| self.key(of_space)).collect();
        let place = |rng: &mut Rng| Place {
            region: pick(rng, &[1, 1, 1, 1, 2, 0, u32::MAX]),
            len: pick(rng, &[block_bytes, block_bytes, block_bytes, block_bytes, block_bytes - 1, 0, u32::MAX]),
            offset: pick(rng, &[0, 0, 4096, 40_000, LENT_BYTES as u64 - 1, LENT_BYTES as u64, u64::MAX - 100]),
        };
        let wild = self.rng.chance(0.5);
        let places = (0..count).map(|_| match wild {
            true => [place(&mut self.rng)],
            false => [Place { region: 1, len: block_bytes, offset: 0 }],
        });
        let places = places.collect();
        Blocks { keys, places }
    }

    /// What is wrong with loads layer by layer, and with pins.
    async fn misbehave_by_layer(&mut self, block_bytes: u32) -> Option<()> {
        match self.rng.below(8) {
            // The only segment of each block is that of one layer, of a layer that has no other, of many, or of none.
            0..=3 => {
                let layer_of = pick(&mut self.rng, &[&[0][..], &[0], &[0], &[1], &[u16::MAX], &[], &[0, 1], &[0; 9]]);
                let blocks = self.blocks(true, block_bytes);
                self.ask(&Request::LoadLayers { layer_of: layer_of.to_vec(), blocks }).await
            }
            // One block in many layers, most of them of no bytes.
            4 => {
                let (key, layers) = (self.key(true), pick(&mut self.rng, &[2, 100, 1024, 1025]));
                let empty = Place { region: 1, len: 0, offset: 0 };
                let mut places = vec![empty; layers];
                places[layers - 1].len = block_bytes;
                let blocks = Blocks { keys: vec![key], places: [places].into_iter().collect() };
                self.ask(&Request::LoadLayers { layer_of: (0..layers as u16).collect(), blocks }).await
            }
            // Pins past what there is, some of one block many times, and of a number that pins already.
            5 | 6 => {
                let keys = (0..self.rng.between(1, 40)).map(|_| self.key(true)).collect();
                let most = pick(&mut self.rng, &[0, 1, 3, u32::MAX]);
                if self.rng.chance(0.3) {
                    self.next_id -= 1;
                }
                self.ask(&Request::Pin { most, keys }).await
            }
            _ => {
                let hold = self.rng.below(self.next_id + 2);
                self.send(&Request::LetGo { hold }.encode(0), None).await
            }
        }
    }

    async fn misbehave(&mut self, block_bytes: u32) -> Option<()> {
        match self.rng.below(14) {
            0..=3 => {
                let blocks = self.blocks(true, block_bytes);
                self.ask(&Request::Load(blocks)).await
            }
            4 | 5 => {
                let blocks = self.blocks(false, block_bytes);
                self.ask(&Request::Store { parent: None, blocks }).await
            }
            // Memory that is used.
            6 | 7 => self.ask(&Request::Unregister { region: 1 }).await,
            8 => {
                let len = pick(&mut self.rng, &[LENT_BYTES as u64, LENT_BYTES as u64 + 1, u64::MAX, 0]);
                let offset = pick(&mut self.rng, &[0, 0, 1, 4096, u64::MAX]);
                if self.rng.chance(0.1) {
                    return self.ask(&Request::RegisterDevice { region: 1, offset, len, handle: [7; 64] }).await;
                }
                let register = Request::Register { region: 1, kind: RegionKind::Host, pin: false, offset, len };
                self.next_id += 1;
                let fd = self.rng.chance(0.7).then(|| self.memory.as_fd());
                self.send(&register.encode(self.next_id), fd).await
            }
            9 => {
                let request = self.rng.below(self.next_id + 2);
                self.send(&Request::Cancel { request }.encode(0), None).await
            }
            10 => {
                // A request of which only a part comes, ever.
                let blocks = self.blocks(true, block_bytes);
                let bytes = Request::Load(blocks).encode(self.next_id + 1);
                let part = self.rng.below(bytes.len() as u64) as usize;
                self.send(&bytes[..part], None).await?;
                self.end.hang_up();
                None
            }
            11 if self.rng.chance(0.3) => {
                // A number that is in flight, or none.
                let id = if self.rng.chance(0.5) { self.next_id } else { 0 };
                self.send(&Request::Sync.encode(id), None).await
            }
            12 if self.rng.chance(0.3) => {
                let bytes: Vec<u8> = (0..self.rng.between(1, 80)).map(|_| self.rng.below(256) as u8).collect();
                self.send(&bytes, None).await
            }
            _ => self.ask(&Request::Stats).await,
        }
    }
}
