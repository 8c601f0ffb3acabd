//! Global identifiers: the addresses that a port has, and the choice of one.

use std::cmp::Reverse;
use std::fmt;
use std::net::Ipv6Addr;

use ibverbs_sys as sys;

/// One entry of a port's GID table (`struct ibv_gid_entry`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the table, as `RDMA_GID_INDEX` takes it.
    pub index: u32,
    /// The identifier, in the form of an IPv6 address; an IPv4 address is mapped (`::ffff:a.b.c.d`).
    pub address: Ipv6Addr,
    /// The protocol that the identifier is for.
    pub kind: GidKind,
    /// Index of its network interface; 0 if it has none.
    pub interface: u32,
}

/// The format of the packets of a GID (`enum ibv_gid_type`).
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

    /// Returns whether the address is valid on the link alone (`fe80::/10`).
    pub fn is_link_local(&self) -> bool {
        self.address.segments()[0] & 0xffc0 == 0xfe80
    }

    /// Returns the rank, best last: RoCE version 2 before version 1, a routable address before a link-local one, IPv4
    /// before IPv6 (because people set up the IPv4 address), and the lowest index.
    fn rank(&self) -> impl Ord {
        let version = match self.kind {
            GidKind::RoceV2 => 2,
            GidKind::InfiniBand => 1,
            GidKind::RoceV1 => 0,
        };
        (version, !self.is_link_local(), self.address.to_ipv4_mapped().is_some(), Reverse(self.index))
    }
}

/// Returns the entry to take if no option names one.
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
