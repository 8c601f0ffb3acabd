//! Global identifiers: the addresses that a port has, and which one to take.

use std::cmp::Reverse;
use std::fmt;
use std::net::Ipv6Addr;

use ibverbs_sys as sys;

/// One entry of a port's GID table (`struct ibv_gid_entry`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its index in the table, as `RDMA_GID_INDEX` names it.
    pub index: u32,
    /// The identifier itself, which has the form of an IPv6 address; an IPv4 address is mapped (`::ffff:a.b.c.d`).
    pub address: Ipv6Addr,
    /// Which protocol it is for.
    pub kind: GidKind,
    /// Index of the network interface that it belongs to; 0 if to none.
    pub interface: u32,
}

/// What packets of a GID look like (`enum ibv_gid_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidKind {
    /// InfiniBand, and devices without a kind of their own.
    InfiniBand,
    /// RoCE version 1: Ethernet frames, which no router forwards.
    RoceV1,
    /// RoCE version 2: UDP, port 4791.
    RoceV2,
}

impl Gid {
    pub(crate) fn new(entry: &sys::ibv_gid_entry) -> Self {
        let kind = match entry.gid_type {
            sys::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            sys::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            _ => GidKind::InfiniBand,
        };
        // SAFETY: both members of the union are 16 bytes for which any value will do.
        let raw = unsafe { entry.gid.raw };
        Self { index: entry.gid_index, address: Ipv6Addr::from(raw), kind, interface: entry.ndev_ifindex }
    }

    /// Whether it reaches no further than the link (`fe80::/10`).
    pub fn is_link_local(&self) -> bool {
        self.address.segments()[0] & 0xffc0 == 0xfe80
    }

    /// The order of preference, best last: RoCE version 2 before version 1, one that routers forward before a
    /// link-local one, IPv4 before IPv6 (it is the address that people set up), and the lowest index.
    fn rank(&self) -> impl Ord {
        let version = match self.kind {
            GidKind::RoceV2 => 2,
            GidKind::InfiniBand => 1,
            GidKind::RoceV1 => 0,
        };
        (version, !self.is_link_local(), self.address.to_ipv4_mapped().is_some(), Reverse(self.index))
    }
}

/// The entry to take if nobody says which.
pub(crate) fn best(gids: &[Gid]) -> Option<&Gid> {
    gids.iter().filter(|gid| !gid.address.is_unspecified()).max_by_key(|gid| gid.rank())
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.index, self.address, self.kind)
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u32, address: &str, kind: GidKind) -> Gid {
        Gid { index, address: address.parse().unwrap(), kind, interface: 0 }
    }

    #[test]
    fn a_routable_gid_of_version_2_is_best() {
        let mut gids = vec![
            gid(0, "fe80::1", GidKind::RoceV1),
            gid(1, "fe80::1", GidKind::RoceV2),
            gid(2, "::ffff:10.0.0.1", GidKind::RoceV1),
            gid(3, "2001:db8::1", GidKind::RoceV2),
            gid(4, "::ffff:10.0.0.1", GidKind::RoceV2),
            gid(5, "::ffff:10.0.0.2", GidKind::RoceV2),
        ];
        let mut order = Vec::new();
        while let Some(best) = best(&gids).copied() {
            order.push(best.index);
            gids.retain(|gid| gid.index != best.index);
        }
        assert_eq!(order, [4, 5, 3, 1, 2, 0]);
    }

    #[test]
    fn an_empty_entry_is_none() {
        assert_eq!(best(&[gid(0, "::", GidKind::RoceV2)]), None);
    }
}
