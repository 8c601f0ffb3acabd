//! Ports of a device: their state, MTU and addresses.

use std::fmt;

use ibverbs_sys as sys;

use super::gid::{self, Gid};

/// One port of a device (`struct ibv_port_attr`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number, from 1.
    pub number: u8,
    /// The state.
    pub state: PortState,
    /// Whether the port is on Ethernet (RoCE, iWARP); otherwise it is on InfiniBand.
    pub ethernet: bool,
    /// The active path MTU in bytes; 0 if the port states none.
    pub active_mtu: u16,
    /// Local identifier on InfiniBand; 0 elsewhere.
    pub lid: u16,
    /// Number of partition keys.
    pub partition_keys: u16,
    /// Longest message of one request, in bytes.
    pub max_message_size: u32,
    /// Its addresses.
    pub gids: Vec<Gid>,
}

/// State of a port (`enum ibv_port_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PortState {
    /// No link.
    Down,
    /// The link is up, but no subnet manager has set up the port yet (InfiniBand).
    Initializing,
    /// Carries traffic.
    Active,
    /// Anything else.
    Unknown,
}

impl Port {
    /// Returns the address that is taken if no option names an index: RoCE version 2 first, then routable addresses,
    /// then IPv4.
    pub fn best_gid(&self) -> Option<&Gid> {
        gid::best(&self.gids)
    }
}

/// Returns the bytes of a path MTU code (IBA vol. 1, 14.2.5.6).
pub(crate) fn mtu_bytes(code: sys::ibv_mtu) -> Option<u16> {
    matches!(code, sys::IBV_MTU_256..=sys::IBV_MTU_4096).then(|| 128 << code)
}

/// Returns the code of the largest path MTU that is not above `bytes`.
pub(crate) fn mtu_code(bytes: u16) -> Option<sys::ibv_mtu> {
    (sys::IBV_MTU_256..=sys::IBV_MTU_4096)
        .rev()
        .find(|&code| mtu_bytes(code).is_some_and(|size| size <= bytes))
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Down => "down",
            Self::Initializing => "initializing",
            Self::Active => "active",
            Self::Unknown => "unknown",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_mtus() {
        assert_eq!((1..=5).map(mtu_bytes).collect::<Vec<_>>(), [256, 512, 1024, 2048, 4096].map(Some));
        assert_eq!((mtu_bytes(0), mtu_bytes(6)), (None, None));
        let codes = [255, 256, 1500, 4096, 9000].map(mtu_code);
        assert_eq!(codes, [None, Some(1), Some(3), Some(5), Some(5)]);
    }
}
