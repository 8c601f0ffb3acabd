//! The port and the address of a device that its queue pairs use.

use ibverbs_sys as sys;

use super::gid::{Gid, GidKind};
use super::options::{OpenOptions, choose_gid, choose_mtu};
use super::port::Port;
use crate::VerbsError;

/// What a queue pair uses of its device: a port, an address, and a path MTU. They may change while the device is open: an
/// interface gets another address, a cable moves. Each queue pair keeps those of the time of its [`to_init`](crate::QueuePair::to_init).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LocalPath {
    pub(crate) port: Port,
    pub(crate) gid: Option<Gid>,
    /// Path MTU that peers are offered, as a code.
    pub(crate) mtu: sys::ibv_mtu,
}

impl LocalPath {
    /// Chooses the address and the MTU of `port`, within `options`. `needs_address`: packets carry an address.
    pub(super) fn choose(
        device: &str,
        port: Port,
        options: &OpenOptions,
        needs_address: bool,
    ) -> Result<Self, VerbsError> {
        let gid = choose_gid(device, &port, options.gid_index)?;
        if gid.is_none() && port.ethernet && needs_address {
            return Err(VerbsError::Unusable(format!(
                "port {} of {device} has no GID: give its network interface an address",
                port.number
            )));
        }
        let mtu = choose_mtu(&port, options.mtu)?;
        Ok(Self { port, gid, mtu })
    }

    /// Returns the format of the packets of queue pairs.
    pub(crate) fn packets(&self) -> GidKind {
        match self.gid.map(|gid| gid.kind) {
            _ if !self.port.ethernet => GidKind::InfiniBand,
            Some(GidKind::RoceV1) => GidKind::RoceV1,
            _ => GidKind::RoceV2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::port::PortState;
    use super::*;

    #[test]
    fn an_ethernet_port_needs_an_address_unless_tcp_carries_the_data() {
        let port = |ethernet| Port {
            number: 2,
            state: PortState::Active,
            ethernet,
            active_mtu: 1024,
            lid: 0,
            partition_keys: 1,
            max_message_size: 1,
            gids: Vec::new(),
        };
        let choose = |ethernet, needs| LocalPath::choose("x", port(ethernet), &OpenOptions::new(), needs);
        let error = choose(true, true).unwrap_err().to_string();
        assert_eq!(error, "port 2 of x has no GID: give its network interface an address");
        assert_eq!(choose(true, false).unwrap().packets(), GidKind::RoceV2);
        assert_eq!(choose(false, true).unwrap().packets(), GidKind::InfiniBand);
    }
}
