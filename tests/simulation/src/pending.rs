//! Promises that the cache does not keep, each with a check that is left off until it does: a constant for each, to be
//! set and then to be removed with its condition.

/// `clear` removes the blocks of a disk tier that is out of service too, or is an error.
pub const CLEAR_REACHES_A_RETIRED_DISK: bool = false;

/// What the disk refused of a block that `get_or_fetch_with` computed, the next sync reports.
pub const COMPUTED_STORES_ARE_REPORTED: bool = false;

/// `get_or_fetch_with` serves nothing that was computed before a removal that had ended when it was called.
pub const JOINERS_GET_NOTHING_REMOVED: bool = false;

/// A caller of `get_or_fetch_with` that waits and is not polled holds up nobody.
pub const WAITERS_NEED_NO_POLL: bool = false;

/// A sync waits for released blocks that were resident when it began, whatever evicts them.
pub const SYNC_WAITS_FOR_RELEASED_BLOCKS: bool = false;

/// An awaited read waits for the transfers in flight, not for those that are queued.
pub const TRANSFERS_HAVE_URGENCY: bool = false;
