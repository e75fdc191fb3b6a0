//! Properties of keys and prefix chains, over the public face.

use kvhoist::{BlockKey, Namespace, PrefixChain};
use proptest::{collection::vec, prelude::*};

fn keys(namespace: &str, tokens: &[u32], block_tokens: usize) -> Vec<BlockKey> {
    PrefixChain::new(namespace).extend_tokens(tokens, block_tokens).expect("block_tokens is at least 1")
}

proptest! {
    /// However a caller cuts its tokens at block boundaries, and whether it keeps the chain or
    /// resumes from a key, the keys are those of the tokens in one piece.
    #[test]
    fn cutting_the_tokens_at_a_block_boundary_changes_no_key(
        tokens in vec(any::<u32>(), 0..600),
        block_tokens in 1..70_usize,
        cuts in vec(0..600_usize, 0..5),
        resume in any::<bool>(),
        sglang in any::<bool>(),
    ) {
        let start = || if sglang { PrefixChain::sglang() } else { PrefixChain::new("model") };
        let whole = start().extend_tokens(&tokens, block_tokens).expect("at least 1");
        prop_assert_eq!(whole.len(), tokens.len() / block_tokens);

        let mut cuts: Vec<usize> = cuts.iter().map(|cut| (cut % (whole.len() + 1)) * block_tokens).collect();
        cuts.sort_unstable();
        cuts.push(tokens.len());
        let (mut chain, mut parts, mut from) = (start(), Vec::new(), 0);
        for to in cuts {
            parts.extend(chain.extend_tokens(&tokens[from..to], block_tokens).expect("at least 1"));
            prop_assert_eq!(chain.parent(), parts.last().copied());
            if let Some(parent) = chain.parent().filter(|_| resume) {
                chain = PrefixChain::resume(parent);
            }
            from = to;
        }
        prop_assert_eq!(parts, whole);
    }

    /// A caller that keeps what filled no block, and passes it again in front of the next tokens,
    /// gets the keys of the tokens in one piece, wherever they were cut.
    #[test]
    fn the_remainder_passed_again_changes_no_key(
        tokens in vec(any::<u32>(), 0..300),
        block_tokens in 1..40_usize,
        step in 1..50_usize,
    ) {
        let (mut chain, mut parts, mut pending) = (PrefixChain::new("model"), Vec::new(), Vec::new());
        for piece in tokens.chunks(step) {
            pending.extend_from_slice(piece);
            let found = chain.extend_tokens(&pending, block_tokens).expect("at least 1");
            pending.drain(..found.len() * block_tokens);
            parts.extend(found);
        }
        prop_assert!(pending.len() < block_tokens);
        prop_assert_eq!(parts, keys("model", &tokens, block_tokens));
    }

    /// No key of one namespace is a key of another.
    #[test]
    fn namespaces_never_share_a_key(
        one in ".{0,20}",
        other in ".{0,20}",
        tokens in vec(any::<u32>(), 1..100),
        block_tokens in 1..20_usize,
        foreign in vec(any::<u8>(), 0..64),
    ) {
        prop_assume!(one != other);
        let theirs = keys(&other, &tokens, block_tokens);
        for key in keys(&one, &tokens, block_tokens) {
            prop_assert!(!theirs.contains(&key));
        }
        prop_assert_ne!(Namespace::new(&one), Namespace::new(&other));
        prop_assert_ne!(Namespace::new(&one).key(&foreign), Namespace::new(&other).key(&foreign));
    }

    /// A changed token changes the key of its block and of all blocks after it, and of none before.
    #[test]
    fn a_token_changes_its_block_and_what_follows(
        tokens in vec(any::<u32>(), 1..200),
        block_tokens in 1..20_usize,
        place in any::<prop::sample::Index>(),
        flip in 1..=u32::MAX,
    ) {
        let place = place.index(tokens.len());
        let mut changed = tokens.clone();
        changed[place] ^= flip;
        let (before, after) = (keys("model", &tokens, block_tokens), keys("model", &changed, block_tokens));
        for (block, (one, other)) in before.iter().zip(&after).enumerate() {
            prop_assert_eq!(one == other, block < place / block_tokens);
        }
    }

    /// Every key survives its text and its bytes.
    #[test]
    fn text_and_bytes_give_the_key_back(bytes in any::<[u8; 32]>()) {
        let key = BlockKey::from(bytes);
        prop_assert_eq!(key.to_string().parse::<BlockKey>().expect("Display is 64 hex characters"), key);
        prop_assert_eq!(BlockKey::try_from(&bytes[..]).expect("32 bytes"), key);
        prop_assert_eq!(key.as_bytes(), &bytes);
    }

    /// No text makes parsing panic, and only 64 hex characters are a key.
    #[test]
    fn only_sixty_four_hex_characters_are_a_key(text in "[0-9a-gA-G+é]{62,66}") {
        let is_key = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        prop_assert_eq!(text.parse::<BlockKey>().is_ok(), is_key);
    }
}
