//! The kinds of calls that callers make.

/// What a caller may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Store,
    Reserve,
    Fetch,
    FetchToDevice,
    Prefetch,
    Remove,
    Match,
    Load,
    StoreFrom,
    Sync,
    Stats,
    /// Fetches a chain block by block, each under the lease of the one before.
    Walk,
    /// Prefetches blocks, and fetches them at once.
    Hurry,
    /// Registers a region, has it pinned, loads into it and takes it back, in any order.
    Regions,
    /// Hands the cache leases and regions of another one.
    Strangers,
    Clear,
    FetchMany,
    Compute,
    RemoveDurably,
    Touch,
    /// Lends memory for one load or store.
    Lend,
    /// Submits a load or a store to a completion queue, or drains it.
    Submit,
    /// Releases a chain, or keeps it. Made between the other calls, by draws of its own.
    Hint,
}

impl Call {
    pub const COUNT: usize = 23;
    /// Those that every run draws from; the others belong to a [`Trial`](crate::trial::Trial), or are
    /// [`EXTRA`](Self::EXTRA).
    pub const COMMON: usize = 11;
    /// Those that are made between the common calls, with their weights. By draws of their own: what a seed draws
    /// for its common calls does not depend on them.
    pub const EXTRA: [(Call, u64); 7] = [
        (Call::Clear, 2),
        (Call::FetchMany, 5),
        (Call::Compute, 8),
        (Call::RemoveDurably, 1),
        (Call::Touch, 4),
        (Call::Lend, 5),
        (Call::Submit, 6),
    ];
    pub const ALL: [Call; Call::COUNT] = [
        Call::Store,
        Call::Reserve,
        Call::Fetch,
        Call::FetchToDevice,
        Call::Prefetch,
        Call::Remove,
        Call::Match,
        Call::Load,
        Call::StoreFrom,
        Call::Sync,
        Call::Stats,
        Call::Walk,
        Call::Hurry,
        Call::Regions,
        Call::Strangers,
        Call::Clear,
        Call::FetchMany,
        Call::Compute,
        Call::RemoveDurably,
        Call::Touch,
        Call::Lend,
        Call::Submit,
        Call::Hint,
    ];

    pub fn name(self) -> &'static str {
        const NAMES: [&str; Call::COUNT] = [
            "store",
            "reserve",
            "fetch",
            "fetch_to_device",
            "prefetch",
            "remove",
            "match_prefix",
            "load_into",
            "store_from",
            "sync",
            "stats",
            "walk",
            "hurry",
            "regions",
            "strangers",
            "clear",
            "fetch_many",
            "get_or_fetch_with",
            "remove_durably",
            "touch",
            "lend",
            "submit",
            "hint",
        ];
        NAMES[self as usize]
    }
}
