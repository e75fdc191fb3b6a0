//! The way of a block: one decision, named by the route that the block is counted as. Pure: what is wanted, where the
//! block is, what works, and what memory the caller has.
//!
//! The ways of a want stand in the order in which they are tried. One that fails says nothing about the block: it is
//! ruled out, and the next that applies is taken. The last of every want applies always: what fails there is an error,
//! or a miss.

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
}

/// What the choice depends on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct View {
    /// Whether the tiers have the block, those in service.
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

    /// Neither in host memory nor on its way there.
    fn is_away_from_host(&self) -> bool {
        !self.has(Tier::Host) && !self.is_moving
    }

    /// libcufile may read it: only the disk has it.
    fn is_for_cufile(&self) -> bool {
        self.has_cufile && self.has(Tier::Disk) && !self.has(Tier::Device) && self.is_away_from_host()
    }
}

/// The way to take; `None` where no tier has a block that is wanted in a host slot.
pub(super) fn choose(want: Want, view: &View, ruled_out: Option<Route>) -> Option<Route> {
    let (v, Shape { is_device, is_in_place }) = (view, view.memory);
    let may = |route| ruled_out != Some(route);
    Some(match want {
        // It stays where it is.
        Want::HostSlot if v.has(Tier::Host) => Route::HostHit,
        Want::HostSlot if v.has(Tier::Disk) => Route::DiskToHost,
        Want::HostSlot if v.has(Tier::Device) => Route::DeviceToHost,
        Want::HostSlot => return None,
        Want::DeviceSlot if v.is_for_cufile() && may(Route::DiskToDevice) => Route::DiskToDevice,
        Want::DeviceSlot => Route::HostToDevice,
        Want::Load if is_in_place && v.has(Tier::Disk) && v.is_away_from_host() && may(Route::DiskToRegion) => {
            Route::DiskToRegion
        }
        // To a device slot first.
        Want::Load if is_device && v.is_for_cufile() && may(Route::DiskToDevice) => Route::DiskToDevice,
        Want::Load => Route::HostToCaller,
        Want::Store if is_in_place && v.writes_through && v.is_nowhere() && may(Route::RegionToDisk) => {
            Route::RegionToDisk
        }
        // From a device slot that it is copied to.
        Want::Store if is_device && v.has_cufile && v.writes_through && v.is_nowhere() && may(Route::DeviceToDisk) => {
            Route::DeviceToDisk
        }
        // The policy's write follows.
        Want::Store => Route::CallerToHost,
    })
}

/// Whether the block goes by a host slot, to which it has a movement of its own that others may join:
/// [`Want::HostSlot`].
pub(super) fn is_through_host(route: Route) -> bool {
    matches!(route, Route::HostToDevice | Route::HostToCaller)
}

#[cfg(test)]
mod tests {
    use super::{Want::*, *};

    const NOWHERE: View = View {
        held: [false; Tier::COUNT],
        is_moving: false,
        has_cufile: false,
        writes_through: true,
        memory: Shape { is_device: false, is_in_place: false },
    };
    const IN_PLACE: Shape = Shape { is_device: false, is_in_place: true };
    const OF_DEVICE: Shape = Shape { is_device: true, is_in_place: false };

    fn held(tiers: &[Tier]) -> View {
        View { held: Tier::ALL.map(|tier| tiers.contains(&tier)), ..NOWHERE }
    }

    #[test]
    fn each_way_is_taken_where_it_is_the_first_that_applies() {
        use {Route::*, Tier::*};
        let on_disk = held(&[Disk]);
        let cufile = View { has_cufile: true, ..on_disk };
        let in_place = View { memory: IN_PLACE, ..on_disk };
        let of_device = View { memory: OF_DEVICE, ..cufile };
        let ways = [
            (HostSlot, held(&[Device, Host, Disk]), Some(HostHit), None),
            (HostSlot, held(&[Device, Disk]), Some(DiskToHost), None),
            (HostSlot, held(&[Device]), Some(DeviceToHost), None),
            (HostSlot, NOWHERE, None, None),
            (DeviceSlot, cufile, Some(DiskToDevice), Some(HostToDevice)),
            (DeviceSlot, on_disk, Some(HostToDevice), None),
            (DeviceSlot, View { is_moving: true, ..cufile }, Some(HostToDevice), None),
            (DeviceSlot, View { has_cufile: true, ..held(&[Host, Disk]) }, Some(HostToDevice), None),
            (Load, in_place, Some(DiskToRegion), Some(HostToCaller)),
            (Load, View { memory: IN_PLACE, ..held(&[Device, Disk]) }, Some(DiskToRegion), Some(HostToCaller)),
            (Load, View { memory: IN_PLACE, ..held(&[Host, Disk]) }, Some(HostToCaller), None),
            (Load, View { is_moving: true, ..in_place }, Some(HostToCaller), None),
            (Load, on_disk, Some(HostToCaller), None),
            (Load, of_device, Some(DiskToDevice), Some(HostToCaller)),
            (Load, View { memory: OF_DEVICE, has_cufile: true, ..held(&[Device, Disk]) }, Some(HostToCaller), None),
            (Load, cufile, Some(HostToCaller), None),
            (Store, View { memory: IN_PLACE, ..NOWHERE }, Some(RegionToDisk), Some(CallerToHost)),
            (Store, View { memory: IN_PLACE, writes_through: false, ..NOWHERE }, Some(CallerToHost), None),
            (Store, View { memory: IN_PLACE, is_moving: true, ..NOWHERE }, Some(CallerToHost), None),
            (Store, View { memory: IN_PLACE, ..held(&[Device]) }, Some(CallerToHost), None),
            (Store, View { memory: OF_DEVICE, has_cufile: true, ..NOWHERE }, Some(DeviceToDisk), Some(CallerToHost)),
            (Store, View { memory: OF_DEVICE, ..NOWHERE }, Some(CallerToHost), None),
            (Store, View { has_cufile: true, ..NOWHERE }, Some(CallerToHost), None),
        ];
        for (want, view, first, next) in ways {
            assert_eq!(choose(want, &view, None), first, "{want:?} {view:?}");
            if next.is_some() {
                assert_eq!(choose(want, &view, first), next, "{want:?} {view:?}, where the first has failed");
            }
        }
    }

    #[test]
    fn there_are_two_ways_at_most_and_the_last_applies_always() {
        for bits in 0..1u32 << 8 {
            let [device, host, disk, is_moving, has_cufile, writes_through, is_device, is_in_place] =
                std::array::from_fn(|n| bits & (1 << n) != 0);
            let memory = Shape { is_device, is_in_place };
            // No direct I/O reaches device memory.
            if is_device && is_in_place {
                continue;
            }
            let view = View { held: [device, host, disk], is_moving, has_cufile, writes_through, memory };
            for (want, last) in
                [(DeviceSlot, Route::HostToDevice), (Load, Route::HostToCaller), (Store, Route::CallerToHost)]
            {
                let first = choose(want, &view, None);
                assert!(first == Some(last) || choose(want, &view, first) == Some(last), "{want:?} {view:?}");
                assert!(choose(want, &view, Some(last)).is_some(), "{want:?} {view:?}");
            }
        }
    }
}
