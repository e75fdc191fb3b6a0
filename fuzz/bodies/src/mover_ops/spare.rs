//! What an input leaves for the next one: under AddressSanitizer it takes more time to make files and payloads than to
//! use them. Nothing of it tells an input what others did.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use kvhoist::Config;
use kvhoist_simulation::sim;

/// Payloads of all blocks.
type Payloads = Rc<[Rc<[u8]>]>;

thread_local! {
    /// By the size of a block; as many as an input can name.
    static PAYLOADS: RefCell<BTreeMap<usize, Payloads>> = RefCell::default();
    /// Files of any size and content.
    static FILES: RefCell<Vec<Vec<u8>>> = RefCell::default();
}

/// The contents that the keys of so many blocks name.
pub fn payloads(blocks: u8, block_bytes: usize) -> Payloads {
    let made = || (0..blocks).map(|block| payload(block, block_bytes)).collect();
    PAYLOADS.with_borrow_mut(|payloads| Rc::clone(payloads.entry(block_bytes).or_insert_with(made)))
}

fn payload(block: u8, block_bytes: usize) -> Rc<[u8]> {
    (0..block_bytes).map(|at| (at as u8).wrapping_mul(31) ^ ((at >> 8) as u8) ^ block.wrapping_mul(89)).collect()
}

/// As [`sim::blank_files`], of memory that was given back where there is some.
pub fn blank_files(config: &Config) -> Vec<Vec<u8>> {
    let blank = |bytes| {
        let mut file = FILES.with_borrow_mut(Vec::pop).unwrap_or_default();
        file.clear();
        file.resize(bytes, 0);
        file
    };
    sim::file_bytes(config).into_iter().map(blank).collect()
}

/// For the inputs to come.
pub fn give_back(files: Vec<Vec<u8>>) {
    FILES.with_borrow_mut(|spare| spare.extend(files));
}
