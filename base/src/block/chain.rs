//! Prefix chains: from tokens to the keys of their blocks.

use std::fmt;

use sha2::{Digest, Sha256};

use super::{BlockKey, key::fmt_short};
use crate::error::{Error, Result};

const NAMESPACE_DOMAIN: &[u8] = b"kvhoist namespace v1\0";
const FOREIGN_DOMAIN: &[u8] = b"kvhoist foreign key v1\0";

/// Separates the keys of one model, dtype, parallel rank or tenant from those of another.
///
/// Two caches agree on keys exactly if they agree on the namespace's name, so put everything into the name that changes
/// the bytes of a block but not its tokens: model and revision, dtype, tensor parallel rank and size, adapter, tenant.
///
/// Its digest is `SHA-256("kvhoist namespace v1\0" || name)`, the name in UTF-8.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Namespace([u8; 32]);

impl Namespace {
    /// The namespace with this name.
    pub fn new(name: &str) -> Self {
        Namespace(Sha256::new().chain_update(NAMESPACE_DOMAIN).chain_update(name).finalize().into())
    }

    /// Its 32-byte digest: the root parent of every prefix chain in it.
    pub const fn digest(&self) -> &[u8; 32] {
        &self.0
    }

    /// The key, in this namespace, of a block with the external name `foreign`: an engine's own page hash, a path, any
    /// byte string that already identifies content and prefix.
    ///
    /// It is `SHA-256("kvhoist foreign key v1\0" || namespace digest || foreign)`.
    pub fn key(&self, foreign: &[u8]) -> BlockKey {
        let digest = Sha256::new().chain_update(FOREIGN_DOMAIN).chain_update(self.0).chain_update(foreign).finalize();
        BlockKey::new(digest.into())
    }
}

impl From<&str> for Namespace {
    fn from(name: &str) -> Self {
        Namespace::new(name)
    }
}

impl From<&String> for Namespace {
    fn from(name: &String) -> Self {
        Namespace::new(name)
    }
}

impl From<String> for Namespace {
    fn from(name: String) -> Self {
        Namespace::new(&name)
    }
}

impl From<&Namespace> for Namespace {
    fn from(namespace: &Namespace) -> Self {
        *namespace
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_short(f, "Namespace", &self.0)
    }
}

/// What the next key's digest starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parent {
    /// Nothing: the first block of an SGLang chain.
    Nothing,
    /// The namespace's digest: the first block of a chain.
    Root(Namespace),
    /// The key of the preceding block.
    Block(BlockKey),
}

/// Makes the keys of consecutive blocks; a key covers its own tokens and all tokens before them.
///
/// A key is `SHA-256(parent || tokens)`: the parent's 32 bytes are the previous block's key, or
/// the namespace's digest for the first block; every token is a `u32` in little endian.
///
/// Only full blocks have keys. Tokens that do not fill a last block are neither hashed nor kept: the caller keeps them,
/// `tokens[keys.len() * block_tokens..]`, and passes them again in front of the tokens that follow.
///
/// ```
/// use kvhoist::PrefixChain;
/// let mut chain = PrefixChain::new("llama-3.1-8b/bf16/tp0of1");
/// let keys = chain.extend_tokens(&[1, 2, 3, 4, 5, 6, 7], 3)?;
/// assert_eq!((keys.len(), chain.parent()), (2, Some(keys[1])));
/// // Token 7 waits for two more.
/// let more = chain.extend_tokens(&[7, 8, 9], 3)?;
/// let at_once = PrefixChain::new("llama-3.1-8b/bf16/tp0of1").extend_tokens(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 3)?;
/// assert_eq!([keys, more].concat(), at_once);
/// # Ok::<(), kvhoist::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixChain {
    parent: Parent,
}

impl PrefixChain {
    /// An empty chain in `namespace`, or in the namespace with this name: for the keys of a cache,
    /// `Config::namespace` of its settings.
    pub fn new(namespace: impl Into<Namespace>) -> Self {
        PrefixChain { parent: Parent::Root(namespace.into()) }
    }

    /// An empty chain whose keys are SGLang's page hashes (`get_hash_str`): like [`PrefixChain`], but the first block
    /// has no parent digest.
    ///
    /// These keys have no namespace: use a store for one model only, or map them with
    /// [`Namespace::key`]. SGLang hashes both tokens of each pair where EAGLE makes pairs of
    /// tokens; pass the pairs flattened and twice the page size for the same keys.
    pub fn sglang() -> Self {
        PrefixChain { parent: Parent::Nothing }
    }

    /// The chain that ends with the block `parent`. Works for both kinds of chains, which differ only in their first
    /// block.
    pub fn resume(parent: BlockKey) -> Self {
        PrefixChain { parent: Parent::Block(parent) }
    }

    /// The key of the chain's last block; `None` while it has no block.
    pub fn parent(&self) -> Option<BlockKey> {
        match self.parent {
            Parent::Block(key) => Some(key),
            Parent::Nothing | Parent::Root(_) => None,
        }
    }

    /// Appends the full blocks of `block_tokens` tokens at the start of `tokens`, and returns
    /// their keys. See [`PrefixChain`] for the tokens left over.
    ///
    /// # Errors
    /// [`Error::Argument`] if `block_tokens` is 0; the chain is then unchanged.
    pub fn extend_tokens(&mut self, tokens: &[u32], block_tokens: usize) -> Result<Vec<BlockKey>> {
        if block_tokens == 0 {
            let expected = "the number of tokens in a block, at least 1";
            return Err(Error::argument("block_tokens", "0", expected));
        }
        Ok(tokens.chunks_exact(block_tokens).map(|block| self.push(block)).collect())
    }

    fn push(&mut self, block: &[u32]) -> BlockKey {
        let mut hasher = Sha256::new();
        match self.parent {
            Parent::Nothing => {}
            Parent::Root(namespace) => hasher.update(namespace.digest()),
            Parent::Block(key) => hasher.update(key.as_bytes()),
        }
        // One call per token would cost more than the hash itself.
        let mut bytes = [0; 1024];
        for tokens in block.chunks(bytes.len() / 4) {
            for (four, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                four.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..tokens.len() * 4]);
        }
        let key = BlockKey::new(hasher.finalize().into());
        self.parent = Parent::Block(key);
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The values come from Python, which shares no code with this crate:
    //   import hashlib, struct
    //   H = lambda b: hashlib.sha256(b).digest(); t = lambda ts: b''.join(struct.pack('<I', x) for x in ts)
    //   ns = H(b'kvhoist namespace v1\0' + b'llama-3.1-8b')
    //   foreign = H(b'kvhoist foreign key v1\0' + ns + b'page-7')
    //   k1 = H(ns + t([1, 2, 3, 4])); k2 = H(k1 + t([5, 6, 7, 4294967295]))
    //   s1 = H(t([1, 2, 3, 4])); s2 = H(s1 + t([5, 6, 7, 4294967295]))
    //   long = H(ns + t(range(1000)))
    const NS: &str = "fbbae1f802b5b3dce3a5d5910f73b3a4907b90a55b545700e68aba31e465b0af";
    const FOREIGN: &str = "7f1a5ca652d40bd768c1cbd599268083ef1ff62fa648cb5833b1700c86976216";
    const K1: &str = "3d09eaf6f06f59b21b726ab9a300ef00493b1a0a7f0ff4c9c2a4070678e04fad";
    const K2: &str = "e3fbb4134e56f294d4f1cb96a2f5d769dfe7b2c4a79aed61d7c90b2ac5402e24";
    const S1: &str = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";
    const S2: &str = "8e05bb0bda6419b08711bd289fa2445f6a48ba2d85859f30d59d93a94e7ae841";
    const LONG: &str = "fd9fa047d401e0b2b7f7152b34bd340b7dd7fea9908bdabf334ca710ce3602af";
    const TOKENS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, u32::MAX];

    fn hex(keys: &[BlockKey]) -> Vec<String> {
        keys.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn known_answers_of_a_namespace() {
        let namespace = Namespace::new("llama-3.1-8b");
        assert_eq!(BlockKey::new(*namespace.digest()).to_string(), NS);
        assert_eq!(namespace.key(b"page-7").to_string(), FOREIGN);
    }

    #[test]
    fn known_answers_of_a_chain() {
        let keys = PrefixChain::new("llama-3.1-8b").extend_tokens(&TOKENS, 4).expect("4 tokens a block");
        assert_eq!(hex(&keys), [K1, K2]);
    }

    #[test]
    fn known_answers_of_a_chain_of_sglang() {
        let keys = PrefixChain::sglang().extend_tokens(&TOKENS, 4).expect("4 tokens a block");
        assert_eq!(hex(&keys), [S1, S2]);
    }

    #[test]
    fn known_answer_of_a_block_longer_than_the_buffer() {
        let tokens: Vec<u32> = (0..1000).collect();
        let keys = PrefixChain::new("llama-3.1-8b").extend_tokens(&tokens, 1000).expect("1000 tokens a block");
        assert_eq!(hex(&keys), [LONG]);
    }

    #[test]
    fn no_tokens_a_block_is_an_error_and_changes_nothing() {
        let mut chain = PrefixChain::new("a");
        let before = chain.clone();
        let error = chain.extend_tokens(&TOKENS, 0).expect_err("0 tokens a block");
        assert!(matches!(error, Error::Argument { what: "block_tokens", .. }), "{error}");
        assert_eq!(chain, before);
    }

    #[test]
    fn what_fills_no_block_has_no_key_and_leaves_no_trace() {
        let mut chain = PrefixChain::new("a");
        assert_eq!(chain.extend_tokens(&TOKENS, 9).expect("9 tokens a block"), []);
        assert_eq!(chain.parent(), None);
        assert_eq!(chain, PrefixChain::new("a"));
    }

    #[test]
    fn debug_shows_no_digest() {
        let chain = PrefixChain::new("llama-3.1-8b");
        assert_eq!(format!("{chain:?}"), "PrefixChain { parent: Root(Namespace(fbbae1f8..)) }");
    }
}
