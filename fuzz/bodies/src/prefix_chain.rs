//! Prefix chains against a naive reference: every token hashed by itself, every digest from its whole definition.

use arbitrary::{Arbitrary, Unstructured};
use kvhoist::{BlockKey, Namespace, PrefixChain};
use sha2::{Digest, Sha256};

#[derive(Debug, Arbitrary)]
struct Input<'a> {
    namespace: String,
    other: String,
    foreign: Vec<u8>,
    sglang: bool,
    block_tokens: u16,
    /// Tokens of a piece, and whether the chain is dropped and resumed after it.
    cuts: Vec<(u8, bool)>,
    /// The rest: four bytes a token.
    tokens: &'a [u8],
}

/// Extends a chain by the tokens in `data` in pieces, and compares.
pub fn run(data: &[u8]) {
    let Ok(input) = Input::arbitrary_take_rest(Unstructured::new(data)) else { return };
    let tokens: Vec<u32> = input.tokens.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)).collect();
    // Longer than what is hashed at once.
    let block_tokens = usize::from(input.block_tokens % 600);
    let start = || if input.sglang { PrefixChain::sglang() } else { PrefixChain::new(&input.namespace) };
    if block_tokens == 0 {
        let mut chain = start();
        chain.extend_tokens(&tokens, 0).expect_err("no tokens a block");
        assert_eq!(chain, start());
        return;
    }
    let root = (!input.sglang).then(|| namespace_digest(&input.namespace));
    let expected = reference(root, &tokens, block_tokens);
    assert_eq!(start().extend_tokens(&tokens, block_tokens).expect("at least one"), expected);
    assert_eq!(in_pieces(start(), &input.cuts, &tokens, block_tokens), expected);
    namespaces(&input, &tokens, &expected, block_tokens);
}

/// The keys where tokens come piece by piece, what filled no block in front of the next piece.
fn in_pieces(mut chain: PrefixChain, cuts: &[(u8, bool)], tokens: &[u32], block_tokens: usize) -> Vec<BlockKey> {
    let (mut keys, mut pending, mut rest) = (Vec::new(), Vec::new(), tokens);
    for &(len, resume) in cuts {
        let (piece, after) = rest.split_at(usize::from(len).min(rest.len()));
        rest = after;
        pending.extend_from_slice(piece);
        let found = chain.extend_tokens(&pending, block_tokens).expect("at least one");
        pending.drain(..found.len() * block_tokens);
        assert!(pending.len() < block_tokens);
        keys.extend(found);
        assert_eq!(chain.parent(), keys.last().copied());
        if let Some(parent) = chain.parent().filter(|_| resume) {
            chain = PrefixChain::resume(parent);
        }
    }
    pending.extend_from_slice(rest);
    keys.extend(chain.extend_tokens(&pending, block_tokens).expect("at least one"));
    keys
}

fn namespaces(input: &Input<'_>, tokens: &[u32], keys: &[BlockKey], block_tokens: usize) {
    let (one, other) = (Namespace::new(&input.namespace), Namespace::new(&input.other));
    assert_eq!(*one.digest(), namespace_digest(&input.namespace));
    let foreign = Sha256::new()
        .chain_update(b"kvhoist foreign key v1\0")
        .chain_update(namespace_digest(&input.namespace))
        .chain_update(&input.foreign)
        .finalize();
    assert_eq!(one.key(&input.foreign), BlockKey::new(foreign.into()));
    if input.namespace == input.other {
        return;
    }
    assert_ne!(one, other);
    assert_ne!(one.key(&input.foreign), other.key(&input.foreign));
    let theirs = PrefixChain::new(other).extend_tokens(tokens, block_tokens).expect("at least one");
    assert!(theirs.iter().all(|key| !keys.contains(key)), "a key of two namespaces");
}

fn namespace_digest(name: &str) -> [u8; 32] {
    let mut bytes = b"kvhoist namespace v1\0".to_vec();
    bytes.extend_from_slice(name.as_bytes());
    Sha256::digest(&bytes).into()
}

/// As SGLang's `get_hash_str` does it: the parent's digest, then each token in 4 bytes. Our own chains differ in the
/// first block only, which has the namespace's digest for a parent.
fn reference(root: Option<[u8; 32]>, tokens: &[u32], block_tokens: usize) -> Vec<BlockKey> {
    let mut parent = root;
    let blocks = tokens.len() / block_tokens;
    (0..blocks)
        .map(|block| {
            let mut hasher = Sha256::new();
            if let Some(parent) = parent {
                hasher.update(parent);
            }
            for token in &tokens[block * block_tokens..][..block_tokens] {
                hasher.update(token.to_le_bytes());
            }
            let digest: [u8; 32] = hasher.finalize().into();
            parent = Some(digest);
            BlockKey::new(digest)
        })
        .collect()
}
