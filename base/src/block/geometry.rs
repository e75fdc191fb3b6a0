//! Sizes and layouts of a model's blocks.

use serde::{Deserialize, Serialize};

use super::layout::{Layout, wrong};
use crate::error::Result;

/// The shape of a block of KV cache: all layers of `tokens` consecutive tokens.
///
/// Bytes of a block: `2 * layers * tokens * kv_heads * head_dim * dtype_bytes` (MHA) or
/// `layers * tokens * latent_dim * dtype_bytes` (MLA).
///
/// The canonical order of its bytes is the keys of all layers, then the values of all layers, each
/// layer whole (`[K|V][layer][token][head][dim]`; MLA: `[layer][token][dim]`). Both layouts below
/// cut that one order, so a block stored from one can be loaded into the other. SGLang calls the
/// second `page_first_direct`; in its plain `page_first` pools the tokens lie outside the layers,
/// which is another order, and blocks of such pools do not mix with these.
///
/// ```
/// use kvhoist::BlockGeometry;
/// let llama_8b = BlockGeometry::Mha { kv_heads: 8, head_dim: 128, layers: 32, tokens: 64, dtype_bytes: 2 };
/// assert_eq!(llama_8b.block_bytes()?, 8 << 20);
/// assert_eq!(llama_8b.layer_first()?.segments().len(), 64);
/// assert_eq!(llama_8b.page_first()?.segments(), [4 << 20, 4 << 20]);
/// # Ok::<(), kvhoist::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum BlockGeometry {
    /// Multi-head or grouped-query attention: a layer stores a key and a value vector for every KV head.
    Mha {
        /// KV heads of one layer *on this device*: the model's KV heads divided by the tensor-parallel size.
        kv_heads: usize,
        /// Elements of one head's vector.
        head_dim: usize,
        /// Number of layers with KV cache.
        layers: usize,
        /// Tokens per block (the engine's page size).
        tokens: usize,
        /// Bytes per element: 2 for bf16 and fp16, 1 for fp8.
        dtype_bytes: usize,
    },
    /// Multi-head latent attention: a layer stores one compressed vector for all heads.
    Mla {
        /// Elements of the vector: `kv_lora_rank` plus `qk_rope_head_dim`, 512 + 64 in DeepSeek-V3.
        latent_dim: usize,
        /// Number of layers with KV cache.
        layers: usize,
        /// Tokens per block (the engine's page size).
        tokens: usize,
        /// Bytes per element: 2 for bf16 and fp16, 1 for fp8.
        dtype_bytes: usize,
    },
}

impl BlockGeometry {
    /// Bytes of a block.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::error::Error::Argument) naming a field that is 0, or if a block of this shape
    /// exceeds the address space.
    pub fn block_bytes(&self) -> Result<usize> {
        self.bytes().map(|(block, _)| block)
    }

    /// One segment per layer and half (keys, values), or one per layer for MLA: for engines with one tensor per layer.
    ///
    /// # Errors
    /// As [`block_bytes`](Self::block_bytes), and if there are more than
    /// [`Layout::SEGMENTS_MAX`] segments.
    pub fn layer_first(&self) -> Result<Layout> {
        let (_, segment_bytes) = self.bytes()?;
        let segments = self.segments_of_a_layer().saturating_mul(self.layers());
        if segments > Layout::SEGMENTS_MAX {
            let expected = format!("{} segments a block at most", Layout::SEGMENTS_MAX);
            return Err(wrong("layers", format!("{} ({segments} segments)", self.layers()), expected));
        }
        Layout::new(vec![segment_bytes; segments])
    }

    /// The layer of every segment of [`layer_first`](Self::layer_first), in the form that
    /// `Cache::load_layers` takes.
    ///
    /// ```
    /// use kvhoist::BlockGeometry;
    /// let model = BlockGeometry::Mha { kv_heads: 8, head_dim: 128, layers: 3, tokens: 64, dtype_bytes: 2 };
    /// assert_eq!(model.layer_of_segments()?, [0, 1, 2, 0, 1, 2]);
    /// # Ok::<(), kvhoist::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`layer_first`](Self::layer_first).
    pub fn layer_of_segments(&self) -> Result<Vec<usize>> {
        let segments = self.layer_first()?.segments().len();
        Ok((0..segments).map(|segment| segment % self.layers()).collect())
    }

    /// One segment for all keys and one for all values (MLA: one segment): for engines that keep all layers of a page
    /// together.
    ///
    /// # Errors
    /// As [`block_bytes`](Self::block_bytes).
    pub fn page_first(&self) -> Result<Layout> {
        let halves = self.segments_of_a_layer();
        let bytes = self.block_bytes()?;
        Layout::new(vec![bytes / halves; halves])
    }

    fn layers(&self) -> usize {
        match *self {
            BlockGeometry::Mha { layers, .. } | BlockGeometry::Mla { layers, .. } => layers,
        }
    }

    fn segments_of_a_layer(&self) -> usize {
        match self {
            BlockGeometry::Mha { .. } => 2,
            BlockGeometry::Mla { .. } => 1,
        }
    }

    /// Bytes of a block, and of one segment of a layer.
    fn bytes(&self) -> Result<(usize, usize)> {
        let (vector, tokens, dtype_bytes) = match *self {
            BlockGeometry::Mha { kv_heads, head_dim, tokens, dtype_bytes, .. } => {
                ([("kv_heads", kv_heads), ("head_dim", head_dim)], tokens, dtype_bytes)
            }
            BlockGeometry::Mla { latent_dim, tokens, dtype_bytes, .. } => {
                ([("latent_dim", latent_dim), ("latent_dim", 1)], tokens, dtype_bytes)
            }
        };
        let rest = [("tokens", tokens), ("dtype_bytes", dtype_bytes), ("layers", self.layers())];
        for (name, value) in vector.into_iter().chain(rest) {
            if value == 0 {
                return Err(wrong(name, "0", "at least 1"));
            }
        }
        let multiply = |product: usize, factor: usize| product.checked_mul(factor);
        let segment = [vector[0].1, vector[1].1, tokens, dtype_bytes].into_iter().try_fold(1, multiply);
        let factors = [self.segments_of_a_layer(), self.layers()];
        let block = segment.and_then(|segment| factors.into_iter().try_fold(segment, multiply));
        match (segment, block.filter(|&bytes| isize::try_from(bytes).is_ok())) {
            (Some(segment), Some(block)) => Ok((block, segment)),
            _ => Err(wrong("geometry", format!("{self:?}"), format!("a block of {} bytes at most", isize::MAX))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn mha(layers: usize, kv_heads: usize, head_dim: usize) -> BlockGeometry {
        BlockGeometry::Mha { kv_heads, head_dim, layers, tokens: 64, dtype_bytes: 2 }
    }

    fn deepseek_v3(tokens: usize) -> BlockGeometry {
        BlockGeometry::Mla { latent_dim: 576, layers: 61, tokens, dtype_bytes: 2 }
    }

    #[test]
    fn blocks_of_known_models_have_their_known_sizes() {
        assert_eq!(mha(32, 8, 128).block_bytes().expect("Llama-8B"), 8 << 20);
        assert_eq!(mha(64, 8, 128).block_bytes().expect("Qwen3-32B"), 16 << 20);
        assert_eq!(deepseek_v3(64).block_bytes().expect("DeepSeek-V3"), 4_497_408);
        assert_eq!(deepseek_v3(1).block_bytes().expect("DeepSeek-V3, page size 1"), 70_272);
    }

    #[test]
    fn both_layouts_cut_the_same_block() {
        for (geometry, layer_first, page_first) in [(mha(32, 8, 128), 64, 2), (deepseek_v3(64), 61, 1)] {
            let bytes = geometry.block_bytes().expect("a known model");
            let layers = geometry.layer_first().expect("a known model");
            let pages = geometry.page_first().expect("a known model");
            assert_eq!((layers.segments().len(), layers.block_bytes()), (layer_first, bytes));
            assert_eq!((pages.segments().len(), pages.block_bytes()), (page_first, bytes));
            assert!(layers.segments().iter().all(|&len| len == bytes / layer_first));
        }
    }

    #[test]
    fn a_field_of_zero_is_named() {
        let cases = [
            ("layers", mha(0, 8, 128)),
            ("kv_heads", mha(32, 0, 128)),
            ("head_dim", mha(32, 8, 0)),
            ("tokens", deepseek_v3(0)),
            ("dtype_bytes", BlockGeometry::Mha { kv_heads: 1, head_dim: 1, layers: 1, tokens: 1, dtype_bytes: 0 }),
            ("latent_dim", BlockGeometry::Mla { latent_dim: 0, layers: 1, tokens: 1, dtype_bytes: 2 }),
        ];
        for (name, geometry) in cases {
            for result in [geometry.block_bytes().map(|_| ()), geometry.layer_first().map(|_| ())] {
                match result {
                    Err(Error::Argument { what, .. }) => assert_eq!(what, name),
                    other => panic!("{name}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let huge = [mha(usize::MAX, 8, 128), mha(1 << 40, 1 << 40, 1), mha(1 << 62, 1, 1), mha(usize::MAX, 1, 1)];
        for geometry in huge {
            for error in [geometry.block_bytes().err(), geometry.layer_first().err(), geometry.page_first().err()] {
                assert!(error.expect("too large").to_string().starts_with("geometry: "));
            }
        }
        let layers = mha(Layout::SEGMENTS_MAX, 1, 1).layer_first().expect_err("too many segments").to_string();
        assert_eq!(layers, "layers: found 65536 (131072 segments), expected 65536 segments a block at most");
        assert!(mha(Layout::SEGMENTS_MAX, 1, 1).page_first().is_ok());
    }
}
