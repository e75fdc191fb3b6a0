//! Every block that a run may store: keys in prefix chains, and what each key's content is.

use crate::sim::Rng;
use kvhoist::BlockKey;

/// One block of a run.
pub struct Block {
    pub key: BlockKey,
    /// Its parent, by number.
    pub parent: Option<usize>,
    /// The content that the key names.
    pub payload: Vec<u8>,
}

/// The blocks of a run, by number.
pub struct Universe(Vec<Block>);

impl Universe {
    /// Chains that share prefixes: some blocks have no parent, some parents have several children.
    pub fn new(rng: &mut Rng, blocks: usize, block_bytes: usize) -> Self {
        let roots = rng.chance(0.3);
        let blocks = (0..blocks).map(|n| {
            let root = n == 0 || rng.chance(if roots { 0.7 } else { 0.15 });
            let parent = (!root).then(|| match rng.chance(0.6) {
                true => n - 1,
                false => rng.below(n as u64) as usize,
            });
            Block { key: key(rng), parent, payload: payload(rng, block_bytes) }
        });
        Universe(blocks.collect())
    }

    /// Chains that are as long as there are blocks, or nearly.
    pub fn of_long_chains(rng: &mut Rng, blocks: usize, block_bytes: usize) -> Self {
        let blocks = (0..blocks).map(|n| {
            let root = n == 0 || rng.chance(0.04);
            let parent = (!root).then(|| if rng.chance(0.9) { n - 1 } else { rng.below(n as u64) as usize });
            Block { key: key(rng), parent, payload: payload(rng, block_bytes) }
        });
        Universe(blocks.collect())
    }

    /// The same keys with other contents.
    pub fn twin(&self, rng: &mut Rng) -> Self {
        let other =
            |block: &Block| Block { key: block.key, parent: block.parent, payload: payload(rng, block.payload.len()) };
        Universe(self.0.iter().map(other).collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn block(&self, n: usize) -> &Block {
        &self.0[n]
    }

    pub fn key(&self, n: usize) -> BlockKey {
        self.0[n].key
    }

    pub fn parent_key(&self, n: usize) -> Option<BlockKey> {
        self.0[n].parent.map(|parent| self.key(parent))
    }

    /// The chain from its root to block `n`, by number.
    pub fn path(&self, n: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(n), |&at| self.0[at].parent).collect();
        path.reverse();
        path
    }
}

fn key(rng: &mut Rng) -> BlockKey {
    let mut bytes = [0; 32];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
    BlockKey::new(bytes)
}

fn payload(rng: &mut Rng, bytes: usize) -> Vec<u8> {
    let mut rng = rng.fork();
    let mut payload: Vec<u8> = Vec::with_capacity(bytes + 8);
    while payload.len() < bytes {
        payload.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    payload.truncate(bytes);
    payload
}
