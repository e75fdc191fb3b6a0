//! Blocks that clients pin in the service's host memory.

use kvhoist::Error;

use super::calls::Caller;

impl Caller {
    /// Pins blocks, and lets some of those go that were pinned before.
    pub(super) async fn pin(&mut self) -> Result<(), Error> {
        while !self.pins.is_empty() && self.rng.chance(0.5) {
            let at = self.rng.below(self.pins.len() as u64) as usize;
            self.pins.swap_remove(at);
        }
        let (blocks, keys) = self.draw(false);
        let most = self.rng.below(blocks.len() as u64 + 2) as usize;
        self.run.say(|| format!("caller {} pins {most} of {blocks:?}", self.number));
        let client = self.client.clone();
        let Some(pinned) = self.made(client.pin(&keys, most)).await else { return Ok(()) };
        let pins = pinned?;
        self.run.mix(pins.count() as u64);
        self.run.report.borrow_mut().blocks_pinned += pins.count() as u64;
        if pins.count() > most.min(keys.len()) {
            self.run.fail(format!("{} of {} blocks are pinned, {most} at most", pins.count(), keys.len()));
        }
        self.pins.push(pins);
        Ok(())
    }
}
