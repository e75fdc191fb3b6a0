//! Blocks that a client pins in the service's host memory.

use kvhoist::BlockKey;

use super::calls::{Client, unexpected};
use crate::{
    error::Result,
    protocol::{KEYS_MAX, Reply, Request},
};

/// Blocks that stay in the service's host memory while this lives, and the connection lasts. Of [`Client::pin`].
#[derive(Debug)]
pub struct Pins {
    client: Client,
    /// The requests that pin them, and how many each.
    requests: Vec<(u64, usize)>,
}

impl Pins {
    /// How many blocks were pinned.
    pub fn count(&self) -> usize {
        self.requests.iter().map(|(_, count)| count).sum()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        self.requests.iter().for_each(|(id, _)| self.client.let_go(*id));
    }
}

impl Client {
    /// Pins those of `keys` that are in host memory, `most` of them at most, and no more than the service gives: all
    /// clients of a space together pin a quarter of its host memory.
    ///
    /// # Errors
    /// [`Error::Service`](kvhoist::Error::Service); [`Error::Closed`](kvhoist::Error::Closed).
    ///
    /// # Cancel safety
    /// Nothing stays pinned.
    ///
    /// ```
    /// # kvhoist_bench_kit::examples::with_stored(async |client, keys| {
    /// client.prefetch(&keys[..1]).await?;
    /// let pins = client.pin(keys, 10).await?;
    /// println!("{} blocks stay in host memory", pins.count());
    /// drop(pins);
    /// # Ok(()) });
    /// ```
    pub async fn pin(&self, keys: &[BlockKey], most: usize) -> Result<Pins> {
        let mut pins = Pins { client: self.clone(), requests: Vec::new() };
        for keys in keys.chunks(KEYS_MAX) {
            let left = most - pins.count().min(most);
            let request = Request::Pin { most: u32::try_from(left).unwrap_or(u32::MAX), keys: keys.to_vec() };
            match self.call_with_id(request).await? {
                (id, Reply::Count(count)) if count as usize <= left => pins.requests.push((id, count as usize)),
                (_, other) => return Err(unexpected(&other)),
            }
        }
        Ok(pins)
    }
}
