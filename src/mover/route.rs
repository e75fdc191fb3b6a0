//! The way of a block: a table, and its first row that applies. Pure: what is wanted, where the block is, what works,
//! and what memory the caller has.
//!
//! The rows of a want stand in the order in which they are tried. One that fails is ruled out, and the next row that
//! applies is taken; the last row of every want applies always.

use crate::block::{Route, Tier};

/// What a movement is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    /// The block in a host slot.
    HostSlot,
    /// The block in a device slot.
    DeviceSlot,
    /// The block in its caller's memory.
    Load,
    /// A block of its caller's memory, stored.
    Store,
    /// A block that is pinned in memory, on disk.
    Write,
}

/// One transfer of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hop {
    /// A movement of its own to a host slot, which others may join: [`Want::HostSlot`].
    ToHost,
    DiskToHost,
    /// By libcufile.
    DiskToDevice,
    DiskToCaller,
    DeviceToHost,
    DeviceToCaller,
    HostToDevice,
    HostToCaller,
    CallerToHost,
    CallerToDevice,
    CallerToDisk,
    HostToDisk,
    /// By libcufile.
    DeviceToDisk,
}

/// Who computes the checksum of a block, or of a block that is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Checked {
    /// It was verified before.
    Before,
    /// The thread that transfers it, or the reactor.
    ByWorker,
    /// The device, or the processor where the device cannot.
    OnDevice,
}

/// What follows a row that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Otherwise {
    /// The next row that applies: the failure says nothing about the block.
    Next,
    /// The error, or a miss: a copy on disk that is wrong in a host slot is given up.
    Fail,
}

/// A way, and when it applies.
pub(super) struct Row {
    applies: fn(&View) -> bool,
    pub(super) hops: &'static [Hop],
    /// As what it is counted.
    pub(super) route: Route,
    pub(super) checked: Checked,
    pub(super) otherwise: Otherwise,
}

/// What the choice depends on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct View {
    /// Whether the tiers have the block, those in service. The pinned copy alone for [`Want::Write`].
    pub(super) held: [bool; Tier::COUNT],
    /// Its movement to a host slot is in flight; for [`Want::Store`], any movement of it.
    pub(super) is_moving: bool,
    /// libcufile is in service for what is wanted: reads or writes.
    pub(super) has_cufile: bool,
    /// The disk tier takes writes, and the policy writes each block at its store.
    pub(super) writes_through: bool,
    pub(super) memory: Shape,
}

/// The caller's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// It is the device's.
    pub(super) is_device: bool,
    /// The settings want transfers in place, direct I/O reaches all of it, and nothing speaks against it: other callers
    /// of the block, or memory that was changed during earlier stores.
    pub(super) is_in_place: bool,
}

impl View {
    fn has(&self, tier: Tier) -> bool {
        self.held[tier as usize]
    }

    fn is_nowhere(&self) -> bool {
        !self.is_moving && self.held == [false; Tier::COUNT]
    }

    /// Only the disk has it, and it is not on its way to host memory.
    fn is_on_disk_alone(&self) -> bool {
        self.has(Tier::Disk) && !self.has(Tier::Host) && !self.has(Tier::Device) && !self.is_moving
    }
}

const fn row(
    applies: fn(&View) -> bool,
    hops: &'static [Hop],
    route: Route,
    checked: Checked,
    otherwise: Otherwise,
) -> Row {
    Row { applies, hops, route, checked, otherwise }
}

const ALWAYS: fn(&View) -> bool = |_| true;

static HOST_SLOT: [Row; 3] = {
    use {Checked::*, Hop::*, Otherwise::*};
    [
        row(|v| v.has(Tier::Host), &[], Route::HostHit, Before, Fail),
        row(|v| v.has(Tier::Disk), &[DiskToHost], Route::DiskToHost, ByWorker, Fail),
        row(|v| v.has(Tier::Device), &[DeviceToHost], Route::DeviceToHost, Before, Fail),
    ]
};

static DEVICE_SLOT: [Row; 2] = {
    use {Checked::*, Hop::*, Otherwise::*};
    [
        row(|v| v.has_cufile && v.is_on_disk_alone(), &[DiskToDevice], Route::DiskToDevice, OnDevice, Next),
        row(ALWAYS, &[ToHost, HostToDevice], Route::HostToDevice, OnDevice, Fail),
    ]
};

static LOAD: [Row; 4] = {
    use {Checked::*, Hop::*, Otherwise::*};
    [
        row(
            |v| v.memory.is_in_place && v.has(Tier::Disk) && !v.has(Tier::Host) && !v.is_moving,
            &[DiskToCaller],
            Route::DiskToRegion,
            ByWorker,
            Next,
        ),
        row(
            |v| v.memory.is_device && v.has_cufile && v.is_on_disk_alone(),
            &[DiskToDevice, DeviceToCaller],
            Route::DiskToDevice,
            OnDevice,
            Next,
        ),
        row(|v| v.memory.is_device, &[ToHost, HostToCaller], Route::HostToCaller, OnDevice, Fail),
        row(ALWAYS, &[ToHost, HostToCaller], Route::HostToCaller, ByWorker, Fail),
    ]
};

static STORE: [Row; 3] = {
    use {Checked::*, Hop::*, Otherwise::*};
    [
        row(
            |v| v.memory.is_in_place && v.writes_through && v.is_nowhere(),
            &[CallerToDisk],
            Route::RegionToDisk,
            ByWorker,
            Next,
        ),
        row(
            |v| v.memory.is_device && v.has_cufile && v.writes_through && v.is_nowhere(),
            &[CallerToDevice, DeviceToDisk],
            Route::DeviceToDisk,
            OnDevice,
            Next,
        ),
        // The policy's write follows.
        row(ALWAYS, &[CallerToHost], Route::CallerToHost, ByWorker, Fail),
    ]
};

static WRITE: [Row; 3] = {
    use {Checked::*, Hop::*, Otherwise::*};
    [
        row(|v| v.has(Tier::Device) && v.has_cufile, &[DeviceToDisk], Route::DeviceToDisk, Before, Next),
        row(|v| v.has(Tier::Device), &[ToHost, HostToDisk], Route::HostToDisk, ByWorker, Fail),
        row(ALWAYS, &[HostToDisk], Route::HostToDisk, Before, Fail),
    ]
};

/// The way to take; `None` where no tier has a block that is wanted in a host slot.
pub(super) fn choose(want: Want, view: &View, ruled_out: Option<Route>) -> Option<&'static Row> {
    let rows: &'static [Row] = match want {
        Want::HostSlot => &HOST_SLOT,
        Want::DeviceSlot => &DEVICE_SLOT,
        Want::Load => &LOAD,
        Want::Store => &STORE,
        Want::Write => &WRITE,
    };
    rows.iter().find(|row| (row.applies)(view) && ruled_out != Some(row.route))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn views() -> impl Iterator<Item = View> {
        (0..1 << 8).map(|bits: u32| {
            let [device, host, disk, is_moving, has_cufile, writes_through, is_device, is_in_place] =
                std::array::from_fn(|n| bits & (1 << n) != 0);
            let memory = Shape { is_device, is_in_place };
            View { held: [device, host, disk], is_moving, has_cufile, writes_through, memory }
        })
    }

    /// The answers of the code that found its way by trying one after the other: nested as they were there.
    fn recorded(want: Want, view: &View, ruled_out: bool) -> Option<Route> {
        let &View { held: [device, host, disk], is_moving, has_cufile, writes_through, memory } = view;
        let for_cufile = has_cufile && disk && !host && !device && !is_moving && !ruled_out;
        let known = device || host || disk || is_moving;
        match want {
            Want::HostSlot if host => Some(Route::HostHit),
            Want::HostSlot if disk => Some(Route::DiskToHost),
            Want::HostSlot if device => Some(Route::DeviceToHost),
            Want::HostSlot => None,
            Want::DeviceSlot if for_cufile => Some(Route::DiskToDevice),
            Want::DeviceSlot => Some(Route::HostToDevice),
            Want::Load if memory.is_in_place && disk && !host && !is_moving && !ruled_out => Some(Route::DiskToRegion),
            Want::Load if memory.is_device && for_cufile => Some(Route::DiskToDevice),
            Want::Load => Some(Route::HostToCaller),
            Want::Store if memory.is_in_place && writes_through && !known && !ruled_out => Some(Route::RegionToDisk),
            Want::Store if memory.is_device && has_cufile && writes_through && !known && !ruled_out => {
                Some(Route::DeviceToDisk)
            }
            Want::Store => Some(Route::CallerToHost),
            Want::Write if device && has_cufile && !ruled_out => Some(Route::DeviceToDisk),
            Want::Write => Some(Route::HostToDisk),
        }
    }

    #[test]
    fn every_case_has_the_way_that_was_recorded() {
        let mut routes = BTreeSet::new();
        // No direct I/O reaches device memory.
        for view in views().filter(|view| !(view.memory.is_device && view.memory.is_in_place)) {
            for want in [Want::HostSlot, Want::DeviceSlot, Want::Load, Want::Store, Want::Write] {
                let first = choose(want, &view, None);
                assert_eq!(first.map(|row| row.route), recorded(want, &view, false), "{want:?} {view:?}");
                let Some(row) = first else { continue };
                routes.insert(row.route);
                if row.otherwise == Otherwise::Next {
                    let next = choose(want, &view, Some(row.route)).expect("a row that may fail is not the last");
                    assert_eq!(Some(next.route), recorded(want, &view, true), "{want:?} {view:?}");
                    assert_eq!(next.otherwise, Otherwise::Fail, "{want:?} {view:?}: two ways at most");
                }
            }
        }
        assert_eq!(routes.len(), 11, "{routes:?}");
    }

    /// The hops of a row lead from where the block is to where it is wanted, and bytes from disk are checked.
    #[test]
    fn hops_join_and_what_comes_from_disk_is_checked() {
        let ends = |hop| match hop {
            Hop::ToHost => ("any", "host"),
            Hop::DiskToHost => ("disk", "host"),
            Hop::DiskToDevice => ("disk", "device"),
            Hop::DiskToCaller => ("disk", "caller"),
            Hop::DeviceToHost => ("device", "host"),
            Hop::DeviceToCaller => ("device", "caller"),
            Hop::HostToDevice => ("host", "device"),
            Hop::HostToCaller => ("host", "caller"),
            Hop::CallerToHost => ("caller", "host"),
            Hop::CallerToDevice => ("caller", "device"),
            Hop::CallerToDisk => ("caller", "disk"),
            Hop::HostToDisk => ("host", "disk"),
            Hop::DeviceToDisk => ("device", "disk"),
        };
        let wants = [
            (&HOST_SLOT[..], "host"),
            (&DEVICE_SLOT[..], "device"),
            (&LOAD[..], "caller"),
            (&STORE[..], "disk"),
            (&WRITE[..], "disk"),
        ];
        for (rows, target) in wants {
            for row in rows {
                for pair in row.hops.windows(2) {
                    assert_eq!(ends(pair[0]).1, ends(pair[1]).0, "{:?}", row.hops);
                }
                let Some((&first, &last)) = row.hops.first().zip(row.hops.last()) else { continue };
                // The policy writes what a store has copied.
                assert!(ends(last).1 == target || row.hops == [Hop::CallerToHost], "{:?}", row.hops);
                let unchecked = matches!(ends(first).0, "disk" | "caller") && row.checked == Checked::Before;
                assert!(!unchecked, "{:?}", row.hops);
            }
        }
    }
}
