//! Ports of an RDMA device: state, GIDs, and the loopback path from a port to itself.

use std::{fmt, net::Ipv6Addr, sync::Arc};

use super::{
    sys::{self, RawAddress, RawGidEntry, RawPortAttr},
    sysfs,
    verbs::Context,
};

/// The link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand: addressed by LID.
    InfiniBand,
    /// Ethernet (RoCE): addressed by GID.
    Ethernet,
}

/// The protocol of a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: its own Ethernet frames.
    RoceV1,
    /// RoCE v2: UDP.
    RoceV2,
    /// Neither libibverbs nor the kernel reports the protocol.
    Unknown,
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gid {
    /// Index in the table.
    pub index: u8,
    /// The GID: an IPv6 address, or an IPv4 address mapped to IPv6.
    pub address: Ipv6Addr,
    /// Its protocol.
    pub kind: GidKind,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Number, from 1.
    pub number: u8,
    /// True if the port's state is ACTIVE.
    pub active: bool,
    /// The state as verbs number it: 1 down, 2 init, 3 armed, 4 active.
    pub state: u32,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// LID, the address on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// MTU in bytes.
    pub mtu_bytes: u32,
    /// Longest message in bytes.
    pub message_bytes_max: u32,
    /// GID table entries in use.
    pub gids: Vec<Gid>,
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["InfiniBand", "Ethernet"][*self as usize])
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["IB", "RoCE v1", "RoCE v2", "unknown"][*self as usize])
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.index, self.address, self.kind)
    }
}

/// Converts `enum ibv_mtu` (1 is 256 bytes, 5 is 4096) to bytes.
fn mtu_bytes(mtu: u32) -> u32 {
    if (1..=5).contains(&mtu) { 128 << mtu } else { 0 }
}

/// A path from a port back to itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoopbackPath {
    pub(crate) port: u8,
    /// `enum ibv_mtu`.
    pub(crate) mtu: u32,
    pub lid: u16,
    pub(crate) gid: Option<Gid>,
    pub message_bytes_max: u32,
}

impl LoopbackPath {
    pub(super) fn address(&self) -> RawAddress {
        let mut address = RawAddress { port: self.port, lid: self.lid, ..RawAddress::default() };
        if let Some(gid) = self.gid {
            let octets = gid.address.octets();
            let half = |at: usize| u64::from_ne_bytes(octets[at..at + 8].try_into().expect("eight of sixteen bytes"));
            address.gid = [half(0), half(8)];
            address.gid_index = gid.index;
            address.hop_limit = 64;
            address.is_global = 1;
        }
        address
    }
}

impl fmt::Display for LoopbackPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {}, MTU {}", self.port, mtu_bytes(self.mtu))?;
        match self.gid {
            Some(gid) => write!(f, ", GID {gid}"),
            None => write!(f, ", LID {}", self.lid),
        }
    }
}

impl Port {
    /// The loopback path of this port, or why it has none.
    pub(crate) fn path(&self) -> Result<LoopbackPath, String> {
        let Port { number, state, .. } = *self;
        if !self.active {
            return Err(format!("port {number} is not active (state {state}, expected 4); connect and enable it"));
        }
        let gid = match self.link_layer {
            // On InfiniBand the LID alone addresses the port.
            LinkLayer::InfiniBand if self.lid != 0 => None,
            _ => Some(*self.best_gid().ok_or_else(|| {
                format!("port {number} has no GID; give its network interface an address, or take its link up")
            })?),
        };
        let mtu = (1..=5).find(|&mtu| mtu_bytes(mtu) == self.mtu_bytes);
        let mtu = mtu.ok_or_else(|| format!("port {number} reports no MTU"))?;
        Ok(LoopbackPath { port: number, mtu, lid: self.lid, gid, message_bytes_max: self.message_bytes_max.max(1) })
    }

    /// The preferred GID: RoCE v2 first, then routable addresses before link-local ones, IPv4 before IPv6.
    fn best_gid(&self) -> Option<&Gid> {
        self.gids.iter().min_by_key(|gid| {
            let kind = match gid.kind {
                GidKind::RoceV2 => 0,
                GidKind::InfiniBand | GidKind::Unknown => 1,
                GidKind::RoceV1 => 2,
            };
            let link_local = gid.address.segments()[0] == 0xfe80;
            (kind, link_local, gid.address.to_ipv4_mapped().is_none(), gid.index)
        })
    }
}

/// Queries a port of the device.
pub(super) fn query(context: &Arc<Context>, device: &str, number: u8) -> Result<Port, String> {
    let mut attributes = std::mem::MaybeUninit::<RawPortAttr>::zeroed();
    // SAFETY: an open context; the call writes one structure of this type, or an older and shorter form of it.
    let given = unsafe { (context.library.functions.query_port)(context.raw(), number, attributes.as_mut_ptr()) };
    if given != 0 {
        return Err(format!("ibv_query_port({number}): {}", std::io::Error::from_raw_os_error(given)));
    }
    // SAFETY: plain integers, zeroed above and written by the call.
    let attributes = unsafe { attributes.assume_init() };
    let ethernet = attributes.link_layer == sys::LINK_ETHERNET;
    let link_layer = if ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand };
    let places = u8::try_from(attributes.gids.clamp(0, 256).saturating_sub(1)).map_or(0..=0, |last| 0..=last);
    let gids =
        if attributes.gids > 0 { places.filter_map(|at| gid(context, device, number, at)).collect() } else { vec![] };
    Ok(Port {
        number,
        active: attributes.state == sys::PORT_ACTIVE,
        state: attributes.state,
        link_layer,
        lid: attributes.lid,
        mtu_bytes: mtu_bytes(attributes.active_mtu),
        message_bytes_max: attributes.max_message,
        gids,
    })
}

/// The GID at this index, if there is one.
fn gid(context: &Arc<Context>, device: &str, port: u8, index: u8) -> Option<Gid> {
    let library = context.library;
    let mut entry = RawGidEntry { gid: [0; 16], index: 0, port: 0, kind: u32::MAX, interface: 0 };
    let has_kind = library.query_gid_ex.is_some_and(|query| {
        let (port, index) = (u32::from(port), u32::from(index));
        // SAFETY: an open context; the call writes one structure of the size passed to it.
        unsafe { query(context.raw(), port, index, &mut entry, 0, size_of::<RawGidEntry>()) == 0 }
    });
    let mut octets = entry.gid;
    if !has_kind {
        // SAFETY: an open context; the call writes sixteen bytes.
        let given = unsafe { (library.functions.query_gid)(context.raw(), port, i32::from(index), &mut octets) };
        if given != 0 {
            return None;
        }
    }
    // An unused entry is zero after its prefix.
    if octets[8..] == [0; 8] {
        return None;
    }
    let kind = match (has_kind, entry.kind) {
        (true, 0) => GidKind::InfiniBand,
        (true, 1) => GidKind::RoceV1,
        (true, 2) => GidKind::RoceV2,
        _ => sysfs::gid_kind(device, port, index),
    };
    Some(Gid { index, address: Ipv6Addr::from(octets), kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, address: &str, kind: GidKind) -> Gid {
        Gid { index, address: address.parse().expect("an address"), kind }
    }

    fn port(gids: Vec<Gid>) -> Port {
        Port {
            number: 1,
            active: true,
            state: 4,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            mtu_bytes: 1024,
            message_bytes_max: 1 << 30,
            gids,
        }
    }

    #[test]
    fn a_routed_gid_of_roce_v2_is_preferred_at_any_index() {
        let gids = vec![
            gid(0, "fe80::1", GidKind::RoceV1),
            gid(1, "fe80::1", GidKind::RoceV2),
            gid(2, "::ffff:10.9.9.1", GidKind::RoceV1),
            gid(5, "::ffff:10.9.9.1", GidKind::RoceV2),
        ];
        let path = port(gids.clone()).path().expect("a path");
        assert_eq!(path.gid.map(|gid| gid.index), Some(5));
        assert_eq!(path.mtu, 3, "as the port says");
        let address = path.address();
        assert_eq!((address.is_global, address.gid_index), (1, 5));
        assert_eq!(address.gid[1].to_ne_bytes()[2..], [255, 255, 10, 9, 9, 1]);
        let path = port(gids[..2].to_vec()).path().expect("a path");
        assert_eq!(path.gid.map(|gid| gid.index), Some(1), "the link's own address before RoCE v1");
    }

    #[test]
    fn infiniband_is_addressed_by_lid() {
        let mut port = port(vec![gid(0, "fe80::1", GidKind::InfiniBand)]);
        (port.link_layer, port.lid) = (LinkLayer::InfiniBand, 7);
        let path = port.path().expect("a path");
        assert_eq!((path.lid, path.gid), (7, None));
        assert_eq!((path.address().is_global, path.address().lid), (0, 7));
    }

    #[test]
    fn a_port_without_a_path_gives_the_reason() {
        let error = port(vec![]).path().expect_err("no GID");
        assert!(error.contains("port 1 has no GID; "), "{error}");
        let mut down = port(vec![gid(0, "fe80::1", GidKind::RoceV2)]);
        (down.active, down.state) = (false, 1);
        let error = down.path().expect_err("down");
        assert!(error.contains("not active (state 1, expected 4)"), "{error}");
    }
}
