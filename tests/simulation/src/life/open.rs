//! The opening of a cache: cut off, repeated after errors, beside another one, or over a new store.

use std::time::Duration;

use kvhoist::Error;
use tokio::time::timeout;

use super::{Exit, Life, PATIENCE};
use crate::sim::{self, FaultRates, SimOptions, Simulated};

impl Life {
    /// Opens the cache; `None` where the life is over before that.
    pub(super) async fn open(&mut self, exit: Exit) -> Option<Simulated> {
        let plan = &self.context.plan;
        if matches!(exit, Exit::Kill | Exit::PowerCut) && self.rng.chance(0.1) {
            let soon = Duration::from_millis(self.rng.below(20));
            match timeout(soon, sim::open(plan.config.clone(), &self.world)).await {
                Err(_) => return None,
                // It was quicker, and is not wanted: the store is free when it has ended.
                Ok(Ok(Simulated { cache, reactor })) => {
                    drop(cache);
                    reactor.ended().await;
                }
                Ok(Err(_)) => {}
            }
        }
        for _ in 0..20 {
            match timeout(PATIENCE, self.open_once()).await {
                Err(_) => self.context.fail("the cache never opened"),
                Ok(Ok(simulated)) => return Some(simulated),
                Ok(Err(Error::Store { found, .. }))
                    if self.context.has_lied(&self.world) || plan.rates.bit_flip > 0.0 =>
                {
                    self.context.say(|| format!("the store is refused: {found}"));
                    return self.wipe().await;
                }
                Ok(Err(error)) => self.context.check_error(&"open", &error, false),
            }
            if self.context.failed() {
                return None;
            }
            self.world.storage.set_rates(FaultRates { stall: plan.rates.stall, ..FaultRates::default() });
        }
        self.context.fail("the cache did not open in 20 attempts");
        None
    }

    /// Opens the cache, perhaps beside another one that wants the same store.
    async fn open_once(&self) -> Result<Simulated, kvhoist::Error> {
        let mut rng = self.rng.clone();
        let open = || sim::open(self.context.plan.config.clone(), &self.world);
        if !self.context.plan.second_opener || self.context.plan.config.disk.paths.is_empty() || rng.chance(0.3) {
            return open().await;
        }
        let (gives_way, pause_ms) = (rng.chance(0.5), rng.below(300));
        let first = async {
            let first = open().await?;
            if !gives_way {
                return Ok::<_, Error>(Some(first));
            }
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            first.cache.close().await?;
            Ok(None)
        };
        let (first, second) = tokio::join!(first, open());
        self.context.report.borrow_mut().second_openers += 1;
        match (first, second) {
            (Ok(Some(first)), Err(Error::Store { .. })) => Ok(first),
            (Ok(Some(_)), Ok(_)) => {
                self.context.fail("two caches have the same store open");
                Err(Error::Closed)
            }
            (Ok(Some(_)), Err(other)) => Err(other),
            // It was closed again, or failed: in either case the store is free.
            (Ok(None) | Err(_), second) => second,
        }
    }

    /// Starts anew, as someone would whose store is refused.
    async fn wipe(&mut self) -> Option<Simulated> {
        self.context.model.borrow_mut().wipe();
        self.context.report.borrow_mut().wipes += 1;
        let config = self.context.plan.config.clone();
        self.world.storage = sim::Sim::new(self.rng.next_u64(), sim::blank_files(&config), SimOptions::default());
        match sim::open(config, &self.world).await {
            Ok(simulated) => Some(simulated),
            Err(error) => {
                self.context.fail(format!("a blank store does not open: {error}"));
                None
            }
        }
    }
}
